"""API keys, by themselves, in files, on the command line and in front of the endpoint."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_openai_endpoint import MAX_BODY, ScriptedBackend, World
from typer.testing import CliRunner

from overstory.orchestrator.api_keys import (
    ApiKeyError,
    KeyRing,
    draw_key,
    key_ring,
    keys_of_variable,
    parse_keys,
)
from overstory.orchestrator.cli import app
from overstory.orchestrator.endpoint import build_http_app
from overstory.orchestrator.spec import DeploymentSpec, load_spec


def test_a_key_is_kept_as_a_hash_alone() -> None:
    secret, key = draw_key("ann", "user")
    assert secret not in key.line()
    (again,) = parse_keys(f"# keys\n\n{key.line()}\n", "file")
    assert again == key
    assert again.matches(secret)
    assert not again.matches(secret[:-1])
    assert draw_key("ann", "user")[0] != secret


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ann user", "line 1: wanted NAME SCOPE"),
        ("ann user plain-text-secret", "wanted NAME SCOPE"),
        ("ann root sha256:" + "0" * 32 + ":" + "0" * 64, "wanted user or admin"),
        (2 * ("ann user sha256:" + "0" * 32 + ":" + "0" * 64 + "\n"), "line 2: a key ann"),
    ],
)
def test_files_that_make_no_sense(text: str, said: str) -> None:
    with pytest.raises(ApiKeyError, match=said):
        parse_keys(text, "keys")


def test_a_ring_follows_its_file(tmp_path: Path) -> None:
    now = [0.0]
    file = tmp_path / "keys"
    (first, ann), (second, bob) = draw_key("ann", "user"), draw_key("bob", "admin")
    file.write_text(ann.line())
    ring = KeyRing(file, clock=lambda: now[0])
    assert ring.find(first) == ann
    file.write_text(bob.line() + "\n")
    assert ring.find(first) == ann  # it looks once a second
    now[0] += 2
    assert ring.find(first) is None
    assert ring.find(second) == bob
    file.write_text("nonsense")
    now[0] += 2
    assert ring.find(second) == bob  # the last that made sense
    with pytest.raises(ApiKeyError):
        ring.reload()
    file.unlink()
    now[0] += 2
    assert ring.find(second) == bob
    with pytest.raises(ApiKeyError, match="cannot be read"):
        KeyRing(file)


def test_keys_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of_variable("KEYS", {"KEYS": "one, admin:two"})
    assert [(key.name, key.scope) for key in keys] == [("KEYS-1", "user"), ("KEYS-2", "admin")]
    assert keys[1].matches("two")
    with pytest.raises(ApiKeyError, match="KEYS is not set"):
        keys_of_variable("KEYS", {"KEYS": " ,"})
    assert key_ring(None, None) is None
    monkeypatch.setenv("KEYS", "one")
    ring = key_ring(None, "KEYS")
    assert ring is not None
    assert ring.find("one") is not None


# ---------------------------------------------------------------- in front of the endpoint


def _ask(
    story: Callable[[httpx.AsyncClient], Awaitable[None]], ring: KeyRing | None, **settings: Any
) -> None:
    async def go() -> None:
        http = build_http_app(World(ScriptedBackend()).service, MAX_BODY, ring, **settings)
        transport = httpx.ASGITransport(http)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await story(client)

    asyncio.run(go())


BODY = {"model": "tiny", "prompt": "p"}


def test_only_keys_open_the_endpoint() -> None:
    (user, first), (admin, second) = draw_key("ann", "user"), draw_key("bob", "admin")

    async def story(client: httpx.AsyncClient) -> None:
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": f"Basic {user}"}):
            refused = await client.post("/v1/completions", json=BODY, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["x-request-id"]
        for headers in ({"authorization": f"Bearer {user}"}, {"x-api-key": user}):
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).is_success
            refused = await client.get("/admin/status", headers=headers)
            assert (
                await client.get("/metrics", headers=headers)
            ).status_code == refused.status_code
            assert refused.status_code == 403
            assert user not in refused.text
        for path in ("/health", "/ready", "/openapi.json"):
            assert (await client.get(path)).is_success
        for path in ("/v1/models", "/admin/status", "/nowhere"):
            assert (await client.get(path)).status_code == 401
        headers = {"authorization": f"bearer {admin}"}
        assert (await client.get("/admin/status", headers=headers)).json()["running"] == 0
        reloaded = await client.post("/admin/keys/reload", headers=headers)
        assert reloaded.json() == {"keys": 2}

    _ask(story, KeyRing(fixed=(first, second)))


def test_a_key_is_revoked_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    (user, ann), (admin, bob) = draw_key("ann", "user"), draw_key("bob", "admin")
    file.write_text(f"{ann.line()}\n{bob.line()}\n")

    async def story(client: httpx.AsyncClient) -> None:
        mine, his = ({"authorization": f"Bearer {secret}"} for secret in (user, admin))
        assert (await client.get("/v1/models", headers=mine)).is_success
        file.write_text(bob.line())
        assert (await client.post("/admin/keys/reload", headers=his)).json() == {"keys": 1}
        assert (await client.get("/v1/models", headers=mine)).status_code == 401
        file.write_text("?")
        broken = await client.post("/admin/keys/reload", headers=his)
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "key_file")
        assert (await client.get("/v1/models", headers=his)).is_success

    _ask(story, KeyRing(file))


def test_without_keys_all_but_admin_is_open() -> None:
    async def story(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/completions", json=BODY)).is_success
        for method, path in (("GET", "/admin/status"), ("POST", "/admin/keys/reload")):
            refused = await client.request(method, path)
            assert refused.status_code == 403
            assert "gateway.api_keys_file" in refused.json()["error"]["message"]

    _ask(story, None)


def test_pages_of_other_origins_are_let_in_where_set() -> None:
    asking = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }

    async def closed(client: httpx.AsyncClient) -> None:
        answer = await client.options("/v1/completions", headers=asking)
        assert "access-control-allow-origin" not in answer.headers
        got = await client.get("/health", headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in got.headers

    async def opened(client: httpx.AsyncClient) -> None:
        answer = await client.options("/v1/completions", headers=asking)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = await client.options("/v1/completions", headers={**asking, "origin": "https://b.x"})
        assert "access-control-allow-origin" not in other.headers
        refused = await client.post(
            "/v1/completions", json=BODY, headers={"origin": "https://a.example"}
        )
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"

    _, key = draw_key("ann", "user")
    _ask(closed, None)
    _ask(opened, KeyRing(fixed=(key,)), cors_origins=["https://a.example"])


# ---------------------------------------------------------------- settings and command line


def test_settings_of_certificates_and_keys(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(
        "model: overstory-tiny\ntree: {budget: 0}\n"
        "gateway: {api_keys_file: ./keys, tls_cert_file: ./a.pem, tls_key_file: /b.pem}\n"
    )
    spec = load_spec(file)
    assert spec.gateway.api_keys_file == str(tmp_path / "keys")
    assert spec.gateway.url == "https://127.0.0.1:8000"
    files = (spec.gateway.tls_cert_file, spec.gateway.tls_key_file)
    assert files == (str(tmp_path / "a.pem"), "/b.pem")
    with pytest.raises(ValueError, match="go together"):
        DeploymentSpec(model="m", tree={"budget": 0}, gateway={"tls_key_file": "x"})


def test_the_command_line_draws_lists_and_revokes(tmp_path: Path) -> None:
    file = str(tmp_path / "keys")

    def key(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["key", *arguments, "--file", file])

    user, admin = key("new", "ann").output.strip(), key("new", "bob", "--admin").output.strip()
    assert os.stat(file).st_mode & 0o777 == 0o600
    ring = KeyRing(Path(file))
    found = [ring.find(secret) for secret in (user, admin)]
    assert [(one.name, one.scope) for one in found if one] == [("ann", "user"), ("bob", "admin")]
    assert key("list").output == "ann\tuser\nbob\tadmin\n"
    assert key("new", "ann").exit_code != 0
    assert key("revoke", "ann").exit_code == 0
    assert key("list").output == "bob\tadmin\n"
    assert key("revoke", "ann").exit_code != 0
    assert key("new", "a b").exit_code != 0

"""The endpoint behind HTTPS and API keys, before two replicas; routing by session and prefix."""

import asyncio
import os
import shutil
import ssl
import subprocess
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
import scripted_replica
from leftovers import wait_until
from ray import serve
from scripted_replica import ScriptedReplica

from overstory.orchestrator.api_keys import draw_key
from overstory.orchestrator.app import replica_deployment, with_gateway
from overstory.orchestrator.backend import TokenChunk
from overstory.orchestrator.local_ray import free_port
from overstory.orchestrator.spec import DeploymentSpec

ADMIN, ADMIN_KEY = draw_key("ops", "admin")
USER, USER_KEY = draw_key("ann", "user")


class WhichReplica(ScriptedReplica):
    """Says its process id; under way for half a second where the prompt says `<slow>`."""

    async def generate(self, call: Any) -> AsyncGenerator[TokenChunk, None]:
        if "<slow>" in self._tokenizer.decode(call.input_ids):
            await asyncio.sleep(0.5)
        ids = self._tokenizer.encode(f"{os.getpid()}", special=False)
        yield TokenChunk(ids[: call.sampling.max_new_tokens], {"type": "stop", "matched": None})


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for this machine that vouches for itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*make, *name, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    return cert, key


@pytest.fixture(scope="module")
def secured(
    serve_here: int, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentSpec]:
    """Served and ready."""
    import test_endpoint_secured as this_module

    for module in (scripted_replica, this_module):
        ray.cloudpickle.register_pickle_by_value(module)
    folder = tmp_path_factory.mktemp("secured")
    scripted_replica.write_byte_model(folder)
    (folder / "keys").write_text(f"{ADMIN_KEY.line()}\n{USER_KEY.line()}\n")
    spec = DeploymentSpec(
        name="secured",
        model=str(folder),
        served_model_name="secured",
        replicas=2,
        tree={"budget": 0},
        engine={"context_length": scripted_replica.CONTEXT_TOKENS},
        gateway={
            "port": free_port(),
            "api_keys_file": str(folder / "keys"),
            "tls_cert_file": str(certificate[0]),
            "tls_key_file": str(certificate[1]),
            "routing": "session_sticky",
            "max_prompt_tokens": 2000,
        },
    )
    replicas = replica_deployment(WhichReplica, spec).options(
        placement_group_bundles=[{"CPU": 0.01}]
    )
    app = with_gateway(spec, replicas.bind(spec))
    serve.run_many([serve.RunTarget(app, name=spec.name, route_prefix=None)])
    with _client(spec) as client:
        wait_until(lambda: client.get("/ready").is_success, 180, "the endpoint is ready")
    yield spec
    serve.delete(spec.name)


def _context(spec: DeploymentSpec) -> ssl.SSLContext:
    """Trusts the certificate."""
    return ssl.create_default_context(cafile=spec.gateway.tls_cert_file)


def _client(spec: DeploymentSpec, key: str = "") -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(
        base_url=spec.gateway.url, verify=_context(spec), headers=headers, timeout=30
    )


def test_https_and_keys(secured: DeploymentSpec) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(secured.gateway.url.replace("https", "http") + "/health", timeout=10)
    with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
        httpx.get(secured.gateway.url + "/health", timeout=10)
    for key, status in (("", 401), ("wrong", 401), (USER, 403), (ADMIN, 200)):
        with _client(secured, key) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/metrics").status_code == status
            assert client.get("/admin/status").status_code == status
    with httpx.Client(verify=_context(secured)) as transport:
        client = openai.OpenAI(
            base_url=secured.gateway.url + "/v1", api_key=USER, http_client=transport
        )
        assert client.completions.create(model="secured", prompt="p").choices[0].text.isdigit()
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="none").completions.create(model="secured", prompt="p")
        with pytest.raises(openai.BadRequestError, match="2000"):
            client.completions.create(model="secured", prompt="p" * 2001)


def test_a_key_is_revoked_while_it_runs(secured: DeploymentSpec) -> None:
    file = Path(str(secured.gateway.api_keys_file))
    with _client(secured, USER) as client:
        assert client.get("/v1/models").status_code == 200
        file.write_text(f"{ADMIN_KEY.line()}\n")
        wait_until(lambda: client.get("/v1/models").status_code == 401, 20, "the key is revoked")
        file.write_text(f"{ADMIN_KEY.line()}\n{USER_KEY.line()}\n")
        wait_until(lambda: client.get("/v1/models").status_code == 200, 20, "it is back")


def test_sessions_and_prefixes_stay_with_a_replica(secured: DeploymentSpec) -> None:
    with _client(secured, USER) as client:

        def where(prompt: str, **fields: Any) -> str:
            body = {"model": "secured", "prompt": prompt, **fields}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        seen: Counter[str] = Counter(where(f"{n}", n=1) for n in range(4))
        assert len(seen) <= 2
        for session in ("ann", "bob", "cid"):
            places = {where(f"{n} {session}", prompt_cache_key=session) for n in range(6)}
            assert len(places) == 1
        for topic in range(3):
            text = f"{topic} and what belongs to it, at some length " * 4
            assert len({where(text + f"turn {n}") for n in range(6)}) == 1


def test_many_of_one_session_spread_over_both(secured: DeploymentSpec) -> None:
    async def go() -> set[str]:
        async with httpx.AsyncClient(
            base_url=secured.gateway.url,
            verify=_context(secured),
            headers={"authorization": f"Bearer {USER}"},
            timeout=60,
        ) as client:
            body = {"model": "secured", "prompt": "<slow>", "prompt_cache_key": "one", "n": 8}
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body) for _ in range(12))
            )
        assert all(answer.status_code == 200 for answer in answers)
        return {choice["text"] for answer in answers for choice in answer.json()["choices"]}

    assert len(asyncio.run(go())) == 2

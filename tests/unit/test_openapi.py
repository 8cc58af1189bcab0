"""The OpenAPI document and the endpoint agree, whatever is sent: no server error, no hang, and
nothing that the document does not foresee."""

import asyncio
import json
import os
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openapi_cases import JUNK, Drawer
from test_openai_endpoint import ScriptedBackend, World

from overstory.orchestrator.answer_parsers import ParserSettings
from overstory.orchestrator.endpoint import build_http_app

PARSERS = ParserSettings("kimi_k2", "kimi_k2")
LONGEST_S = 20.0
"""No request may take longer; one takes milliseconds."""


WORLD = World(ScriptedBackend("hm</think>one {}"), parsers=PARSERS, context=1000)
APP = build_http_app(WORLD.service, 10_000)
DOCUMENT: dict[str, Any] = APP.openapi()
OPERATIONS = [
    (method.upper(), path, operation)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
]


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(APP), base_url="http://test", timeout=LONGEST_S
    )


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of the document that stands alone."""
    return {**schema, "components": DOCUMENT["components"]}


def _declared(operation: dict[str, Any], status: int) -> dict[str, Any] | None:
    answers = operation["responses"]
    found = answers.get(str(status)) or answers.get(f"{status // 100}XX")
    return found


def _body_schema(operation: dict[str, Any]) -> dict[str, Any] | None:
    body = operation.get("requestBody")
    return None if body is None else body["content"]["application/json"]["schema"]


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, dict[str, Any], bytes | None, str]:
    """Method, path, operation, body and content type."""
    method, path, operation = draw(st.sampled_from(OPERATIONS))
    name = draw(st.one_of(st.just("tiny"), st.text("abc/%? é", max_size=6)))
    schema = _body_schema(operation)
    kind = draw(st.sampled_from(["application/json"] * 8 + ["text/plain", "", "a/b; c=d"]))
    if schema is None:
        return method, path.replace("{name}", name), operation, None, kind
    body = draw(Drawer(DOCUMENT).body(schema))
    if isinstance(body, dict) and draw(st.integers(0, 9)) and "model" in body:
        body["model"] = "tiny"
    if isinstance(body, dict) and draw(st.booleans()):
        body = {name: value for name, value in body.items() if name != "n"}
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    cut = draw(st.integers(0, 40))
    return method, path, operation, raw[:cut] if cut < 2 else raw, kind


async def _answers(call: tuple[str, str, dict[str, Any], bytes | None, str]) -> None:
    method, path, operation, body, kind = call
    async with _client() as client, asyncio.timeout(LONGEST_S):
        response = await client.request(
            method, path, content=body, headers={"content-type": kind} if kind else {}
        )
    assert WORLD.idle()
    assert response.status_code < 500, (method, path, body, response.text)
    if response.status_code in (404, 405, 307) and path not in DOCUMENT["paths"]:
        return  # a name with a slash or a query is another path
    declared = _declared(operation, response.status_code)
    assert declared is not None, response.status_code
    media = response.headers["content-type"].split(";")[0]
    assert media in declared["content"], (response.status_code, media)
    if media == "application/json":
        schema = _resolved(declared["content"][media]["schema"])
        jsonschema.validate(response.json(), schema, cls=jsonschema.Draft202012Validator)
    elif media == "text/event-stream":
        assert response.text.endswith("data: [DONE]\n\n") or '"error"' in response.text


SETTINGS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@settings(max_examples=80, **SETTINGS)  # type: ignore[arg-type]
@given(calls())
def test_answers_are_as_the_document_says(call: Any) -> None:
    asyncio.run(_answers(call))


@pytest.mark.full
@settings(max_examples=int(os.environ.get("OVERSTORY_FUZZ_CASES", "2500")), **SETTINGS)  # type: ignore[arg-type]
@given(calls())
def test_answers_are_as_the_document_says_thousands_of_times(call: Any) -> None:
    asyncio.run(_answers(call))


@settings(max_examples=40, **SETTINGS)  # type: ignore[arg-type]
@given(st.sampled_from([path for _, path, _ in OPERATIONS]), JUNK)
def test_other_methods_are_refused(path: str, body: Any) -> None:
    async def go() -> None:
        async with _client() as client:
            for method in ("PUT", "DELETE", "PATCH"):
                sent = json.dumps(body).encode("utf-8", "surrogatepass")
                response = await client.request(method, path.replace("{name}", "x"), content=sent)
                refused = (403,) if path.startswith("/admin/") else (400, 405)
                assert response.status_code in refused
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    asyncio.run(go())


def test_the_document_is_one() -> None:
    assert DOCUMENT["openapi"].startswith("3.1")
    for _, path, operation in OPERATIONS:
        assert operation["description"], path
        assert set(operation["responses"]) == {"200", "4XX", "5XX"}
        for answer in operation["responses"].values():
            assert answer["content"], path
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        if name.endswith("Request"):
            undocumented = [
                field
                for field, given in schema["properties"].items()
                if not given.get("description") and "$ref" not in given
            ]
            assert undocumented in ([], ["model"]), name


def test_what_the_document_calls_fitting_is_mostly_served() -> None:
    """Else the fuzz above would only see refusals."""
    served: list[int] = []

    @settings(max_examples=40, database=None, **SETTINGS)  # type: ignore[arg-type]
    @given(calls())
    def sample(call: Any) -> None:
        async def go() -> int:
            async with _client() as client:
                method, path, _, body, kind = call
                response = await client.request(
                    method, path, content=body, headers={"content-type": kind} if kind else {}
                )
                return response.status_code

        served.append(asyncio.run(go()))

    sample()
    assert served.count(200) >= len(served) // 10, served


def test_requests_can_name_the_served_model_alone() -> None:
    schemas, name = DOCUMENT["components"]["schemas"], WORLD.service.served_name
    for title in ("CompletionRequest", "ChatCompletionRequest"):
        assert schemas[title]["properties"]["model"]["enum"] == [name]
    optional = schemas["TokenizeRequest"]["properties"]["model"]["anyOf"]
    assert [kind.get("enum") for kind in optional] == [[name], None]
    assert "enum" not in schemas["CompletionAnswer"]["properties"]["model"]

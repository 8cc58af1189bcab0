"""Whatever JSON comes in: an answer, or an error in OpenAI's shape that is the client's own."""

import asyncio
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_openai_endpoint import MAX_BODY, ScriptedBackend, World

from overstory.orchestrator.endpoint import build_http_app
from overstory.orchestrator.openai_protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    known_fields,
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 40),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "tiny", "user", "text", "none"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.one_of(
    st.sampled_from(sorted(known_fields(CompletionRequest) | known_fields(ChatCompletionRequest))),
    st.text(max_size=6),
)
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": SCALARS, "content": JSON, "name": JSON}), max_size=3
)


WORLD = World(ScriptedBackend())
APP = build_http_app(WORLD.service, MAX_BODY)


async def _status(path: str, body: Any) -> int:
    transport = httpx.ASGITransport(APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(path, json=_finite(body))
    assert WORLD.idle()
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    return response.status_code


def _finite(value: Any) -> Any:
    """httpx sends no NaN; other tests do."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else 0.5
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    st.dictionaries(FIELDS, JSON, max_size=4),
    st.one_of(JSON, MESSAGES),
)
def test_no_body_makes_a_server_error(path: str, extra: dict[str, Any], content: Any) -> None:
    field = "prompt" if path == "/v1/completions" else "messages"
    body = {"model": "tiny", "max_tokens": 4, field: content, **extra}
    assert asyncio.run(_status(path, body)) in (200, 400, 404, 413)


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_no_json_at_all_makes_a_server_error(body: Any) -> None:
    assert asyncio.run(_status("/v1/completions", body)) in (400, 404)

"""The endpoint before the real engine: one rank on a CPU, DDTREE."""

import asyncio
import json
import os
import re
import signal
import socket
import uuid
from typing import Any, Literal
from urllib.parse import urlsplit

import openai
import pydantic
import pytest
import ray
from fixtures_endpoint import REAL_START_S, Endpoint, ready, wait_until

from overstory.orchestrator.backend import TokenChunk
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.rank_group import CONTROL, NAMESPACE, call
from overstory.orchestrator.sampling import Sampling
from overstory.orchestrator.tokenizer import load_tokenizer
from overstory.workers.tiny.paths import resolve_model

PROMPT = "def add(a, b):\n    "


def _texts(endpoint: Endpoint, **fields: Any) -> list[str]:
    response = endpoint.post(**{"prompt": PROMPT, "max_tokens": 24, **fields})
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def test_whole_and_streamed_text_are_one(real: Endpoint) -> None:
    client = openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=60)
    messages: Any = [{"role": "user", "content": PROMPT}]
    for temperature in (0.0, 1.0):
        fields: Any = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": 40,
            "temperature": temperature,
            "seed": 3,
        }
        whole = client.chat.completions.create(**fields)
        *chunks, last = client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(pieces) == whole.choices[0].message.content
        assert last.usage == whole.usage
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_seeds_make_text_repeatable_and_choices_distinct(real: Endpoint) -> None:
    three = _texts(real, seed=11, n=3)
    assert len(set(three)) == 3
    assert _texts(real, seed=11, n=3) == three
    assert _texts(real, seed=11) == three[:1]
    assert _texts(real, seed=12) != three[:1]
    assert _texts(real) != _texts(real)


def test_log_probabilities_whole_and_streamed(real: Endpoint) -> None:
    client = openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=60)
    fields: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 30,
        "seed": 4,
        "frequency_penalty": 0.5,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**fields)
    content = whole.choices[0].logprobs.content
    raw = bytes(byte for token in content for byte in token.bytes)
    assert raw.decode() == whole.choices[0].message.content
    for token in content:
        values = [other.logprob for other in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert token.logprob <= values[0] <= 0
        known = {other.token: other.logprob for other in token.top_logprobs}
        assert known.get(token.token, token.logprob) == token.logprob
    streamed = [
        token
        for chunk in client.chat.completions.create(**fields, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in content]
    # Other forwards, for the prompt is in the prefix cache now: the same up to rounding.
    assert [token.logprob for token in streamed] == pytest.approx(
        [token.logprob for token in content], abs=2e-4
    )
    body = real.post(prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2).json()
    logged = body["choices"][0]["logprobs"]
    assert "".join(logged["tokens"]) == body["choices"][0]["text"]
    assert all(
        value == max(top.values())
        for value, top in zip(logged["token_logprobs"], logged["top_logprobs"], strict=True)
    )


def test_rules_for_the_logits_reach_the_model(real: Endpoint) -> None:
    tokenizer = load_tokenizer(resolve_model(real.spec.model))
    fields: Any = {"max_tokens": 12, "temperature": 0}
    bare = _texts(real, **fields)
    a = tokenizer.encode("a", special=False)[0]
    assert _texts(real, **fields, logit_bias={str(a): 100}) == ["a" * 12]
    assert _texts(real, **fields, logit_bias={str(a): 100}, presence_penalty=2) == ["a" * 12]
    assert _texts(real, **fields, repetition_penalty=2.0) != bare
    ended = real.post(prompt=PROMPT, stop_token_ids=[a], logit_bias={str(a): 100}, **fields)
    assert ended.json()["usage"]["completion_tokens"] == 1
    later = real.post(
        prompt=PROMPT, stop_token_ids=[a], logit_bias={str(a): 100}, min_tokens=5, **fields
    )
    assert later.json()["usage"]["completion_tokens"] == 6


def test_the_text_fits_what_it_must(real: Endpoint) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "bb"]}, "count": {"type": "integer", "maximum": 9}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = real.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": PROMPT}],
        response_format=wanted,
        max_tokens=200,
        temperature=0,
    ).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert set(json.loads(answer["message"]["content"])) == {"kind", "count"}
    texts = _texts(real, regex="(ab|cd)-[0-9]{2}", n=3, seed=2)
    assert all(re.fullmatch("(ab|cd)-[0-9]{2}", text) for text in texts)
    refused = real.post(prompt=PROMPT, regex="(")
    assert refused.status_code == 400
    assert "regex" in refused.json()["error"]["message"]


class Verdict(pydantic.BaseModel):
    """An answer in a form."""

    kind: Literal["good", "bad"]
    sure: bool


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def test_the_openai_client_calls_tools(real: Endpoint) -> None:
    client = openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=60)
    question: Any = {"role": "user", "content": "Weather?"}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        fields: Any = {
            "model": "tiny", "messages": [question], "tools": [WEATHER], "tool_choice": choice,
            "max_tokens": 200, "temperature": 0, "parallel_tool_calls": False,
        }  # fmt: skip
        whole = client.chat.completions.create(**fields)
        assert whole.choices[0].finish_reason == "tool_calls", whole.choices[0].message
        message = whole.choices[0].message
        (call,) = message.tool_calls
        assert (call.id, call.function.name) == ("functions.weather:0", "weather")
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Oslo", "Rome")
        assert arguments["days"] in (1, 2)
        with client.chat.completions.stream(**fields) as stream:
            for _ in stream:
                pass
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert (streamed.id, streamed.function.arguments) == (call.id, call.function.arguments)
    turn = [question, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    after = client.chat.completions.create(
        model="tiny", messages=turn, tools=[WEATHER], max_tokens=8, seed=1
    )
    assert after.choices[0].finish_reason in ("length", "stop")
    free = client.chat.completions.create(
        model="tiny", messages=[question], tools=[WEATHER], max_tokens=8, seed=1
    )
    assert free.choices[0].message.content


def test_the_openai_client_gets_structured_output(real: Endpoint) -> None:
    client = openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=60)
    fields: Any = {
        "model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 100,
        "temperature": 0, "frequency_penalty": 2, "response_format": Verdict,
    }  # fmt: skip
    parsed = client.chat.completions.parse(**fields).choices[0].message.parsed
    assert isinstance(parsed, Verdict)
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
    assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_the_async_openai_client(real: Endpoint) -> None:
    async def go() -> None:
        fields: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "seed": 9}
        async with openai.AsyncOpenAI(
            base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            whole, stream, other = await asyncio.gather(
                client.completions.create(**fields),
                client.completions.create(**fields, stream=True),
                client.completions.create(**{**fields, "seed": 10}),
            )
            pieces = [chunk.choices[0].text async for chunk in stream]
            assert "".join(pieces) == whole.choices[0].text
            assert whole.choices[0].text != other.choices[0].text
            with pytest.raises(openai.NotFoundError, match="huge"):
                await client.completions.create(**{**fields, "model": "huge"})
            with pytest.raises(openai.BadRequestError, match="context"):
                await client.completions.create(**{**fields, "max_tokens": 5000})

    asyncio.run(go())


def test_text_does_not_depend_on_what_else_runs(real: Endpoint) -> None:
    alone = _texts(real, seed=5)[0]
    prompts = ["import os\n", PROMPT, "class A:\n    def"]
    assert _texts(real, prompt=prompts, seed=5)[1] == alone


def test_a_stop_string_ends_the_text_and_the_sequence(real: Endpoint) -> None:
    full = _texts(real, temperature=0)[0]
    stop = full[6:9]
    response = real.post(prompt=PROMPT, max_tokens=500, temperature=0, stop=stop)
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (full[: full.index(stop)], "stop")
    wait_until(real.idle, 10, "the sequence is gone from the engine")


def _committed(endpoint: Endpoint, prompt: list[int], **sampling: Any) -> list[TokenChunk]:
    """What the replica sends for a greedy sequence: token ids, as the engine commits them."""
    greedy = Sampling(seed=0, max_new_tokens=20, temperature=0.0, **sampling)
    replica = endpoint.replica.options(stream=True)
    return list(replica.generate.remote(GenerateCall(uuid.uuid4().hex, tuple(prompt), greedy)))


def test_a_stop_token_ends_the_text(real: Endpoint) -> None:
    tokenizer = load_tokenizer(resolve_model(real.spec.model))
    prompt = tokenizer.encode(PROMPT)
    ids = [token for chunk in _committed(real, prompt) for token in chunk.ids]
    full = tokenizer.decode(ids)
    at = next(at for at in range(3, len(ids) - 1) if ids[at] not in ids[:at])
    fields: Any = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
    assert _texts(real, **fields) == [full]

    body = real.post(**fields, stop_token_ids=[ids[at]]).json()
    text = body["choices"][0]["text"]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert text == tokenizer.decode(ids[:at])
    assert full.startswith(text)
    assert len(text) < len(full)
    assert body["usage"]["completion_tokens"] == at + 1  # the stop token counts
    *_, last = _committed(real, prompt, stop_token_ids=(ids[at],))
    assert (last.finish or {}).items() >= {"type": "stop", "matched": ids[at]}.items()
    assert last.ids[-1] == ids[at]


def test_the_context_can_be_filled_to_its_end_and_not_beyond(real: Endpoint) -> None:
    context = real.replica.limits.remote().result(timeout_s=30)["context_tokens"]
    assert 1000 < context < 1024
    full = real.post(prompt=[9] * 1000, max_tokens=context - 1000, ignore_eos=True)
    assert full.status_code == 200
    assert full.json()["usage"]["total_tokens"] == context
    assert full.json()["choices"][0]["finish_reason"] == "length"
    for prompt, new in (([9] * 1000, context - 999), ([9] * context, 1), ([9] * 5000, 1)):
        refused = real.post(prompt=prompt, max_tokens=new)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def _held_slots(endpoint: Endpoint) -> int:
    """KV slots of sequences: neither free nor held by the prefix cache alone."""
    load = endpoint.stats()["load"]
    return load["max_slots"] - load["free_slots"] - load["cached_slots"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_engine_slots(
    real: Endpoint,
    stream: bool,
) -> None:
    wait_until(lambda: real.idle() and _held_slots(real) == 0)
    body = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "n": 2,
        "stream": stream,
    }  # fmt: skip
    address, content = urlsplit(real.url), json.dumps(body).encode()
    head = (
        f"POST {address.path}/v1/completions HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + content)
        wait_until(lambda: real.stats()["running"] == 2, what="the engine has both")
        wait_until(lambda: _held_slots(real) > 0, what="both have KV slots")
    wait_until(real.idle, 10, "the sequences are gone everywhere")
    wait_until(lambda: _held_slots(real) == 0, 10, "all their KV slots are given back")
    assert real.snapshot()["ended"]["aborted"] >= 2


def _rank_actor(endpoint: Endpoint) -> Any:
    """The one rank of the endpoint's replica."""
    prefix = f"overstory/{endpoint.spec.name}/"
    names = [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["name"].startswith(prefix) and entry["name"].endswith("/rank-0")
    ]
    assert len(names) == 1, names
    return ray.get_actor(names[0], namespace=NAMESPACE)


@pytest.mark.full
def test_a_killed_rank_is_replaced_and_its_streams_go_on(
    real: Endpoint,
) -> None:
    pid = ray.get(call(_rank_actor(real), CONTROL, "health"))["pid"]
    client = openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=300)
    asked: Any = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 900,
        "seed": 8,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }
    *chunks, last = client.completions.create(**asked)
    undisturbed = "".join(chunk.choices[0].text for chunk in chunks)
    stream = client.completions.create(**asked)
    text = next(iter(stream)).choices[0].text
    os.kill(pid, signal.SIGKILL)
    *chunks, usage = stream
    assert text + "".join(chunk.choices[0].text for chunk in chunks) == undisturbed
    assert usage.usage == last.usage
    assert ray.get(call(_rank_actor(real), CONTROL, "health"))["pid"] != pid
    wait_until(lambda: ready(real.url), REAL_START_S, "the endpoint is ready again")
    assert len(_texts(real, seed=1, n=2)) == 2

"""The endpoint on Serve: gateway and replica processes, the engine scripted."""

import asyncio
import itertools
import json
import shutil
import socket
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fixtures_endpoint import Endpoint, ready, wait_until
from scripted_replica import STEP_TOKENS, TEXT

from overstory.orchestrator.serving import replica_states, set_replicas

MODEL = "scripted"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def _client(endpoint: Endpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=endpoint.url + "/v1", api_key="none", max_retries=0, timeout=30)


# ---------------------------------------------------------------- the openai client, unmodified


def test_openai_client(scripted: Endpoint) -> None:
    client = _client(scripted)
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.completions.create(model=MODEL, prompt="p", max_tokens=3000)
    assert answer.choices[0].text == TEXT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(TEXT.encode())
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="p",
            max_tokens=3000,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT
    assert chunks[-1].usage == answer.usage
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, stop=["two"])
    assert [choice.message.content for choice in chat.choices] == [TEXT.split("two")[0]] * 2
    assert chat.choices[0].finish_reason == "stop"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(scripted: Endpoint) -> None:
    def curl(*options: str) -> str:
        command = ["curl", "-sS", "--fail-with-body", "--max-time", "30", *options]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    asked = json.dumps({"model": MODEL, "prompt": "p", "max_tokens": 3000})
    url = scripted.url + "/v1/completions"
    kind = ("-H", "Content-Type: application/json")
    assert json.loads(curl(url, *kind, "-d", asked))["choices"][0]["text"] == TEXT
    lines = curl("-N", url, *kind, "-d", asked[:-1] + ', "stream": true}').splitlines()
    assert lines[-2] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2:2]]
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT
    assert "overstory_requests_total" in curl(scripted.url + "/metrics")


def test_openai_async_client_streams(scripted: Endpoint) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=200, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=scripted.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*[one(client) for _ in range(4)])

    texts = asyncio.run(several())
    assert len(set(texts)) == 1
    assert TEXT.startswith(texts[0].rstrip("\ufffd"))


def test_openai_errors(scripted: Endpoint) -> None:
    client = _client(scripted)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="p")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, top_logprobs=2)
    assert refused.value.param == "top_logprobs"
    assert refused.value.request_id
    with pytest.raises(openai.BadRequestError, match="not this one"):
        client.completions.create(model=MODEL, prompt="<refuse>")


# ---------------------------------------------------------------- streaming


def test_chunks_are_sent_as_they_come(scripted: Endpoint) -> None:
    # The best of some tries: a client that gets no CPU for a while sees chunks together.
    assert min(_share_batched(scripted) for _ in range(3)) < 0.25


def _share_batched(scripted: Endpoint) -> float:
    """Share of chunks of a slow text that came together with the one before."""
    body = {"model": MODEL, "prompt": "<slow>", "max_tokens": 150, "stream": True}
    arrivals = []
    with httpx.stream("POST", scripted.url + "/v1/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.monotonic())
    assert len(arrivals) >= 150 // STEP_TOKENS * 0.8  # broken characters are held back
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    return sum(gap < 0.002 for gap in gaps) / len(gaps)


def test_a_request_id_is_given_or_kept(scripted: Endpoint) -> None:
    assert scripted.post(prompt="p", max_tokens=1).headers["x-request-id"]
    named = httpx.get(scripted.url + "/nowhere", headers={"x-request-id": "mine"}, timeout=30)
    assert (named.status_code, named.headers.get_list("x-request-id")) == (404, ["mine"])


# ---------------------------------------------------------------- clients that leave


def _leave_by_socket(endpoint: Endpoint, stream: bool) -> Any:
    address = urlsplit(endpoint.url)
    body = json.dumps({"model": MODEL, "prompt": "<stuck>", "stream": stream}).encode()
    head = (
        f"POST {address.path}/v1/completions HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(head.encode() + body)
    return connection.close


def _leave_by_httpx(endpoint: Endpoint, stream: bool) -> Any:
    client = httpx.Client(timeout=30)
    body = {"model": MODEL, "prompt": "<slow>", "max_tokens": 400, "stream": True}
    response = client.send(
        client.build_request("POST", endpoint.url + "/v1/completions", json=body), stream=True
    )
    lines = response.iter_lines()
    next(lines)

    def leave() -> None:
        client.close()
        lines.close()  # type: ignore[attr-defined]  # held till now: httpx ends with its iterator

    return leave


def _leave_by_openai(endpoint: Endpoint, stream: bool) -> Any:
    chunks = _client(endpoint).completions.create(
        model=MODEL, prompt="<slow>", max_tokens=400, n=3, stream=True
    )
    next(iter(chunks))
    return chunks.close


@pytest.mark.parametrize(
    ("start", "stream", "sequences"),
    [
        (_leave_by_socket, True, 1),
        (_leave_by_socket, False, 1),
        (_leave_by_httpx, True, 1),
        (_leave_by_openai, True, 3),
    ],
)
def test_a_client_that_leaves_frees_its_slots(
    scripted: Endpoint,
    start: Any,
    stream: bool,
    sequences: int,
) -> None:
    wait_until(scripted.idle)
    aborted = scripted.stats()["aborted"]
    leave = start(scripted, stream)
    wait_until(lambda: scripted.stats()["running"] == sequences, what="the replica has it")
    leave()
    wait_until(scripted.idle, 30, "the sequences are gone everywhere")
    assert scripted.stats()["aborted"] == aborted + sequences


def test_behind_serve_s_proxy(proxied: Endpoint) -> None:
    """As KubeRay has it: the proxy gives the request id, and carries the answer and the leaving."""
    named = httpx.post(
        proxied.url + "/v1/completions",
        json={"model": MODEL, "prompt": "p", "max_tokens": 3000},
        headers={"x-request-id": "mine"},
        timeout=30,
    )
    assert named.json()["choices"][0]["text"] == TEXT
    assert named.headers.get_list("x-request-id") == ["mine"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(proxied.spec.gateway.url + "/health", timeout=10)
    leave = _leave_by_socket(proxied, stream=False)
    wait_until(lambda: proxied.stats()["running"] == 1, what="the replica has it")
    leave()
    wait_until(proxied.idle, 30, "the sequence is gone everywhere")
    assert proxied.stats()["aborted"] == 1


def test_a_request_out_of_time_is_aborted(hasty: Endpoint) -> None:
    response = hasty.post(prompt="<stuck>")
    assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
    wait_until(hasty.idle, 30)
    assert hasty.stats()["aborted"] == 1


# ---------------------------------------------------------------- too much


def test_500_at_once_on_a_queue_of_64(scripted: Endpoint) -> None:
    wait_until(scripted.idle)
    gateway = scripted.spec.gateway
    assert gateway.max_queued_requests == 64

    async def one(client: httpx.AsyncClient) -> httpx.Response:
        body = {"model": MODEL, "prompt": "<slow>", "max_tokens": 30}
        return await client.post(scripted.url + "/v1/completions", json=body)

    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=500)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            return await asyncio.gather(*[one(client) for _ in range(500)])

    responses = asyncio.run(flood())
    counts = Counter(response.status_code for response in responses)
    assert set(counts) <= {200, 429}, counts
    assert counts[200] >= gateway.max_concurrent_requests + gateway.max_queued_requests
    assert counts[429] > 0
    for response in responses:
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "queue_full"
    assert scripted.stats()["most"] <= gateway.max_concurrent_requests
    wait_until(scripted.idle, 30)


@pytest.mark.parametrize(
    ("megabytes", "status", "code"),
    [(10, 413, "request_too_large"), (3, 400, "context_length_exceeded")],
)
def test_a_huge_prompt_is_refused_quickly(
    scripted: Endpoint,
    megabytes: int,
    status: int,
    code: str,
) -> None:
    begun = time.monotonic()
    response = scripted.post(prompt="x" * (megabytes * 1_000_000))
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert time.monotonic() - begun < 20


def test_bad_bodies(scripted: Endpoint) -> None:
    kind = {"content-type": "application/json"}
    for content, param in (
        (b"{bad", None),
        (b'{"model": "scripted", "prompt": "p", "max_tokens": 0}', "max_tokens"),
        (b'{"model": "scripted", "prompt": "p", "max_tokens": -3}', "max_tokens"),
        (b'{"model": "scripted", "prompt": 7}', "prompt"),
        (b'{"model": "scripted", "prompt": "p", "temperature": "hot"}', "temperature"),
    ):
        url = scripted.url + "/v1/completions"
        response = httpx.post(url, content=content, headers=kind, timeout=30)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# ---------------------------------------------------------------- replicas that come and go


def test_more_replicas_take_more_requests(scripted: Endpoint) -> None:
    each = scripted.spec.gateway.max_concurrent_requests
    late_s = 0.0
    for replicas in (2, 1, 2, 1):
        set_replicas(scripted.spec.name, replicas)
        wait_until(lambda: _running(scripted) == replicas, 60, f"{replicas} replicas run")  # noqa: B023
        late_s += wait_until(
            lambda: scripted.snapshot()["max_concurrent"] == each * replicas,  # noqa: B023
            60,
            f"the gateway knows of {replicas} replicas",
        )
        assert ready(scripted.url)
    assert late_s < 10, "Serve tells; looks every 10 s would be late by 5 s each time"


def _running(scripted: Endpoint) -> int:
    """Replicas that run, by Serve."""
    return list(replica_states(scripted.spec.name).values()).count("RUNNING")


def _replaced(scripted: Endpoint, before: int) -> bool:
    return ready(scripted.url) and scripted.stats()["pid"] != before


def test_the_death_of_the_only_replica_is_outlived(scripted: Endpoint) -> None:
    """Streamed and whole, by what runs on it and by what waits for its first token."""
    before = scripted.stats()["pid"]
    with ThreadPoolExecutor(4) as pool:
        bystanders = [pool.submit(scripted.post, prompt="<slow>", max_tokens=300) for _ in range(2)]
        streamed = pool.submit(_streamed_text, scripted, prompt="<slow>", max_tokens=300)
        wait_until(lambda: scripted.stats()["running"] == 3)
        killer = pool.submit(scripted.post, prompt="<exit-once>", max_tokens=300)
        responses = [future.result(timeout=60) for future in (killer, *bystanders)]
        text = streamed.result(timeout=60)
    assert [response.status_code for response in responses] == [200] * 3, responses[0].text
    assert {response.json()["choices"][0]["text"] for response in responses} == {text}
    assert TEXT.startswith(text.rstrip("\ufffd"))
    assert responses[0].json()["usage"]["completion_tokens"] == 300
    wait_until(lambda: _replaced(scripted, before), 60, "a new replica generates")
    wait_until(scripted.idle, 30)
    assert httpx.get(scripted.url + "/health", timeout=10).status_code == 200


def _streamed_text(endpoint: Endpoint, **fields: Any) -> str:
    client = _client(endpoint)
    chunks = client.with_options(timeout=60).completions.create(model=MODEL, stream=True, **fields)
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_a_request_that_its_replicas_die_of_ends_with_the_cause(scripted: Endpoint) -> None:
    before = scripted.stats()["pid"]
    with pytest.raises(openai.APIError, match="rank 1 died"):
        _streamed_text(scripted, prompt="<lose>", max_tokens=99)
    wait_until(lambda: _replaced(scripted, before), 60, "a new replica generates")
    response = scripted.post(prompt="p", max_tokens=5)
    assert response.status_code == 200
    wait_until(scripted.idle, 30)

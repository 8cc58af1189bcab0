"""The endpoint as an ASGI application, with tokens from a script: everything but Serve and the
engine."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from overstory.orchestrator import openai_responses
from overstory.orchestrator.admission import Admission
from overstory.orchestrator.answer_parsers import ParserSettings
from overstory.orchestrator.backend import (
    EngineRefused,
    ReplicaLost,
    TokenChunk,
    TokenLogprobs,
)
from overstory.orchestrator.endpoint import build_http_app
from overstory.orchestrator.generation_config import sampling_defaults
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.openai_errors import ApiError
from overstory.orchestrator.openai_protocol import CompletionRequest
from overstory.orchestrator.openai_responses import LoggedToken
from overstory.orchestrator.readiness import Readiness
from overstory.orchestrator.service import EndpointService, ServiceLimits
from overstory.orchestrator.token_text import TokenText
from overstory.orchestrator.tokenizer import ChatTemplateError

CONTEXT, LONGEST_PROMPT = 100, 95
MAX_BODY = 10_000


class Codepoints:
    """One token per character; ids are code points."""

    vocab_size = 0x110000
    max_token_chars = 1
    template: str | None = None

    def vocabulary(self) -> dict[str, int]:
        return {}

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return "".join(map(chr, ids))

    def token(self, token_id: int) -> TokenText:
        return TokenText(chr(token_id), chr(token_id).encode())

    def render_chat(self, messages: Sequence[Any], **variables: Any) -> str:
        if messages[0]["content"] == "refuse":
            raise ChatTemplateError("no")
        return "".join(f"{message['role']}:{message['content']}\n" for message in messages)


class ScriptedBackend:
    """Writes `text` in chunks of `size`; stops there or at the call's limit. `gate` holds back all
    but the first, or all of them where it is `whole`."""

    def __init__(self, text: str = "one two three", size: int = 3) -> None:
        self.text = text
        self.size = size
        self.calls: list[GenerateCall] = []
        self.closed: list[str] = []
        self.gate: asyncio.Event | None = None
        self.whole = False
        self.fail: Exception | None = None
        self.stop_token = "."

    async def generate(self, call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        self.calls.append(call)
        text, limit = (
            self.text.replace("SEED", str(call.sampling.seed)),
            call.sampling.max_new_tokens,
        )
        ids = [ord(char) for char in text[:limit]]
        ends = {"type": "length"} if len(text) >= limit else {"type": "stop", "matched": 0}
        if ids and ids[-1] == ord(self.stop_token):
            ends = {"type": "stop", "matched": ids[-1]}
        try:
            for at in range(0, len(ids), self.size):
                if (at or self.whole) and self.gate is not None:
                    await self.gate.wait()
                if at and self.fail is not None:
                    raise self.fail
                last = at + self.size >= len(ids)
                some = ids[at : at + self.size]
                logged = None if call.logprobs is None else _logged(some, at, call.logprobs)
                yield TokenChunk(some, ends if last else None, logged)
        finally:
            self.closed.append(call.rid)


def _logged(ids: list[int], at: int, top: int) -> list[TokenLogprobs]:
    """The token at place i has logarithm -(i + 1) / 8 and is the second of its alternatives."""
    return [
        TokenLogprobs(
            -(at + i + 1) / 8,
            ((ord("X"), -0.01), (token, -(at + i + 1) / 8), (ord("Z"), -9.0))[:top],
        )
        for i, token in enumerate(ids)
    ]


class World:
    """Client, service and backend of one test."""

    def __init__(
        self,
        backend: ScriptedBackend,
        concurrent: int = 8,
        queued: int = 8,
        timeout_s: float = 30,
        parsers: ParserSettings | None = None,
        context: int = CONTEXT,
        chat_defaults: Any = None,
    ) -> None:
        async def nothing() -> None:
            pass

        self.backend = backend
        readiness = Readiness(nothing, nothing)
        readiness.ready = True
        self.service = EndpointService(
            "tiny",
            Codepoints(),
            backend,
            Admission(concurrent, queued),
            readiness,
            ServiceLimits(context, context - CONTEXT + LONGEST_PROMPT, timeout_s),
            parsers=parsers,
            chat_defaults=chat_defaults,
        )
        app = build_http_app(self.service, MAX_BODY)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", timeout=30
        )

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "p", "max_tokens": 50, **fields}
        )

    async def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return await self.client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields}
        )

    def idle(self) -> bool:
        return self.service.admission.running == 0 and len(self.service.journal) == 0


def play(story: Callable[[World], Awaitable[None]], **world: Any) -> None:
    async def scenario() -> None:
        made = World(world.pop("backend", ScriptedBackend()), **world)
        async with made.client:
            await story(made)
            assert made.idle(), "a slot or a journal entry was left behind"

    asyncio.run(scenario())


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def streamed_texts(chunks: Sequence[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


# ---------------------------------------------------------------- answers


def test_a_completion_and_its_usage() -> None:
    async def story(world: World) -> None:
        body = (await world.complete(prompt="prompt")).json()
        assert body["object"] == "text_completion"
        assert body["choices"] == [
            {"index": 0, "text": "one two three", "logprobs": None, "finish_reason": "stop"}
        ]
        assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 13, "total_tokens": 19}
        assert world.backend.calls[0].input_ids == tuple(map(ord, "prompt"))

    play(story)


def test_max_tokens_ends_it_with_length_and_defaults_as_openai_s() -> None:
    async def story(world: World) -> None:
        choice = (await world.complete(max_tokens=4)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("one ", "length")
        await world.client.post("/v1/completions", json={"model": "tiny", "prompt": "p"})
        await world.chat()
        limits = [call.sampling.max_new_tokens for call in world.backend.calls[1:]]
        assert limits == [16, CONTEXT - len("user:hi\n")]

    play(story)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_stop_string_cuts_the_text_and_aborts_the_engine(size: int) -> None:
    async def story(world: World) -> None:
        body = (await world.complete(stop=["tw", "zzz"])).json()
        assert body["choices"][0]["text"] == "one "
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len("one tw")
        assert len(world.backend.closed) == 1
        assert world.service.journal.ended()["stop"] == 1

    play(story, backend=ScriptedBackend(size=size))


def test_a_stop_token_is_no_part_of_the_text_but_counts() -> None:
    async def story(world: World) -> None:
        body = (await world.complete(stop_token_ids=[ord(".")])).json()
        assert body["choices"][0]["text"] == "an end"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len("an end.")
        assert world.backend.calls[0].sampling.stop_token_ids == (ord("."),)

    play(story, backend=ScriptedBackend("an end.", 4))


@pytest.mark.parametrize("stop", [None, "thr", "e"])
def test_a_stream_joins_to_the_whole_answer(stop: str | None) -> None:
    async def story(world: World) -> None:
        fields = {"stop": stop, "n": 3, "seed": 5, "echo": True}
        whole = (await world.complete(**fields)).json()
        chunks = events(await world.complete(**fields, stream=True))
        assert chunks[-1] == "[DONE]"
        assert streamed_texts(chunks) == {c["index"]: c["text"] for c in whole["choices"]}
        ends = [c["finish_reason"] for chunk in chunks[:-1] for c in chunk["choices"]]
        assert [end for end in ends if end] == [c["finish_reason"] for c in whole["choices"]]
        assert all("usage" not in chunk for chunk in chunks[:-1])

    play(story, backend=ScriptedBackend("SEED one two three"))


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
def test_usage_in_a_stream_where_asked_for(endpoint: str) -> None:
    async def story(world: World) -> None:
        post = getattr(world, endpoint)
        usage = (await post()).json()["usage"]
        response = await post(stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last, done = events(response)
        assert done == "[DONE]"
        assert (last["choices"], last["usage"]) == ([], usage)
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)

    play(story)


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
@pytest.mark.parametrize("include", [False, True])
def test_usage_so_far_in_each_chunk_where_asked_for(endpoint: str, include: bool) -> None:
    async def story(world: World) -> None:
        options = {"continuous_usage_stats": True, "include_usage": include}
        post = getattr(world, endpoint)
        chunks = events(await post(n=2, stream=True, stream_options=options))[:-1]
        prompt = len("p") if endpoint == "complete" else len("user:hi\n")
        counts: dict[int, list[int]] = {0: [], 1: []}
        for chunk in chunks[:-1] if include else chunks:
            usage = chunk["usage"]
            assert usage["prompt_tokens"] == prompt
            assert usage["total_tokens"] == prompt + usage["completion_tokens"]
            counts[chunk["choices"][0]["index"]].append(usage["completion_tokens"])
        opening = [] if endpoint == "complete" else [3]
        assert counts[0] == counts[1] == [*opening, 3, 6, 9, 12, 13]
        if include:
            assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 26)

    play(story)


def test_a_chat_that_does_not_say_is_sampled_as_the_model_wants() -> None:
    wanted = {"temperature": 0.6, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1}

    async def story(world: World) -> None:
        await world.chat()
        await world.chat(temperature=None, top_p=1.0, top_k=0)
        await world.complete()
        first, second, plain = (call.sampling.engine_params() for call in world.backend.calls)
        names = [*wanted, "min_p"]
        assert [first[name] for name in names] == [0.6, 0.95, 40, 1.1, 0.0]
        assert [second[name] for name in names] == [0.6, 1.0, -1, 1.1, 0.0]
        assert [plain[name] for name in names] == [1.0, 1.0, -1, 1.0, 0.0], "as SGLang has it"

    play(story, chat_defaults=wanted)


def test_what_a_model_wants_is_in_its_folder(tmp_path: Path) -> None:
    assert sampling_defaults(str(tmp_path)) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": null, "eos_token_id": 1, "do_sample": true}')
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.6}
    for text in ("{", '{"top_p": "high"}', '{"top_k": 1.5}', '{"min_p": true}'):
        file.write_text(text)
        with pytest.raises(
            ValueError, match=r"generation_config\.json: .*gateway\.sampling_defaults"
        ):
            sampling_defaults(str(tmp_path))


def test_chat_answers_whole_and_streamed() -> None:
    async def story(world: World) -> None:
        body = (await world.chat()).json()
        assert body["object"] == "chat.completion"
        message = {"role": "assistant", "content": "one two three", "refusal": None}
        assert body["choices"][0]["message"] == message
        chunks = events(await world.chat(stream=True))
        assert chunks[0]["object"] == "chat.completion.chunk"
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert streamed_texts(chunks) == {0: "one two three"}
        assert len({chunk["id"] for chunk in chunks[:-1]}) == 1

    play(story)


def test_several_prompts_with_several_choices_are_numbered_prompt_by_prompt() -> None:
    async def story(world: World) -> None:
        body = (await world.complete(prompt=["ab", "c"], n=2, seed=9, echo=True)).json()
        texts = [choice["text"] for choice in body["choices"]]
        seeds = [call.sampling.seed for call in world.backend.calls]
        assert [text[: -len(str(seed))] for text, seed in zip(texts, seeds, strict=True)] == [
            "ab", "ab", "c", "c"
        ]  # fmt: skip
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == 3
        alone = (await world.complete(prompt="c", n=2, seed=9, echo=True)).json()
        assert [choice["text"] for choice in alone["choices"]] == texts[2:]

    play(story, backend=ScriptedBackend("SEED"))


def test_token_ids_are_taken_as_they_are() -> None:
    async def story(world: World) -> None:
        await world.complete(prompt=[1, 2])
        await world.complete(prompt=[[3], [4, 5]])
        assert [call.input_ids for call in world.backend.calls] == [(1, 2), (3,), (4, 5)]
        refused = await world.complete(prompt=[Codepoints.vocab_size])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")

    play(story)


def test_seeds_are_kept_drawn_and_distinct() -> None:
    async def story(world: World) -> None:
        for fields in ({"seed": 5}, {"seed": 5, "n": 3}, {"seed": 5, "n": 3}, {}, {}, {"n": 3}):
            await world.complete(**fields)
        seeds = [call.sampling.seed for call in world.backend.calls]
        assert seeds[0] == 5
        assert seeds[1:4] == seeds[4:7]
        assert len(set(seeds[1:4])) == 3
        assert len(set(seeds[7:])) == 5

    play(story)


def test_log_probabilities_of_a_completion() -> None:
    async def story(world: World) -> None:
        body = (await world.complete(logprobs=2)).json()
        assert body["choices"][0]["logprobs"] == {
            "tokens": ["a", "b", "c"],
            "token_logprobs": [-0.125, -0.25, -0.375],
            "top_logprobs": [
                {"X": -0.01, "a": -0.125}, {"X": -0.01, "b": -0.25}, {"X": -0.01, "c": -0.375}
            ],
            "text_offset": [0, 1, 2],
        }  # fmt: skip
        few = (await world.complete(logprobs=1)).json()["choices"][0]["logprobs"]
        assert few["top_logprobs"][2] == {"X": -0.01, "c": -0.375}, "the token itself is there too"
        none = (await world.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        assert (none["token_logprobs"], none["top_logprobs"]) == ([-0.125, -0.25, -0.375], None)
        for fields in ({}, {"logprobs": None}, {"logprobs": False}):
            assert (await world.complete(**fields)).json()["choices"][0]["logprobs"] is None
        assert [call.logprobs for call in world.backend.calls] == [2, 1, 0, None, None, None]

    play(story, backend=ScriptedBackend("abc", 2))


def test_what_a_token_stands_for_is_looked_up_once() -> None:
    async def story(world: World) -> None:
        answers = [(await world.chat(logprobs=True, top_logprobs=3)).json() for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert world.service._describe.cache_info().misses == len({*"aba", "X", "Z"})

    play(story, backend=ScriptedBackend("aba", 2))


@pytest.mark.parametrize(("own", "shown"), [("a", -3.0), ("b", -1.0)])
def test_of_alternatives_with_one_text_the_token_itself_counts_or_the_best(
    own: str, shown: float
) -> None:
    a, b = TokenText("a", b"a"), TokenText("b", b"b")
    token = LoggedToken(
        {"a": a, "b": b}[own], -3.0, ((a, -1.0), (b, -3.0), (a, -5.0), (b, -7.0)), 0
    )
    (logged,) = openai_responses._text_logprobs([token])["top_logprobs"]  # type: ignore[index]
    assert logged == {"a": shown, "b": -3.0}


def test_log_probabilities_of_a_chat() -> None:
    async def story(world: World) -> None:
        body = (await world.chat(logprobs=True, top_logprobs=1)).json()
        first, second = body["choices"][0]["logprobs"]["content"]
        assert first == {
            "token": "\xe4",
            "logprob": -0.125,
            "bytes": [0xC3, 0xA4],
            "top_logprobs": [{"token": "X", "logprob": -0.01, "bytes": [88]}],
        }
        assert second["token"] == "b"
        bare = (await world.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in bare] == [[], []]
        assert (await world.chat(logprobs=False)).json()["choices"][0]["logprobs"] is None

    play(story, backend=ScriptedBackend("\xe4b", 2))


@pytest.mark.parametrize("stop", [None, "thr", "e", "one"])
@pytest.mark.parametrize("size", [1, 4])
def test_streamed_log_probabilities_are_those_of_the_whole_answer(
    size: int, stop: str | None
) -> None:
    """Of the tokens that the text shows: what a stop string swallows has none."""

    async def story(world: World) -> None:
        fields = {"stop": stop, "n": 2, "seed": 5, "logprobs": 2}
        choices = (await world.complete(**fields)).json()["choices"]
        for choice in choices:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            assert choice["logprobs"]["text_offset"] == list(range(len(choice["text"])))
        chunks = events(await world.complete(**fields, stream=True))[:-1]
        for choice in choices:
            for name in ("tokens", "token_logprobs", "text_offset"):
                parts = [
                    part["logprobs"][name]
                    for chunk in chunks
                    for part in chunk["choices"]
                    if part["index"] == choice["index"]
                ]
                assert [one for part in parts for one in part] == choice["logprobs"][name]
        fields = {"stop": stop, "logprobs": True, "top_logprobs": 1}
        whole = (await world.chat(**fields)).json()["choices"][0]["logprobs"]["content"]
        deltas = [
            chunk["choices"][0]["logprobs"]
            for chunk in events(await world.chat(**fields, stream=True))[:-1]
        ]
        assert deltas[0] is None, "the opening chunk has no token"
        assert [entry for delta in deltas[1:] for entry in delta["content"]] == whole

    play(story, backend=ScriptedBackend("one two three", size))


def test_a_stop_token_has_no_log_probability() -> None:
    async def story(world: World) -> None:
        choice = (await world.complete(stop_token_ids=[ord(".")], logprobs=0)).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == list("an end")

    play(story, backend=ScriptedBackend("an end.", 4))


def test_rules_for_the_logits_reach_the_engine() -> None:
    async def story(world: World) -> None:
        asked = {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.5}
        for post in (world.complete, world.chat):
            answer = await post(**asked, min_tokens=7, logit_bias={"8": -100, "9": 1.5})
            assert answer.status_code == 200
        for call in world.backend.calls:
            params = call.sampling.engine_params()
            assert {name: params[name] for name in asked} == asked
            assert params["min_new_tokens"] == 7
            assert params["logit_bias"] == {"8": -100, "9": 1.5}

    play(story)


def test_what_the_text_must_fit_reaches_the_engine() -> None:
    async def story(world: World) -> None:
        await world.chat(response_format={"type": "json_object"})
        await world.complete(regex="a+")
        await world.complete(ebnf="root ::= [a-z]")
        params = [call.sampling.engine_params() for call in world.backend.calls]
        assert params[0]["json_schema"] == '{"type": "object"}'
        assert params[1]["regex"] == "a+"
        assert params[2]["ebnf"] == "root ::= [a-z]"
        assert not {"regex", "ebnf"} & set(params[0])

    play(story)


# ---------------------------------------------------------------- refusals


def test_errors_have_openai_s_shape_and_a_request_id() -> None:
    async def story(world: World) -> None:
        response = await world.complete(max_tokens=0)
        assert response.status_code == 400
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]

    play(story)


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (b"{bad", "application/json", "invalid_json"),
        (b"", "application/json", "missing_required_parameter"),
        (b"[1]", "application/json", "invalid_body"),
        (b'"x"', "application/json", "invalid_body"),
        (b'{"model": "tiny"}', "text/plain", "invalid_body"),
        (b"\xff\xfe", "application/json", "invalid_json"),
        (b"[" * 5000, "application/json", "invalid_json"),
        (b'{"seed": 1' + b"0" * 5000 + b"}", "application/json", "invalid_json"),
    ],
)
def test_bodies_that_are_no_request(content: bytes, kind: str, code: str | None) -> None:
    async def story(world: World) -> None:
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = await world.client.post(
                path, content=content, headers={"content-type": kind}
            )
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["message"]
            assert code is None or error["code"] == code

    play(story)


@pytest.mark.parametrize("text", ["\ud800", "x\udfffy"])
def test_half_surrogate_pairs_are_refused_and_whole_ones_pass(text: str) -> None:
    async def story(world: World) -> None:
        cases = (
            ({"prompt": text}, 400), ({"model": text}, 400), ({text: 1}, 400),
            ({"prompt": "\U0001f600"}, 200), ({"prompt": "\\" + "ud800"}, 200),
        )  # fmt: skip
        for fields, status in cases:
            body = json.dumps({"model": "tiny", "prompt": "p", **fields}).encode()
            response = await world.client.post(
                "/v1/completions", content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code == status
            assert ("error" in response.json()) == (status == 400)

    play(story)


def test_another_model_is_not_found() -> None:
    async def story(world: World) -> None:
        for response in (
            await world.complete(model="gpt-4"),
            await world.client.get("/v1/models/gpt-4"),
        ):
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "model_not_found"
            assert "tiny" in response.json()["error"]["message"]

    play(story)


def test_other_paths_and_methods_answer_in_the_same_shape() -> None:
    async def story(world: World) -> None:
        assert (await world.client.get("/nowhere")).json()["error"]["message"]
        response = await world.client.get("/v1/completions")
        assert (response.status_code, "error" in response.json()) == (405, True)

    play(story)


def test_the_context_is_checked_before_the_engine_sees_anything() -> None:
    async def story(world: World) -> None:
        for fields, fits in (
            ({"prompt": "x" * CONTEXT}, False),
            ({"prompt": "x" * 96, "max_tokens": 1}, False),
            ({"prompt": "x" * 95, "max_tokens": 1}, True),
            ({"prompt": "x" * 50, "max_tokens": 51}, False),
            ({"prompt": "x" * 5000}, False),
            ({"prompt": ["x", "x" * CONTEXT]}, False),
            ({"prompt": "x" * 50, "max_tokens": 50}, True),
        ):
            response = await world.complete(**fields)
            assert (response.status_code == 200) == fits
            if not fits:
                error = response.json()["error"]
                assert (response.status_code, error["code"], error["param"]) == (
                    400, "context_length_exceeded", "prompt"
                )  # fmt: skip
                assert str(CONTEXT) in error["message"]
        assert len(world.backend.calls) == 2

    play(story)


def test_tokens_beyond_the_vocabulary_and_beyond_the_limit_are_refused() -> None:
    async def story(world: World) -> None:
        for fields in (
            {"logit_bias": {str(Codepoints.vocab_size): 1}},
            {"stop_token_ids": [Codepoints.vocab_size]},
            {"min_tokens": 51},
        ):
            response = await world.complete(**fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(fields))
        assert (await world.complete(min_tokens=50)).status_code == 200
        assert len(world.backend.calls) == 1

    play(story)


def test_a_prompt_without_tokens_and_too_many_choices_are_refused() -> None:
    async def story(world: World) -> None:
        assert (await world.complete(prompt="")).json()["error"]["param"] == "prompt"
        many = await world.complete(prompt=["x"] * 65, n=2)
        assert (many.status_code, many.json()["error"]["param"]) == (400, "n")
        assert not world.backend.calls

    play(story)


def test_messages_that_the_template_refuses() -> None:
    async def story(world: World) -> None:
        response = await world.chat(messages=[{"role": "user", "content": "refuse"}])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")

    play(story)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_refused_while_it_comes(declared: bool) -> None:
    sent = 0

    async def body() -> AsyncGenerator[bytes, None]:
        nonlocal sent
        for _ in range(1000):
            sent += 1000
            yield b"x" * 1000

    async def story(world: World) -> None:
        content: Any = b"x" * (MAX_BODY + 1) if declared else body()
        response = await world.client.post("/v1/completions", content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (
            413, "request_too_large"
        )  # fmt: skip
        assert sent <= MAX_BODY + 2000

    play(story)


# ---------------------------------------------------------------- limits and failures


def test_more_requests_than_may_wait_get_429_and_a_time() -> None:
    async def story(world: World) -> None:
        world.backend.gate = asyncio.Event()
        admitted = [asyncio.create_task(world.complete()) for _ in range(3)]
        while world.service.admission.queued < 1:
            await asyncio.sleep(0)
        refused = await world.complete()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        world.backend.gate.set()
        assert [(await task).status_code for task in admitted] == [200] * 3

    play(story, concurrent=2, queued=1)


def test_choices_count_towards_the_limit() -> None:
    async def story(world: World) -> None:
        world.backend.gate = asyncio.Event()
        requests = [asyncio.create_task(world.complete(prompt=["a", "b"], n=2)) for _ in range(2)]
        while world.service.admission.queued < 1 or len(world.backend.calls) < 4:
            await asyncio.sleep(0)
        assert len(world.backend.calls) == 4
        assert (await world.complete()).status_code == 429
        world.backend.gate.set()
        assert [(await request).status_code for request in requests] == [200, 200]

    play(story, concurrent=5, queued=1)


def test_more_choices_than_can_ever_run_are_refused_at_once() -> None:
    async def story(world: World) -> None:
        slot = await world.service.admission.acquire(4)  # all of them
        cases = (
            ({"n": 5}, "n"),
            ({"prompt": ["x"] * 5}, "prompt"),
            ({"prompt": ["x"] * 3, "n": 2}, "n"),
        )
        for fields, param in cases:
            response = await world.complete(**fields)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "too_many_choices")
            assert error["param"] == param
            assert "gateway.max_concurrent_requests" in error["message"]
        assert (await world.chat(n=5)).json()["error"]["param"] == "n"
        slot.release()
        assert (await world.complete(n=4)).status_code == 200

    play(story, concurrent=4)


def test_not_ready_is_503_with_the_reason() -> None:
    async def story(world: World) -> None:
        assert (await world.client.get("/ready")).status_code == 200
        world.service.readiness.ready = False
        world.service.readiness.reason = "replicas load"
        for response in (await world.complete(), await world.client.get("/ready")):
            assert response.status_code == 503
            assert "replicas load" in response.json()["error"]["message"]
            assert response.headers["retry-after"]
        assert (await world.client.get("/health")).status_code == 200
        assert (await world.client.get("/v1/models")).json()["data"][0]["id"] == "tiny"

    play(story)


def test_a_request_under_way_that_goes_on_proves_readiness() -> None:
    async def story(world: World) -> None:
        world.backend.gate = asyncio.Event()
        under_way = asyncio.create_task(world.complete())
        while not world.backend.calls:
            await asyncio.sleep(0)
        world.service.readiness.ready = False
        world.backend.gate.set()
        assert (await under_way).status_code == 200
        assert (await world.complete()).status_code == 200

    play(story)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_aborted(stream: bool) -> None:
    async def story(world: World) -> None:
        world.backend.gate = asyncio.Event()
        response = await world.complete(stream=stream)
        if stream:
            *_, last = events(response)
            assert last["error"]["code"] == "request_timeout"
        else:
            assert response.status_code == 504
            assert response.headers["x-should-retry"] == "false"
        assert len(world.backend.closed) == 1

    play(story, timeout_s=0.05)


def test_waiting_for_a_slot_counts_towards_the_time_limit() -> None:
    async def story(world: World) -> None:
        slot = await world.service.admission.acquire()
        assert (await world.complete()).status_code == 504
        slot.release()

    play(story, timeout_s=0.05, concurrent=1)


def test_a_client_that_reads_slowly_keeps_neither_a_place_nor_the_time_limit() -> None:
    async def story(world: World) -> None:
        service = world.service
        body = CompletionRequest(model="tiny", prompt="p", n=2)
        running = await service.open(await service.plan_completion(body), "slow", stream=True)
        pieces = running.pieces()
        await anext(pieces)
        while len(world.backend.closed) < 2 or len(service.journal):
            await asyncio.sleep(0)
        assert service.admission.running == 0, "the engine has nothing of it any more"
        await asyncio.sleep(0.06)
        with pytest.raises(ApiError) as late:
            await anext(pieces)
        assert late.value.status == 504
        await running.aclose()

    play(story, timeout_s=0.05)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (ReplicaLost("rank 1 died"), 503, "replica_lost"),
        (EngineRefused("too long", 400), 400, "refused_by_engine"),
        (EngineRefused("its queue is full", 503), 503, "engine_busy"),
        (EngineRefused("too many at once", 429), 429, "queue_full"),
        (EngineRefused("out of memory", 500), 500, "internal_error"),
        (RuntimeError("a bug"), 500, "internal_error"),
    ],
)
def test_failures_after_some_tokens(failure: Exception, status: int, code: str) -> None:
    async def story(world: World) -> None:
        world.backend.fail = failure
        response = await world.complete(n=2)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert str(failure) in response.json()["error"]["message"]
        assert (int(response.headers.get("retry-after", 0)) >= 1) == (status in (429, 503))
        *_, last = events(await world.complete(stream=True))
        assert last["error"]["code"] == code  # and no [DONE]: the text is not complete

    play(story)


def test_a_failure_before_the_first_token_still_has_its_status_in_a_stream() -> None:
    async def story(world: World) -> None:
        async def refuse(call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
            raise EngineRefused("no", 400)
            yield

        world.backend.generate = refuse  # type: ignore[method-assign]
        assert (await world.complete(stream=True)).status_code == 400

    play(story)


@pytest.mark.parametrize("before_a_token", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_along(stream: bool, before_a_token: bool) -> None:
    async def story(world: World) -> None:
        world.backend.gate, world.backend.whole = asyncio.Event(), before_a_token
        request = asyncio.create_task(world.complete(stream=stream, n=2))
        while len(world.backend.calls) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert sorted(world.backend.closed) == sorted(call.rid for call in world.backend.calls)
        assert world.service.journal.ended()["aborted"] == 2

    play(story)


def test_the_openapi_document_names_both_endpoints() -> None:
    async def story(world: World) -> None:
        document = (await world.client.get("/openapi.json")).json()
        assert {"/v1/completions", "/v1/chat/completions", "/ready"} <= set(document["paths"])
        fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
        assert fields["min_p"]["description"]

    play(story)


# ---------------------------------------------------------------- tokens


def test_tokens_of_texts_and_conversations_and_back() -> None:
    async def story(world: World) -> None:
        for path in ("/tokenize", "/v1/tokenize"):
            one = (await world.client.post(path, json={"model": "tiny", "prompt": "ab"})).json()
            assert one == {"tokens": [97, 98], "count": 2, "max_model_len": CONTEXT}
        many = (await world.client.post("/tokenize", json={"prompt": ["a", "bc"]})).json()
        assert (many["tokens"], many["count"]) == ([[97], [98, 99]], [1, 2])
        messages = [{"role": "user", "content": "hi"}]
        chat = (await world.client.post("/tokenize", json={"messages": messages})).json()
        assert "".join(map(chr, chat["tokens"])) == "user:hi\n"
        back = await world.client.post("/detokenize", json={"tokens": chat["tokens"]})
        assert back.json()["text"] == "user:hi\n"
        several = await world.client.post("/v1/detokenize", json={"tokens": [[97], []]})
        assert several.json()["text"] == ["a", ""]

    play(story)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "huge"}, "model"),
        ("/detokenize", {"tokens": [Codepoints.vocab_size]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [1], "extra": 1}, "extra"),
    ],
)
def test_tokens_that_cannot_be_are_refused(path: str, body: dict[str, Any], param: str) -> None:
    async def story(world: World) -> None:
        response = await world.client.post(path, json=body)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param

    play(story)

"""Tool calls and reasoning in chats, by SGLang's own parsers, with answers from a script."""

import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from test_openai_endpoint import ScriptedBackend, World, events
from test_openai_endpoint import play as play_it

from overstory.orchestrator.answer_parsers import AnswerParser, ParserSettings, Parts
from overstory.orchestrator.openai_protocol import ChatCompletionRequest
from overstory.orchestrator.parser_names import REASONING_PARSERS, TOOL_CALL_PARSERS
from overstory.orchestrator.sglang_parsers import sglang_parsers
from overstory.orchestrator.spec import DeploymentSpec

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
KIMI_CALLS = (
    "<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}'
    "<|tool_call_end|>"
    "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}


play = partial(play_it, context=1000)


def _joined(response: httpx.Response) -> dict[str, Any]:
    """A streamed answer put together, as clients do."""
    content, reasoning, reason = "", "", None
    calls: dict[int, dict[str, Any]] = {}
    for chunk in events(response)[:-1]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            reason = choice["finish_reason"] or reason
            for piece in delta.get("tool_calls", []):
                call = calls.setdefault(piece["index"], {"arguments": ""})
                call |= {"id": piece["id"]} if "id" in piece else {}
                function = piece["function"]
                call |= {"name": function["name"]} if "name" in function else {}
                call["arguments"] += function.get("arguments", "")
    return {
        "content": content,
        "reasoning": reasoning,
        "calls": list(calls.values()),
        "end": reason,
    }


def _whole(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", [])],
        "end": choice["finish_reason"],
    }


async def _both(world: World, **fields: Any) -> dict[str, Any]:
    """The answer, which is the same whole and streamed."""
    whole = _whole(await world.chat(**fields))
    assert _joined(await world.chat(**fields, stream=True)) == whole
    return whole


def test_the_names_are_sglang_s() -> None:
    assert set(TOOL_CALL_PARSERS) == set(sglang_parsers().function_call.ToolCallParserEnum)
    assert set(REASONING_PARSERS) == set(sglang_parsers().reasoning.DetectorMap)


def test_the_parsers_come_without_the_engine() -> None:
    """In a process of its own, since others import torch."""
    code = (
        "import sys\n"
        "from overstory.orchestrator.answer_parsers import ParserSettings\n"
        "ParserSettings('kimi_k2', 'kimi_k2')\n"
        "heavy = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'sglang.srt.function_call.kimik2_detector' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_kimi_s_calls_whole_and_streamed(size: int) -> None:
    async def story(world: World) -> None:
        answer = await _both(world, tools=TOOLS)
        assert answer["content"] == "Let me see. "
        assert answer["end"] == "tool_calls"
        assert answer["calls"] == [
            {"id": "functions.weather:0", "name": "weather", "arguments": '{"city": "Oslo"}'},
            {"id": "functions.now:1", "name": "now", "arguments": "{}"},
        ]
        one = await _both(world, tools=TOOLS, parallel_tool_calls=False)
        assert [call["name"] for call in one["calls"]] == ["weather"]

    play(
        story,
        backend=ScriptedBackend("Let me see. " + KIMI_CALLS, size),
        parsers=ParserSettings("kimi_k2"),
    )


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_qwen_s_calls(size: int) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ås"}}\n</tool_call>'

    async def story(world: World) -> None:
        whole = _whole(await world.chat(tools=TOOLS))
        streamed = _joined(await world.chat(tools=TOOLS, stream=True))
        for answer in (whole, streamed):
            assert answer["end"] == "tool_calls"
            assert [c["name"] for c in answer["calls"]] == ["weather"]
            assert json.loads(answer["calls"][0]["arguments"]) == {"city": "Ås"}
            assert answer["calls"][0]["id"].startswith("call_")

    play(story, backend=ScriptedBackend(call, size), parsers=ParserSettings("qwen25"))


@pytest.mark.parametrize("text", ["no calls here", "a < b <|", "<|tool_calls_section_beg"])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_text_without_calls_comes_through_whole(text: str, size: int) -> None:
    async def story(world: World) -> None:
        answer = await _both(world, tools=TOOLS)
        assert (answer["content"], answer["end"], answer["calls"]) == (text, "stop", [])
        assert (await _both(world, tools=TOOLS, tool_choice="none"))["content"] == text

    play(story, backend=ScriptedBackend(text, size), parsers=ParserSettings("kimi_k2"))


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_reasoning_apart_and_in_the_text(size: int) -> None:
    async def story(world: World) -> None:
        answer = await _both(world)
        assert (answer["reasoning"], answer["content"]) == ("hm, yes", "It is")
        assert (await _both(world, separate_reasoning=False))["content"] == "hm, yes</think>It is"
        off = await _both(world, chat_template_kwargs={"thinking": False})
        assert off["content"].startswith("hm, yes")
        for effort in ("none", "no_think"):
            assert await _both(world, reasoning_effort=effort) == off
        said = {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}
        assert await _both(world, **said) == answer, "what the template is told counts"
        assert await _both(world, reasoning_effort=0.5) == answer

    play(
        story,
        backend=ScriptedBackend("hm, yes</think>It is", size),
        parsers=ParserSettings(reasoning="kimi_k2"),
    )


_READS_OTHERWISE = {"mistral", "llama3"}
"""Mistral's takes every closing bracket for its end mark, Llama's every object for a call."""


@pytest.mark.parametrize("text", ["Hello, 1 < 2 and [3].", "Hi <tool", "ends in <|", '{"a": 1}'])
@pytest.mark.parametrize("name", sorted(set(TOOL_CALL_PARSERS) - _READS_OTHERWISE))
def test_no_parser_loses_or_doubles_plain_text(name: str, text: str) -> None:
    plan = _plan(ParserSettings(name))
    assert plan.parser().whole(text).content == text
    for size in (1, 5, 100):
        parser = plan.parser()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        parts = [parser.feed(piece, piece is pieces[-1]) for piece in pieces]
        assert "".join(part.content for part in parts) == text
        assert not parser.called


def test_a_parser_that_fails_leaves_the_text() -> None:
    class Broken:
        detector = SimpleNamespace()

        def __getattr__(self, name: str) -> Any:
            raise ValueError(name)

    parser = AnswerParser(Broken(), Broken(), [], lambda index, name: name)
    assert parser.whole("abc") == Parts("abc")
    parts = [parser.feed(piece, piece == "c") for piece in "abc"]
    assert "".join(part.content for part in parts) == "abc"


def test_reasoning_before_calls() -> None:
    async def story(world: World) -> None:
        answer = await _both(world, tools=TOOLS)
        assert (answer["reasoning"], answer["content"]) == ("hm", "")
        assert [call["name"] for call in answer["calls"]] == ["weather", "now"]

    play(
        story,
        backend=ScriptedBackend("hm</think>" + KIMI_CALLS),
        parsers=ParserSettings("kimi_k2", "kimi_k2"),
    )


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_by_json_where_there_is_no_parser(choice: Any) -> None:
    async def story(world: World) -> None:
        whole = _whole(await world.chat(tools=TOOLS, tool_choice=choice))
        stream = await world.chat(tools=TOOLS, tool_choice=choice, stream=True)
        for answer in (whole, _joined(stream)):
            assert (answer["content"], answer["end"]) == ("", "tool_calls")
            assert answer["calls"][0]["name"] == "weather"
            assert json.loads(answer["calls"][0]["arguments"]) == {"city": "Oslo"}
        kind, text = world.backend.calls[0].sampling.constraint or ("", "")
        assert kind == "json_schema"
        assert json.loads(text)["type"] == "array"
        refused = await world.chat(tools=TOOLS)
        assert refused.status_code == 400
        assert "gateway.tool_call_parser" in refused.json()["error"]["message"]

    play(story, backend=ScriptedBackend('[{"name": "weather", "parameters": {"city": "Oslo"}}]'))


def _plan(settings: ParserSettings, **fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
    return settings.plan(ChatCompletionRequest.model_validate(body))


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_a_forced_call_has_a_grammar_with_every_parser(name: str, choice: Any) -> None:
    plan = _plan(ParserSettings(name), tool_choice=choice)
    native = ParserSettings(name)._native([])
    assert native is not None
    if native().detector.parses_required_natively():
        assert plan.constraint is None
        return
    kind, text = plan.constraint
    assert kind in ("structural_tag", "json_schema")
    assert "weather" in text
    if kind == "structural_tag":
        assert set(json.loads(text)) >= {"format"}
    assert _plan(ParserSettings(name), tool_choice="none").constraint is None


def test_one_call_alone_where_asked_for() -> None:
    for name in ("kimi_k2", "qwen25", "pythonic"):
        several = _plan(ParserSettings(name), tool_choice="required").constraint[1]
        one = _plan(
            ParserSettings(name), tool_choice="required", parallel_tool_calls=False
        ).constraint[1]
        assert several != one
        assert '"stop_after_first": true' in one or '"maxItems": 1' in one


def test_a_grammar_begins_after_the_reasoning() -> None:
    settings = ParserSettings("kimi_k2", "kimi_k2")
    plan = _plan(settings, tool_choice="required")
    first, second = json.loads(plan.constraint[1])["format"]["elements"]
    assert (first["content"]["type"], first["end"]) == ("any_text", "</think>")
    assert second["type"] == "sequence"
    schema = {"name": "n", "schema": SCHEMA}
    formatted = {"response_format": {"type": "json_schema", "json_schema": schema}, "tools": []}
    kind, text = _plan(settings, **formatted).constraint
    assert json.loads(text)["format"]["elements"][1]["json_schema"] == SCHEMA
    for off in ({"chat_template_kwargs": {"thinking": False}}, {"reasoning_effort": "none"}):
        assert _plan(settings, **formatted, **off).constraint[0] == "json_schema"
    asked_for = ParserSettings("deepseekv3", "deepseek-v3")  # It thinks only where it is told to.
    for effort, kind in ((None, "json_schema"), ("low", "structural_tag"), ("none", "json_schema")):
        assert _plan(asked_for, **formatted, reasoning_effort=effort).constraint[0] == kind
    for asked, kind in ({"regex": "a+"}, "regex"), ({"ebnf": 'root ::= "a"'}, "grammar"):
        text = _plan(settings, tools=[], **asked).constraint[1]
        assert json.loads(text)["format"]["elements"][1]["type"] == kind


def test_strict_tools_are_held_to_their_schema_by_choice_too() -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
    assert _plan(ParserSettings("kimi_k2")).constraint is None
    kind, text = _plan(ParserSettings("kimi_k2"), tools=strict).constraint
    assert kind == "structural_tag"
    assert json.loads(text)["format"]["type"] == "triggered_tags"


def test_the_template_gets_tools_calls_and_answers() -> None:
    seen: dict[str, Any] = {}
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "functions.now:0", "type": "function",
                 "function": {"name": "now", "arguments": '{"zone": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "functions.now:0",
         "content": [{"type": "text", "text": "9"}]},
    ]  # fmt: skip

    async def story(world: World) -> None:
        def render(messages: Any, **variables: Any) -> str:
            seen.update(variables, messages=messages)
            return "x"

        world.service.tokenizer.render_chat = render  # type: ignore[method-assign]
        response = await world.chat(
            messages=messages, tools=TOOLS, tool_choice=NAMED, reasoning_effort="low"
        )
        assert (
            response.json()["choices"][0]["message"]["tool_calls"][0]["id"] == "functions.weather:1"
        )

    play(story, backend=ScriptedBackend(KIMI_CALLS), parsers=ParserSettings("kimi_k2"))
    assert seen["reasoning_effort"] == "low"
    assert seen["thinking"] is seen["enable_thinking"] is True
    assert [tool["function"]["name"] for tool in seen["tools"]] == ["weather"]
    call = seen["messages"][1]["tool_calls"][0]
    assert call["function"] == {"name": "now", "arguments": {"zone": 1}}
    assert seen["messages"][1]["reasoning_content"] == "hm"
    assert seen["messages"][2] == {
        "role": "tool", "tool_call_id": "functions.now:0", "content": "9"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS[:1] * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS[1:], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 5}}}]},
         "tools.0.function.parameters"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": "[]"}}]}]}, "messages.0.tool_calls"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async def story(world: World) -> None:
        response = await world.chat(**{"max_tokens": 9, **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param

    play(story, parsers=ParserSettings("kimi_k2"))


def test_a_deployment_names_parsers_that_there_are() -> None:
    base: dict[str, Any] = {"model": "m", "tree": {"budget": 0}}
    spec = DeploymentSpec(**base, gateway={"tool_call_parser": "kimi_k2"})
    assert spec.gateway.tool_call_parser == "kimi_k2"
    with pytest.raises(ValueError, match="did you mean kimi_k2"):
        DeploymentSpec(**base, gateway={"reasoning_parser": "kimi-k2"})

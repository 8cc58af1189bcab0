"""Grammars that the gateway writes for forced calls compile in the engine's backend, and say what
they should."""

import json
from typing import Any

import pytest
import sglang  # noqa: F401  (the whole of it, before the gateway's loader would take parts)
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from overstory.orchestrator.answer_parsers import ParserSettings
from overstory.orchestrator.openai_protocol import ChatCompletionRequest
from overstory.orchestrator.parser_names import TOOL_CALL_PARSERS

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def _grammar(
    tool_call: str | None, reasoning: str | None, **fields: Any
) -> xgrammar.Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    request = ChatCompletionRequest.model_validate(body)
    constraint = ParserSettings(tool_call, reasoning).plan(request).constraint
    if constraint is None:
        return None
    kind, text = constraint
    if kind == "json_schema":
        return xgrammar.Grammar.from_json_schema(text)
    assert kind == "structural_tag"
    return xgrammar.Grammar.from_structural_tag(text)


@pytest.mark.parametrize("reasoning", [None, "kimi_k2"])
@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_every_forced_call_compiles(name: str, choice: Any, reasoning: str | None) -> None:
    for parallel in (True, False):
        grammar = _grammar(
            name, reasoning, tools=[TOOL], tool_choice=choice, parallel_tool_calls=parallel
        )
        assert grammar is None or not accepts(grammar, "no call at all")


def _kimi(city: str, number: int = 0) -> str:
    arguments = json.dumps({"city": city})
    return (
        f"<|tool_call_begin|>functions.weather:{number}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
    )


def _section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def test_kimi_s_calls_fit_and_others_do_not() -> None:
    one, two = _section(_kimi("Oslo")), _section(_kimi("Oslo"), _kimi("Rome", 1))
    several = _grammar("kimi_k2", None, tools=[TOOL], tool_choice="required")
    single = _grammar(
        "kimi_k2", None, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    assert accepts(several, one)
    assert accepts(several, two)
    assert accepts(single, one)
    assert not accepts(single, two)
    for grammar in (several, single):
        assert not accepts(grammar, _section(_kimi("Bonn")))
        assert not accepts(grammar, f"well, {one}")


def test_reasoning_comes_before_what_is_forced() -> None:
    call = _section(_kimi("Rome"))
    thinking = _grammar("kimi_k2", "kimi_k2", tools=[TOOL], tool_choice=NAMED)
    assert accepts(thinking, f"hm, {{]</think>{call}")
    assert not accepts(thinking, call)
    assert not accepts(thinking, f"hm</think>well, {call}")
    off = {"chat_template_kwargs": {"thinking": False}}
    assert accepts(_grammar("kimi_k2", "kimi_k2", tools=[TOOL], tool_choice=NAMED, **off), call)

    formatted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    for asked, good in (
        ({"response_format": formatted}, '{"city": "Oslo"}'),
        ({"regex": "a+b"}, "aab"),
        ({"ebnf": 'root ::= "x" "y"'}, "xy"),
    ):
        grammar = _grammar(None, "kimi_k2", **asked)
        assert accepts(grammar, f"so: 1 < 2</think>{good}")
        assert not accepts(grammar, f"so: 1 < 2</think>{good}!")
        assert not accepts(grammar, good)


def test_strict_arguments_by_choice_of_the_model() -> None:
    grammar = _grammar("kimi_k2", None, tools=[TOOL])
    assert accepts(grammar, "just text")
    assert accepts(grammar, f"let me see {_section(_kimi('Rome'))}")
    assert not accepts(grammar, f"let me see {_section(_kimi('Bonn'))}")

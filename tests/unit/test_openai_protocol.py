import importlib
import json
from typing import Any

import pytest
from pydantic import ValidationError

from overstory.orchestrator.openai_errors import ApiError, from_validation
from overstory.orchestrator.openai_protocol import (
    HARMLESS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    known_fields,
)
from overstory.orchestrator.sglang_parsers import sglang_parsers

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "p", **fields})


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": [USER], **fields})


def refusal(kind: type[GenerationRequest], **fields: Any) -> ApiError:
    base = {"prompt": "p"} if kind is CompletionRequest else {"messages": [USER]}
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "m", **base, **fields})
    return from_validation(caught.value.errors())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_in_every_form(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [1, "a"], ["a", 1], [[1], "a"], [True], [-1], [1.5], 7, {"a": 1}, [[1], []]],
)
def test_prompts_in_no_form_are_refused_by_name(prompt: Any) -> None:
    error = refusal(CompletionRequest, prompt=prompt)
    assert (error.status, error.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "ten"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("presence_penalty", 3),
        ("presence_penalty", "much"),
        ("presence_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 2.1),
        ("repetition_penalty", float("inf")),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("logit_bias", {"1": 100.1}),
        ("logit_bias", {"1": -101}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"\u0663": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"1" * 5000: 1}),
        ("logit_bias", [1, 2]),
        ("n", 0),
        ("n", 129),
        ("seed", "lucky"),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", ["a"]),
        ("stream", "yes"),
        ("stream", 1),
        ("model", 3),
        ("echo", "no"),
        ("ignore_eos", 0),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    error = refusal(CompletionRequest, **{field: value})
    assert (error.status, error.param) == (400, field) or error.param == f"{field}.0"
    assert field in error.message


def test_of_a_field_of_several_kinds_the_fault_of_the_kind_that_came_is_told() -> None:
    said = refusal(CompletionRequest, stop=["x"] * 17).message
    assert said == "stop: List should have at most 16 items after validation, not 17"
    assert "valid string, got 5" in refusal(CompletionRequest, stop=["x", 5]).message
    assert "at least 1 character" in refusal(CompletionRequest, stop="").message
    assert "a valid string" in refusal(CompletionRequest, stop={"a": 1}).message


@pytest.mark.parametrize("model", [{}, {"model": None}])
def test_a_model_must_be_named(model: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "p", **model})
    assert from_validation(caught.value.errors()).param == "model"


@pytest.mark.parametrize(
    ("field", "asking", "off"),
    [
        ("best_of", 2, 1),
        ("suffix", "x", ""),
        ("json_schema", "{}", None),
        ("lora_path", "x", None),
    ],
)
def test_what_cannot_be_done_yet_is_refused_unless_it_asks_for_nothing(
    field: str, asking: Any, off: Any
) -> None:
    for kind in (CompletionRequest, ChatCompletionRequest):
        error = refusal(kind, **{field: asking})
        assert (error.param, error.code) == (field, "unsupported_parameter")
    completion(**{field: off})
    chat(**{field: off})


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_every_field_of_sglang_s_is_known_and_passes_where_it_asks_for_nothing(kind: Any) -> None:
    """Their clients send defaults; what they ask for and get nothing of is refused by name."""
    sglang_parsers()  # Without SGLang's engine.
    protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    theirs = getattr(protocol, kind.__name__).model_fields
    assert len(theirs) > 50
    assert set(theirs) <= known_fields(kind)
    assert set(protocol.StreamOptions.model_fields) <= set(StreamOptions.model_fields)
    off = {
        name: field.default
        for name, field in theirs.items()
        if not field.is_required() and name not in ("model", "tool_choice")
    }
    base = {"model": "m", "prompt": "p", "messages": [USER]}
    kind.model_validate({**{n: v for n, v in base.items() if n in theirs}, **off})
    refused = set(theirs) - set(kind.model_fields) - HARMLESS
    for name in refused:
        error = refusal(kind, **{name: "something"})
        assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("effort", [1, 0.995, -0.1, True, "some"])
def test_an_effort_is_a_word_or_a_number_below_one(effort: Any) -> None:
    error = refusal(ChatCompletionRequest, reasoning_effort=effort)
    assert (error.status, error.param) == (400, "reasoning_effort")
    assert chat(reasoning_effort=0.5).reasoning_effort == 0.5
    assert chat(reasoning_effort="max").reasoning_effort == "max"


@pytest.mark.parametrize("bias", [{"1": "x"}, {"1": True}, {"1": float("nan")}, {"1": None}])
def test_bias_that_is_no_number_is_refused_by_token(bias: dict[str, Any]) -> None:
    error = refusal(CompletionRequest, logit_bias=bias)
    assert error.status == 400
    assert (error.param or "").startswith("logit_bias")


@pytest.mark.parametrize("logprobs", [-1, 6, True, 1.5, "two"])
def test_logprobs_of_completions(logprobs: Any) -> None:
    assert refusal(CompletionRequest, logprobs=logprobs).param == "logprobs"
    assert [completion(logprobs=value).alternatives for value in (0, 5, None, False)] == [
        0, 5, None, None
    ]  # fmt: skip
    assert refusal(CompletionRequest, logprobs=0, echo=True).code == "unsupported_parameter"
    assert refusal(CompletionRequest, top_logprobs=3).code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_logprobs_of_chats(fields: dict[str, Any], param: str) -> None:
    error = refusal(ChatCompletionRequest, **fields)
    assert (error.status, error.param) == (400, param)
    assert chat(logprobs=True, top_logprobs=20).alternatives == 20
    assert chat(logprobs=True).alternatives == 0
    assert chat(top_logprobs=0).alternatives is None
    assert chat(logprobs=None, top_logprobs=None).alternatives is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": None, "regex": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", '{"type": "object"}')),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"ebnf": 'root ::= "x"', "response_format": {"type": "text"}}, ("ebnf", 'root ::= "x"')),
    ],
)
def test_what_the_text_must_fit(fields: dict[str, Any], constraint: Any) -> None:
    assert completion(**fields).constraint == constraint
    assert chat(**fields).constraint == constraint


def test_a_schema_is_handed_on_as_it_is() -> None:
    wanted = {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}
    kind, text = chat(
        response_format={"type": "json_schema", "json_schema": wanted}
    ).constraint or ("", "null")
    assert (kind, json.loads(text)) == ("json_schema", SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}},
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema.name",
        ),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"regex": "a", "ebnf": "x"}, "regex"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ],
)
def test_what_no_text_can_fit_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for kind in (CompletionRequest, ChatCompletionRequest):
        error = refusal(kind, **fields)
        assert (error.status, error.param) == (400, param)


def test_rules_at_their_limits_pass() -> None:
    for kind in (completion, chat):
        asked = kind(
            frequency_penalty=-2,
            presence_penalty=2.0,
            repetition_penalty=2,
            min_tokens=3,
            logit_bias={"1": 100, "22": -100.0},
        )
        assert asked.logit_bias == {"1": 100, "22": -100}
        kind(frequency_penalty=None, repetition_penalty=None, logit_bias=None, min_tokens=None)


def test_an_unknown_field_is_named_with_the_nearest_known_one() -> None:
    error = refusal(CompletionRequest, max_token=3)
    assert (error.param, error.code) == ("max_token", "unknown_parameter")
    assert "max_tokens" in error.message


def test_harmless_fields_and_nulls_pass() -> None:
    completion(user="u", metadata={"a": "b"}, store=True, seed=None, stop=None, top_k=0)
    chat(max_tokens=None, safety_identifier="x", parallel_tool_calls=True)


def test_stops_are_a_tuple() -> None:
    assert completion(stop="x").stops == ("x",)
    assert completion(stop=["x", "y"]).stops == ("x", "y")
    assert completion().stops == ()


def test_stream_options_only_with_stream() -> None:
    assert (
        refusal(CompletionRequest, stream_options={"include_usage": True}).param == "stream_options"
    )
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream=True).include_usage
    error = refusal(CompletionRequest, stream=True, stream_options={"usage": True})
    assert error.param == "stream_options.usage"


def test_chat_limits_by_either_name_but_not_by_two() -> None:
    assert chat().limit is None
    assert chat(max_tokens=3).limit == 3
    assert chat(max_completion_tokens=4).limit == 4
    assert chat(max_tokens=4, max_completion_tokens=4).limit == 4
    assert (
        refusal(ChatCompletionRequest, max_tokens=3, max_completion_tokens=4).param == "max_tokens"
    )


def test_messages_reach_the_template_as_text() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "name": "x"},
        ]
    )
    assert [message.for_template() for message in request.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c", "name": "x"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages.0.content.0",
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
            "messages.0.tool_calls",
        ),
    ],
)
def test_messages_that_cannot_be_read_are_named(message: dict[str, Any], param: str) -> None:
    error = refusal(ChatCompletionRequest, messages=[message])
    assert error.param is not None
    assert error.param.startswith(param)


def test_no_messages_are_refused() -> None:
    assert refusal(ChatCompletionRequest, messages=[]).param == "messages"

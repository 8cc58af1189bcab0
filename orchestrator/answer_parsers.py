"""What an answer's text holds beside plain content: tool calls and reasoning, as SGLang's parsers
find them, and the grammar that forces a call.

A `ParserSettings` belongs to the deployment, a `ChatPlan` to a request, an `AnswerParser` to one
choice. Nothing here touches HTTP or Ray; SGLang's modules are imported with the first plan that
needs them.
"""

import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from overstory.orchestrator import openai_errors
from overstory.orchestrator.marker_cut import MarkerCut, markers_of
from overstory.orchestrator.openai_protocol import ChatCompletionRequest, Constraint
from overstory.orchestrator.openai_tools import NamedTool
from overstory.orchestrator.sglang_parsers import sglang_parsers

logger = logging.getLogger(__name__)

_SPECIAL_MARKERS = {"apertus2509", "kimi_k3", "inkling", "mistral", "gemma4", "gpt-oss"}
"""Reasoning parsers whose markers are special tokens (`_patch_reasoning_skip_special_tokens` in
SGLang's `serving_chat`)."""

_MOST_STEPS = 1000
"""How often a parser is asked whether it has more to say about text that it has; a net."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call; `id` and `name` come with a call's first piece alone."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What a piece of text came to."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class AnswerParser:
    """The parts of one choice.

    Either `feed` all pieces, the last one marked, or give the `whole` text: SGLang has a parser
    for each, and the latter sees more.
    """

    def __init__(
        self,
        reasoning: Any | None,
        calls: Any | None,
        tools: Sequence[Any],
        call_id: Callable[[int, str], str],
        one_call: bool = False,
    ) -> None:
        """`reasoning` and `calls` are SGLang's parsers, `tools` its tool objects; `call_id` names
        a call by its number in this answer and its function; `one_call` drops all but the
        first."""
        self._reasoning = reasoning
        self._calls = calls
        self._tools = tools
        self._call_id = call_id
        self._one_call = one_call
        self._thought_cut = MarkerCut(() if reasoning is None else markers_of(_detector(reasoning)))
        self._calls_cut = MarkerCut(() if calls is None else markers_of(_detector(calls)))
        self._fed, self._shown = "", ""
        self.called = False
        """Whether there was a call."""

    def feed(self, text: str, last: bool) -> Parts:
        """The parts that a piece of text makes certain. Where a parser fails, the rest is
        content, and the log says so."""
        reasoning = ""
        if self._reasoning is not None:
            try:
                reasoning, text = self._feed_reasoning(text, last)
            except Exception:
                _failed("reasoning", text)
                self._reasoning = None
        if self._calls is None:
            return Parts(text, reasoning)
        self._fed += text
        try:
            content, items = self._feed_calls(text, last)
        except Exception:
            _failed("tool calls", text)
            self._calls = None
            return Parts(text, reasoning)
        self._shown += content
        calls = tuple(self._delta(item.tool_index, item.name, item.parameters) for item in items)
        kept = self._kept(calls)
        if last and not self.called:
            content += self._held_back()
        return Parts(content, reasoning, kept)

    def _feed_reasoning(self, text: str, last: bool) -> tuple[str, str]:
        """Reasoning, and what is not."""
        assert self._reasoning is not None
        found = [
            self._reasoning.parse_stream_chunk(piece)
            for piece in self._thought_cut.feed(text, last)
        ]
        if last:
            found.append(self._reasoning.parse_stream_end())
        return "".join(one or "" for one, _ in found), "".join(one or "" for _, one in found)

    def _feed_calls(self, text: str, last: bool) -> tuple[str, list[Any]]:
        """Content, and SGLang's pieces of calls."""
        content: list[str] = []
        items: list[Any] = []
        for piece in self._calls_cut.feed(text, last):
            for step in range(_MOST_STEPS):  # a parser may take one at a time: name, arguments, ...
                more, found = _increment(self._calls, "" if step else piece, self._tools)
                content.append(more or "")
                items += found
                if not found:
                    break
        if last:
            items += _unsent_arguments(_detector(self._calls))
        return "".join(content), items

    def whole(self, text: str) -> Parts:
        """The parts of a finished answer; where a parser fails, as `feed`."""
        reasoning = ""
        if self._reasoning is not None:
            try:
                reasoning, text = _texts(self._reasoning.parse_non_stream(text))
            except Exception:
                _failed("reasoning", text)
        if self._calls is None:
            return Parts(text, reasoning)
        try:
            return self._whole_calls(text, reasoning)
        except Exception:
            _failed("tool calls", text)
            return Parts(text, reasoning)

    def _whole_calls(self, text: str, reasoning: str) -> Parts:
        assert self._calls is not None
        if isinstance(self._calls, sglang_parsers().json_array):
            content, items = _json_calls(text)
        else:
            content, found = self._calls.parse_non_stream(text)
            items = [(item.name, item.parameters) for item in found]
        calls = tuple(
            self._delta(number, name, arguments) for number, (name, arguments) in enumerate(items)
        )
        return Parts(content, reasoning, self._kept(calls))

    def _held_back(self) -> str:
        """The end of the text, where it might have become a call and did not; some parsers keep
        what they have handed on."""
        detector = _detector(self._calls)
        held = getattr(detector, "_buffer", "")
        rest = self._fed[len(self._shown) :] if self._fed.startswith(self._shown) else ""
        return rest if held.endswith(rest) and not detector.has_tool_call(held) else ""

    def _delta(self, index: int, name: str | None, arguments: str | None) -> CallDelta:
        call_id = self._call_id(index, name) if name else None
        return CallDelta(index, call_id, name or None, arguments or "")

    def _kept(self, calls: tuple[CallDelta, ...]) -> tuple[CallDelta, ...]:
        if self._one_call:
            calls = tuple(call for call in calls if call.index == 0)
        self.called = self.called or bool(calls)
        return calls


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What a chat request asks of template, sampling and text.

    Attributes:
        tools: for the chat template; None where the model is to know of none.
        variables: for the chat template.
        constraint: what the answer must fit, if anything.
        special_tokens: whether the text must keep the model's special tokens.
        stops: stop strings beside the request's own.
        parser: makes the parser of a choice; None where text is content.
    """

    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    special_tokens: bool = False
    stops: tuple[str, ...] = ()
    parser: Callable[[], AnswerParser] | None = None


class ParserSettings:
    """The deployment's parsers by SGLang's names.

    Args:
        tool_call, reasoning: names, or None for no such parser.
        template: the model's chat template, which tells how thinking is switched.
        vocabulary: the tokenizer's, token text to id.
    """

    def __init__(
        self,
        tool_call: str | None = None,
        reasoning: str | None = None,
        template: str | None = None,
        vocabulary: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._tool_call = tool_call
        self._reasoning = reasoning
        self._tokenizer = SimpleNamespace(get_vocab=vocabulary)
        self._forced, self._toggle = False, None
        if reasoning is not None:
            self._forced, self._toggle = sglang_parsers().detect_reasoning(template)
        if tool_call is not None:
            sglang_parsers()

    def plan(self, request: ChatCompletionRequest) -> ChatPlan:
        """What `request` needs.

        Raises:
            ApiError: 400 for tools that cannot be served here, and for two grammars at once.
        """
        variables = _variables(request)
        thinking = self._thinks(request, variables)
        separate = self._reasoning is not None and request.separate_reasoning
        constraint = request.constraint
        calls: Callable[[], Any] | None = None
        tools: list[Any] = []
        stops: tuple[str, ...] = ()
        if request.uses_tools:
            tools = self._tools(request)
            forced, calls = self._calls(request, tools, thinking)
            if forced is not None and constraint is not None:
                raise openai_errors.invalid(
                    "tool_choice and tools with strict cannot be combined with response_format, "
                    "regex or ebnf: an answer fits one grammar",
                    "tool_choice",
                )
            if forced is not None and request.min_tokens:
                raise openai_errors.invalid(
                    "min_tokens is not supported where tool_choice or strict tools force a grammar",
                    "min_tokens",
                )
            constraint = forced or constraint
        if thinking and constraint is not None:
            constraint = self._after_reasoning(constraint)
        if calls is not None and self._tool_call == "kimi_k3":
            stops = (calls().detector.eot_token,)
        parser = None
        if separate or calls is not None:
            reasoning = self._reasoning_maker(request, variables, thinking) if separate else None
            parser = self._parser_maker(request, tools, calls, reasoning)
        return ChatPlan(
            tools=_for_template(tools, request) if request.uses_tools else None,
            variables=variables,
            constraint=constraint,
            special_tokens=request.uses_tools or self._reasoning in _SPECIAL_MARKERS,
            stops=stops,
            parser=parser,
        )

    # ------------------------------------------------------------------ tools

    def _tools(self, request: ChatCompletionRequest) -> list[Any]:
        """SGLang's tool objects, with schemas that are JSON schemas."""
        if self._tool_call is None and not request.forces_tools:
            raise openai_errors.invalid(
                "tools are not supported by this deployment: gateway.tool_call_parser is not set "
                "(tool_choice required or a named function works without)",
                "tools",
                "unsupported_parameter",
            )
        tools = []
        for number, tool in enumerate(request.tools):
            given = tool.model_dump(exclude_none=True)
            schema = given["function"].get("parameters")
            if schema is not None:
                _check_schema(schema, f"tools.{number}.function.parameters")
            tools.append(sglang_parsers().tool(**given))
        return tools

    def _calls(
        self, request: ChatCompletionRequest, tools: list[Any], thinking: bool
    ) -> tuple[Constraint | None, Callable[[], Any]]:
        """The grammar that forces a call, if any, and SGLang's parser of what comes then."""
        parsers = sglang_parsers()
        choice: Any = request.tool_choice or "auto"
        if isinstance(choice, NamedTool):
            choice = parsers.tool_choice(function={"name": choice.function.name})
        native = self._native(tools)
        if native is not None:
            found = native().get_structure_constraint(
                choice, parallel_tool_calls=request.parallel_tool_calls, thinking_mode=False
            )
            if found is not None and found[0] == "structural_tag":
                tag = _tag(found[1])
                if not request.parallel_tool_calls:
                    _stop_after_one(tag)
                return ("structural_tag", json.dumps(tag)), native
            if not request.forces_tools or native().detector.parses_required_natively():
                return None, native
        try:
            schema = parsers.tools_schema(
                tools, choice, parallel_tool_calls=request.parallel_tool_calls
            )
        except ValueError as error:
            raise openai_errors.invalid(f"tools: {error}", "tools") from error
        return ("json_schema", json.dumps(schema)), parsers.json_array

    def _native(self, tools: list[Any]) -> Callable[[], Any] | None:
        """The deployment's tool call parser for these tools."""
        name = self._tool_call
        if name is None:
            return None
        return lambda: sglang_parsers().function_call(tools, name, tokenizer=self._tokenizer)

    def _call_ids(self, request: ChatCompletionRequest) -> Callable[[int, str], str]:
        """How calls are named: Kimi's models want their own numbering over the conversation."""
        before = sum(len(message.tool_calls) for message in request.messages)
        if self._tool_call == "kimi_k2":
            return lambda index, name: f"functions.{name}:{before + index}"
        if self._tool_call == "kimi_k3":
            return lambda index, name: f"{name}:{before + index}"
        return lambda index, name: f"call_{uuid.uuid4().hex[:24]}"

    def _parser_maker(
        self,
        request: ChatCompletionRequest,
        tools: list[Any],
        calls: Callable[[], Any] | None,
        reasoning: Callable[[], Any] | None,
    ) -> Callable[[], AnswerParser]:
        call_id = self._call_ids(request)

        def make() -> AnswerParser:
            return AnswerParser(
                None if reasoning is None else reasoning(),
                None if calls is None else calls(),
                tools,
                call_id,
                one_call=not request.parallel_tool_calls,
            )

        return make

    # ------------------------------------------------------------------ reasoning

    def _reasoning_maker(
        self, request: ChatCompletionRequest, variables: Mapping[str, Any], thinking: bool
    ) -> Callable[[], Any]:
        streams = request.stream and request.stream_reasoning
        return lambda: self._reasoning_parser(variables, thinking or self._forced, streams)

    def _reasoning_parser(
        self, variables: Mapping[str, Any], forced: bool = False, streams: bool = False
    ) -> Any:
        return sglang_parsers().reasoning(
            self._reasoning,
            streams,
            forced,
            SimpleNamespace(chat_template_kwargs=variables),
            tokenizer=self._tokenizer,
        )

    def _thinks(self, request: ChatCompletionRequest, variables: Mapping[str, Any]) -> bool:
        """Whether the model thinks before this answer; as `_get_reasoning_from_request` of
        SGLang's `serving_chat` tells it from template and request."""
        if self._reasoning is None:
            return False
        if self._reasoning == "minimax-m3":
            return variables.get("thinking_mode") == "enabled"
        if self._reasoning == "hunyuan":
            return request.reasoning_effort not in (None, "none", "no_think")
        if self._toggle is not None:
            mode = self._toggle.special_case
            switch, on = self._toggle.toggle_param, self._toggle.default_enabled
        else:
            detector = self._reasoning_parser(variables).detector
            mode = detector.reasoning_default
            switch = mode.removeprefix("explicit_") if mode else None
            on = mode is not None and not mode.startswith("explicit_")
        if mode == "always":
            return True
        if mode == "mistral":
            return request.reasoning_effort not in (None, "none")
        if switch is None or on is None:
            return False
        return variables.get(switch) is not False if on else variables.get(switch) is True

    def _after_reasoning(self, constraint: Constraint) -> Constraint:
        """The grammar from where the reasoning ends; SGLang's engine-side gate for this does not
        know draft trees."""
        end = sglang_parsers().reasoning(self._reasoning).detector.think_end_token
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
        elements = [thought, _format(constraint)]
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
        return "structural_tag", json.dumps(tag)


def _variables(request: ChatCompletionRequest) -> dict[str, Any]:
    """For the chat template; what an effort says of thinking is as in SGLang's
    `normalize_reasoning_inputs`."""
    effort = request.reasoning_effort
    if effort is None:
        return dict(request.chat_template_kwargs)
    thinks = effort not in ("none", "no_think")
    said = {"reasoning_effort": effort, "thinking": thinks, "enable_thinking": thinks}
    return {**said, **request.chat_template_kwargs}


def _format(constraint: Constraint) -> dict[str, Any]:
    """A constraint as a part of a structural tag."""
    kind, text = constraint
    match kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(text)}
        case "regex":
            return {"type": "regex", "pattern": text}
        case "ebnf":
            return {"type": "grammar", "grammar": text}
    assert kind == "structural_tag", kind
    inner: dict[str, Any] = json.loads(text)["format"]
    return inner


def _tag(tag: Any) -> dict[str, Any]:
    """A structural tag as JSON has it; the older form, with triggers beside structures, as the
    newer."""
    given: dict[str, Any] = tag.model_dump(by_alias=True, exclude_none=True)
    if "structures" in given:
        tags = [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one.get("schema") or {}},
                "end": one["end"],
            }
            for one in given["structures"]
        ]
        given = {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": given["triggers"],
                "tags": tags,
                "at_least_one": given["at_least_one"],
            },
        }
    return given


def _stop_after_one(part: Any) -> None:
    """Make a structural tag end with its first call, in place; SGLang leaves `parallel_tool_calls`
    to the model."""
    if isinstance(part, dict):
        if part.get("type") in ("tags_with_separator", "triggered_tags"):
            part["stop_after_first"] = True
        for inner in part.values():
            _stop_after_one(inner)
    elif isinstance(part, list):
        for inner in part:
            _stop_after_one(inner)


def _for_template(tools: Sequence[Any], request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """Tools as templates get them: a named one alone."""
    wanted = request.tool_choice
    name = wanted.function.name if isinstance(wanted, NamedTool) else None
    return [tool.model_dump() for tool in tools if name in (None, tool.function.name)]


def _check_schema(schema: dict[str, Any], param: str) -> None:
    """A JSON schema, after names of types that databases use have been put right in place."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        sglang_parsers().normalize_types(schema)
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise openai_errors.invalid(f"{param}: {error.message}", param) from error
    except RecursionError as error:
        raise openai_errors.invalid(f"{param}: is nested too deeply", param) from error


def _texts(found: tuple[str | None, str | None]) -> tuple[str, str]:
    return found[0] or "", found[1] or ""


def _detector(parser: Any) -> Any:
    return getattr(parser, "detector", parser)


def _increment(parser: Any, text: str, tools: Sequence[Any]) -> tuple[str | None, Sequence[Any]]:
    if isinstance(parser, sglang_parsers().json_array):
        found = parser.parse_streaming_increment(text, tools)
        return found.normal_text, found.calls
    content, calls = parser.parse_stream_chunk(text)
    return content, calls


def _unsent_arguments(detector: Any) -> list[Any]:
    """What a parser knows of its last call and has not sent: it learns of a call's end from the
    text that follows, which may never come."""
    known = getattr(detector, "prev_tool_call_arr", [])
    sent = getattr(detector, "streamed_args_for_tool", [])
    last = len(known) - 1
    if last < 0 or last >= len(sent):
        return []
    wanted = known[last].get("arguments", {})
    text = wanted if isinstance(wanted, str) else json.dumps(wanted, ensure_ascii=False)
    if not text.startswith(sent[last]) or text == sent[last]:
        return []
    return [SimpleNamespace(tool_index=last, name=None, parameters=text[len(sent[last]) :])]


def _failed(what: str, text: str) -> None:
    """A parser raised: SGLang's own server answers with the text as it is, too."""
    logger.exception("%s could not be parsed in %.200r", what, text)


def _json_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Calls as `tools_schema` forces them; an answer that was cut off is content."""
    try:
        return "", [
            (call["name"], json.dumps(call["parameters"], ensure_ascii=False))
            for call in json.loads(text)
        ]
    except (ValueError, KeyError, TypeError):
        return text, []

"""What clients may ask: OpenAI's completions and chat completions, with the sampling fields that
SGLang adds.

Every field is either honoured, harmless, or refused by name; none is dropped in silence. A field
that cannot be honoured yet passes at the value that means "off", since clients like to send those.
SGLang's own types (`sglang.srt.entrypoints.openai.protocol`) let unknown fields pass; the parsers
get theirs in `answer_parsers`.
"""

import difflib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from overstory.orchestrator.openai_tools import (
    MAX_TOOLS,
    ChatMessage,
    Choosing,
    NamedTool,
    Strict,
    ToolSpec,
    field_error,
)

MAX_CHOICES = 128
"""Most sequences that one request may ask for."""
MAX_STOPS = 16
"""Most stop strings of a request (OpenAI allows 4)."""
MAX_BIAS = 100.0
"""Largest logit bias, either way (OpenAI's)."""

MAX_LOGPROBS, MAX_CHAT_LOGPROBS = 5, 20
"""Most alternatives at each position of a completion and of a chat (OpenAI's)."""

_MAX_ID_DIGITS = 9

HARMLESS = frozenset(
    {
        "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention",
    }
)  # fmt: skip
"""Accepted and of no effect on the text."""

_OFF: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "json_schema": (),
    "stop_regex": (),
    "no_stop_trim": (False,),
    "lora_path": (),
    "reasoning": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_cached_tokens_details": (False,),
    "return_prompt_token_ids": (False,),
    "return_token_ids": (False,),
    "return_meta_info": (False,),
    "continue_final_message": (False,),
    "use_audio_in_video": (False,),
    "custom_params": ({},),
    **dict.fromkeys(
        (
            "bootstrap_host", "bootstrap_port", "bootstrap_room", "cache_salt", "custom_labels",
            "custom_logit_processor", "data_parallel_rank", "disagg_prefill_dp_rank", "extra_key",
            "images_config", "input_ids", "max_dynamic_patch", "min_dynamic_patch", "priority",
            "rid", "routed_dp_rank", "session_id", "session_params", "task",
        ),
        (),
    ),
}  # fmt: skip
"""Known fields that are not supported, with the values besides null that ask for nothing: OpenAI's,
and all of SGLang's."""


def known_fields(request: type[BaseModel]) -> set[str]:
    """Names that a request may carry or is told about: honoured, harmless, not supported yet."""
    return {*request.model_fields, *HARMLESS, *_OFF}


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    """End with a chunk that has no choices and the usage."""

    continuous_usage_stats: bool = False
    """Each chunk has the usage of its choice so far."""

    include_obfuscation: bool = False
    """Accepted; no padding is sent."""


Constraint = tuple[str, str]
"""A kind of grammar by SGLang's name, and its text."""


class JsonSchema(Strict):
    """A named JSON schema."""

    name: str = Field(min_length=1, max_length=64)
    """What the client calls it; of no effect."""

    description: str | None = None
    """Of no effect."""

    schema_: dict[str, Any] = Field(alias="schema")
    """The schema that the text must fit."""

    strict: bool | None = None
    """Accepted; the text always fits."""


class ResponseFormat(Strict):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    """Anything, a JSON object, or JSON that fits a schema."""

    json_schema: JsonSchema | None = None
    """With type json_schema only."""

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise field_error(
                "response_format",
                "response_format has json_schema if and only if its type is json_schema",
            )
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The schema, if there is anything to keep to."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return "json_schema", json.dumps(schema)


ReasoningEffort = (
    Literal["none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max"]
    | Annotated[float, Field(ge=0, le=0.99)]
)
"""How long the model may think; a number where its template wants one."""

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0)]


class GenerationRequest(Strict):
    """Fields that both endpoints share."""

    model: str
    """The served model's name."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 takes the most probable token."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""

    top_k: int = Field(default=-1, ge=-1)
    """Sample among the k most probable tokens; -1 or 0 for all."""

    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample among tokens at least this probable, relative to the most probable."""

    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off a token's logit for each time that it is in the output."""

    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logits of tokens that are in the output."""

    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    """Divides the positive logits of tokens that are in the output, multiplies the negative ones;
    1 for none."""

    logit_bias: dict[str, float] = Field(default={})
    """Added to the logits of tokens, by id."""

    min_tokens: int = Field(default=0, ge=0)
    """No end token, nor any of stop_token_ids, before that many new tokens; a stop string ends the
    text all the same."""

    response_format: ResponseFormat | None = None
    """JSON, of some schema or none."""

    regex: str | None = Field(default=None, min_length=1)
    """A regular expression that the whole text must match."""

    ebnf: str | None = Field(default=None, min_length=1)
    """A grammar in xgrammar's EBNF that the whole text must fit."""

    seed: int | None = None
    """The same seed and request give the same text. Unset: a random one."""

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Choices per prompt."""

    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = Field(default=[])
    """Strings that end the text; they are not part of it."""

    stop_token_ids: list[TokenId] = Field(default=[])
    """Token ids that end the text besides the model's own."""

    ignore_eos: bool = False
    """Go on past the model's end tokens, to max_tokens (for load tests)."""

    speculate: bool = True
    """False has nothing drafted for this request: the same text, a token at a time."""

    skip_special_tokens: bool = True
    """Leave the model's special tokens out of the text."""

    stream: bool = False
    """Send text as it is generated, as server-sent events."""

    stream_options: StreamOptions | None = None
    """Only with stream."""

    prompt_cache_key: str | None = None
    """Names a conversation: with `gateway.routing: session_sticky` its requests go to one replica
    as far as load allows. Of no effect on the text."""

    user: str | None = None
    """The same, where there is no prompt_cache_key."""

    @model_validator(mode="before")
    @classmethod
    def _sort_fields(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept: dict[str, Any] = {}
        for name, value in data.items():
            if name in cls.model_fields:
                if value is not None or cls.model_fields[name].is_required():
                    kept[name] = value
            elif value is not None and name not in HARMLESS:
                _refuse_unless_off(name, value, cls)
        return kept

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float]) -> dict[str, float]:
        for token, value in bias.items():
            if not (token.isascii() and token.isdigit() and len(token) <= _MAX_ID_DIGITS):
                raise field_error(
                    "logit_bias", f"logit_bias maps token ids to numbers; {token!r} is no token id"
                )
            if not -MAX_BIAS <= value <= MAX_BIAS:
                raise field_error(
                    "logit_bias",
                    f"logit_bias of token {token} must be from -{MAX_BIAS:g} to {MAX_BIAS:g}, "
                    f"got {value:g}",
                )
        return bias

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "stream_options is only allowed with stream: true")
        return self

    @model_validator(mode="after")
    def _check_constraints(self) -> "GenerationRequest":
        asked = self._constraints()
        if len(asked) > 1:
            names = ", ".join(asked)
            raise field_error(next(iter(asked)), f"only one of {names} may be given")
        if asked and self.min_tokens:
            raise field_error(
                "min_tokens",
                f"min_tokens is not supported with {next(iter(asked))}: where the text is "
                "complete, only an end token is left",
            )
        return self

    @property
    def constraint(self) -> Constraint | None:
        """What the text must fit, if anything."""
        return next(iter(self._constraints().values()), None)

    def _constraints(self) -> dict[str, Constraint]:
        asked: dict[str, Constraint] = {}
        formatted = self.response_format and self.response_format.constraint
        if formatted:
            asked["response_format"] = formatted
        if self.regex is not None:
            asked["regex"] = ("regex", self.regex)
        if self.ebnf is not None:
            asked["ebnf"] = ("ebnf", self.ebnf)
        return asked

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Alternatives to log at each position; None for no log-probabilities."""

    @property
    def session(self) -> str:
        """The client's name of its conversation; empty for none."""
        return self.prompt_cache_key or self.user or ""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream says its choice's usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    """A text, several texts, the token ids of one prompt, or those of several."""

    max_tokens: int = Field(default=16, ge=1)
    """Most tokens to generate per choice."""

    echo: bool = False
    """Put the prompt's text before the completion."""

    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of the new tokens, and of this many alternatives at each position."""

    @model_validator(mode="before")
    @classmethod
    def _check_prompt(cls, data: Any) -> Any:
        prompt = data.get("prompt") if isinstance(data, Mapping) else None
        if prompt is not None and not _is_prompt(prompt):
            raise field_error(
                "prompt",
                "prompt must be a string, a list of strings, a list of token ids, or a list of "
                "lists of token ids, and not empty",
            )
        return data

    @model_validator(mode="before")
    @classmethod
    def _drop_false_logprobs(cls, data: Any) -> Any:
        """False asks for nothing, as in chats."""
        if not isinstance(data, Mapping) or data.get("logprobs") is not False:
            return data
        return {name: value for name, value in data.items() if name != "logprobs"}

    @model_validator(mode="after")
    def _no_logprobs_of_prompts(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise field_error(
                "logprobs",
                "logprobs of prompts are not supported by this server: ask without echo",
                "unsupported_parameter",
            )
        return self

    @property
    def alternatives(self) -> int | None:
        """See `GenerationRequest.alternatives`."""
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as a list, texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class ChatCompletionRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    """The conversation so far."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Older name of max_completion_tokens."""

    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Most tokens to generate per choice. Unset: what the context leaves."""

    logprobs: bool = False
    """Log-probabilities of the new tokens."""

    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_CHAT_LOGPROBS)
    """And of this many alternatives at each position; only with logprobs."""

    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables for the model's chat template."""

    tools: list[ToolSpec] = Field(default=[], max_length=MAX_TOOLS)
    """What the model may call."""

    tool_choice: Choosing | None = None
    """Whether it may or must. Unset: auto where there are tools."""

    parallel_tool_calls: bool = True
    """Whether one answer may hold several calls."""

    reasoning_effort: ReasoningEffort | None = None
    """A variable for the model's chat template. With none and no_think the model does not think,
    with others it does, where its template knows thinking or enable_thinking and
    chat_template_kwargs does not say otherwise."""

    separate_reasoning: bool = True
    """Put reasoning into `reasoning_content`, where the deployment has a reasoning parser."""

    stream_reasoning: bool = True
    """Stream reasoning as it comes, instead of whole at its end."""

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatCompletionRequest":
        names = [tool.function.name for tool in self.tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise field_error("tools", f"the function {twice} is there more than once")
        if self.forces_tools and not names:
            raise field_error("tool_choice", "tool_choice asks for a call, but there are no tools")
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            if wanted not in names:
                raise field_error("tool_choice", f"tool_choice: there is no tool {wanted}")
        return self

    @property
    def forces_tools(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def uses_tools(self) -> bool:
        """Whether the answer may be a call."""
        return bool(self.tools) and self.tool_choice != "none"

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatCompletionRequest":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise field_error(
                "max_tokens", "max_tokens and max_completion_tokens differ; set only the latter"
            )
        return self

    @model_validator(mode="after")
    def _top_logprobs_with_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        return self

    @property
    def alternatives(self) -> int | None:
        """See `GenerationRequest.alternatives`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """Most new tokens, if the client set any limit."""
        return self.max_completion_tokens or self.max_tokens


def _refuse_unless_off(name: str, value: Any, request: type[BaseModel]) -> None:
    if name in _OFF:
        if not any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in _OFF[name]
        ):
            raise field_error(
                name, f"{name} is not supported by this server", "unsupported_parameter"
            )
        return
    near = difflib.get_close_matches(name, [*request.model_fields, *_OFF], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise field_error(name, f"Unrecognized request argument: {name}{hint}", "unknown_parameter")


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list) or not prompt:
        return False
    if all(isinstance(part, str) for part in prompt):
        return True
    if all(_is_token(part) for part in prompt):
        return True
    return all(isinstance(part, list) and part and all(map(_is_token, part)) for part in prompt)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

"""Answers in OpenAI's shapes, as JSON bytes; streamed ones as server-sent events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from overstory.orchestrator.answer_parsers import CallDelta, Parts
from overstory.orchestrator.openai_errors import ApiError
from overstory.orchestrator.token_text import TokenText

FinishReason = Literal["stop", "length"]
"""How a sequence ends."""

AnswerReason = Literal["stop", "length", "tool_calls"]
"""How an answer ends: one with calls that went to its end says so."""

DONE = b"data: [DONE]\n\n"
"""The end of a stream that went well."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: all its prompts, all its choices."""

    prompt_tokens: int
    completion_tokens: int

    def json(self) -> dict[str, int]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class LoggedToken:
    """A token with natural logarithms of probabilities.

    Attributes:
        name: what the token stands for.
        logprob: its own.
        top: the most probable tokens at its position, best first; it may be one of them.
        offset: the character of the choice's text at which its text starts.
    """

    name: TokenText
    logprob: float
    top: tuple[tuple[TokenText, float], ...]
    offset: int


Logged = Sequence[LoggedToken] | None
"""Tokens of a choice or a piece of one; None where nobody asked for log-probabilities."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A finished choice."""

    text: str
    finish_reason: AnswerReason
    tokens: Logged = None
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates, which JSON can carry and UTF-8 cannot, stay
    escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def stream_json(chunk: dict[str, Any], usage: Usage | None, asked: bool) -> bytes:
    """A chunk as an event, with the usage so far of its choice. Where the usage of the whole was
    `asked` for, chunks before it that have none carry it as null."""
    if usage is not None:
        return sse({**chunk, "usage": usage.json()})
    return sse({**chunk, "usage": None} if asked else chunk)


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error in a stream whose status is out already; no `[DONE]` follows it."""
    return sse(error.body())


class CompletionShape:
    """`/v1/completions`. One object per answer: it holds what all its chunks share."""

    def __init__(self, request_id: str, model: str, created: int) -> None:
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": created,
            "model": model,
        }

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        listed = [
            _text_choice(index, choice.text, choice.finish_reason, choice.tokens)
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": listed, "usage": usage.json()}

    def first(self, index: int) -> dict[str, Any] | None:
        """A chunk that opens a choice: none here."""
        return None

    def delta(
        self, index: int, parts: Parts, finish_reason: AnswerReason | None, tokens: Logged = None
    ) -> dict[str, Any]:
        """A chunk with a piece of a choice."""
        choice = _text_choice(index, parts.content, finish_reason, tokens)
        return {**self._head, "choices": [choice]}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, where asked for."""
        return {**self._head, "choices": [], "usage": usage.json()}


class ChatShape:
    """`/v1/chat/completions`; see `CompletionShape`."""

    def __init__(self, request_id: str, model: str, created: int) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": created, "model": model}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        listed = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": _chat_logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {
            **self._head, "object": "chat.completion", "choices": listed, "usage": usage.json()
        }  # fmt: skip

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens a choice: who speaks."""
        return self._chunk([_chat_delta(index, {"role": "assistant", "content": ""}, None, None)])

    def delta(
        self, index: int, parts: Parts, finish_reason: AnswerReason | None, tokens: Logged = None
    ) -> dict[str, Any]:
        """A chunk with a piece of a choice."""
        return self._chunk([_chat_delta(index, _delta(parts), finish_reason, tokens)])

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, where asked for."""
        return {**self._chunk([]), "usage": usage.json()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}


def _text_choice(
    index: int, text: str, finish_reason: AnswerReason | None, tokens: Logged
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": _text_logprobs(tokens),
        "finish_reason": finish_reason,
    }


def _chat_delta(
    index: int, delta: dict[str, Any], finish_reason: AnswerReason | None, tokens: Logged
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": _chat_logprobs(tokens),
        "finish_reason": finish_reason,
    }


def _message(choice: Choice) -> dict[str, Any]:
    """An answer as a message; `reasoning_content` is SGLang's and vLLM's."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if choice.text or not choice.calls else None,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in choice.calls
        ]
    return message


def _delta(parts: Parts) -> dict[str, Any]:
    """What of a message is new; pieces of one call go together."""
    delta: dict[str, Any] = {}
    if parts.content:
        delta["content"] = parts.content
    if parts.reasoning:
        delta["reasoning_content"] = parts.reasoning
    calls: dict[int, dict[str, Any]] = {}
    for call in parts.calls:
        entry = calls.setdefault(call.index, {"index": call.index, "function": {"arguments": ""}})
        if call.name is not None:
            entry |= {"id": call.id, "type": "function"}
            entry["function"] = {"name": call.name, **entry["function"]}
        entry["function"]["arguments"] += call.arguments
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _text_logprobs(tokens: Logged) -> dict[str, Any] | None:
    """As `/v1/completions` has them: the token itself is always among its alternatives."""
    if tokens is None:
        return None
    alternatives = [_alternatives(token) for token in tokens]
    return {
        "tokens": [token.name.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": alternatives if any(alternatives) else None,
        "text_offset": [token.offset for token in tokens],
    }


def _alternatives(token: LoggedToken) -> dict[str, float]:
    """By text; of several tokens with one text the best, unless one of them is the token itself."""
    if not token.top:
        return {}
    named: dict[str, float] = {}
    for name, logprob in token.top:
        named.setdefault(name.text, logprob)
    return {**named, token.name.text: token.logprob}


def _chat_logprobs(tokens: Logged) -> dict[str, Any] | None:
    if tokens is None:
        return None
    content = [
        {
            **_chat_token(token.name, token.logprob),
            "top_logprobs": [_chat_token(name, logprob) for name, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(name: TokenText, logprob: float) -> dict[str, Any]:
    raw = None if name.raw is None else list(name.raw)
    return {"token": name.text, "logprob": logprob, "bytes": raw}


def models(name: str, created: int, context_tokens: int) -> dict[str, Any]:
    """`/v1/models`; `max_model_len` is what vLLM and SGLang add."""
    return {"object": "list", "data": [model(name, created, context_tokens)]}


def model(name: str, created: int, context_tokens: int) -> dict[str, Any]:
    """`/v1/models/{name}`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "overstory",
        "max_model_len": context_tokens,
    }

"""Answers in OpenAI's shapes, as JSON bytes; streamed ones as server-sent events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from overstory.orchestrator.openai_errors import ApiError

FinishReason = Literal["stop", "length"]

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
class Choice:
    """A finished choice."""

    text: str
    finish_reason: FinishReason


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates, which JSON can carry and UTF-8 cannot, stay
    escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def stream_json(chunk: dict[str, Any], usage: bool) -> bytes:
    """A chunk as an event; where usage was asked for, chunks before it carry it as null."""
    return sse({**chunk, "usage": None} if usage and "usage" not in chunk else chunk)


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
            _text_choice(index, choice.text, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": listed, "usage": usage.json()}

    def first(self, index: int) -> dict[str, Any] | None:
        """A chunk that opens a choice: none here."""
        return None

    def delta(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        """A chunk with a piece of a choice."""
        return {**self._head, "choices": [_text_choice(index, text, finish_reason)]}

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
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {
            **self._head, "object": "chat.completion", "choices": listed, "usage": usage.json()
        }  # fmt: skip

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens a choice: who speaks."""
        return self._chunk([_chat_delta(index, {"role": "assistant", "content": ""}, None)])

    def delta(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        """A chunk with a piece of a choice."""
        return self._chunk([_chat_delta(index, {"content": text} if text else {}, finish_reason)])

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, where asked for."""
        return {**self._chunk([]), "usage": usage.json()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}


def _text_choice(index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _chat_delta(
    index: int, delta: dict[str, str], finish_reason: FinishReason | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


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

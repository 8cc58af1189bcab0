"""`/tokenize` and `/detokenize`: bodies as SGLang and vLLM take them, and the routes."""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field, ValidationError, model_validator
from starlette.responses import Response

from overstory.orchestrator import openai_errors
from overstory.orchestrator.openai_documents import documented
from overstory.orchestrator.openai_protocol import ChatCompletionRequest, TokenId
from overstory.orchestrator.openai_tools import (
    MAX_TOOLS,
    ChatMessage,
    Choosing,
    Strict,
    ToolSpec,
    field_error,
)
from overstory.orchestrator.service import EndpointService

MAX_TEXTS = 2048
"""Most prompts, or lists of token ids, of one request."""


class TokenizeRequest(Strict):
    """Body of `POST /tokenize`: a prompt, several, or a conversation."""

    model: str | None = None
    """The served model's name; unset: the one there is."""

    prompt: str | list[str] | None = None
    """One text or several."""

    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    """A conversation, as the chat template renders it."""

    tools: list[ToolSpec] = Field(default=[], max_length=MAX_TOOLS)
    """With messages only."""

    tool_choice: Choosing | None = None
    """With messages only."""

    chat_template_kwargs: dict[str, Any] = Field(default={})
    """With messages only: variables for the chat template."""

    add_special_tokens: bool = True
    """With a prompt only: what the model wants around a plain prompt."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "prompt: give either prompt or messages")
        if isinstance(self.prompt, list) and len(self.prompt) > MAX_TEXTS:
            raise field_error("prompt", f"prompt: at most {MAX_TEXTS} texts at once")
        return self

    def chat(self, model: str) -> ChatCompletionRequest:
        """The conversation as a request for an answer.

        Raises:
            ApiError: 400, as for such a request.
        """
        try:
            return ChatCompletionRequest(
                model=model,
                messages=self.messages or [],
                tools=self.tools,
                tool_choice=self.tool_choice,
                chat_template_kwargs=self.chat_template_kwargs,
            )
        except ValidationError as error:
            raise openai_errors.from_validation(error.errors()) from error


class TokenizeAnswer(BaseModel):
    """Token ids of each text; not lists of lists for a single one."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeRequest(Strict):
    """Body of `POST /detokenize`."""

    model: str | None = None
    """The served model's name; unset: the one there is."""

    tokens: list[TokenId] | list[list[TokenId]]
    """Token ids of one text or several."""

    skip_special_tokens: bool = True
    """Leave the model's special tokens out of the text."""


class DetokenizeAnswer(BaseModel):
    """The text, or several."""

    text: str | list[str]
    prompt: str | list[str]
    """The same, by vLLM's name."""


def add_token_routes(
    app: FastAPI, service: EndpointService, answer: Callable[[Any], Response]
) -> None:
    """The routes, under SGLang's and vLLM's paths; `answer` makes a response of JSON."""

    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of texts, or of a conversation as the model gets it."""
        _check_model(body.model, service)
        if body.messages is not None:
            ids = await service.chat_ids(body.chat(service.served_name))
            return answer(_counted([list(ids)], True, service))
        assert body.prompt is not None
        one = isinstance(body.prompt, str)
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        encode = service.tokenizer.encode
        lists = await asyncio.to_thread(
            lambda: [encode(text, body.add_special_tokens) for text in texts]
        )
        return answer(_counted(lists, one, service))

    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids."""
        _check_model(body.model, service)
        many = bool(body.tokens) and isinstance(body.tokens[0], list)
        lists: Any = body.tokens if many else [body.tokens]
        if len(lists) > MAX_TEXTS:
            raise openai_errors.invalid(f"tokens: at most {MAX_TEXTS} texts at once", "tokens")
        worst = max((token for ids in lists for token in ids), default=0)
        if worst >= service.tokenizer.vocab_size:
            raise openai_errors.invalid(
                f"tokens: {worst} is not below the vocabulary's {service.tokenizer.vocab_size}",
                "tokens",
            )
        special = not body.skip_special_tokens
        decode = service.tokenizer.decode
        texts = await asyncio.to_thread(lambda: [decode(ids, special) for ids in lists])
        shown = texts if many else texts[0]
        return answer({"text": shown, "prompt": shown})

    for prefix in ("", "/v1"):
        app.post(f"{prefix}/tokenize", **documented(TokenizeAnswer))(tokenize)
        app.post(f"{prefix}/detokenize", **documented(DetokenizeAnswer))(detokenize)


def _counted(lists: list[list[int]], one: bool, service: EndpointService) -> dict[str, Any]:
    counts = [len(ids) for ids in lists]
    return {
        "tokens": lists[0] if one else lists,
        "count": counts[0] if one else counts,
        "max_model_len": service.limits.context_tokens,
    }


def _check_model(name: str | None, service: EndpointService) -> None:
    if name not in (None, service.served_name):
        raise openai_errors.model_not_found(str(name), service.served_name)

"""What the OpenAPI document says of answers. For documentation and tests: answers are written by
`openai_responses`, and a test checks them against these."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.responses import PlainTextResponse


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class UsageAnswer(_Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(_Answer):
    """Log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(_Answer):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(_Answer):
    """Answer of `/v1/completions` that is not streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class TokenAlternative(_Answer):
    """A token and the logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenChosen(TokenAlternative):
    """A token of the answer, with the most probable ones at its position."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(_Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenChosen]
    refusal: None


class CalledFunctionAnswer(_Answer):
    """The function that a call is for; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCallAnswer(_Answer):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class MessageAnswer(BaseModel):
    """What the assistant said."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"required": ["role", "content"]})

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str = ""
    tool_calls: list[ToolCallAnswer] = []


class ChatChoice(_Answer):
    """One answer."""

    index: int
    message: MessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(_Answer):
    """Answer of `/v1/chat/completions` that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class ModelAnswer(_Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelsAnswer(_Answer):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelAnswer]


class StateAnswer(_Answer):
    """A state in a word."""

    status: str


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is wrong, or not for now"},
    "5XX": {"model": ErrorAnswer, "description": "The request could not be served"},
}
"""For every operation; 429 and 503 come with `Retry-After`."""


def name_the_model(document: dict[str, Any], name: str) -> dict[str, Any]:
    """An OpenAPI document in which requests can name the one model that is served alone."""
    for title, schema in document["components"]["schemas"].items():
        model = schema.get("properties", {}).get("model")
        if model is not None and title.endswith("Request"):
            text = model if model.get("type") == "string" else model["anyOf"][0]
            text["enum"] = [name]
    return document


def documented(
    answer: type[BaseModel] | None, streamed: bool = False, text: str = ""
) -> dict[str, Any]:
    """Arguments of a route that answers so, or with server-sent events where asked to stream; or
    (without a model) with `text`, described so."""
    if answer is None:
        content = {"text/plain": {"schema": {"type": "string"}}}
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
        errors = {
            code: {"content": error, "description": one["description"]}
            for code, one in ERRORS.items()
        }
        plain = {"content": content, "description": text}
        return {"responses": {200: plain, **errors}, "response_class": PlainTextResponse}
    whole: dict[str, Any] = {"model": answer}
    if streamed:
        events = {"schema": {"type": "string", "description": "Server-sent events"}}
        whole["content"] = {"text/event-stream": events}
    return {"responses": {200: whole, **ERRORS}}

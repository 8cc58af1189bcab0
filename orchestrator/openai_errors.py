"""Errors as OpenAI's clients expect them: a status and `{"error": {message, type, param,
code}}`."""

from collections.abc import Mapping, Sequence
from typing import Any

_NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients retry 408, 409, 429 and 5xx by themselves unless this header says no."""


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        param: the request's field at fault, dotted.
        code: a word for programs.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is wrong (400)."""
    return ApiError(400, message, param=param, code=code)


def invalid_json(detail: str) -> ApiError:
    """The body cannot be read (400)."""
    return invalid(f"The body is not valid JSON: {detail}", code="invalid_json")


def model_not_found(asked: str, served: str) -> ApiError:
    """No such model here (404)."""
    return ApiError(
        404,
        f"The model `{asked}` does not exist; this endpoint serves `{served}`",
        param="model",
        code="model_not_found",
    )


def prompt_too_long(prompt: int, longest: int, context: int, param: str) -> ApiError:
    """The prompt leaves no room (400); all in tokens, `prompt` at least."""
    return invalid(
        f"This model's maximum context length is {context} tokens, of which a prompt may have "
        f"{longest}; this one has at least {prompt}. Shorten the prompt.",
        param=param,
        code="context_length_exceeded",
    )


def context_exceeded(prompt: int, new: int, context: int, param: str) -> ApiError:
    """Prompt and completion together are longer than the context (400); all in tokens."""
    return invalid(
        f"This model's maximum context length is {context} tokens, but the request wants "
        f"{prompt + new}: {prompt} in the prompt and {new} for the completion. "
        "Shorten the prompt or the completion.",
        param=param,
        code="context_length_exceeded",
    )


def body_too_large(limit: int) -> ApiError:
    """The body has more than `limit` bytes (413)."""
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes (gateway.max_body_bytes)",
        code="request_too_large",
    )


def bad_http(detail: str) -> ApiError:
    """What came is no HTTP request (400)."""
    return invalid(f"This is no HTTP/1.1 request: {detail}", code="invalid_http")


def head_too_large(limit: int) -> ApiError:
    """Request line and headers have more than `limit` bytes (431)."""
    return ApiError(
        431, f"Request line and headers are larger than {limit} bytes", code="head_too_large"
    )


def too_slow(detail: str) -> ApiError:
    """The request does not come (408)."""
    message = f"The request was given up: {detail}"
    return ApiError(408, message, code="request_too_slow", headers=_NO_RETRY)


def encoded_body(encoding: str) -> ApiError:
    """The body is compressed (415)."""
    return ApiError(
        415,
        f"Content-Encoding {encoding} is not supported: send the body as it is",
        code="unsupported_content_encoding",
    )


def queue_full(detail: str, retry_after_s: int) -> ApiError:
    """More requests than may wait (429)."""
    return ApiError(
        429,
        f"The server is busy: {detail}. Try again in {retry_after_s} s",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_after_s)},
    )


def unavailable(detail: str, code: str, retry_after_s: int = 5) -> ApiError:
    """Nothing here can serve the request for the moment (503)."""
    return ApiError(
        503,
        detail,
        kind="server_error",
        code=code,
        headers={"Retry-After": str(retry_after_s)},
    )


def timed_out(limit_s: float) -> ApiError:
    """The request took longer than the gateway allows (504)."""
    return ApiError(
        504,
        f"The request was aborted after {limit_s:g} s (gateway.request_timeout_s)",
        kind="server_error",
        code="request_timeout",
        headers=_NO_RETRY,
    )


def from_engine(detail: str, status: int, retry_after_s: int) -> ApiError:
    """The engine ended a request by itself, naming an HTTP status; 429 and 503 are worth another
    try."""
    if status == 429:
        return queue_full(detail, retry_after_s)
    if status == 503:
        message = f"The engine cannot take the request now: {detail}"
        return unavailable(message, "engine_busy", retry_after_s)
    if 400 <= status < 500:
        return invalid(detail, code="refused_by_engine")
    return internal(f"The engine ended the request: {detail}")


def internal(detail: str) -> ApiError:
    """Our own fault (500)."""
    return ApiError(500, detail, kind="server_error", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's findings (`ValidationError.errors()`), as FastAPI hands them over."""
    error = _deepest(errors)
    kind, context = error["type"], error.get("ctx") or {}
    if kind == "json_invalid":
        return invalid_json(context.get("error", error["msg"]))
    param = context.get("param") or _dotted(error["loc"])
    if param is not None and param.startswith("."):
        param = (_dotted(error["loc"]) or "") + param
    if kind == "request_field":
        return invalid(context["reason"], param=param, code=context["code"])
    if kind == "missing":
        return invalid(
            f"Missing required parameter: {param}" if param else "The request has no JSON body",
            param=param,
            code="missing_required_parameter",
        )
    if param is None:
        return invalid(
            "The body must be a JSON object, sent with Content-Type: application/json",
            code="invalid_body",
        )
    got = error.get("input")
    shown = f", got {_short(got)}" if isinstance(got, str | int | float | None) else ""
    return invalid(f"{param}: {error['msg']}{shown}", param=param, code="invalid_value")


def _deepest(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first fault; of a union's branches the one that got furthest, at least to a value of its
    kind."""
    first = _dotted(errors[0]["loc"])
    same = [error for error in errors if (_dotted(error["loc"]) or "").startswith(first or "")]
    return max(same, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))


_TYPE_TAGS = {"body", "str", "int"}


def _dotted(location: Sequence[str | int]) -> str | None:
    """The field's path; pydantic also names the branch of a union there (`list[...]`, `str`)."""
    path = [
        str(part)
        for part in location
        if isinstance(part, int) or (part.isidentifier() and part not in _TYPE_TAGS)
    ]
    return ".".join(path) or None


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."

"""The endpoint over HTTP: what the command line and the benchmark ask it. Standard library only."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from overstory.orchestrator.errors import UserFault

KEY_VARIABLE = "OVERSTORY_API_KEY"
"""Environment variable with the API key to send, where the endpoint wants one."""


class EndpointError(UserFault, RuntimeError):
    """The endpoint cannot be reached or refused; `status` is 0 if it could not be reached."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Event:
    """A piece of a streamed completion. `usage` comes with the last one only."""

    text: str
    finish_reason: str | None = None
    usage: dict[str, int] | None = None


def _open(url: str, body: dict[str, Any] | None, timeout_s: float) -> http.client.HTTPResponse:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {os.environ[KEY_VARIABLE]}"
    with _told(url):
        try:
            request = urllib.request.Request(url, data, headers)
            return urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise EndpointError(_message(error.read()) or str(error), error.code) from error


@contextmanager
def _told(url: str) -> Iterator[None]:
    """What goes wrong with a connection, or with what comes over it, in words."""
    try:
        yield
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise EndpointError(f"{url} does not answer: {reason}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise EndpointError(f"{url} does not answer as an OpenAI endpoint: {error!r}") from error


def _message(body: bytes) -> str:
    """The message of an OpenAI-style error body, or the body itself."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def get_json(endpoint: str, path: str, timeout_s: float = 10.0) -> Any:
    """GET `path`.

    Raises:
        EndpointError: not reachable, or an error status.
    """
    url = f"{endpoint.rstrip('/')}{path}"
    with _told(url), _open(url, None, timeout_s) as response:
        return json.load(response)


def ready(endpoint: str, timeout_s: float = 5.0) -> tuple[bool, str]:
    """Whether the endpoint has proved that it generates, and if not, why."""
    try:
        get_json(endpoint, "/ready", timeout_s)
    except EndpointError as error:
        return False, str(error)
    return True, ""


def stream_completion(
    endpoint: str, body: dict[str, Any], chat: bool = False, timeout_s: float = 600.0
) -> Generator[Event, None, None]:
    """Pieces of one completion as they come; `body` is OpenAI's without `stream`.

    Raises:
        EndpointError: not reachable, refused, an error in the middle of the stream, or a stream
            that ends before `[DONE]`.
    """
    path = "/v1/chat/completions" if chat else "/v1/completions"
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    url = f"{endpoint.rstrip('/')}{path}"
    with _told(url), _open(url, streamed, timeout_s) as response:
        for line in response:
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield _event(json.loads(line[6:]), chat)
        raise EndpointError(f"{url}: the answer broke off; what came is not the whole")


def _event(chunk: dict[str, Any], chat: bool) -> Event:
    if "error" in chunk:
        raise EndpointError(str(chunk["error"].get("message", chunk["error"])))
    usage = chunk.get("usage")
    if not chunk.get("choices"):
        return Event("", None, usage)
    choice = chunk["choices"][0]
    text = choice.get("delta", {}).get("content") if chat else choice.get("text")
    return Event(text or "", choice.get("finish_reason"), usage)

"""`overstory generate`: one completion, printed as it comes."""

import sys
import time
from typing import Any

from overstory.orchestrator import client
from overstory.orchestrator.state import read_state


def find_endpoint(name: str | None, endpoint: str | None) -> str:
    """The endpoint to ask: the given one, else that of the deployment `name` (or the only one).

    Raises:
        StateError: no such deployment, and no endpoint given.
        EndpointError: the given one is no URL.
    """
    if endpoint is None:
        return read_state().pick(name).endpoint
    if not endpoint.startswith(("http://", "https://")):
        raise client.EndpointError(f"--endpoint: got {endpoint!r}, wanted http://HOST:PORT")
    return endpoint


def served_model(endpoint: str) -> str:
    """The model that the endpoint serves."""
    try:
        return str(client.get_json(endpoint, "/v1/models")["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise client.EndpointError(
            f"{endpoint}/v1/models does not name a model: no OpenAI endpoint; name the model with "
            "--model, or another --endpoint"
        ) from error


def generate(
    text: str, body: dict[str, Any], name: str | None, endpoint: str | None, chat: bool
) -> None:
    """Print the completion to standard output, and how fast it came to standard error.

    Raises:
        EndpointError: the endpoint is not there or refuses.
    """
    url = find_endpoint(name, endpoint)
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    asked = {"model": body.get("model") or served_model(url), **prompt, **body}
    begun, first, usage = time.monotonic(), None, None
    for event in client.stream_completion(url, asked, chat):
        if event.text and first is None:
            first = time.monotonic() - begun
        sys.stdout.write(event.text)
        sys.stdout.flush()
        usage = event.usage or usage
    print(flush=True)
    seconds = time.monotonic() - begun
    if usage and first is not None:
        tokens = usage["completion_tokens"]
        print(
            f"[{tokens} tokens in {seconds:.2f} s, first after {first:.2f} s, "
            f"{tokens / seconds:.1f} tokens/s]",
            file=sys.stderr,
        )

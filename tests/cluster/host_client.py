"""Streams completions on a lab's host and prints one line of JSON when all have ended.

python host_client.py URL MODEL STREAMS TOKENS FILE

Writes a dot to FILE for each stream that has begun to bring text. Prints a list with, for each
stream, `text`, `finish`, `error` and `gap_s` (longest time between two pieces).
"""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

TIMEOUT_S = 280.0
_BEGUN = threading.Lock()


def follow(url: str, model: str, tokens: int, begun: Path) -> dict[str, Any]:
    """One greedy stream."""
    body = {
        "model": model,
        "prompt": "def add(a, b):\n    ",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    result: dict[str, Any] = {"text": "", "finish": None, "error": None, "gap_s": 0.0}
    last = None
    try:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=TIMEOUT_S) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    result["error"] = line if answer.status_code != 200 else result["error"]
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    result["error"] = event["error"]["message"]
                    break
                if last is None:
                    with _BEGUN, begun.open("a") as file:
                        file.write(".")
                else:
                    result["gap_s"] = max(result["gap_s"], time.monotonic() - last)
                last = time.monotonic()
                for choice in event["choices"]:
                    result["text"] += choice["text"]
                    result["finish"] = choice["finish_reason"] or result["finish"]
    except httpx.HTTPError as error:
        result["error"] = f"{type(error).__name__}: {error}"
    return result


def main(url: str, model: str, streams: str, tokens: str, begun: str) -> None:
    """All at once."""
    Path(begun).unlink(missing_ok=True)
    with ThreadPoolExecutor(int(streams)) as pool:
        runs = [
            pool.submit(follow, url, model, int(tokens), Path(begun)) for _ in range(int(streams))
        ]
        print(json.dumps([run.result() for run in runs]))


if __name__ == "__main__":
    main(*sys.argv[1:])

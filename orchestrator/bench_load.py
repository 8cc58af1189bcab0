"""The load of a benchmark: held-out prompts, sent to the endpoint. No Ray."""

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from overstory.orchestrator import client
from overstory.orchestrator.bench_profiles import Asked
from overstory.orchestrator.bench_rows import Answer, BenchError
from overstory.orchestrator.state import DeploymentRecord

PROMPT_FILE = Path(__file__).parents[1] / "workers" / "tiny" / "heldout_prompts.json"


def load_prompts(count: int, as_ids: bool) -> list[Any]:
    """The first `count` held-out prompts: token ids for the built-in model, else texts.

    Raises:
        BenchError: there are fewer.
    """
    stored = json.loads(PROMPT_FILE.read_text())["prompts"]
    if count > len(stored):
        raise BenchError(f"--prompts: got {count}, there are {len(stored)} held-out prompts")
    return [prompt["ids"] if as_ids else prompt["text"] for prompt in stored[:count]]


class Load:
    """Sends prompts to one endpoint."""

    def __init__(self, record: DeploymentRecord, prompts: Sequence[Any]) -> None:
        self._endpoint = record.endpoint
        self._model = record.spec["served_model_name"]
        self._prompts = prompts
        self._stop = threading.Event()

    @property
    def prompts(self) -> Sequence[Any]:
        """What the prompts are made of."""
        return self._prompts

    def answer(self, number: int, max_tokens: int, temperature: float) -> Answer:
        """One request, its length fixed; the seed is the prompt's number."""
        return self._ask(Asked(self._prompts[number]), number, max_tokens, temperature)

    def _ask(self, asked: Asked, number: int, max_tokens: int, temperature: float) -> Answer:
        body = {
            "model": self._model,
            "prompt": asked.prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": number,
            "ignore_eos": True,
        }
        begun, first, tokens = time.monotonic(), None, 0
        with closing(client.stream_completion(self._endpoint, body)) as events:
            for place, event in enumerate(events, 1):
                self._check()
                if first is None:
                    first = time.monotonic() - begun
                tokens = event.usage["completion_tokens"] if event.usage else tokens
                if place == asked.leaves_after and not event.usage:
                    return Answer(first, 0, left=True)
        if first is None or tokens != max_tokens:
            raise BenchError(f"prompt {number}: got {tokens} tokens, wanted {max_tokens}")
        return Answer(first, tokens)

    def run(
        self,
        max_tokens: int,
        concurrency: int,
        temperature: float,
        requests: Sequence[Asked] | None = None,
        at_their_times: bool = False,
    ) -> list[Answer]:
        """All requests (unset: each prompt once), `concurrency` at a time; or each when it is due,
        however many are under way. Whatever ends it early (Ctrl-C, a request that failed) breaks
        the others off, and with them this load."""
        asked = requests or [Asked(prompt) for prompt in self._prompts]
        begun = time.monotonic()

        def send(number: int) -> Answer:
            if at_their_times:
                self._stop.wait(max(0.0, begun + asked[number].at_s - time.monotonic()))
            self._check()
            return self._ask(asked[number], number, max_tokens, temperature)

        with ThreadPoolExecutor(len(asked) if at_their_times else concurrency) as pool:
            try:
                return list(pool.map(send, range(len(asked))))
            except BaseException:
                self._stop.set()  # The pool waits for its threads.
                raise

    def _check(self) -> None:
        if self._stop.is_set():
            raise BenchError("stopped")

"""The load of a benchmark: held-out prompts, sent to the endpoint. No Ray."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from overstory.orchestrator import client
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

    def answer(self, number: int, max_tokens: int, temperature: float) -> Answer:
        """One request, its length fixed; the seed is the prompt's number."""
        body = {
            "model": self._model,
            "prompt": self._prompts[number],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": number,
            "ignore_eos": True,
        }
        begun, first, tokens = time.monotonic(), None, 0
        for event in client.stream_completion(self._endpoint, body):
            if first is None:
                first = time.monotonic() - begun
            tokens = event.usage["completion_tokens"] if event.usage else tokens
        if first is None or tokens != max_tokens:
            raise BenchError(f"prompt {number}: got {tokens} tokens, wanted {max_tokens}")
        return Answer(first, tokens)

    def run(self, max_tokens: int, concurrency: int, temperature: float) -> list[Answer]:
        """All prompts, `concurrency` at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(
                pool.map(
                    lambda number: self.answer(number, max_tokens, temperature),
                    range(len(self._prompts)),
                )
            )

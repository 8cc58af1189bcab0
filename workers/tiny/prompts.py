"""The held-out prompts that tests and benchmarks share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .config import BOS, EOS

PROMPT_FILE = Path(__file__).parent / "heldout_prompts.json"
PROMPT_TOKENS = 160


@dataclass(frozen=True)
class Prompt:
    """A piece of a standard library file that the pair was not trained on."""

    file: str
    """Path relative to the standard library."""
    offset: int
    """Index of the first token in the file; 0 is the beginning-of-text token."""
    ids: tuple[int, ...]
    """`PROMPT_TOKENS` token ids."""
    text: str
    """The text of the ids, without special tokens."""


def heldout_prompts() -> list[Prompt]:
    """All prompts, in an order that mixes files, so that any first few are a fair sample."""
    stored = json.loads(PROMPT_FILE.read_text())["prompts"]
    return [Prompt(**{**entry, "ids": tuple(entry["ids"])}) for entry in stored]


def cut_prompts(stream: np.ndarray, files: list[str], tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts from the held-out stream: every file's start, and four pieces from its middle.

    Prompts do not overlap, and at least as many tokens follow each as a prompt has.
    """
    starts, ends = np.flatnonzero(stream == BOS), np.flatnonzero(stream == EOS)
    assert len(starts) == len(ends) == len(files), "one document per file"
    rng = np.random.default_rng(7)
    rounds: list[list[Prompt]] = [[] for _ in range(5)]
    for file, start, end in zip(files, starts.tolist(), ends.tolist(), strict=True):
        cells = (end - start) // (2 * PROMPT_TOKENS)
        middle = rng.permutation(np.arange(1, max(cells, 1)))[:4].tolist()
        for order, cell in enumerate([0, *middle][: cells and 5]):
            offset = cell * 2 * PROMPT_TOKENS
            ids = stream[start + offset : start + offset + PROMPT_TOKENS].tolist()
            rounds[order].append(Prompt(file, offset, tuple(ids), tokenizer.decode(ids)))
    return [prompt for some in rounds for prompt in (some[i] for i in rng.permutation(len(some)))]


def write_prompts(prompts: list[Prompt], path: Path = PROMPT_FILE) -> None:
    """Write the prompts as JSON, one per line."""
    lines = ",\n".join(json.dumps(asdict(prompt)) for prompt in prompts)
    about = "held-out prompts; ids are of the tokenizer in pair/target"
    path.write_text(f'{{"about": "{about}", "prompts": [\n{lines}\n]}}\n')

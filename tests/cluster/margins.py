"""How near the right answers to the load's questions are to other ones. Not collected: no test.

In float32 the same row of a forward differs in its last bits with the width of the batch and with
what the prefix cache held. A draw that falls within that rounding of a bound of its distribution,
or two best tokens as near to each other, come out one way or the other
(docs/decisions/0002-sampling-noise.md). Answers that must never change are asked of questions
without such places; this finds them, by the oracle:

    .venv/bin/python tests/cluster/margins.py            margins of the questions as they are
    .venv/bin/python tests/cluster/margins.py --seeds 9  and of other seeds below that (minutes)

Constrained questions are left out: the oracle knows no grammar.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from load_clients import questions as load_questions
from soak import questions as soak_questions

from overstory.kernels.reference.sample import filtered_probs, uniforms
from overstory.orchestrator.sampling import choice_seeds
from overstory.orchestrator.tokenizer import load_tokenizer
from overstory.workers.tiny.oracle import Oracle
from overstory.workers.tiny.paths import resolve_model

LEAST = 2e-6
"""Flips were seen at 3e-7."""
LEAST_GREEDY = 1e-4
"""Between the two best logits."""


class Margins:
    """A chooser that also keeps the least margin of each row of its batch.

    Args:
        body: fields of the request.
        seeds: one for each row.
        vocabulary: tokens.
    """

    def __init__(self, body: dict[str, Any], seeds: Sequence[int], vocabulary: int) -> None:
        self._body = body
        self._seeds = torch.tensor(seeds)
        self._counts = torch.zeros(len(seeds), vocabulary)
        self.least = torch.full((len(seeds),), float("inf"), dtype=torch.float64)

    def __call__(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As a `Chooser`, one row for each prompt."""
        row = logits[:, -1] - self._counts * self._body.get("frequency_penalty", 0.0)
        greedy = self._body["temperature"] == 0
        tokens, margins = self._greedy(row) if greedy else self._sampled(row, positions[:, -1])
        self._counts[torch.arange(len(tokens)), tokens] += 1
        self.least = torch.minimum(self.least, margins)
        return tokens[:, None]

    def _greedy(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = row.topk(2).values.double()
        return row.argmax(1), (best[:, 0] - best[:, 1]) * (LEAST / LEAST_GREEDY)

    def _sampled(
        self, row: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        full = torch.ones(len(row))
        probs = filtered_probs(
            row,
            full * self._body["temperature"],
            torch.full((len(row),), -1),
            full * self._body.get("top_p", 1.0),
            full * 0.0,
        )
        sums = probs.cumsum(1)
        u = uniforms(self._seeds, positions)[:, None]
        tokens = torch.searchsorted(sums, u, right=True)
        above = sums.gather(1, tokens) - u
        below = u - torch.where(tokens > 0, sums.gather(1, (tokens - 1).clamp(min=0)), -1.0)
        return tokens[:, 0], torch.minimum(above, below)[:, 0]


def least_margins(oracle: Oracle, prompt: list[int], body: dict[str, Any], seeds: list[int]) -> Any:
    """Least margin of the answer under each seed."""
    margins = Margins(body, seeds, oracle.decoder.target.config.vocab_size)
    oracle.decoder.plain(torch.tensor([prompt] * len(seeds)), body["max_tokens"], margins)
    return dict(zip(seeds, margins.least.tolist(), strict=True))


def main() -> int:
    """Prints each kind of question with its least margins by seed; 1 if one that is asked is too
    near."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=0)
    others = range(parser.parse_args().seeds)
    oracle, tokenizer = Oracle.load(), load_tokenizer(resolve_model("overstory-tiny"))
    kinds: dict[str, dict[int, float]] = {}
    near = []
    for question in (*soak_questions("tiny"), *load_questions("tiny", 16, 48)):
        body = dict(question.body)
        if "regex" in body:
            continue
        if "prompt" in body:
            prompt = tokenizer.encode(body.pop("prompt"))
        else:
            text = tokenizer.render_chat(body.pop("messages"))
            prompt = tokenizer.encode(text, special=False)
        own = choice_seeds(body.pop("seed", 0), body.get("n", 1))
        more = [] if body["temperature"] == 0 or len(own) > 1 else others
        least = least_margins(oracle, prompt, body, [*own, *(s for s in more if s not in own)])
        near += [(question.body, seed, least[seed]) for seed in own if least[seed] < LEAST]
        kind = kinds.setdefault(str(body), {})
        for seed, margin in least.items():
            kind[seed] = min(kind.get(seed, 1.0), margin)
    for name, kind in kinds.items():
        print(name, {seed: f"{margin:.1e}" for seed, margin in kind.items()})
    print("too near:", *near or ["none"], sep="\n")
    return 1 if near else 0


if __name__ == "__main__":
    sys.exit(main())

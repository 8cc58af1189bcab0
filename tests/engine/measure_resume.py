"""Sequences cut and gone on with elsewhere, by dtype: how many texts flip, how near the ties were.

`.venv/bin/python tests/engine/measure_resume.py --json docs/benchmarks/resume.json`
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from overstory.workers.environment import prepare_process

prepare_process("cpu")

from ddtree_support import policy, random_prompts, server_args  # noqa: E402
from harness import EngineHarness, Output  # noqa: E402

from overstory.orchestrator.host_facts import host_facts  # noqa: E402
from overstory.orchestrator.journal import JournalEntry  # noqa: E402
from overstory.orchestrator.sampling import Sampling  # noqa: E402
from overstory.workers.tiny.paths import resolve_model  # noqa: E402

LENGTH = 48
BATCH = 8


def measure(dtype: str, sequences: int) -> dict[str, Any]:
    """Greedy sequences whole, then each cut once at a place drawn for it."""
    harness = EngineHarness(
        resolve_model("overstory-tiny"),
        dtype=dtype,
        **server_args(resolve_model("overstory-tiny-drafter"), context_length=256),
    )
    try:
        draw = random.Random(4)
        prompts = random_prompts([draw.randrange(8, 64) for _ in range(sequences)], seed=3)
        entries = [
            JournalEntry(
                f"s{i}",
                tuple(prompt),
                Sampling(seed=i, max_new_tokens=LENGTH, temperature=0.0, ignore_eos=True),
                0.0,
            )
            for i, prompt in enumerate(prompts)
        ]
        wholes = _run(harness, entries, "whole")
        cuts = [draw.randrange(1, LENGTH) for _ in entries]
        for entry, whole, at in zip(entries, wholes, cuts, strict=True):
            entry.commit(whole.ids[:at])
            entry.moves = 1
        rests = _run(harness, entries, "rest")
        flips = [
            _flip(whole, rest, at) for whole, rest, at in zip(wholes, rests, cuts, strict=True)
        ]
    finally:
        harness.close()
    gaps = [gap for gap in flips if gap is not None]
    cut = list(zip(wholes, rests, cuts, flips, strict=True))
    return {
        "sequences": sequences,
        "tokens_after_the_cut": sum(LENGTH - at for at in cuts),
        "flipped": len(gaps),
        "top2_gaps_where_they_flipped": sorted(round(gap, 4) for gap in gaps),
        # How near the texts came to a flip.
        "smallest_top2_gap": round(min(min(_gaps(whole, at)) for whole, _, at, _ in cut), 6),
        "largest_change_of_a_logprob": max(
            abs(one - other)
            for whole, rest, at, flip in cut
            if flip is None
            for one, other in zip(whole.logprobs[at:], rest.logprobs, strict=True)
        ),
    }


def _run(harness: EngineHarness, entries: list[JournalEntry], name: str) -> list[Output]:
    outputs = []
    for first in range(0, len(entries), BATCH):
        harness.flush_cache()  # Another replica has nothing of it: what was decoded is prefilled.
        with policy("tree-15"):
            rids = []
            for entry in entries[first : first + BATCH]:
                call = entry.call()
                rids.append(
                    harness.submit(
                        call.input_ids,
                        call.sampling.engine_params(),
                        rid=f"{name}-{call.rid}",
                        return_logprob=True,
                        top_logprobs_num=2,
                    )
                )
            harness.run(rids)
        outputs += [harness.outputs[rid] for rid in rids]
        assert not any(harness.outputs[rid].cached_tokens for rid in rids)
    return outputs


def _gaps(whole: Output, at: int) -> list[float]:
    """Differences of the two best log-probabilities at each place after the cut."""
    return [
        best - second
        for best, second in (
            sorted(alternatives.values(), reverse=True)[:2]
            for alternatives in whole.top_logprobs[at:]
        )
    ]


def _flip(whole: Output, rest: Output, at: int) -> float | None:
    """Difference of the two best log-probabilities where the texts part; None if they do not."""
    for place, (token, other) in enumerate(zip(whole.ids[at:], rest.ids, strict=True), at):
        if token != other:
            return _gaps(whole, place)[0]
    return None


def main() -> None:
    """Both dtypes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=160)
    given = parser.parse_args()
    result = {
        "host": host_facts(),
        "model": "overstory-tiny, greedy, trees of 15 nodes, batches of 8",
        **{dtype: measure(dtype, given.sequences) for dtype in ("float32", "bfloat16")},
    }
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

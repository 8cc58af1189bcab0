"""Seconds to a first token, by our kernel's blocks of rows and by SGLang's Triton kernel.

    slice_prefill.py ROLES/prefill.json      prints what came of a run as a table

Whole prompts by chunks, and a few rows to a whole chunk behind a prefix that is in the cache, each
both ways in one engine. Text is drawn at random; what both ways say to it is compared.
"""

from __future__ import annotations

import json
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAYS = ("ours", "triton")
TRITON_PAIRS_PER_S, TRITON_KEYS_PER_S = 4e7, 4e4
"""Rows times keys that Triton does in a second with all 61 layers, at least, and keys where
rows are few: 65,536 tokens took 46 s on an H200, one row behind 200,000 4.5 s."""
TWICE_S = 2.0
"""What takes ours no longer is measured twice."""
TOP = 8


@dataclass(frozen=True)
class Lengths:
    """Tokens of everything that is measured.

    Attributes:
        whole: prompts, from an empty cache.
        computed: prefixes that are computed before, and rows behind each.
        made_up: a prefix whose KV is random numbers, and rows behind it.
        last: a prompt whose prefill by Triton takes most of the time.
    """

    whole: tuple[int, ...]
    computed: tuple[tuple[int, tuple[int, ...]], ...]
    made_up: tuple[int, tuple[int, ...]]
    last: int


_ROWS = (1, 64, 1024, 8192)
FULL = Lengths((8192, 32768), ((256, _ROWS), (57_344, _ROWS)), (200_000, (1, 128, 1024)), 65_536)
TOY = Lengths((200, 400), ((20, (1, 100)), (300, (1, 64, 100))), (500, (1, 70)), 600)


class PrefillBench:
    """Everything of `Lengths`, as far as time goes.

    Args:
        engine: `SliceEngine` of all layers' KV.
        left: seconds left.
        report: `slice_report.Report`; gets each measurement when it is there.
    """

    def __init__(self, engine: Any, left: Callable[[], float], report: Any) -> None:
        self._engine, self._left, self._report = engine, left, report
        self._found: list[dict[str, Any]] = report.content.get("prefills", [])
        self._left_out: list[str] = []

    def run(self, lengths: Lengths) -> str:
        """Measures; returns how many measurements there are by now. Where none was left out, the
        report has ``prefill``."""
        for way in WAYS:  # whatever is compiled or loaded at the first
            self._engine.flush_cache()
            self._timed(way, drawn(300), 0)
            self._timed(way, drawn(300) + drawn(90, 1), 300)
        for length in lengths.whole:
            self._both(f"whole {length}", length, 0, self._engine.flush_cache)
        for prefix, counts in lengths.computed:
            self._behind(prefix, counts, self._compute)
        self._behind(*lengths.made_up, self._make_up)
        self._both(f"whole {lengths.last}", lengths.last, 0, self._engine.flush_cache)
        if not self._left_out:
            self._report.put("prefill", "all")
        return f"{len(self._found)} measurements"

    def _behind(self, prefix: int, counts: Sequence[int], place: Callable[[int], None]) -> None:
        place(prefix)
        for count in counts:
            name = f"{count} behind {prefix}, {place.__name__.strip('_')}"
            self._both(name, count, prefix, lambda: self._engine.at_boundary(keep_only, prefix))

    def _both(self, name: str, count: int, prefix: int, clear: Callable[[], Any]) -> None:
        """One text by each way, each time with no more than the prefix in the cache. Not again
        where an earlier run has done it."""
        if any((f["what"], f["way"]) == (name, "triton") for f in self._found):
            return
        text = drawn(prefix) + drawn(count, 1)
        for turn, way in enumerate(("ours", *WAYS)):
            if turn == 1 and self._found[-1]["seconds"] > TWICE_S:
                continue
            if way == "triton" and self._left() < triton_s(prefix, count) + 3:
                self._left_out.append(name)
                self._report.put("left_out", self._left_out)
                continue
            clear()
            found = self._timed(way, text, prefix)
            self._found.append({"what": name, "prefix": prefix, "rows": count, "way": way} | found)
            self._report.put("prefills", self._found)

    def _timed(self, way: str, text: list[int], prefix: int) -> dict[str, Any]:
        """Seconds to the first token, that token and the likeliest ones."""
        engine = self._engine
        asked = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        with by(way) as cut:
            begun = time.perf_counter()
            rid = engine.submit(text, asked, return_logprob=True, top_logprobs_num=TOP)
            while not engine.outputs[rid].ids and engine.outputs[rid].refused is None:
                engine.step()
            seconds = time.perf_counter() - begun
            engine.run([rid])
        output = engine.outputs.pop(rid)
        if output.refused is not None or output.cached_tokens != prefix:
            raise RuntimeError(
                f"{len(text)} tokens behind {prefix}: {output.cached_tokens} were in the cache, "
                f"refused: {output.refused}"
            )
        found = {"seconds": seconds, "token": output.ids[0], "top": output.top_logprobs[0]}
        return found | {"cut": sum(cut)}

    def _compute(self, prefix: int) -> None:
        self._engine.flush_cache()
        self._timed("ours", drawn(prefix), 0)

    def _make_up(self, prefix: int) -> None:
        self._engine.flush_cache()
        self._engine.at_boundary(make_up, drawn(prefix))


def drawn(count: int, seed: int = 0) -> list[int]:
    """A text; a longer one of the same seed begins with it."""
    draw = random.Random(seed)
    return [draw.randrange(5, 2000) for _ in range(count)]


def triton_s(prefix: int, rows: int) -> float:
    """Seconds that Triton may need."""
    keys = prefix + rows / 2
    return max(rows * keys / TRITON_PAIRS_PER_S, keys / TRITON_KEYS_PER_S) + 1


@contextmanager
def by(way: str) -> Iterator[list[bool]]:
    """Extends go this way, where the rule lets them. Yields which were cut in blocks."""
    from overstory.workers.seam import extend_blocks

    rule, cut = extend_blocks.left_to_triton, []

    def noted(*lengths: Any) -> str | None:
        why = "asked for" if way == "triton" else rule(*lengths)
        cut.append(why is None)
        return why

    extend_blocks.left_to_triton = noted
    try:
        yield cut
    finally:
        extend_blocks.left_to_triton = rule


def keep_only(scheduler: Any, count: int) -> None:
    """Of the one text in the prefix cache, its first ``count`` tokens stay."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache = scheduler.tree_cache
    cache.evict(EvictParams(num_tokens=cache.evictable_size() - count))


def make_up(scheduler: Any, tokens: list[int]) -> None:
    """A text is in the prefix cache; its KV, and everybody's, is random numbers."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    with torch.inference_mode():
        worker = scheduler.model_worker
        for buffer in worker.model_runner.token_to_kv_pool.kv_buffer:
            buffer.normal_()
        slots = scheduler.token_to_kv_pool_allocator.alloc(len(tokens))
        assert slots is not None, "no room"
        key = RadixKey(array("q", tokens))
        scheduler.tree_cache.insert(InsertParams(key=key, value=slots))


def compared(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each measurement, ours (the faster of two) beside Triton's.

    Seconds, how many times faster, whether the first tokens are the same, and the largest
    difference of log-probabilities of tokens that both name among the likeliest.
    """
    rows = []
    for what in dict.fromkeys(one["what"] for one in found):
        ways = {way: [f for f in found if (f["what"], f["way"]) == (what, way)] for way in WAYS}
        best = {way: min(f["seconds"] for f in made) for way, made in ways.items() if made}
        row = {"what": what} | {f"{way}_s": round(seconds, 4) for way, seconds in best.items()}
        if all(ways.values()):
            ours, theirs = (
                {int(token): value for token, value in ways[way][0]["top"].items()} for way in WAYS
            )
            row |= {
                "times": round(best["triton"] / best["ours"], 2),
                "same_token": ways["ours"][0]["token"] == ways["triton"][0]["token"],
                "common": len(ours.keys() & theirs.keys()),
                "logprobs_differ": max(
                    (abs(ours[t] - theirs[t]) for t in ours.keys() & theirs.keys()), default=None
                ),
            }
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """What `compared` found, in Markdown."""
    lines = [
        "| rows | ours, s | Triton, s | times | same first token | log-probabilities differ by |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["what"], f"{row['ours_s']:.3f}"]
        if "triton_s" in row:
            same = "yes" if row["same_token"] else "no"
            far = "no common" if row["logprobs_differ"] is None else f"{row['logprobs_differ']:.3f}"
            cells += [f"{row['triton_s']:.3f}", f"{row['times']:.1f}", same, far]
        else:
            cells += ["not run", "", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(compared(json.loads(Path(sys.argv[1]).read_text())["prefills"])))

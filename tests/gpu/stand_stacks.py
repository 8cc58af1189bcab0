"""An extension of ranks: what their start takes, and where the loop was in iterations that took
long, by samples of its stack.

Loaded by OVERSTORY_RANK_EXTENSIONS=stand_stacks:register; what it sees goes to the folder
STAND_STACKS, a file for each rank. A gap between two samples is a time in which nobody had the
interpreter's lock.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from overstory.workers.gate import StepGate
from overstory.workers.rank import RankHost

VARIABLE = "STAND_STACKS"
LONG_S = 0.1
EVERY_S = 0.01
KEPT_S = 30.0
DEPTH = 14
TIMED = (
    "overstory.workers.handoff.loading:WeightShelf.load",
    "overstory.workers.handoff.peers:Peers.close",
    "overstory.workers.handoff.rank_side:RankSide.rehearse_meeting",
    "overstory.workers.handoff.rank_side:RankSide.rehearse_rows",
    "sglang.srt.model_executor.model_runner:ModelRunner.init_torch_distributed",
    "sglang.srt.model_executor.model_runner:ModelRunner.load_model",
    "sglang.srt.model_executor.model_runner:ModelRunner.init_cuda_graphs",
    "sglang.srt.managers.scheduler:Scheduler.__init__",
)
"""Calls that are told with their begin and length."""


class Stacks:
    """Of the thread that passes the gate.

    Args:
        folder: where long iterations go.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}.jsonl"
        self._left = time.monotonic()
        self._thread: int | None = None
        self._seen: deque[tuple[float, list[str]]] = deque(maxlen=int(KEPT_S / EVERY_S))

    def passes(self, launched: int) -> None:
        """The loop is at its gate: an iteration is over."""
        now = time.monotonic()
        if self._thread is None:
            self._thread = threading.get_ident()
            threading.Thread(target=self._sample, name="stand-stacks", daemon=True).start()
        elif now - self._left > LONG_S:
            self._tell(now, launched)

    def leaves(self) -> None:
        """An iteration begins."""
        self._left = time.monotonic()

    def _tell(self, now: float, launched: int) -> None:
        seen = [one for one in list(self._seen) if self._left <= one[0] <= now]
        stacks = runs([(round(at - self._left, 3), stack) for at, stack in seen])
        took_s = round(now - self._left, 3)
        self.tell(at=round(time.time(), 3), took_s=took_s, batches=launched, stacks=stacks)

    def tell(self, **told: Any) -> None:
        """A line."""
        with self._file.open("a") as opened:
            opened.write(json.dumps(told) + "\n")

    def _sample(self) -> None:
        while True:
            frame = sys._current_frames().get(self._thread or 0)
            self._seen.append((time.monotonic(), described(frame)))
            time.sleep(EVERY_S)


def described(frame: FrameType | None) -> list[str]:
    """The innermost calls, the innermost first."""
    stack = []
    while frame is not None and len(stack) < DEPTH:
        code = frame.f_code
        stack.append(
            f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_name}"
        )
        frame = frame.f_back
    return stack


def runs(samples: list[tuple[float, list[str]]]) -> list[dict[str, Any]]:
    """Samples with the same innermost calls in a row as one: `at` (seconds after the iteration's
    begin) of the first and the last, how many, and the calls of the first."""
    found: list[dict[str, Any]] = []
    for at, stack in samples:
        if found and found[-1]["stack"][:3] == stack[:3]:
            found[-1]["last"], found[-1]["samples"] = at, found[-1]["samples"] + 1
        else:
            found.append({"at": at, "last": at, "samples": 1, "stack": stack})
    return found


def register(add: Callable[..., None]) -> None:
    """Entry point for `OVERSTORY_RANK_EXTENSIONS`; adds no command."""
    del add
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    stacks, before_pull = Stacks(Path(folder)), StepGate.before_pull

    def watched(gate: StepGate, scheduler: Any) -> Any:
        stacks.passes(scheduler.launched())
        try:
            return before_pull(gate, scheduler)
        finally:
            stacks.leaves()

    StepGate.before_pull = watched  # type: ignore[method-assign]
    enter = RankHost._enter

    def entered(rank: RankHost, phase: str) -> None:
        stacks.tell(phase=phase, at=round(time.time(), 3))
        enter(rank, phase)

    RankHost._enter = entered  # type: ignore[method-assign]
    for place in TIMED:
        time_calls(place, stacks)


def time_calls(place: str, stacks: Stacks) -> None:
    """Tells each call of `module:Class.method`, with its begin (seconds since 1970)."""
    module, _, path = place.partition(":")
    name, _, method = path.partition(".")
    owner = getattr(importlib.import_module(module), name)
    original = getattr(owner, method)

    @functools.wraps(original)
    def timed(*given: Any, **named: Any) -> Any:
        begun = time.time()
        try:
            return original(*given, **named)
        finally:
            stacks.tell(did=path, at=round(begun, 3), took_s=round(time.time() - begun, 3))

    setattr(owner, method, timed)


def compiled_since(when: float) -> list[tuple[float, str, str]]:
    """Kernels that Triton has compiled since: seconds after, name, and `variant`. What lies in its
    cache is read from there."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    kernels = [(file.stat().st_mtime, file) for file in folder.glob("*/*.json")]
    return sorted(
        (round(at - when, 2), file.stem, variant(file.with_suffix(".ttir")))
        for at, file in kernels
        if at > when and not file.stem.startswith("__grp__")
    )


def variant(ttir: Path) -> str:
    """What tells a kernel from others of its name, of Triton's first form of it: arguments that are
    not known to be multiples of 16, and the lengths of its ranges."""
    if not ttir.exists():
        return ""
    text = ttir.read_text()
    head = next((line for line in text.splitlines() if "tt.func public" in line), "")
    given = re.findall(r"%(\w+): [^,{]+?(\{tt\.divisibility = 16[^}]*\})? loc\(", head)
    ranges = sorted({int(end) for end in re.findall(r"make_range \{end = (\d+)", text)})
    return f"not by 16: {' '.join(name for name, even in given if not even)}; ranges: {ranges}"


def told(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What ranks have written, by their process's number."""
    return {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    }

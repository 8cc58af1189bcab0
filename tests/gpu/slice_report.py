"""Results of one role, on disk after each of them, and waiting for the roles before it."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class Report:
    """One file of results, gone on with where an earlier run of the role has left one.

    Attributes:
        content: what the file holds; ``errors`` of this run by the name of what failed, ``runs``
            with this one.
    """

    def __init__(self, role: str, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = out / f"{role}.json"
        before = json.loads(self._file.read_text()) if self._file.exists() else {}
        before.pop("left_out", None)
        runs = before.get("runs", 0) + 1
        self.content: dict[str, Any] = before | {"role": role, "errors": {}, "runs": runs}

    def put(self, name: str, value: Any) -> None:
        """Keeps a result and writes the file."""
        self.content[name] = value
        beside = self._file.with_suffix(".part")
        beside.write_text(json.dumps(self.content))
        beside.replace(self._file)
        print(f"[{time.strftime('%H:%M:%S')}] {name} done", flush=True)

    def attempt(self, name: str, act: Callable[[], Any]) -> None:
        """Keeps what ``act`` returns; an error is noted, printed, and does not end the run."""
        try:
            self.put(name, act())
        except Exception:
            self.failed(name)

    def failed(self, name: str) -> None:
        """Notes the error at hand."""
        text = traceback.format_exc()
        print(text, flush=True)
        self.content["errors"][name] = text[-4000:]
        self.put("failed", sorted(self.content["errors"]))


def wait_for(out: Path, earlier: Iterable[str], ends: tuple[str, ...] = ("done",)) -> None:
    """Until ``out`` holds a file NAME.END, of whichever end, of all of ``earlier``."""
    names = tuple(earlier)
    while not all(any((out / f"{name}.{end}").exists() for end in ends) for name in names):
        time.sleep(0.1)

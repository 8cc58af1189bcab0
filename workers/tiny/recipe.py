"""The whole training on one GPU (under 12 minutes on an H200), after `prepare` on a CPU.

    python -m overstory.workers.tiny.recipe --data FOLDER --out FOLDER

`--data` is what `prepare` wrote; `--out` gets `target/`, `drafter/` and the acceptance table. A
stage whose result is there already is left out, so a run that was cut short can go on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

_PACKAGE = __package__


def stage(module: str, *arguments: str | float | Path) -> None:
    """Run a module of this package in a process of its own (each frees its GPU memory)."""
    started = time.monotonic()
    command = [sys.executable, "-u", "-m", f"{_PACKAGE}.{module}", *map(str, arguments)]
    subprocess.run(command, check=True)
    print(f"{module}: {time.monotonic() - started:.0f} s in all", flush=True)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="train and measure the built-in pair")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target-seconds", type=float, default=225.0)
    parser.add_argument("--drafter-seconds", type=float, default=235.0)
    parser.add_argument("--only-target", action="store_true")
    arguments = parser.parse_args()
    data, out = arguments.data, arguments.out
    target, drafter = out / "target", out / "drafter"

    if not (target / "training.json").exists():
        seconds = arguments.target_seconds
        stage("train_target", "--data", data, "--out", target, "--seconds", seconds)
    if arguments.only_target:
        return
    if not (drafter / "training.json").exists():
        seconds = arguments.drafter_seconds
        common = ("--data", data, "--target", target)
        stage("train_drafter", *common, "--out", drafter, "--seconds", seconds)
    for folder in (target, drafter):
        shutil.copytree(data / "tokenizer", folder, dirs_exist_ok=True)
    stage("evaluate", "--pair", out, "--out", out / "tiny_pair.json")


if __name__ == "__main__":
    main()

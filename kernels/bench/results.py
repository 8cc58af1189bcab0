"""Rows of results, written to CSV as they come."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

COMMIT_VARIABLE = "OVERSTORY_COMMIT"


@dataclass(frozen=True)
class Row:
    """One implementation at one shape. The ops that are no attention use some columns anew:
    `docs/kernels.md` says which."""

    op: str
    impl: str
    gpu: str
    bs: int
    q: int
    heads: int
    context: int
    kv_dtype: str
    us_median: float
    us_p20: float
    us_p80: float
    gb_per_s: float
    tflops: float
    floor_us: float
    versions: str
    commit: str


COLUMNS = [field.name for field in fields(Row)]


class ResultFile:
    """A CSV file that holds every row as soon as it is measured."""

    def __init__(self, path: Path, keep: bool = False) -> None:
        """`keep`: add to the rows that the file holds already."""
        self.path = path
        self.rows: list[Row] = read_rows(path) if keep and path.exists() else []
        if self.rows:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            csv.DictWriter(file, COLUMNS).writeheader()

    def add(self, row: Row) -> None:
        """Append a row."""
        self.rows.append(row)
        rounded = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(row).items()}
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(rounded)


def read_rows(path: Path) -> list[Row]:
    """Rows of a CSV file that `ResultFile` wrote."""
    kinds = {"int": int, "float": float, "str": str}
    with path.open(newline="") as file:
        return [
            Row(**{field.name: kinds[str(field.type)](line[field.name]) for field in fields(Row)})
            for line in csv.DictReader(file)
        ]


def versions(others: Iterable[str] = ()) -> str:
    """torch, its CUDA, the driver, Triton where it is installed, and `others`."""
    found = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    try:
        import triton

        found.append(f"triton {triton.__version__}")
    except ImportError:
        pass
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = _output(query)
    return "; ".join([*found, *([f"driver {driver}"] if driver else []), *others])


def commit() -> str:
    """$OVERSTORY_COMMIT, else the checkout's, else "unknown"."""
    named = os.environ.get(COMMIT_VARIABLE)
    here = str(Path(__file__).resolve().parent)
    return named or _output(["git", "-C", here, "rev-parse", "--short", "HEAD"]) or "unknown"


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()

"""Choosing training text: reading files, the held-out split, and removal of copies.

The held-out set is a part of the standard library, chosen file by file by a hash of the path. No
training file may share more than a little of its text with it, and training files that mostly
repeat earlier ones are dropped, since distinct text is what a small model gains most from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .sources import TEST_SHARE, Source

MIN_BYTES, MAX_BYTES = 200, 300_000
HELD_OUT_MIN_BYTES = 4_000
HELD_OUT_PER_MILLE = 75
RESERVED_PER_MILLE = 60
MIN_LINE = 24
"""Lines shorter than this, in characters without indentation, say nothing about copying."""

_NOT_HELD_OUT = ("test/", "tests/", "lib2to3/", "idlelib/", "turtledemo/", "encodings/")


@dataclass(frozen=True)
class Document:
    """One source file."""

    origin: str
    """Path relative to its root, with the package name in front."""
    text: str


def _hash_per_mille(salt: str, name: str) -> int:
    return int(hashlib.md5(f"{salt}:{name}".encode()).hexdigest(), 16) % 1000


def _readable(path: Path) -> str | None:
    """The text of a file fit for training, or None."""
    if not MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    digits = sum(map(str.isdigit, text)) / max(1, len(text))
    plain = sum(map(str.isascii, text)) / max(1, len(text))
    longest = max(map(len, text.splitlines()), default=0)
    return text if digits < 0.12 and plain > 0.95 and longest < 1000 else None


def read_package(root: Path, source: Source) -> Iterator[Document]:
    """Fit files of a package under `root`; raises FileNotFoundError if the package is missing."""
    folder = root / source.package
    if not folder.is_dir():
        raise FileNotFoundError(f"package {source.package!r} is not in {root}")
    for path in sorted(folder.rglob("*.py")):
        origin = str(path.relative_to(root))
        if "thirdparty_files" in origin or "_vendor" in origin or "/vendored/" in origin:
            continue
        share = source.share * (TEST_SHARE if "/test" in origin else 1.0)
        if _hash_per_mille("share", origin) < 1000 * share:
            text = _readable(path)
            if text is not None:
                yield Document(origin, text)


def read_standard_library(root: Path) -> Iterator[Document]:
    """Fit files of the standard library at `root`, without `site-packages`."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts:
            continue
        text = _readable(path)
        if text is not None:
            yield Document(f"{relative}", text)


def is_held_out(document: Document) -> bool:
    """Whether a standard library file belongs to the held-out set."""
    if any(part in f"{document.origin}" for part in _NOT_HELD_OUT):
        return False
    big_enough = len(document.text) >= HELD_OUT_MIN_BYTES
    return big_enough and _hash_per_mille("held-out", document.origin) < HELD_OUT_PER_MILLE


def is_reserved(document: Document) -> bool:
    """Whether a training file is kept from the target and gives prompts to the drafter only."""
    return _hash_per_mille("reserved", document.origin) < RESERVED_PER_MILLE


def lines_of(text: str) -> set[int]:
    """Hashes of the distinct lines that are long enough to tell copies."""
    stripped = (line.strip() for line in text.splitlines())
    return {hash(line) for line in stripped if len(line) >= MIN_LINE}


def without_copies(
    documents: Iterable[Document], held_out: Iterable[Document], seen: set[int] | None = None
) -> Iterator[Document]:
    """Documents that copy neither the held-out set nor, mostly, earlier documents.

    A document goes if 40 of its lines, or a tenth and at least 8, are lines of the held-out set;
    or if two thirds of its lines were in `seen` (lines of earlier documents, which it updates).
    """
    guarded = set().union(*(lines_of(d.text) for d in held_out))
    seen = set() if seen is None else seen
    for document in documents:
        lines = lines_of(document.text)
        shared = len(lines & guarded)
        if shared >= 40 or (shared >= 8 and shared > 0.1 * len(lines)):
            continue
        if len(lines & seen) > 0.67 * len(lines):
            continue
        seen |= lines
        yield document

"""Token streams on disk: one compressed file that is small enough to carry to a GPU machine.

Layout: a line of JSON (`{"chunks": [[stream, tokens, bytes], ...]}`) padded to 64 KiB, then the
chunks, each LZMA-compressed uint16 tokens. Chunks are compressed and read in parallel.
"""

from __future__ import annotations

import itertools
import json
import lzma
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

STREAM_NAMES = ("standard", "other", "reserved_standard", "reserved_other", "held_out")
"""Standard library and other packages, as the target sees them; the parts of both that only give
the drafter prompts; the held-out part of the standard library."""

_HEADER = 1 << 16
_CHUNK = 4_000_000
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 5, "lc": 3, "lp": 1, "pb": 1}]


def write_streams(streams: dict[str, np.ndarray], path: Path) -> int:
    """Write uint16 streams; returns the file's size in bytes."""
    pieces = [
        (name, stream[i : i + _CHUNK])
        for name, stream in streams.items()
        for i in range(0, len(stream), _CHUNK)
    ]

    def squeeze(piece: tuple[str, np.ndarray]) -> bytes:
        return lzma.compress(piece[1].tobytes(), format=lzma.FORMAT_RAW, filters=_FILTERS)

    with ThreadPoolExecutor(8) as pool:
        packed = list(pool.map(squeeze, pieces))
    chunks = [[n, len(t), len(b)] for (n, t), b in zip(pieces, packed, strict=True)]
    header = json.dumps({"chunks": chunks}).encode().ljust(_HEADER)
    assert len(header) == _HEADER
    path.write_bytes(b"".join([header, *packed]))
    return path.stat().st_size


def read_streams(path: Path) -> dict[str, np.ndarray]:
    """The streams by name, uint16 [tokens]."""
    data = path.read_bytes()
    chunks = json.loads(data[:_HEADER])["chunks"]
    ends = np.cumsum([_HEADER, *(size for _, _, size in chunks)])
    spans = [data[a:b] for a, b in itertools.pairwise(ends)]

    def expand(packed: bytes) -> np.ndarray:
        raw = lzma.decompress(packed, format=lzma.FORMAT_RAW, filters=_FILTERS)
        return np.frombuffer(raw, dtype=np.uint16)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        arrays = list(pool.map(expand, spans))
    parts: dict[str, list[np.ndarray]] = {}
    for (name, tokens, _), array in zip(chunks, arrays, strict=True):
        assert len(array) == tokens, f"chunk of {name} is damaged"
        parts.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}

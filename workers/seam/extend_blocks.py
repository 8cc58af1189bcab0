"""How an extend is cut for `verify_attention`, and which extends are: pure.

The kernel takes at most `BLOCK` rows of a request. KV is written before attention, so rows of an
extend may be blocks of so many, each a request of the kernel whose prefix is all that stands before
it, earlier blocks of the same extend included. The prefixes overlap in one list of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from overstory.kernels.ops.attention import MAX_ROWS

BLOCK = MAX_ROWS
"""Rows of a block: the most that the kernel takes, since each block reads all keys before it."""

_TILE_ROWS, _GRANULE_KEYS = 8, 16
"""What the kernel counts its work in: rows (heads of tokens) at a time, and keys."""


@dataclass(frozen=True)
class ExtendBlocks:
    """The blocks of a forward, its requests after one another.

    Attributes:
        row_bounds: [blocks + 1] bounds of the blocks' rows.
        key_begins, key_ends: [blocks] the keys before a block's rows, in the list of the slots of
            all requests' prefixes and rows.
        rows: of the largest block.
    """

    row_bounds: list[int]
    key_begins: list[int]
    key_ends: list[int]
    rows: int


def cut(prefixes: Sequence[int], counts: Sequence[int]) -> ExtendBlocks:
    """Blocks of requests with ``counts`` rows behind ``prefixes`` tokens; without rows, none."""
    sizes, begins, ends = [], [], []
    request_begin = 0
    for prefix, count in zip(prefixes, counts, strict=True):
        for first in range(0, count, BLOCK):
            sizes.append(min(BLOCK, count - first))
            begins.append(request_begin)
            ends.append(request_begin + prefix + first)
        request_begin += prefix + count
    return ExtendBlocks([0, *accumulate(sizes)], begins, ends, max(sizes, default=1))


def left_to_triton(
    prefixes: Sequence[int] | None, counts: Sequence[int] | None, heads: int
) -> str | None:
    """Why an extend is not cut in blocks; None: it is.

    Args:
        prefixes, counts: tokens before each request's rows, and rows, as known on the host.
        heads: of the rank.
    """
    if prefixes is None or counts is None:
        return "its lengths are on the device alone: reading them would wait for it"
    if not any(prefixes):
        return "no request has a prefix: SGLang then attends with expanded keys (MHA)"
    if _most_steps(prefixes, counts, heads) >= 1 << 31:
        return "the kernel counts its steps in 32 bits"
    return None


def _most_steps(prefixes: Sequence[int], counts: Sequence[int], heads: int) -> int:
    """A bound of the kernel's steps: granules of keys for every tile of rows. It takes up to nine
    tiles in one step, so there are fewer."""
    blocks = cut(prefixes, counts)
    sizes = (end - begin for begin, end in pairwise(blocks.row_bounds))
    return sum(
        -(-size * heads // _TILE_ROWS) * -(-(end - begin + size) // _GRANULE_KEYS)
        for size, begin, end in zip(sizes, blocks.key_begins, blocks.key_ends, strict=True)
    )

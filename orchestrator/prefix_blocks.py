"""Beginnings of prompts in blocks of tokens, by hashes that gateway and ranks make alike. Pure.

A block's hash is of all tokens up to its end, so that it stands for a whole beginning. Python's
hash of integers is the same in every process of one Python version, and nodes have one version.
"""

from collections.abc import Iterator, Sequence

BLOCK_TOKENS = 64
"""Shorter common beginnings are not worth a preference."""


def blocks_of(ids: Sequence[int]) -> Iterator[int]:
    """A hash for each whole block of a sequence."""
    seen = 0
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        seen = next_block(seen, ids[end - BLOCK_TOKENS : end])
        yield seen


def next_block(seen: int, ids: Sequence[int]) -> int:
    """The hash of a block after the one whose hash is `seen` (0: none)."""
    return hash((seen, *ids))

"""How extends are cut for the attention kernel, and which are."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overstory.workers.seam.extend_blocks import BLOCK, cut, left_to_triton


def test_blocks_of_two_requests() -> None:
    blocks = cut([100, 7], [130, 3])
    assert blocks.row_bounds == [0, 64, 128, 130, 133]
    assert blocks.key_begins == [0, 0, 0, 230]
    assert blocks.key_ends == [100, 164, 228, 237]
    assert blocks.rows == 64


def test_few_rows_are_a_small_block() -> None:
    blocks = cut([200_000, 8192], [1, 5])
    assert (blocks.row_bounds, blocks.rows) == ([0, 1, 6], 5)
    assert blocks.key_ends == [200_000, 200_001 + 8192]


def test_requests_without_rows_have_no_block() -> None:
    blocks = cut([5, 6, 7], [0, 2, 0])
    assert (blocks.row_bounds, blocks.key_begins, blocks.key_ends) == ([0, 2], [5], [11])
    assert cut([], []).row_bounds == [0]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), max_size=6))
def test_every_row_sees_what_stands_before_it(requests: list[tuple[int, int]]) -> None:
    """A row of a block sees its keys, and of its own rows those up to itself: that is the request's
    tokens up to the row, in the list of all requests' slots."""
    blocks = cut([prefix for prefix, _ in requests], [count for _, count in requests])
    seen = []
    for (first, end), key_begin, key_end in zip(
        pairwise(blocks.row_bounds), blocks.key_begins, blocks.key_ends, strict=True
    ):
        assert 0 < end - first <= min(BLOCK, blocks.rows)
        seen += [(key_begin, key_end + row + 1) for row in range(end - first)]
    want, begin = [], 0
    for prefix, count in requests:
        want += [(begin, begin + prefix + row + 1) for row in range(count)]
        begin += prefix + count
    assert seen == want


@pytest.mark.parametrize(
    ("prefixes", "counts", "reason"),
    [
        (None, None, "on the device alone"),
        ([0, 0], [8192, 3], "no request has a prefix"),
        ([1 << 20], [1 << 20], "32 bits"),
        ([1], [1], None),
        ([0, 8], [100, 1], None),
        ([253_952], [8192], None),
    ],
)
def test_which_extends_are_cut(
    prefixes: list[int] | None, counts: list[int] | None, reason: str | None
) -> None:
    found = left_to_triton(prefixes, counts, heads=16)
    assert found is None if reason is None else found is not None and reason in found


def test_more_heads_are_more_steps() -> None:
    """The last chunk whose steps 32 bits count, at 2 and at 16 heads."""
    assert left_to_triton([1 << 20], [100_000], heads=2) is None
    assert left_to_triton([1 << 20], [100_000], heads=16) is not None

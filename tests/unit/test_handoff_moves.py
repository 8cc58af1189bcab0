"""Which rows a taking rank asks for next."""

from __future__ import annotations

from array import array

import pytest

from overstory.workers.handoff.taking import Move, _Text, next_moves


def text(tokens: list[int], have: int = 0, page: int = 1) -> _Text:
    return _Text(array("q", tokens), len(tokens) // page * page, have, None)


ONE = list(range(100))
OTHER = [*ONE[:37], *range(500, 560)]  # 97, of which 37 are the same


def test_texts_come_in_order_and_what_they_share_once() -> None:
    texts = [text(ONE), text(OTHER)]
    assert next_moves(texts, 1000, 1) == [Move(0, 0, 100), Move(1, 37, 97)]


def test_a_part_has_no_more_rows_than_it_may() -> None:
    texts = [text(ONE, have=30), text(OTHER)]
    assert next_moves(texts, 50, 1) == [Move(0, 30, 80), Move(1, 37, 37)]
    texts[0].have, texts[1].have = 80, 37
    assert next_moves(texts, 50, 1) == [Move(0, 80, 100), Move(1, 37, 67)]


def test_what_an_earlier_text_has_brought_already() -> None:
    assert next_moves([text(ONE, have=100), text(OTHER)], 10, 1) == [Move(1, 37, 47)]
    assert next_moves([text(ONE, have=100), text(ONE[:40])], 10, 1) == [Move(1, 40, 40)]


def test_nothing_is_left() -> None:
    assert next_moves([text(ONE, have=100), text(OTHER, have=97)], 10, 1) == []
    assert next_moves([], 10, 1) == []


@pytest.mark.parametrize("page", [16, 64])
def test_pages_are_taken_whole(page: int) -> None:
    moves = next_moves([text(ONE, page=page), text(OTHER, page=page)], 10 * page, page)
    shared, ends = 37 // page * page, (100 // page * page, 97 // page * page)
    assert moves == [Move(0, 0, ends[0]), Move(1, shared, ends[1])]

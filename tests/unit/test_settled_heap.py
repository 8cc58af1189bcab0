"""What is alive when a process has started is looked at by no collection."""

from __future__ import annotations

import gc
import weakref

from overstory.workers.settled_heap import settle_heap


class _Node:
    def __init__(self) -> None:
        self.other: _Node | None = None


def _cycle() -> weakref.ref[_Node]:
    node = _Node()
    node.other = node
    return weakref.ref(node)


def _in_sight(nodes: list[_Node]) -> int:
    """How many of them a collection would look at."""
    return len({id(node) for node in nodes} & {id(seen) for seen in gc.get_objects()})


def test_what_is_alive_is_out_of_sight_and_what_comes_later_is_not() -> None:
    kept = [_Node() for _ in range(50)]
    assert _in_sight(kept) == 50
    settle_heap()
    assert _in_sight(kept) == 0
    assert _in_sight([_Node()]) == 1
    late = _cycle()
    gc.collect()
    assert late() is None


def test_garbage_does_not_stay_for_ever() -> None:
    gone = _cycle()
    settle_heap()
    assert gone() is None

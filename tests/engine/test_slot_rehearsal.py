"""What a rank rehearses of SGLang's slot bookkeeping is all that its loop meets: by the sizes,
types and alignments that Triton compiles a kernel for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import GREEDY, policy, random_prompts, server_args

from overstory.workers.seam.slot_rehearsal import powers, rehearse_slots

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
Variant = tuple[Any, ...]

MOST = 16
"""Requests at a time."""


def kind(value: Any) -> Any:
    """What Triton tells apart in an argument: a tensor's type and alignment; 1, multiples of 16."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return min(value, 2), value % 16 == 0


class Launches:
    """Notes the kernels that the bookkeeping launches, as on a GPU."""

    def __init__(self, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.mem_cache import allocation

        self.seen: set[Variant] = set()
        self._monkeypatch = monkeypatch
        self._watch(allocation, "assign_req_to_token_pool_func", self._assign)
        self._watch(allocation, "write_cache_indices", self._write)
        self._watch(allocation, "get_last_loc", self._last)
        self._watch(scheduler.token_to_kv_pool_allocator, "alloc_extend", self._extend)

    def new(self) -> set[Variant]:
        """Those since the last call."""
        seen, self.seen = self.seen, set()
        return seen

    def _watch(self, owner: Any, name: str, note: Callable[..., Variant]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        def noted(*given: Any, **named: Any) -> Any:
            self.seen.add((name, *note(*given, *named.values())))
            return original(*given, **named)

        self._monkeypatch.setattr(owner, name, noted)

    @staticmethod
    def _assign(rows: Any, table: Any, start: Any, end: Any, slots: Any, requests: int) -> Variant:
        return powers(requests)[-1], *map(kind, (rows, table, start, end, slots)), table.shape[1]

    @staticmethod
    def _write(slots: Any, *given: Any) -> Variant:
        return tuple(map(kind, (slots, *given[0:8:2])))

    @staticmethod
    def _last(table: Any, rows: Any, lengths: Any) -> Variant:
        return tuple(map(kind, (table, rows, lengths, len(lengths))))

    @staticmethod
    def _extend(before: Any, _: Any, after: Any, __: Any, last: Any, *more: Any) -> Variant:
        del more
        return powers(len(before))[-1], *map(kind, (before, after, last))


def load(harness: EngineHarness) -> None:
    """Requests that come and go, more and more at a time, of many lengths, many with a beginning
    that the prefix cache has."""
    draw = random.Random(3)
    begin = random_prompts([40], 1)[0]
    for together in (1, 2, 3, 6, MOST, MOST + 4):
        for number in range(2):
            rids = []
            for one in range(together):
                prompt = begin[: draw.randrange(40)] + random_prompts([one + 1], number)[0]
                sampled = {"temperature": 1.0, "sampling_seed": one} if one % 2 else {}
                more = {"max_new_tokens": draw.randrange(1, 40)}
                rids.append(harness.submit(prompt, GREEDY | sampled | more))
                if draw.random() < 0.3:
                    harness.step()
            harness.run(rids)
    harness.assert_no_leak()
    harness.flush_cache()


@pytest.mark.parametrize("page_size", [1, 16])
def test_all_that_a_loop_launches_has_been_launched_at_the_start(
    engine: Engine, pair: tuple[str, str], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = engine(
        max_running_requests=MOST, page_size=page_size, context_length=256, **server_args(pair[1])
    )
    allocator = harness.scheduler.token_to_kv_pool_allocator
    table = harness.scheduler.req_to_token_pool.req_to_token
    launches = Launches(harness.scheduler, monkeypatch)
    free, before = allocator.free_pages.tolist(), table.clone()
    rehearse_slots(harness.scheduler)
    assert allocator.free_pages.tolist() == free
    assert torch.equal(table, before)
    rehearsed = launches.new()
    with policy("tree-15"):
        load(harness)
    met = launches.new()
    assert met <= rehearsed, met - rehearsed
    sizes = {one[1] for one in met if one[0] == "assign_req_to_token_pool_func"}
    assert sizes == {1, 2, 4, 8, 16}
    begins = {one[6][1] for one in met if one[0] == "assign_req_to_token_pool_func"}
    assert begins == ({True, False} if page_size == 1 else {True})


def test_powers_of_two_up_to_the_first_that_holds_all() -> None:
    assert [powers(n)[-1] for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
    assert powers(9) == [1, 2, 4, 8, 16]

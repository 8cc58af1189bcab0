from types import SimpleNamespace
from typing import Any

import pytest

from overstory.workers.scheduler_view import SglangScheduler


def _plain() -> Any:
    return SimpleNamespace(evictable_size=lambda: 30)


def _hybrid() -> Any:
    """As SGLang's caches for models with several kinds of attention layers."""

    def refuse() -> None:
        raise NotImplementedError

    return SimpleNamespace(evictable_size=refuse, full_evictable_size=lambda: 30)


@pytest.mark.parametrize("cache", [_plain, _hybrid])
def test_the_load_tells_cached_slots_from_those_of_requests(cache: Any) -> None:
    scheduler: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        device="cuda",
        running_batch=SimpleNamespace(reqs=[1, 2]),
        waiting_queue=[3],
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 60),
        tree_cache=cache(),
        max_total_num_tokens=100,
    )
    assert SglangScheduler(scheduler).load() == {
        "running": 2, "waiting": 1, "free_slots": 60, "cached_slots": 30, "max_slots": 100,
    }  # fmt: skip

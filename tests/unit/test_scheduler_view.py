from types import SimpleNamespace
from typing import Any

import pytest

from overstory.workers.scheduler_view import SglangScheduler, already_processed


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


def _overlapped(device: str, overlap: bool = True) -> tuple[Any, list[str]]:
    """A scheduler with two batches whose results were not taken in, and what it does."""
    done: list[str] = []
    queue = [(name, SimpleNamespace(name=name)) for name in ("first", "second")]
    scheduler = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=SimpleNamespace(numpy=lambda: None)),
        device=device,
        enable_overlap=overlap,
        forward_stream=SimpleNamespace(synchronize=lambda: done.append("waited")),
        result_queue=queue,
        process_batch_result=lambda batch, result: done.append(batch),
    )
    return scheduler, done


@pytest.mark.parametrize(
    ("device", "wanted"), [("cpu", ["first", "second"]), ("cuda", ["waited", "first", "second"])]
)
def test_a_drain_takes_in_what_is_in_flight_once_and_leaves_it_in_the_queue(
    device: str, wanted: list[str]
) -> None:
    """A command must see the requests as they are, and slots that no forward still writes to."""
    scheduler, done = _overlapped(device)
    view = SglangScheduler(scheduler)
    view.drain()
    assert done == wanted
    assert [batch for batch, _ in scheduler.result_queue] == ["first", "second"]
    assert all(already_processed(result) for _, result in scheduler.result_queue)
    done.clear()
    scheduler.result_queue.append(("third", SimpleNamespace()))
    view.drain()
    assert done == [*wanted[:-2], "third"]


def test_without_overlap_there_is_nothing_to_drain() -> None:
    scheduler, done = _overlapped("cpu", overlap=False)
    SglangScheduler(scheduler).drain()
    assert not done

"""Parts of SGLang's loop that run shorter here: what they leave behind is what SGLang's leave."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


class _Sampling:
    """Stands for a batch's sampling parameters."""

    def copy_for_forward(self) -> str:
        return "the forward's own"


def _ours(*arguments: Any, **named: Any) -> Any:
    from overstory.workers.ddtree.lean_loop import isolate

    return isolate(_never, *arguments, **named)


def _never(*_arguments: Any, **_named: Any) -> Any:
    raise AssertionError("SGLang's own ran")


def _theirs(*arguments: Any, **named: Any) -> Any:
    return _sglangs()(*arguments, **named)


def _sglangs() -> Callable[..., Any]:
    """SGLang's own function, whether our hook stands before it or not."""
    from sglang.srt.managers.scheduler import Scheduler

    found: Any = Scheduler._forward_isolation
    while found.__code__.co_filename.endswith("hook_registry.py"):
        found = found.__wrapped__
    return found  # type: ignore[no-any-return]


def _after_a_step(isolation: Callable[..., Any], overlap: bool) -> dict[str, Any]:
    """What a step that changes every field of a batch and then fails leaves behind."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    names = [field.name for field in dataclasses.fields(ScheduleBatch)]
    batch: Any = ScheduleBatch(reqs=[])
    for name in names:
        setattr(batch, name, f"before: {name}")
    batch.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    batch.sampling_info = sampling = _Sampling()
    batch.not_a_field = "before"
    scheduler = SimpleNamespace(batch_record_buf=["kept", "older"], batch_record_ct=0)
    scheduler.record_batch_in_overlap = lambda b: Scheduler.record_batch_in_overlap(scheduler, b)  # type: ignore[arg-type]
    seen = None

    def step() -> None:
        nonlocal seen
        seen = batch.sampling_info
        for name in [*names, "not_a_field"]:
            setattr(batch, name, "the step's")
        raise KeyError

    with pytest.raises(KeyError), isolation(scheduler, batch, overlap=overlap):
        step()
    assert batch.sampling_info is sampling
    record = scheduler.batch_record_buf[1]
    return {
        "batch": {name: getattr(batch, name) for name in names if name != "spec_algorithm"}
        | {"sampling_info": None},
        "more": batch.not_a_field,
        "seen": seen,
        "place": scheduler.batch_record_ct,
        "other record": scheduler.batch_record_buf[0],
        "kept alive": record
        if isinstance(record, str)
        else {one for one in _flat(record) if isinstance(one, str)},
    }


def _flat(record: list[Any]) -> list[Any]:
    """What a record of a batch holds, one level of lists down."""
    return list(
        itertools.chain(*([*one] if isinstance(one, list | tuple) else [one] for one in record))
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_leaves_a_batch_as_under_sglangs_isolation(overlap: bool) -> None:
    ours, theirs = _after_a_step(_ours, overlap), _after_a_step(_theirs, overlap)
    assert ours == theirs
    assert ours["seen"] == "the forward's own"
    assert ("the forward's own" in ours["kept alive"]) == overlap


def test_batches_of_other_engines_are_sglangs() -> None:
    from overstory.workers.ddtree.lean_loop import isolate

    batch = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: True))
    got = isolate(lambda *given, **named: (given, named), "scheduler", batch, overlap=True)
    assert got == (("scheduler", batch), {"overlap": True})


def test_a_forwards_sampling_parameters_are_sglangs() -> None:
    """Every field but the one that SGLang takes off; the batch's own stay as they are."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from overstory.workers.ddtree.sampling_info import RuledSamplingInfo

    names = [field.name for field in dataclasses.fields(RuledSamplingInfo)]
    info = RuledSamplingInfo(**{name: f"of {name}" for name in names})  # type: ignore[arg-type]
    info.penalizer_orchestrator = SimpleNamespace(is_required=False)  # type: ignore[assignment]
    theirs = vars(SamplingBatchInfo.copy_for_forward(info))
    ours = vars(info.copy_for_forward())
    assert ours == theirs
    assert ours["penalizer_orchestrator"] is None
    assert info.penalizer_orchestrator is not None


def test_results_are_copied_with_and_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one, under the name that SGLang gives the range."""
    import torch
    from sglang.srt.managers.utils import GenerationBatchResult

    def copied() -> Any:
        result = GenerationBatchResult(next_token_ids=torch.tensor([3]))
        result.copy_done = SimpleNamespace(record=lambda: done.append(result))  # type: ignore[assignment]
        result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
        return result.next_token_ids

    done: list[Any] = []
    assert copied().tolist() == [3]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert copied().tolist() == [3]
    assert len(done) == 2
    assert "copy_result_to_cpu" in {event.name for event in profile.events()}


def test_settings_are_read_again_when_their_variable_is_set_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In all ways that SGLang and others set them."""
    import os

    from sglang.srt.environ import EnvBool, EnvField, EnvInt

    monkeypatch.setattr(EnvField, "_allow_set_name", True)

    class Settings:
        OVERSTORY_TEST_FLAG = EnvBool(False)
        OVERSTORY_TEST_NUMBER = EnvInt(lambda: next(made))

    made = itertools.count(10)
    flag, number = Settings.OVERSTORY_TEST_FLAG, Settings.OVERSTORY_TEST_NUMBER
    assert [flag.get(), flag.get()] == [False, False]
    with flag.override(True):
        assert [flag.get(), flag.get()] == [True, True]
    assert flag.get() is False
    for text in ("1", "0", "yes"):
        os.environ["OVERSTORY_TEST_FLAG"] = text
        assert [flag.get(), flag.get()] == [text != "0"] * 2
    del os.environ["OVERSTORY_TEST_FLAG"]
    assert flag.get() is False
    flag.set(None)
    assert flag.get() is None
    flag.clear()
    assert flag.get() is False
    assert [number.get(), number.get()] == [10, 11], "a default that is made anew each time"
    monkeypatch.setenv("OVERSTORY_TEST_NUMBER", "5")
    assert [number.get(), number.get()] == [5, 5]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("free", [0, 131, 132, 160, 263, 264, 287, 288, 4000])
def test_room_for_a_step_is_what_sglang_finds(
    monkeypatch: pytest.MonkeyPatch, page_size: int, free: int
) -> None:
    """Two requests: one with slots for a step, one without; a cache that gives nothing back."""
    import sglang.srt.managers.schedule_batch as module
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    from overstory.workers.ddtree.lean_loop import enough_slots

    allocator_class = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
    allocator = object.__new__(allocator_class)
    allocator.page_size = page_size
    monkeypatch.setattr(allocator_class, "available_size", lambda _: free)
    for target in (module, __import__("overstory.workers.ddtree.lean_loop", fromlist=["_"])):
        monkeypatch.setattr(target, "get_alloc_reserve_per_decode", lambda: 128)
    evicted: list[int] = []
    monkeypatch.setattr(module, "evict_from_tree_cache", lambda _, count: evicted.append(count))
    req = lambda committed, allocated: SimpleNamespace(  # noqa: E731
        kv_committed_len=committed, kv=SimpleNamespace(kv_allocated_len=allocated)
    )
    batch: Any = module.ScheduleBatch(reqs=[req(40, 160), req(33, 48)])
    batch.token_to_kv_pool_allocator = allocator
    batch.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    asked: list[Any] = []

    def theirs(batch: Any, selected: Any = None) -> bool:
        asked.append(batch)
        function: Any = module.ScheduleBatch.check_decode_mem
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        return bool(function(batch, selected))

    assert enough_slots(theirs, batch) == theirs(batch)
    most = (128 + page_size) * 2
    assert len(asked) == (1 if free >= most else 2)

"""SGLang's loop around a DDTREE step, for less of the host's time.

What the loop does beside a step of a millisecond is paid for in full. Here is what SGLang does at
each step by going through the eighty fields of a batch, or for a profiler that is not there: the
same outcome, by fewer calls.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

_NAMES = tuple(field.name for field in dataclasses.fields(ScheduleBatch))
_PLAIN_ALLOCATORS = (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)

_READ = "_overstory_read"
"""Attribute on SGLang's EnvField: the variable's name, its text when it was read, its value."""
_variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]

_values_of: Callable[[Any], tuple[Any, ...]] = attrgetter(*_NAMES)


class _Isolation:
    """SGLang's ``Scheduler._forward_isolation`` of a speculative batch."""

    __slots__ = ("_batch", "_overlap", "_scheduler", "_values")

    def __init__(self, scheduler: Scheduler, batch: Any, overlap: bool) -> None:
        self._scheduler, self._batch, self._overlap = scheduler, batch, overlap

    def __enter__(self) -> None:
        batch, scheduler = self._batch, self._scheduler
        self._values = _values_of(batch)
        given = batch.sampling_info
        if given is not None:
            batch.sampling_info = given.copy_for_forward()
        if self._overlap:
            # Keeps the tensors of two forwards alive, those of the copy too.
            scheduler.batch_record_ct = (scheduler.batch_record_ct + 1) % 2
            kept = [batch, self._values, batch.sampling_info]
            scheduler.batch_record_buf[scheduler.batch_record_ct] = kept

    def __exit__(self, *_error: object) -> None:
        vars(self._batch).update(zip(_NAMES, self._values, strict=True))


def isolate(original: Callable[..., Any], scheduler: Any, batch: Any, *, overlap: bool) -> Any:
    """AROUND hook on SGLang's ``Scheduler._forward_isolation``."""
    if batch.spec_algorithm.is_none():
        return original(scheduler, batch, overlap=overlap)
    return _Isolation(scheduler, batch, overlap)


def copy_results(original: Callable[..., Any], result: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND hook on SGLang's ``GenerationBatchResult.copy_to_cpu``: it opens a range for torch's
    profiler each time."""
    copy = original if torch.autograd._profiler_enabled() else _within_range(original)
    return copy(result, *arguments, **named)


def _within_range(function: Callable[..., Any]) -> Callable[..., Any]:
    inner: Callable[..., Any] = getattr(function, "__wrapped__", function)
    return inner


def enough_slots(
    original: Callable[..., bool], batch: Any, selected_indices: list[int] | None = None
) -> bool:
    """AROUND hook on SGLang's ``ScheduleBatch.check_decode_mem``: where there is room for the most
    that any request may want, none of them is asked."""
    allocator = batch.token_to_kv_pool_allocator
    if type(allocator) in _PLAIN_ALLOCATORS:
        most = get_alloc_reserve_per_decode() + allocator.page_size
        if allocator.available_size() >= most * len(batch.reqs):
            return True
    return original(batch, selected_indices)


def setting(original: Callable[[Any], Any], field: Any) -> Any:
    """AROUND hook on SGLang's ``EnvField.get``, which a step asks half a dozen times: what was read
    of an environment variable holds until the variable is set again."""
    kept = field.__dict__.get(_READ)
    if kept is None:
        kept = (os.environ.encodekey(field.name), None, None)
    elif kept[1] is _variables.get(kept[0]):
        return kept[2]
    value = original(field)
    given = _variables.get(kept[0])
    if given is not None or not callable(field.default):
        field.__dict__[_READ] = (kept[0], given, value)
    return value

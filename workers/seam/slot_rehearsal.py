"""Kernels of SGLang's slot bookkeeping, launched once for every size that a loop may meet.

Triton compiles a kernel in the middle of a step, for a tenth of a second in which every stream
waits, when it meets a size for the first time. Each power of two of requests is a kernel of its
own, and so is a tensor that begins at no multiple of 16 bytes: slots one by one are handed out as a
slice of the free ones, so one time they begin at such a place and another time not. What was
compiled once lies in Triton's cache.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache import allocation

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


def rehearse_slots(scheduler: Scheduler) -> None:
    """Launches them for requests without a token: nothing is written and no slot is taken.

    To be called before the scheduler's loop runs, by its thread.
    """
    try:
        for requests in powers(scheduler.max_running_requests):
            _reserve(scheduler, requests)
            _take_pages(scheduler, requests)
        _write(scheduler)
    except Exception as error:  # The loop does without.
        logger.warning("Streams may wait while Triton compiles for a batch's size: %r", error)


def powers(most: int) -> list[int]:
    """Powers of two from 1 on; the last is not less than ``most``."""
    return [1 << n for n in range((most - 1).bit_length() + 1)]


def _reserve(scheduler: Scheduler, requests: int) -> None:
    """Slots of a step, as `alloc_for_spec_decode` has them for `DDTreeDraftInput`."""
    table = scheduler.req_to_token_pool.req_to_token
    rows = _zeros(scheduler, requests, torch.int64)
    lengths = _zeros(scheduler, requests, torch.int32)
    if _by_pages(scheduler):
        _extend(scheduler, lengths, allocation.get_last_loc(table, rows, lengths))
    for slots in _handed_out(scheduler):
        allocation.assign_req_to_token_pool_func(rows, table, lengths, lengths, slots, requests)


def _take_pages(scheduler: Scheduler, requests: int) -> None:
    """Pages of prompts, as `alloc_for_extend` has them."""
    if _by_pages(scheduler):
        lengths = _zeros(scheduler, requests, torch.int64)
        _extend(scheduler, lengths, torch.full_like(lengths, -1))


def _write(scheduler: Scheduler) -> None:
    """Slots of a prompt, as `alloc_for_extend` writes them, of however many requests."""
    none = _zeros(scheduler, 1, torch.int64)
    on_host = torch.zeros_like(none, device="cpu")
    for slots in _handed_out(scheduler):
        allocation.write_cache_indices(
            slots,
            *(none, on_host) * 4,
            prefix_tensors=[slots[:0]],
            req_to_token_pool=scheduler.req_to_token_pool,
        )


def _extend(scheduler: Scheduler, lengths: torch.Tensor, last: torch.Tensor) -> None:
    on_host = torch.zeros_like(lengths, device="cpu")
    scheduler.token_to_kv_pool_allocator.alloc_extend(
        lengths, on_host, lengths, on_host, last, 0, num_new_pages=0
    )


def _handed_out(scheduler: Scheduler) -> list[torch.Tensor]:
    """Slots that begin at a multiple of 16 bytes and, where they are handed out one by one, some
    that do not."""
    some = _zeros(scheduler, 2, torch.int64)
    return [some] if _by_pages(scheduler) else [some, some[1:]]


def _by_pages(scheduler: Scheduler) -> bool:
    return bool(scheduler.token_to_kv_pool_allocator.page_size > 1)


def _zeros(scheduler: Scheduler, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device=scheduler.req_to_token_pool.req_to_token.device)

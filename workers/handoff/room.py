"""Slots that requests under way here may yet need. Rows of others leave these alone.

SGLang admits a request where there is room for it, and counts on that room afterwards: a prompt in
chunks that finds none ends the rank, and a request that is alone and finds none is ended with an
error. Slots that rows come to, or came to, cannot be evicted while their hand-off lasts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from overstory.workers.defrag.holders import live_requests

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


class Need(NamedTuple):
    """Of one request, in tokens.

    Attributes:
        missing: that it has no slots for although the next steps need them.
        left: that it may generate, as far as SGLang counts on it.
    """

    missing: int
    left: int


def spoken_for(needs: Iterable[Need], ratio: float) -> int:
    """Slots that are not to be had.

    Args:
        needs: of requests that have slots.
        ratio: share of what requests may generate that SGLang counts on for all together. One of
            them, which is not put back for want of room, may generate all of it.
    """
    known = list(needs)
    left = [need.left for need in known]
    generated = max(int(ratio * sum(left)), max(left, default=0))
    return sum(need.missing for need in known) + generated


def free_for_rows(scheduler: Scheduler) -> int:
    """Slots that rows of others may have: a number that the ranks of a replica share, as what they
    admit is."""
    return _spare(scheduler, scheduler.new_token_ratio_tracker.current)


def none_left(scheduler: Scheduler) -> bool:
    """Whether what is held now takes from a request what it cannot do without: whoever can be put
    back is, as ever. Alike on all ranks of a replica."""
    return _spare(scheduler, 0.0) < 0


def _spare(scheduler: Scheduler, ratio: float) -> int:
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    return int(allocator.available_size() + cache.evictable_size()) - spoken_for(
        _needs(scheduler), ratio
    )


def _needs(scheduler: Scheduler) -> Iterable[Need]:
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    # Of a step's rows beyond what is committed, and of a page that is begun.
    beyond = get_alloc_reserve_per_decode() + int(scheduler.token_to_kv_pool_allocator.page_size)
    for request in live_requests(scheduler):
        generated = len(request.output_ids)
        length = len(request.origin_input_ids) + generated
        left = min(request.sampling_params.max_new_tokens - generated, CLIP_MAX_NEW_TOKENS)
        missing = length + beyond - request.kv.kv_allocated_len
        yield Need(max(0, missing), max(0, left))

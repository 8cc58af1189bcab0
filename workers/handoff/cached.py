"""KV of texts in the prefix cache: found and held at the giving rank, put in at the taking one.

A request that moves is a text whose KV the next replica will look for in its prefix cache. So KV is
handed over as cached text, and resuming needs nothing new: what is not there is computed again.

All of it runs at a boundary, in the loop's thread: the cache is the loop's. While rows are on their
way their slots are cached text too, of a key that no request has: so they have an owner as every
slot has.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from overstory.workers.defrag.holders import requests, unfamiliar
from overstory.workers.handoff.room import free_for_rows, none_left

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


@dataclass(frozen=True)
class Held:
    """A cached text that cannot be evicted until `let_go`.

    Attributes:
        slots: int64 [n], of its first n tokens.
        node: the cache's, locked.
    """

    slots: torch.Tensor
    node: Any


@dataclass(frozen=True)
class Reserved:
    """Slots that rows are written to while the loop goes on.

    Attributes:
        slots: int64 [n], whole pages.
        node: the cache's, locked, under a key of its own.
    """

    slots: torch.Tensor
    node: Any


def cannot(scheduler: Scheduler) -> str:
    """Why this engine's KV cannot be handed over; empty if it can."""
    if reason := unfamiliar(scheduler):
        return reason
    if getattr(scheduler.tree_cache, "disable", True):
        return "the prefix cache is off (disable_radix_cache)"
    if getattr(scheduler.tree_cache, "is_eagle", False):
        return "the prefix cache counts pairs of tokens (EAGLE)"
    if getattr(scheduler.tree_cache, "enable_kv_cache_events", False):
        return "events of the prefix cache are published (kv_events_config)"
    return ""


def page_size(scheduler: Scheduler) -> int:
    """Tokens by which this replica's cache keeps texts."""
    return int(scheduler.token_to_kv_pool_allocator.page_size)


def still_running(scheduler: Scheduler, rid: str) -> bool:
    """Whether a request's KV has not come into the cache yet. It does when the request ends."""
    return any(request.rid == rid for request in requests(scheduler))


def hold(scheduler: Scheduler, tokens: Sequence[int]) -> Held:
    """The longest cached beginning of `tokens`, held; nothing where requests under way count on
    its eviction."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    cache = scheduler.tree_cache
    found = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
    taken = cache.inc_lock_ref(found.last_device_node).delta
    if taken and none_left(scheduler):
        cache.dec_lock_ref(found.last_device_node)
        return Held(found.device_indices[:0], cache.root_node)
    return Held(found.device_indices, found.last_device_node)


def let_go(scheduler: Scheduler, held: Held) -> None:
    """May be evicted again."""
    scheduler.tree_cache.dec_lock_ref(held.node)


def take_slots(scheduler: Scheduler, count: int) -> torch.Tensor | None:
    """Free slots int64 [count], whole pages, making room in the cache; None where there is not so
    much beside what requests under way may yet need."""
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    if count > free_for_rows(scheduler):
        return None
    evict_from_tree_cache(scheduler.tree_cache, count)
    slots: torch.Tensor | None = scheduler.token_to_kv_pool_allocator.alloc(count)
    return slots


def reserve(scheduler: Scheduler, count: int, name: str) -> Reserved | None:
    """Slots for `count` rows, whole pages; None where there is no room.

    Args:
        scheduler: this replica's.
        count: rows.
        name: unique.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    slots = take_slots(scheduler, count)
    if slots is None:
        return None
    cache = scheduler.tree_cache
    key = RadixKey(array("q", range(count)), extra_key=f"on its way: {name}")
    node = cache.insert(InsertParams(key=key, value=slots)).last_device_node
    cache.inc_lock_ref(node)
    return Reserved(slots, node)


def release(scheduler: Scheduler, reserved: Reserved) -> torch.Tensor:
    """Takes them out of the cache. Returns the slots, which are nobody's now."""
    cache = scheduler.tree_cache
    cache.dec_lock_ref(reserved.node)
    cache._delete_leaf(reserved.node)
    return reserved.slots


def give_back(scheduler: Scheduler, slots: torch.Tensor) -> None:
    """Slots that came to nothing."""
    if len(slots):
        scheduler.token_to_kv_pool_allocator.free(slots)


def put_in(scheduler: Scheduler, tokens: array[int], start: int, slots: torch.Tensor) -> Any:
    """The cache owns `slots`, whole pages, from now on, as the KV of the `tokens` from `start` on.
    What it has of them meanwhile, by a request with the same beginning, it keeps.

    Returns:
        its node of the last of these tokens.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    whole = torch.cat((slots.new_zeros(start), slots))  # What is before is there, and held.
    key = RadixKey(tokens[: len(whole)])
    result = scheduler.tree_cache.insert(InsertParams(key=key, value=whole))
    assert result.prefix_len >= start, "what was held is gone"
    give_back(scheduler, whole[start : result.prefix_len])
    return result.last_device_node

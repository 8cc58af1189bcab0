"""Whether every slot number in a rank still means what it should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from overstory.workers.defrag.holders import live_requests, nodes, path_slots, unknown

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


class SlotsAstray(RuntimeError):
    """Slot numbers do not add up, or somebody unknown may hold some. Names each fault."""


def audit(scheduler: Scheduler, look_for_unknown: bool = True) -> None:
    """Checks allocator, prefix cache and slot rows against each other.

    Each slot must be free, in one node of the prefix cache, or one request's own, and exactly one
    of these. With pages of several slots that goes for pages, and a text must lie in them from
    their beginning on: token i in place i modulo the page size. A request's row must begin with the
    slots of its prefix in the cache, and with those that it has noted as its prefix.

    Args:
        scheduler: at a boundary, drained.
        look_for_unknown: also look for holders that `holders` does not name (some milliseconds).

    Raises:
        SlotsAstray: any of it fails.
    """
    problems = [*_ownership(scheduler), *_rows(scheduler)]
    if look_for_unknown:
        problems += [f"{name} may hold slots and is not listed" for name in unknown(scheduler)]
    if problems:
        raise SlotsAstray("; ".join(problems))


def _ownership(scheduler: Scheduler) -> Iterator[str]:
    """Slots that have no owner or several, and slots that do not lie as pages do."""
    allocator, table = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    live = live_requests(scheduler)
    held = [node.value for node in nodes(scheduler)]
    held += [
        table.req_to_token[r.req_pool_idx, r.cache_protected_len : r.kv.kv_allocated_len]
        for r in live
    ]
    page_size = int(allocator.page_size)
    strewn = sum(not in_pages(slots, page_size) for slots in held)
    if strewn:
        yield f"{strewn} texts do not lie in whole pages of {page_size} slots, in order"
        return
    what, size = ("slot", int(allocator.size))
    if page_size > 1:
        what, size = "page", size // page_size
        held = [slots[::page_size] // page_size for slots in held]
    pieces = [allocator.free_pages, allocator.release_pages, *held]
    owned = torch.cat([piece.to(torch.int64) for piece in pieces])
    outside = int(torch.count_nonzero((owned < 1) | (owned > size)))
    if outside:
        yield f"{outside} {what} numbers are not in 1..{size}"
        return
    owners = torch.bincount(owned, minlength=size + 1)[1:]
    for count, words in ((owners == 0, "nobody's"), (owners > 1, "held twice")):
        wrong = count.nonzero().view(-1)
        if len(wrong):
            yield f"{len(wrong)} {what}s are {words}, the first is {int(wrong[0]) + 1}"
    used = table.size - len(table.free_slots)
    if used != len({r.req_pool_idx for r in live}):
        yield f"{used} slot rows are used, requests known to the scheduler have {len(live)}"


def in_pages(slots: torch.Tensor, page_size: int) -> bool:
    """Whether a text's ``slots`` [n] are pages one after the other, each from its first slot on;
    the last one may be held in part."""
    if page_size == 1 or not len(slots):
        return True
    place = torch.arange(len(slots), device=slots.device)
    first = slots[place // page_size * page_size]
    return bool(((first % page_size == 0) & (slots == first + place % page_size)).all())


def _rows(scheduler: Scheduler) -> Iterator[str]:
    for request in live_requests(scheduler):
        if fault := _row_fault(scheduler, request):
            yield f"request {request.rid}: {fault}"


def _row_fault(scheduler: Scheduler, request: Req) -> str:
    row = scheduler.req_to_token_pool.req_to_token[request.req_pool_idx]
    if request.kv.kv_allocated_len > len(row):
        return f"{request.kv.kv_allocated_len} rows allocated, its slot row has {len(row)}"
    protected = int(request.cache_protected_len)
    pieces = path_slots(scheduler, request.last_node)
    cached = torch.cat(pieces) if pieces else row[:0]
    if len(cached) != protected:
        return f"its prefix in the cache has {len(cached)} rows, it counts on {protected}"
    noted = request.prefix_indices
    for words, slots in (("in the cache", cached), ("that it noted", noted)):
        if not torch.equal(row[: len(slots)].to(torch.int64), slots.to(torch.int64)):
            return f"its slot row differs from the prefix {words}"
    return ""

"""One relocation pass in one rank, and the picture that plans are made from."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from overstory.kernels import ops
from overstory.kernels.ops.choice import library_for
from overstory.orchestrator.defrag_plan import (
    Plan,
    SlotPicture,
    Slots,
    SlotSequence,
    permutation,
)
from overstory.workers.ddtree.commit import kv_buffers
from overstory.workers.defrag.audit import SlotsAstray, audit
from overstory.workers.defrag.holders import holders, live_requests, nodes, unsupported

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


Groups: TypeAlias = "list[ops.LayerTable | list[torch.Tensor]]"


class CannotRelocate(ValueError):
    """This engine's slots cannot be moved; nothing has changed. Says why."""


@dataclass(frozen=True)
class PassDone:
    """What a pass did; all but the times must be equal on all ranks.

    Attributes:
        plan: digest of the plan.
        state: digest of all slot rows and free slots afterwards.
        rows: rows copied; others than planned if the pool has changed since the plan's picture.
        pause_ms: all of it, the audits included.
        copy_ms: copying rows alone.
    """

    plan: str
    state: str
    rows: int
    pause_ms: float
    copy_ms: float


def take_picture(scheduler: Scheduler) -> SlotPicture:
    """Who holds which slots. At a boundary, drained.

    Raises:
        CannotRelocate: see `unsupported`.
    """
    _check_supported(scheduler)
    names, pieces = [], []
    table = scheduler.req_to_token_pool.req_to_token
    for request in live_requests(scheduler):
        names.append((request.rid, True))
        pieces.append(table[request.req_pool_idx, : request.kv.kv_allocated_len].long())
    root = getattr(scheduler.tree_cache, "root_node", None)
    for node in nodes(scheduler):
        names.append((f"cached-{len(names)}", False))
        before = [] if node.parent is root else [node.parent.value[-1:]]
        pieces.append(torch.cat([*before, node.value]))
    rows = _to_host(pieces)
    return SlotPicture(
        size=int(scheduler.token_to_kv_pool_allocator.size),
        sequences=tuple(
            SlotSequence(name, slots, running)
            for (name, running), slots in zip(names, rows, strict=True)
        ),
        free=np.sort(_to_host([_free(scheduler)])[0]),
        row_bytes=sum(b[0].numel() * b.element_size() for b in pool_buffers(scheduler)),
    )


def relocate(scheduler: Scheduler, plan: Plan, look_for_unknown: bool = False) -> PassDone:
    """Carries a checked plan out: rows, then every holder, then sorts what is free.

    Slot numbers are read everywhere before any is written, since holders may share memory.

    Args:
        scheduler: at a boundary, drained.
        plan: `check_plan` has passed it.
        look_for_unknown: see `audit`.

    Raises:
        CannotRelocate: nothing has changed: the engine is of another kind, or its slot numbers did
            not add up to begin with, or an unknown holder has some.
        SlotsAstray: they do not add up afterwards; the rank must end.
    """
    begun = time.perf_counter()
    _check_supported(scheduler)
    try:
        groups = _groups(pool_buffers(scheduler))
    except ValueError as other:
        raise CannotRelocate(f"rows of this pool cannot be moved: {other}") from other
    try:
        audit(scheduler, look_for_unknown)
    except SlotsAstray as astray:
        raise CannotRelocate(f"the audit before the pass failed: {astray}") from astray
    device = scheduler.req_to_token_pool.req_to_token.device
    with torch.inference_mode():
        table = torch.from_numpy(permutation(plan)).to(device)
        rows, copy_ms = _copy_rows(scheduler, groups, table)
        _rewrite(scheduler, table)
        _sort_free(scheduler)
        audit(scheduler, look_for_unknown=False)
        state = _state_digest(scheduler)
    pause_ms = (time.perf_counter() - begun) * 1e3
    return PassDone(plan.digest, state, rows, round(pause_ms, 3), round(copy_ms, 3))


def pool_buffers(scheduler: Scheduler) -> list[torch.Tensor]:
    """KV tensors [slots, ...] of the target and of the drafter, if there is one."""
    worker = scheduler.model_worker
    runners = [worker.model_runner, getattr(worker, "draft_model_runner", None)]
    pools = [runner.token_to_kv_pool for runner in runners if runner is not None]
    return [buffer for pool in pools for buffer in kv_buffers(pool)]


def _copy_rows(scheduler: Scheduler, groups: Groups, table: torch.Tensor) -> tuple[int, float]:
    begun = time.perf_counter()
    moves = table != torch.arange(len(table), device=table.device)
    moves[_free(scheduler)] = False
    sources = moves.nonzero().view(-1)
    for buffers in groups:
        ops.kv_relocate(buffers, sources, table[sources])
    if table.is_cuda:
        torch.cuda.current_stream().synchronize()
    return int(sources.numel()), (time.perf_counter() - begun) * 1e3


def _groups(buffers: list[torch.Tensor]) -> Groups:
    """Buffers whose rows move in one call.

    For the kernel those alike, each once. For the reference those that share memory: it holds a
    copy of all rows that it moves, which for all layers of a large model may be more than a GPU has
    left beside its pool.
    """
    if library_for("kv_relocate", buffers[0].device) is not None:
        once = {(buffer.data_ptr(), buffer.shape): buffer for buffer in buffers}
        alike: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for buffer in once.values():
            alike.setdefault((buffer.shape, buffer.dtype), []).append(buffer)
        return [ops.LayerTable(some) for some in alike.values()]
    together: dict[int, list[torch.Tensor]] = {}
    for buffer in buffers:
        together.setdefault(buffer.untyped_storage().data_ptr(), []).append(buffer)
    return list(together.values())


def _rewrite(scheduler: Scheduler, table: torch.Tensor) -> None:
    """Looks every slot number up in the table, in place, and writes where some have changed."""
    found = [holder.slots for holder in holders(scheduler) if holder.slots.numel()]
    if not found:
        return
    old = torch.cat([slots.reshape(-1).to(torch.int64) for slots in found])
    new = table[old]
    changes = torch.cat((new.new_zeros(1), (new != old).cumsum(0)))
    ends = np.cumsum([slots.numel() for slots in found])
    begins = ends - [slots.numel() for slots in found]
    edges = changes[torch.from_numpy(np.stack((begins, ends))).to(changes.device)].tolist()
    for slots, begin, end, before, after in zip(found, begins, ends, *edges, strict=True):
        if before != after:
            slots.copy_(new[begin:end].view(slots.shape))


def _sort_free(scheduler: Scheduler) -> None:
    """New requests get what is free from the lowest slot on, in long runs where there are some."""
    allocator = scheduler.token_to_kv_pool_allocator
    allocator.free_pages = torch.sort(_free(scheduler)).values
    allocator.release_pages = allocator.release_pages[:0]


def _free(scheduler: Scheduler) -> torch.Tensor:
    allocator = scheduler.token_to_kv_pool_allocator
    return torch.cat((allocator.free_pages, allocator.release_pages))


def _state_digest(scheduler: Scheduler) -> str:
    table = scheduler.req_to_token_pool.req_to_token
    pieces = [_free(scheduler)]
    for request in sorted(live_requests(scheduler), key=lambda request: str(request.rid)):
        pieces.append(table[request.req_pool_idx, : request.kv.kv_allocated_len].long())
    hashed = hashlib.blake2b(digest_size=8)
    for piece in _to_host(pieces):
        hashed.update(len(piece).to_bytes(8, "little") + piece.tobytes())
    return hashed.hexdigest()


def _to_host(pieces: list[torch.Tensor]) -> list[Slots]:
    """Each piece as an array of its own; one copy from the device for all."""
    if not pieces:
        return []
    whole = torch.cat(pieces).cpu().numpy()
    return [part.copy() for part in np.split(whole, np.cumsum([len(p) for p in pieces])[:-1])]


def _check_supported(scheduler: Scheduler) -> None:
    if reason := unsupported(scheduler):
        raise CannotRelocate(reason)

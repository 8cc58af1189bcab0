"""Every place in a rank that holds KV slot numbers. The one list that relocation goes by.

A slot number that is not rewritten when its row moves reads another request's KV. So what holds
some is named here, and `unknown` looks through the scheduler for integer tensors that are not.

Not looked through: `sglang.srt.model_executor`, `sglang.srt.layers` and the attention backends.
What they hold (CUDA graph inputs, page tables) is filled from `req_to_token` and `out_cache_loc` by
every forward before it is read; `req_to_token` itself is rewritten in place, since CUDA graphs hold
its address.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.radix_cache import TreeNode

#: Rewritten by a pass.
REWRITTEN = {
    "ReqToTokenPool.req_to_token": "rows of requests, with those reserved for the next step",
    "Req.prefix_indices": "cached prefix of a request; of the chunked one, all chunks so far",
    "TreeNode.value": "text in the prefix cache",
    "ScheduleBatch.out_cache_loc": "slots that a forward writes",
    "TokenToKVPoolAllocator.free_pages": "free slots, next ones first",
    "TokenToKVPoolAllocator.release_pages": "free slots to be sorted in",
}

#: Hold slots, but each step writes them before it reads them, or nobody reads them.
REBUILT = {
    "Scheduler.batch_record_buf": "keeps tensors of the last two forwards alive",
    "DDTreeWorker._draft_verify_out_cache_loc_buf": "DFLASH's own step, which DDTREE replaces",
    "TokenToKVPoolAllocator.free_group": "what the last group freed; empty while none is open",
    "RadixCache._empty_match_result": "always empty",
}

#: Hold pages, in engines with pages of several slots. No pass runs there: see `unsupported`.
OF_PAGES = {
    "PagedTokenToKVPoolAllocator.free_pages",
    "PagedTokenToKVPoolAllocator.release_pages",
    "PagedTokenToKVPoolAllocator.free_group",
    "PagedTokenToKVPoolAllocator.free_page_reps_group",
}

#: Integers, but no slots.
NO_SLOTS = {
    "DDTreeDraftInput.bonus_tokens",
    "DDTreeDraftInput.new_seq_lens",
    "DDTreeDraftInput.future_indices",
    "DDTreeWorker._block_pos_offsets",
    "DDTreeWorker._window_offsets",
    "DDTreeWorker._accept_len_buf",
    "DDTreeWorker._bonus_id_bufs",
    "DDTreeWorker._commit_lens_bufs",
    "DDTreeWorker._new_seq_lens_bufs",
    "DDTreeWorker._out_tokens_bufs",
    "DDTreeWorker._draft_block_ids_buf",
    "DDTreeWorker._draft_block_positions_buf",
    "DDTreeWorker._draft_block_tokens_buf",
    "DDTreeWorker._draft_block_end_buf",
    "DDTreeWorker._draft_seq_lens_cpu_buf",
    "DDTreeWorker._draft_greedy_gathered_ids_buf",
    "DDTreeWorker._draft_greedy_local_arg_buf",
    "DDTreeWorker._draft_greedy_best_rank_buf",
    "DDTreeWorker._draft_greedy_rank_index_buf",
    "DDTreeWorker._draft_greedy_selected_ids_buf",
    "_DflashDraftSampler.best_rank",
    "_DflashDraftSampler.gathered_ids",
    "_DflashDraftSampler.local_arg",
    "_DflashDraftSampler.out",
    "_DflashDraftSampler.selected_ids",
    "DFlashVerifyInput.draft_token",
    "DFlashVerifyInput.positions",
    "Drafter._offsets",
    "FutureMap.new_seq_lens_buf",
    "FutureMap.new_seq_lens_cpu_pinned",
    "FutureMap.output_tokens_buf",
    "GenerationBatchResult.accept_lens",
    "GenerationBatchResult.future_indices",
    "GenerationBatchResult.new_seq_lens",
    "GenerationBatchResult.next_token_ids",
    "GraphedCandidates._all",
    "GraphedCandidates._status",
    "GraphedCandidates._workspace",
    "MHATokenToKVPool.data_strides",
    "MLATokenToKVPool.data_strides",
    "ReqToTokenPool.req_generation",
    "ScheduleBatch.encoder_lens",
    "ScheduleBatch.extend_input_logprob_token_ids",
    "ScheduleBatch.input_ids",
    "ScheduleBatch.mix_running_indices",
    "ScheduleBatch.orig_seq_lens",
    "ScheduleBatch.prefill_input_ids_cpu",
    "ScheduleBatch.req_pool_indices",
    "ScheduleBatch.req_pool_indices_cpu",
    "ScheduleBatch.seq_lens",
    "ScheduleBatch.seq_lens_cpu",
    "_Landing.raw",
    "_Landing._hosts",
    "_Landing._outputs",
    "StepInputs.ids",
    "StepInputs._ids_of_batch",
    "StepInputs.live",
    "StepInputs.sampling",
    "StepInputs._sampling_of",
}

_LOOKED_THROUGH = (
    "sglang.srt.managers.",
    "sglang.srt.mem_cache.",
    "sglang.srt.speculative.",
    "sglang.srt.session.",
    "overstory.workers.",
)

_NOT_LOOKED_THROUGH = (
    "overstory.workers.seam.",
    "sglang.srt.sampling.",
    "overstory.workers.ddtree.grammar",
    "overstory.workers.ddtree.rules",
    "overstory.workers.ddtree.sampling_info",
)
"""Attention's plan of one forward; integers that are tokens, seeds, masks and counts."""


@dataclass(frozen=True, eq=False)
class Holder:
    """One tensor of slot numbers, or the part of it that means something.

    Attributes:
        name: a key of `REWRITTEN`.
        slots: int32 or int64, any shape; a view of the holder's own memory.
    """

    name: str
    slots: torch.Tensor


def unsupported(scheduler: Scheduler) -> str:
    """Why this scheduler's slots cannot be moved; empty if they can."""
    page_size = int(scheduler.token_to_kv_pool_allocator.page_size)
    if page_size > 1:
        return (
            f"slots lie in pages of {page_size} (engine.page_size), which the prefix cache counts "
            "on, and are moved one by one: passes run with engine.page_size 1"
        )
    return unfamiliar(scheduler)


def unfamiliar(scheduler: Scheduler) -> str:
    """What of this scheduler holds slots in a way that is not known here; empty if nothing does."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.mem_cache.allocator import (
        PagedTokenToKVPoolAllocator,
        TokenToKVPoolAllocator,
    )
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache

    allocators = (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)
    for part, kinds in (
        (scheduler.token_to_kv_pool_allocator, allocators),
        (scheduler.tree_cache, (RadixCache, ChunkCache)),
        (scheduler.req_to_token_pool, (ReqToTokenPool,)),
    ):
        if type(part) not in kinds:
            known = " or ".join(kind.__name__ for kind in kinds)
            return f"slots are held by a {type(part).__name__}; known are {known}"
    if scheduler.disaggregation_mode != DisaggregationMode.NULL:
        return "slots may be on their way to another engine (disaggregation)"
    drafter = getattr(scheduler.model_worker, "draft_model_runner", None)
    if drafter is not None and drafter.req_to_token_pool is not scheduler.req_to_token_pool:
        return "the drafter keeps slot rows of its own (speculative_draft_window_size)"
    if not scheduler.token_to_kv_pool_allocator.is_not_in_free_group:
        return "slots are being freed in a group: this is no boundary"
    return ""


def holders(scheduler: Scheduler) -> Iterator[Holder]:
    """All that a pass rewrites. May name memory twice (tensors that share it)."""
    table = scheduler.req_to_token_pool.req_to_token
    for request in live_requests(scheduler):
        row = table[request.req_pool_idx, : request.kv.kv_allocated_len]
        yield Holder("ReqToTokenPool.req_to_token", row)
    for request in requests(scheduler):
        yield Holder("Req.prefix_indices", request.prefix_indices)
    for node in nodes(scheduler):
        yield Holder("TreeNode.value", node.value)
    for batch in batches(scheduler):
        if batch.out_cache_loc is not None:
            yield Holder("ScheduleBatch.out_cache_loc", batch.out_cache_loc)
    allocator = scheduler.token_to_kv_pool_allocator
    yield Holder("TokenToKVPoolAllocator.free_pages", allocator.free_pages)
    yield Holder("TokenToKVPoolAllocator.release_pages", allocator.release_pages)


def batches(scheduler: Scheduler) -> list[ScheduleBatch]:
    """Running, just launched, and launched but not taken in."""
    found = [scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug]
    found += [batch for batch, _ in getattr(scheduler, "result_queue", ())]
    return list({id(batch): batch for batch in found if batch is not None}.values())


def requests(scheduler: Scheduler) -> list[Req]:
    """All that the scheduler knows, waiting ones included, each once."""
    found = [request for batch in batches(scheduler) for request in batch.reqs]
    found += [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    if scheduler.chunked_req is not None:
        found.append(scheduler.chunked_req)
    return list({id(request): request for request in found}.values())


def live_requests(scheduler: Scheduler) -> list[Req]:
    """Those that have rows in the pool."""
    return [request for request in requests(scheduler) if request.req_pool_idx is not None]


def nodes(scheduler: Scheduler) -> Iterator[TreeNode]:
    """The prefix cache's nodes without its root, parents before children."""
    root = getattr(scheduler.tree_cache, "root_node", None)
    stack = [] if root is None else list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def path_slots(scheduler: Scheduler, node: TreeNode | None) -> list[torch.Tensor]:
    """Slots of the text that ends with `node`, piece by piece."""
    pieces: list[torch.Tensor] = []
    root = getattr(scheduler.tree_cache, "root_node", None)
    while node is not None and node is not root:
        pieces.append(node.value)
        node = node.parent
    return pieces[::-1]


def unknown(scheduler: Scheduler) -> list[str]:
    """Integer tensors within reach of the scheduler that no list of this module names."""
    known = {*REWRITTEN, *REBUILT, *OF_PAGES, *NO_SLOTS}
    return sorted({name for name in _integers(scheduler) if name not in known})


def _integers(scheduler: Scheduler) -> Iterator[str]:
    """`Class.field` of every integer tensor or array; containers count as their owner's field."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("Scheduler", scheduler)]
    while stack:
        name, found = stack.pop()
        if found is None or isinstance(found, (str, bytes, int, float, type, types.ModuleType)):
            continue
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            if found.dtype in (torch.int32, torch.int64):
                yield name
        elif isinstance(found, np.ndarray):
            if found.dtype.kind in "iu":
                yield name
        elif isinstance(found, types.MethodType):
            stack.append((name, found.__self__))
        elif isinstance(found, (list, tuple, set, frozenset, dict, deque)):
            stack += [(name, item) for item in _items(found)]
        elif _looked_through(type(found).__module__):
            stack += [(f"{type(found).__name__}.{field}", v) for field, v in _fields(found)]


def _items(container: Any) -> list[Any]:
    """What is in a container; nothing of long ones of plain numbers."""
    items = list(container.values() if isinstance(container, dict) else container)
    return [] if items and isinstance(items[0], (int, float, str)) else items


def _looked_through(module: str) -> bool:
    return module.startswith(_LOOKED_THROUGH) and not module.startswith(_NOT_LOOKED_THROUGH)


def _fields(owner: Any) -> list[tuple[str, Any]]:
    fields = dict(getattr(owner, "__dict__", {}))
    for base in type(owner).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in fields and hasattr(owner, name):
                fields[name] = getattr(owner, name)
    return list(fields.items())

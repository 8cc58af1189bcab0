"""A trace of many tenants' requests over SGLang's own allocator and prefix cache, without a model.

Slots are taken and given back as a scheduler with DDTREE does: a prefill at once, then before each
step what the requests lack, for the whole batch in one allocation.
The trace stands in for a scheduler where `overstory.workers.defrag` wants one.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from overstory.workers.ddtree.limits import StepLimits

SLOTS = 32768
RUNNING = 16
TENANTS = 8
TENANT_PREFIX = 400
ROWS, BLOCK = 64, 8
LAYERS = 8
ROW = 576


@dataclass(eq=False)
class TraceRequest:
    """What `RadixCache` and the relocation pass read of SGLang's Req."""

    rid: str
    origin_input_ids: array[int]
    new_tokens: int
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    prefix_indices: Any = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    req_pool_idx: int | None = None
    kv: Any = None
    kv_committed_len: int = 0
    cache_protected_len: int = 0
    last_node: Any = None
    extra_key: str | None = None
    priority: int = 0
    inflight_middle_chunks: int = 0

    def get_fill_ids(self) -> array[int]:
        """All tokens with KV."""
        return (self.origin_input_ids + self.output_ids)[: self.kv_committed_len]


class ChurnTrace:
    """The pool and its users.

    Args:
        seed: of arrivals, lengths and acceptance.
        policy: how free slots are handed out: `as_freed`, `lazy`, `eager` or `best_fit`.
        top_up: reserve in blocks, as `StepLimits.reserved` does; else what each step lacks.
        buffers: KV tensors to move rows in.
        device: where slot numbers are kept.
    """

    def __init__(
        self,
        seed: int,
        policy: str,
        top_up: bool,
        buffers: list[torch.Tensor],
        device: str = "cpu",
    ) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self._draw = random.Random(seed)
        self._limits = StepLimits(BLOCK, ROWS, overlap=True)
        self._top_up = top_up
        self._tenants = [self._tokens(TENANT_PREFIX) for _ in range(TENANTS)]
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(
            SLOTS, torch.bfloat16, device, None, need_sort=policy in ("lazy", "eager")
        )
        self.allocator_s = 0.0
        self._dress(policy)
        self.req_to_token_pool = ReqToTokenPool(RUNNING + 1, 4096, device, False)
        self.tree_cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=1,
            )
        )
        self.running: list[TraceRequest] = []
        self.served = 0
        self.disaggregation_mode = DisaggregationMode.NULL
        pool = SimpleNamespace(kv_buffer=buffers)
        self.model_worker = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool))
        self.last_batch = self.cur_batch_for_debug = self.chunked_req = None
        self.waiting_queue: list[Any] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])

    @property
    def running_batch(self) -> Any:
        """As a scheduler's."""
        return SimpleNamespace(reqs=self.running, out_cache_loc=None)

    def step(self) -> None:
        """Arrivals, one decode step of all that run, ends."""
        while len(self.running) < RUNNING and self._draw.random() < 0.5:
            self._begin()
        self._reserve()
        for request in list(self.running):
            self._commit(request, self._draw.randrange(1, 7))
            if len(request.output_ids) >= request.new_tokens:
                self._end(request)

    def _begin(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        prompt = self._draw.choice(self._tenants) + self._tokens(self._draw.randrange(30, 900))
        request = TraceRequest(f"t{self.served}", prompt, self._draw.randrange(30, 500))
        self.served += 1
        found = self.tree_cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt[:-1])))
        request.prefix_indices = found.device_indices
        request.cache_protected_len = len(found.device_indices)
        request.last_node = found.last_device_node
        self.tree_cache.inc_lock_ref(request.last_node)
        self.req_to_token_pool.alloc([request])
        row = self.req_to_token_pool.req_to_token[request.req_pool_idx]
        row[: request.cache_protected_len] = found.device_indices
        row[request.cache_protected_len : len(prompt)] = self._take(
            len(prompt) - request.cache_protected_len
        )
        request.kv = SimpleNamespace(kv_allocated_len=len(prompt))
        request.kv_committed_len = len(prompt)
        self.running.append(request)
        self.tree_cache.cache_unfinished_req(request)

    def _reserve(self) -> None:
        missing = [
            self._wanted(r.kv_committed_len, r.kv.kv_allocated_len) - r.kv.kv_allocated_len
            for r in self.running
        ]
        if not sum(missing):
            return
        taken = self._take(sum(missing))
        for request, count in zip(self.running, missing, strict=True):
            at = request.kv.kv_allocated_len
            table = self.req_to_token_pool.req_to_token
            table[request.req_pool_idx, at : at + count] = taken[:count]
            taken = taken[count:]
            request.kv.kv_allocated_len += count

    def _wanted(self, committed: int, allocated: int) -> int:
        if self._top_up:
            return self._limits.reserved(committed, allocated)
        return max(allocated, committed + self._limits.ahead)

    def _commit(self, request: TraceRequest, tokens: int) -> None:
        request.output_ids += self._tokens(tokens)
        request.kv_committed_len += tokens

    def _end(self, request: TraceRequest) -> None:
        row = self.req_to_token_pool.req_to_token[request.req_pool_idx]
        committed = request.kv_committed_len
        self.tree_cache.cache_finished_req(request, kv_len_to_handle=committed)
        over = row[committed : request.kv.kv_allocated_len]
        self.token_to_kv_pool_allocator.free_segment(over.to(torch.int64), start_pos=committed)
        self.req_to_token_pool.free(request)
        request.kv = None
        self.running.remove(request)

    def _take(self, count: int) -> torch.Tensor:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.tree_cache, count)
        taken = self.token_to_kv_pool_allocator.alloc(count)
        assert taken is not None, "the trace needs a larger pool"
        return taken

    def _tokens(self, count: int) -> array[int]:
        return array("q", [self._draw.randrange(150_000) for _ in range(count)])

    def _dress(self, policy: str) -> None:
        """Makes the allocator follow the policy, and measures what it costs."""
        import time

        allocator = self.token_to_kv_pool_allocator
        free, alloc = allocator.free, allocator.alloc

        def eager(slots: torch.Tensor) -> None:
            free(slots)
            allocator.merge_and_sort_free()

        def sorted_free(slots: torch.Tensor) -> None:
            allocator.free_pages = torch.sort(torch.cat((allocator.free_pages, slots))).values

        def best_fit(count: int) -> torch.Tensor | None:
            return take_best_fit(allocator, count)

        def timed(act: Callable[..., Any]) -> Callable[..., Any]:
            def run(argument: Any) -> Any:
                begun = time.thread_time()
                result = act(argument)
                self.allocator_s += time.thread_time() - begun
                return result

            return run

        allocator.free = timed({"eager": eager, "best_fit": sorted_free}.get(policy, free))
        allocator.alloc = timed(best_fit if policy == "best_fit" else alloc)


def take_best_fit(allocator: Any, count: int) -> torch.Tensor | None:
    """The shortest free run that is long enough; else the longest ones together."""
    slots = allocator.free_pages
    if count > len(slots):
        return None
    edges = (slots.diff() != 1).nonzero().view(-1) + 1
    bounds = torch.cat((edges.new_zeros(1), edges, edges.new_full((1,), len(slots))))
    lengths = bounds.diff()
    enough = (lengths >= count).nonzero().view(-1)
    chosen = torch.zeros(len(slots), dtype=torch.bool)
    if len(enough):
        start = int(bounds[enough[lengths[enough].argmin()]])
        chosen[start : start + count] = True
    else:
        left = count
        for run in lengths.argsort(descending=True).tolist():
            size = min(left, int(lengths[run]))
            chosen[int(bounds[run]) : int(bounds[run]) + size] = True
            left -= size
            if not left:
                break
    allocator.free_pages = slots[~chosen]
    return slots[chosen]

"""What a running batch carries from one DDTREE step to the next, and the slots it reserves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from overstory.workers.ddtree.limits import StepLimits


class DDTreeDraftInput(DFlashDraftInputV2):
    """Root tokens and lengths of the next step.

    ``bonus_tokens`` [bs] int64 are the roots: handed out already, their KV not computed yet.
    ``new_seq_lens`` [bs] int64 are the committed lengths. Under overlap scheduling both travel
    through SGLang's future map instead and ``future_indices`` says which rows of it are meant.
    """

    def __init__(
        self, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor, limits: StepLimits
    ) -> None:
        super().__init__(
            topk_p=None,
            topk_index=None,
            bonus_tokens=bonus_tokens,
            new_seq_lens=new_seq_lens,
            hidden_states=None,
        )
        self.bonus_tokens: torch.Tensor = bonus_tokens
        self.new_seq_lens: torch.Tensor = new_seq_lens
        self.limits = limits
        self.future_indices: torch.Tensor | None = None
        self.committed = 0
        """Tokens of all requests that the scheduler knew of when it made the step ready, which all
        ranks do alike. Where lengths stay on the device, SGLang's ``seq_lens_sum`` is None."""

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve the slots of the next step for each request; called by the scheduler.

        See `StepLimits.reserved`: as many as SGLang's DFLASH keeps, but topped up only when a step
        could run short.
        """
        bs = batch.batch_size()
        if bs == 0:
            return
        committed = [req.kv_committed_len for req in batch.reqs]
        allocated = [req.kv.kv_allocated_len for req in batch.reqs]
        if self.limits.short(committed, allocated):
            self._reserve(batch, committed, allocated)
        if self.future_indices is None:  # else SGLang puts its own there before the step
            batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = self.committed = sum(committed)

    def _reserve(self, batch: ScheduleBatch, committed: list[int], allocated: list[int]) -> None:
        wanted = [
            self.limits.reserved(length, now)
            for now, length in zip(allocated, committed, strict=True)
        ]
        width = batch.req_to_token_pool.req_to_token.shape[1]
        assert max(wanted) <= width, f"slot row of {width} columns cannot hold {max(wanted)} tokens"
        missing = sum(wanted) - sum(allocated)
        # Pinned: from other memory CUDA may wait for all that was launched before.
        pinned = batch.req_pool_indices.is_cuda
        current_cpu = torch.tensor(allocated, dtype=torch.int32, pin_memory=pinned)
        wanted_cpu = torch.tensor(wanted, dtype=torch.int32, pin_memory=pinned)
        by_pages = self.limits.page_size > 1
        alloc_for_spec_decode(
            batch.tree_cache,
            batch.req_to_token_pool,
            reqs=batch.reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=current_cpu.to(batch.device, non_blocking=True),
            cur_kv_lens_cpu=current_cpu,
            nxt_kv_lens=wanted_cpu.to(batch.device, non_blocking=True),
            # Read one by one, which costs a microsecond each of a tensor; pages need one.
            nxt_kv_lens_cpu=wanted_cpu if by_pages else wanted,
            num_needed_tokens=missing,
            batch=batch,
        )

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        """Keep the requests at ``new_indices`` [kept] of the batch."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, spec_info: DDTreeDraftInput) -> None:
        """Append the requests of another batch."""
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, spec_info.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, spec_info.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, spec_info.new_seq_lens])

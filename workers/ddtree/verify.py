"""The verify forward: every row of every tree through the target at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from overstory.kernels.reference import Tree, full_mask, positions

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult


def tree_positions(tree: Tree, seq_lens: torch.Tensor, last_position: int) -> torch.Tensor:
    """[bs * n] int64 absolute positions of the rows.

    Rows beyond the context share its last position: a request ends before any of them is handed
    out, and the rotary tables hold no more.
    """
    return positions(tree, seq_lens).clamp_(max=last_position).view(-1)


def verify(
    target_worker: Any,
    batch: ScheduleBatch,
    tree: Tree,
    slots: torch.Tensor,
    row_positions: torch.Tensor,
    branches: bool,
) -> GenerationBatchResult:
    """Target logits and captured hidden states of all rows.

    Args:
        target_worker: SGLang's worker of the target model.
        batch: the running batch; its input fields are set for this forward (the scheduler restores
            them afterwards).
        tree: n rows per request.
        slots: [bs, n] int64, KV slot of each row.
        row_positions: [bs * n] int64.
        branches: false if every row but the first has its predecessor as parent: plain causal
            attention then is the ancestor mask.
    """
    verify_input = DFlashVerifyInput(
        draft_token=tree.tokens.view(-1),
        positions=row_positions,
        draft_token_num=tree.rows,
        custom_mask=full_mask(tree, _host_lengths(batch))[0] if branches else None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    batch.out_cache_loc = slots.reshape(-1)
    forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    return target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )


def _host_lengths(batch: ScheduleBatch) -> torch.Tensor:
    """Committed lengths, from the host copy if the scheduler has one."""
    return batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu

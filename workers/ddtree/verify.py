"""The verify forward: every row of every tree through the target at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from overstory.kernels import ops
from overstory.kernels.reference import Tree, full_mask, positions

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult


class TreeVerifyInput(DFlashVerifyInput):
    """SGLang's verify input with the mask as `OverstoryAttention` takes it.

    Attributes:
        mask_words: [bs, n] int64, see `overstory.kernels.reference.packed_mask`; None where the
            attention backend reads ``custom_mask``.
    """

    mask_words: torch.Tensor | None = None


class RowLayout(NamedTuple):
    """What the target has to know of the rows of trees."""

    positions: torch.Tensor
    """[bs * n] int64, absolute."""
    words: torch.Tensor | None
    """[bs, n] int64 masks, where they were asked for."""


def row_layout(
    tree: Tree, seq_lens: torch.Tensor, last_position: int, with_words: bool
) -> RowLayout:
    """Positions of the rows, and their masks if ``with_words``.

    Rows beyond the context share its last position: a request ends before any of them is handed
    out, and the rotary tables hold no more.
    """
    if not with_words:
        at = positions(tree, seq_lens).clamp_(max=last_position)
        return RowLayout(at.view(-1), None)
    mask = ops.tree_mask(tree, seq_lens)
    return RowLayout(mask.positions.clamp_(max=last_position).view(-1), mask.packed)


def verify(
    target_worker: Any,
    batch: ScheduleBatch,
    tree: Tree,
    slots: torch.Tensor,
    layout: RowLayout,
    branches: bool,
) -> GenerationBatchResult:
    """Target logits and captured hidden states of all rows.

    Args:
        target_worker: SGLang's worker of the target model.
        batch: the running batch; its input fields are set for this forward (the scheduler restores
            them afterwards).
        tree: n rows per request.
        slots: [bs, n] int64, KV slot of each row.
        layout: of the tree.
        branches: false if every row but the first has its predecessor as parent: plain causal
            attention then is the ancestor mask.
    """
    verify_input = TreeVerifyInput(
        draft_token=tree.tokens.view(-1),
        positions=layout.positions,
        draft_token_num=tree.rows,
        custom_mask=_bool_mask(batch, tree) if branches and layout.words is None else None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    verify_input.mask_words = layout.words
    batch.out_cache_loc = slots.reshape(-1)
    forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    return target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )


def _bool_mask(batch: ScheduleBatch, tree: Tree) -> torch.Tensor:
    """The mask in FULL_MASK layout, for backends that read ``custom_mask``."""
    if not tree.tokens.is_cuda:
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        return full_mask(tree, lengths)[0]
    # How long the requests are is not known here without waiting: room for the longest.
    width = batch.req_to_token_pool.req_to_token.shape[1] + tree.rows
    room = torch.empty(tree.tokens.numel() * width, dtype=torch.bool, device=tree.tokens.device)
    ops.tree_mask(tree, batch.seq_lens, full=room)
    return room

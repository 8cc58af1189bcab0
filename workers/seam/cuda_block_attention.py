"""The drafter's attention on CUDA, spread over the keys as well.

SGLang's Triton kernel gives one program a request, a head and all keys: at 32k tokens a layer takes
two milliseconds, whatever the device. Here each row of the drafted block is a row of SGLang's
decode kernel, which splits the keys. All rows of a block see the prefix and the whole block, whose
keys are in the cache by then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.kernels.ops.kvcache.kv_indices import create_flashinfer_kv_indices_triton
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

SPLITS = 32
"""Most parts that a row's keys are cut into."""


class RowPlan(NamedTuple):
    """The keys of each row of a forward, and room for partial results."""

    bounds: torch.Tensor
    """[rows + 1] int32."""
    slots: torch.Tensor
    """int64, those of row r are slots[bounds[r] : bounds[r + 1]]."""
    parts: torch.Tensor
    """[rows, heads, SPLITS, v_head_dim] float32."""
    sums: torch.Tensor
    """[rows, heads, SPLITS] float32."""
    splits: torch.Tensor
    """[rows] int32, SPLITS each."""

    def first(self, rows: int) -> RowPlan:
        """Of the first ``rows`` rows."""
        return RowPlan(
            self.bounds[: rows + 1],
            self.slots,
            self.parts[:rows],
            self.sums[:rows],
            self.splits[:rows],
        )


class BlockAttention(TritonAttnBackend):
    """SGLang's Triton backend, with block forwards of uniform rows split over their keys."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._width = int(model_runner.req_to_token_pool.req_to_token.shape[1])
        self._captured: RowPlan | None = None
        self._plan: RowPlan | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *more: Any) -> None:
        """Room for the largest captured forward."""
        super().init_cuda_graph_state(max_bs, max_num_tokens, *more)
        self._captured = self._room(max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans a forward outside of a graph."""
        super().init_forward_metadata(forward_batch)
        self._plan = None
        if forward_batch.forward_mode.is_target_verify():
            rows = forward_batch.batch_size * int(forward_batch.spec_info.draft_token_num)
            self._plan = self._fill(self._room(rows), forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plans a captured forward, in tensors that stay."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self._plan = None
        if forward_batch.forward_mode.is_target_verify():
            assert self._captured is not None, "init_cuda_graph_state runs before"
            self._plan = self._fill(self._captured, forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **named: Any,
    ) -> torch.Tensor:
        """Arguments and result as SGLang's."""
        if self._plan is None or not _sees_all(layer) or named:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **named)
        if save_kv_cache:
            place = KVWriteLoc(forward_batch.out_cache_loc, None)
            self._set_kv_buffer(forward_batch, layer, place, k, v, layer.k_scale, layer.v_scale)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = queries.new_empty(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        plan = self._plan
        self.decode_attention_fwd(
            queries,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            out,
            plan.bounds,
            plan.slots,
            plan.parts,
            plan.sums,
            plan.splits,
            SPLITS,
            layer.scaling,
            1.0,
            1.0,
        )
        return out.view(q.shape[0], -1)

    def _room(self, rows: int) -> RowPlan:
        def made(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        partial = (rows, self.num_head, SPLITS)
        return RowPlan(
            made((rows + 1,), torch.int32),
            torch.empty(rows * self._width, dtype=torch.int64, device=self.device),
            made((*partial, self.v_head_dim), torch.float32),
            made(partial, torch.float32),
            torch.full((rows,), SPLITS, dtype=torch.int32, device=self.device),
        )

    def _fill(self, room: RowPlan, forward_batch: Any) -> RowPlan:
        """Lists the keys of each row: the prefix and the block."""
        bs, block = forward_batch.batch_size, int(forward_batch.spec_info.draft_token_num)
        rows = bs * block
        plan = room.first(rows)
        lengths, pool = (
            values.unsqueeze(1).expand(bs, block).reshape(-1)
            for values in (forward_batch.seq_lens + block, forward_batch.req_pool_indices)
        )
        plan.bounds[1:] = torch.cumsum(lengths, dim=0)
        create_flashinfer_kv_indices_triton[(rows,)](
            self.req_to_token,
            pool,
            lengths,
            plan.bounds,
            None,
            plan.slots,
            self.req_to_token.stride(0),
        )
        return plan


def _sees_all(layer: Any) -> bool:
    """Whether every row of a block attends to the whole prefix and block."""
    window = layer.sliding_window_size
    return (
        layer.attn_type == AttentionType.ENCODER_ONLY
        and (window is None or window < 0)
        and not layer.logit_cap
        and layer.k_scale is None
    )

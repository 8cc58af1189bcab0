"""The `overstory` attention backend on CUDA: our kernels for MLA verify, decode and extends.

Prefill without a prefix goes to SGLang's Triton backend (`extend_blocks.left_to_triton`). What a
verify or decode forward needs to know (slots, bounds, the tree's mask) lies in tensors that never
move, so that one CUDA graph per batch size and number of rows serves every forward of that shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from overstory.kernels import ops
from overstory.workers.seam import extend_blocks
from overstory.workers.seam.cuda_limits import MAX_ROWS, AttentionShape, attention_shape
from overstory.workers.seam.cuda_slots import SlotLists


@dataclass(frozen=True)
class RowPlan:
    """Where the rows, keys and masks of one forward are; the same for all its layers.

    Attributes:
        rows: per request; of an extend: of its largest block, and bs counts its blocks.
        row_bounds: [bs + 1] int32, bounds of the requests' rows.
        key_bounds: [bs + 1] int32, bounds of the requests' slots in `SlotLists.slots`; of an
            extend [bs], where they begin.
        key_ends: [bs] int32, where they end, of an extend.
        words: [bs * rows] int64, the mask of `verify_attention`; None: causal.
    """

    rows: int
    row_bounds: torch.Tensor
    key_bounds: torch.Tensor
    key_ends: torch.Tensor | None = None
    words: torch.Tensor | None = None


class OverstoryAttention(AttentionBackend):
    """Attention of an MLA target: tree verify, decode and extends by `overstory.kernels.ops`.

    A verify forward's mask comes as words (``spec_info.mask_words`` [bs, rows] int64, see
    `overstory.kernels.reference.packed_mask`); without them rows are causal. SGLang's own
    ``custom_mask`` is not read.

    Raises:
        ValueError: a model, type or KV cache that the kernels are not made for.
    """

    #: Nothing here reads lengths on the host, so SGLang need not fetch them in every step.
    needs_cpu_seq_lens = False

    #: Asked by the DDTREE worker: the mask goes in as words, and graphs honour it.
    takes_mask_words = True

    def __init__(self, model_runner: Any, others: AttentionBackend) -> None:
        super().__init__()
        self._others = others
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._table = model_runner.req_to_token_pool.req_to_token
        self._shape: AttentionShape = attention_shape(model_runner)
        device, requests = self._table.device, int(self._table.shape[0])
        self._lists = SlotLists(requests, int(self._table.shape[1]), device)
        self._words = torch.zeros(requests * self._shape.max_rows, dtype=torch.int64, device=device)
        self._row_bounds: dict[int, torch.Tensor] = {}
        self._causal_words = torch.tensor(
            [_causal_word(row) for row in range(MAX_ROWS)], dtype=torch.int64, device=device
        )
        self._workspace = self._shape.workspace(device)
        self._plan: RowPlan | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans a forward outside of a graph, for all its layers."""
        self._plan = self._plan_rows(forward_batch) or self._plan_blocks(forward_batch)
        if self._plan is None and not forward_batch.forward_mode.is_idle():
            self._others.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plans a captured forward: before the capture, and before each replay.

        The captured launches read the tensors that this fills.
        """
        del in_capture
        self._plan = self._plan_rows(forward_batch)
        assert self._plan is not None, f"no graph holds {forward_batch.forward_mode}"

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Checks that the tensors made at the start hold the largest captured forward."""
        if max_num_tokens > self._words.numel() or max_bs >= self._lists.bounds.numel():
            raise ValueError(
                f"graphs of {max_bs} requests and {max_num_tokens} rows, but this engine has room "
                f"for {self._lists.bounds.numel() - 1} and {self._words.numel()}: lower "
                "cuda_graph_max_bs_decode"
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that fill a graph's batch up; they read slot 0."""
        return 1

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **named: Any,
    ) -> torch.Tensor:
        """Verify and extends by our kernel; what is not planned for it by Triton's.

        Args:
            q: [rows, heads * qk_head_dim].
            k, v: the new rows' keys [rows, 1, 576] and values, or None when written already.

        Returns:
            [rows, heads * v_head_dim].
        """
        if self._plan is None:
            return self._others.forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache, **named
            )
        plan = self._write_rows(k, v, layer, forward_batch, save_kv_cache)
        queries, out = self._queries_and_room(q, layer)
        ops.verify_attention(
            queries,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            plan.row_bounds,
            plan.key_bounds,
            self._lists.slots,
            forward_batch.out_cache_loc,
            scale=layer.scaling,
            kv_scale=_scale_of(layer),
            v_head_dim=layer.v_head_dim,
            mask_words=plan.words,
            kv_ends=plan.key_ends,
            max_q=plan.rows,
            out=out,
            workspace=self._workspace,
        )
        return out.view(q.shape[0], -1)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **named: Any,
    ) -> torch.Tensor:
        """One row per request; arguments and result as `forward_extend`."""
        del named
        plan = self._write_rows(k, v, layer, forward_batch, save_kv_cache)
        queries, out = self._queries_and_room(q, layer)
        ops.decode_attention(
            queries,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            plan.key_bounds,
            self._lists.slots,
            scale=layer.scaling,
            kv_scale=_scale_of(layer),
            v_head_dim=layer.v_head_dim,
            out=out,
            workspace=self._workspace,
        )
        return out.view(q.shape[0], -1)

    def _plan_rows(self, forward_batch: Any) -> RowPlan | None:
        """The plan of a verify or decode forward, None of any other."""
        mode = forward_batch.forward_mode
        if not (mode.is_target_verify() or mode.is_decode()):
            return None
        rows = int(forward_batch.spec_info.draft_token_num) if mode.is_target_verify() else 1
        bs = int(forward_batch.seq_lens.shape[0])
        # Without the rows under verification, with the row that is decoded.
        self._lists.fill(self._table, forward_batch.req_pool_indices, forward_batch.seq_lens)
        return RowPlan(
            rows,
            self._bounds_of(rows)[: bs + 1],
            self._lists.bounds[: bs + 1],
            words=self._fill_words(forward_batch.spec_info, bs, rows)
            if mode.is_target_verify()
            else None,
        )

    def _plan_blocks(self, forward_batch: Any) -> RowPlan | None:
        """The plan of an extend that is ours, None of any other forward.

        One copy to the device, of lengths that SGLang has on the host.
        """
        if forward_batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return None
        prefixes = forward_batch.extend_prefix_lens_cpu
        counts = forward_batch.extend_seq_lens_cpu
        if extend_blocks.left_to_triton(prefixes, counts, self._shape.heads) is not None:
            return None
        blocks = extend_blocks.cut(prefixes, counts)
        lengths = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
        parts = (blocks.row_bounds, blocks.key_begins, blocks.key_ends, lengths)
        row_bounds, begins, ends, all_lengths = self._to_device(parts)
        # int64 as SGLang's lengths of decode forwards: their variant of the kernel is compiled.
        self._lists.fill(self._table, forward_batch.req_pool_indices, all_lengths.long())
        return RowPlan(blocks.rows, row_bounds, begins, ends)

    def _to_device(self, parts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """Lists of numbers as int32, by one copy that the host does not wait for."""
        flat = torch.tensor(
            [number for part in parts for number in part],
            dtype=torch.int32,
            pin_memory=self._table.is_cuda,
        ).to(self._table.device, non_blocking=True)
        return flat.split([len(part) for part in parts])

    def _fill_words(self, spec_info: Any, bs: int, rows: int) -> torch.Tensor:
        """The masks' words at their place; requests that fill up the batch keep what is there."""
        words = self._words[: bs * rows]
        given = getattr(spec_info, "mask_words", None)
        if given is None:
            words.view(bs, rows).copy_(self._causal_words[:rows].expand(bs, rows))
        else:
            words[: given.numel()].copy_(given.reshape(-1))
        return words

    def _bounds_of(self, rows: int) -> torch.Tensor:
        """[requests + 1] int32 multiples of ``rows``; made once, before any capture."""
        if rows not in self._row_bounds:
            count = torch.arange(
                self._lists.bounds.numel(), dtype=torch.int32, device=self._table.device
            )
            self._row_bounds[rows] = count * rows
        return self._row_bounds[rows]

    def _write_rows(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> RowPlan:
        assert self._plan is not None, "init_forward_metadata runs before every forward"
        if save_kv_cache and k is not None:
            place = KVWriteLoc(forward_batch.out_cache_loc, None)
            # The pool only rounds to its type: as SGLang's Triton backend, so that prefill agrees.
            scaled = k if layer.k_scale is None else (k / layer.k_scale).to(k.dtype)
            self.token_to_kv_pool.set_kv_buffer(layer, place, scaled, v)
        return self._plan

    def _queries_and_room(self, q: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        room = queries.new_empty(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        return queries, room


def _scale_of(layer: Any) -> float:
    """What rows of this layer's cache are multiplied by; 1 where the checkpoint has no scale."""
    return 1.0 if layer.k_scale_float is None else float(layer.k_scale_float)


def _causal_word(row: int) -> int:
    """Bits 0..row as a signed 64-bit number."""
    word = (1 << (row + 1)) - 1
    return word - (1 << 64) if word >> 63 else word

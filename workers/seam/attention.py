"""The `overstory` attention backend on a CPU, on the reference attention of `overstory.kernels`.

SGLang takes every backend name but `torch_native` and `intel_amx` to run Triton kernels, so on a
CPU ours stands behind the name `torch_native`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from overstory.kernels.reference.attention import decode_attention, verify_attention
from overstory.workers.seam.patches import Patch
from overstory.workers.seam.portable.grouped_attention import block_attention
from overstory.workers.seam.process_report import write_process_report

BACKEND_NAME = "torch_native"


@dataclass(frozen=True)
class ForwardPlan:
    """Where each request's rows, keys and mask are in one forward; the same for all its layers.

    Attributes:
        decoding: one row per request; `kv_indices` then includes the row's own slot.
        counts: rows per request.
        prefixes: keys per request before its first row.
        qo_indptr: [batch + 1] int64 bounds of the requests' rows.
        kv_indptr: [batch + 1] int64 bounds of the requests' slots in `kv_indices`.
        kv_indices: int64 slots of the prefixes (with the own row when decoding).
        mask: flat bool in FULL_MASK layout, or None for causal.
        mask_indptr: [batch + 1] int64 bounds of the requests in `mask`.
    """

    decoding: bool
    counts: list[int]
    prefixes: list[int]
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None


class OverstoryCpuAttention(AttentionBackend):
    """Prefill, decode, tree verify and the drafter's block attention, MLA and GQA alike.

    Prefill, chunks, prefix hits and verify of an MLA model go through one arithmetic (absorbed
    MLA), so that which of them a token took does not change what follows.
    """

    def __init__(self, model_runner: Any):
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.plan: ForwardPlan | None = None
        _report_serving()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans the forward, for all its layers."""
        self.plan = (
            None
            if forward_batch.forward_mode.is_idle()
            else plan_forward(forward_batch, self.req_to_token_pool.req_to_token)
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **unused: Any,
    ) -> torch.Tensor:
        """Attention of several query rows per request; see `_attend`."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **unused: Any,
    ) -> torch.Tensor:
        """Attention of one query row per request; see `_attend`."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def support_triton(self) -> bool:
        """False: nothing here may launch a Triton kernel."""
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length given to padded rows of a graph; there are no graphs on a CPU."""
        return 1

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        """Writes the new rows' KV, then attends.

        Args:
            q: [rows, heads * qk_head_dim].
            k, v: the new rows' keys and values, or None when written already.

        Returns:
            [rows, heads * v_head_dim].

        Raises:
            NotImplementedError: cross attention, sliding windows or capped logits.
        """
        _refuse_unsupported(layer)
        plan, slots = self.plan, forward_batch.out_cache_loc
        assert plan is not None, "init_forward_metadata runs before every forward"
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        causal = layer.attn_type is not AttentionType.ENCODER_ONLY
        if _is_latent(keys, values):
            out = latent_attention(queries, keys, slots, layer, plan, causal)
        else:
            out = block_attention(
                queries,
                keys,
                values,
                plan.prefixes,
                plan.counts,
                self._slots_per_request(plan, slots),
                scale=layer.scaling,
                causal=causal,
                mask=plan.mask if causal else None,
            )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _slots_per_request(self, plan: ForwardPlan, out: torch.Tensor) -> list[torch.Tensor]:
        """Each request's key slots, its own rows last."""
        if plan.decoding:
            return list(plan.kv_indices.split([p + 1 for p in plan.prefixes]))
        parts = zip(plan.kv_indices.split(plan.prefixes), out.split(plan.counts), strict=True)
        return [torch.cat(pair) for pair in parts]


def latent_attention(
    queries: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layer: Any,
    plan: ForwardPlan,
    causal: bool,
) -> torch.Tensor:
    """Absorbed MLA by the reference ops. Returns [rows, heads, v_head_dim]."""
    if plan.decoding:
        return decode_attention(
            queries,
            cache,
            plan.kv_indptr,
            plan.kv_indices,
            scale=layer.scaling,
            v_head_dim=layer.v_head_dim,
        )
    return verify_attention(
        queries,
        cache,
        plan.qo_indptr,
        plan.kv_indptr,
        plan.kv_indices,
        slots,
        plan.mask if causal else None,
        plan.mask_indptr if causal else None,
        scale=layer.scaling,
        v_head_dim=layer.v_head_dim,
        causal=causal,
    )


def plan_forward(forward_batch: Any, req_to_token: torch.Tensor) -> ForwardPlan:
    """Reads SGLang's batch into a plan.

    In TARGET_VERIFY `seq_lens` excludes the block under verification; in the other modes it
    includes the rows of this forward. `seq_lens_cpu` is not read: a DDTREE step passes the same
    lengths in it, but SGLang's own DFLASH passes an upper bound (one verify block more).
    """
    mode = forward_batch.forward_mode
    mask = None
    if mode.is_target_verify():
        prefixes = forward_batch.seq_lens.tolist()
        counts = [int(forward_batch.spec_info.draft_token_num)] * len(prefixes)
        mask = getattr(forward_batch.spec_info, "custom_mask", None)
    elif mode.is_decode():
        prefixes = [length - 1 for length in forward_batch.seq_lens.tolist()]
        counts = [1] * len(prefixes)
    else:
        prefixes = forward_batch.extend_prefix_lens.tolist()
        counts = forward_batch.extend_seq_lens.tolist()
    return _plan(
        req_to_token, forward_batch.req_pool_indices, prefixes, counts, mask, mode.is_decode()
    )


def _plan(
    req_to_token: torch.Tensor,
    pool_rows: torch.Tensor,
    prefixes: list[int],
    counts: list[int],
    mask: torch.Tensor | None,
    decoding: bool,
) -> ForwardPlan:
    lengths = [prefix + 1 for prefix in prefixes] if decoding else prefixes
    rows = pool_rows.tolist()
    pieces = [req_to_token[row, :length] for row, length in zip(rows, lengths, strict=True)]
    mask_sizes = [count * (prefix + count) for count, prefix in zip(counts, prefixes, strict=True)]
    assert mask is None or mask.numel() == sum(mask_sizes), "mask made for other lengths"
    return ForwardPlan(
        decoding=decoding,
        counts=counts,
        prefixes=prefixes,
        qo_indptr=_bounds(counts),
        kv_indptr=_bounds(lengths),
        kv_indices=torch.cat(pieces).long(),
        mask=mask,
        mask_indptr=None if mask is None else _bounds(mask_sizes),
    )


def _bounds(sizes: list[int]) -> torch.Tensor:
    """[len(sizes) + 1] int64 running sum from 0."""
    return torch.tensor([0, *accumulate(sizes)])


def _is_latent(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the pool holds MLA rows: the values are the front of the keys."""
    return keys.shape[1] == 1 and keys.data_ptr() == values.data_ptr()


def _refuse_unsupported(layer: Any) -> None:
    window = layer.sliding_window_size is not None and layer.sliding_window_size > -1
    if layer.is_cross_attention or window or layer.logit_cap:
        raise NotImplementedError(
            "attention on a plain CPU does not do cross attention, sliding windows or capped logits"
        )


def _report_serving() -> None:
    """Notes, where notes are wanted, which changes stand in the process that runs the model."""
    from overstory.workers.seam import plugin

    write_process_report("serving", {"stands": plugin.report()})


def _install_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(BACKEND_NAME)(OverstoryCpuAttention)


def _backend_taken() -> bool:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS.get(BACKEND_NAME) is OverstoryCpuAttention


def _absorbed(attention: Any, forward_batch: Any) -> Any:
    """The path of an MLA layer: always absorbed."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttnForwardMethod

    return AttnForwardMethod.MLA


def _install_mla_path() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )

    AttentionBackendRegistry.register(BACKEND_NAME, _absorbed)


def _mla_path_taken() -> bool:
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )

    return AttentionBackendRegistry.get_handler(BACKEND_NAME) is _absorbed


def patches() -> list[Patch]:
    """The backend and the choice of MLA path, as changes to SGLang."""
    return [
        Patch(
            f"attention backend {BACKEND_NAME}",
            "SGLang's own has no verify forward and expands the one KV head of MLA",
            _install_backend,
            _backend_taken,
        ),
        Patch(
            f"MLA path of {BACKEND_NAME}",
            "SGLang would choose the path of its Triton backend",
            _install_mla_path,
            _mla_path_taken,
        ),
    ]

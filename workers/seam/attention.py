"""The `overstory` attention backend on a CPU: plain matmuls over SGLang's paged KV pools.

SGLang takes every backend name but `torch_native` and `intel_amx` to run Triton kernels, so on a CPU
ours stands behind the name `torch_native`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from overstory.workers.seam.patches import Patch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

BACKEND_NAME = "torch_native"

#: Queries of one request scored at a time: bounds the scores held in memory to rows * heads * keys.
QUERY_BLOCK = 256


@dataclass(frozen=True)
class RequestSpan:
    """One request's part of a forward.

    Attributes:
        first: its first row in the query tensor.
        rows: number of query rows.
        prefix: keys before the first query.
        slots: [prefix + rows] int64 KV slots of its keys.
        mask: [rows, prefix + rows] bool allowed pairs of a tree, or None for causal.
    """

    first: int
    rows: int
    prefix: int
    slots: torch.Tensor
    mask: torch.Tensor | None


class OverstoryCpuAttention(AttentionBackend):
    """Prefill, decode, tree verify and the drafter's block attention on a CPU, MLA and GQA alike."""

    def __init__(self, model_runner: Any):
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.spans: list[RequestSpan] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Looks up each request's rows, keys and mask once per forward, for all layers."""
        self.spans = request_spans(forward_batch, self.req_to_token_pool.req_to_token)

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
        """
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, None)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = queries.new_zeros((queries.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        causal = layer.attn_type is not AttentionType.ENCODER_ONLY
        shared = keys.shape[1] == 1 and values.data_ptr() == keys.data_ptr()
        for span in self.spans:
            rows = slice(span.first, span.first + span.rows)
            span_keys = keys[span.slots].to(q.dtype)
            span_values = (
                span_keys[..., : layer.v_head_dim] if shared else values[span.slots].to(q.dtype)
            )
            out[rows] = attend_request(
                queries[rows], span_keys, span_values, layer.scaling, span, causal
            )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def request_spans(forward_batch: Any, req_to_token: torch.Tensor) -> list[RequestSpan]:
    """Each request's rows, KV slots and mask in one forward of SGLang.

    In TARGET_VERIFY, `seq_lens` excludes the block under verification; in the other modes it includes
    the rows of this forward.
    """
    mode = forward_batch.forward_mode
    if mode.is_idle():
        return []
    # Not seq_lens_cpu: under overlap scheduling that copy is an upper bound.
    seq_lens = forward_batch.seq_lens.tolist()
    pool_rows = forward_batch.req_pool_indices.tolist()
    masks: torch.Tensor | None = None
    if mode.is_target_verify():
        count = int(forward_batch.spec_info.draft_token_num)
        prefixes, counts = seq_lens, [count] * len(seq_lens)
        masks = getattr(forward_batch.spec_info, "custom_mask", None)
    elif mode.is_decode():
        prefixes, counts = [length - 1 for length in seq_lens], [1] * len(seq_lens)
    else:
        counts = _host_list(forward_batch.extend_seq_lens_cpu, forward_batch.extend_seq_lens)
        prefixes = _host_list(
            forward_batch.extend_prefix_lens_cpu, forward_batch.extend_prefix_lens
        )
    return _spans(req_to_token, pool_rows, prefixes, counts, masks)


def _spans(
    req_to_token: torch.Tensor,
    pool_rows: list[int],
    prefixes: list[int],
    counts: list[int],
    masks: torch.Tensor | None,
) -> list[RequestSpan]:
    spans, first, mask_start = [], 0, 0
    for pool_row, prefix, rows in zip(pool_rows, prefixes, counts, strict=True):
        total = prefix + rows
        mask = None
        if masks is not None:
            mask = masks[mask_start : mask_start + rows * total].view(rows, total).bool()
            mask_start += rows * total
        slots = req_to_token[pool_row, :total].long()
        spans.append(RequestSpan(first, rows, prefix, slots, mask))
        first += rows
    return spans


def attend_request(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    span: RequestSpan,
    causal: bool,
) -> torch.Tensor:
    """Attention of one request's rows over its keys, softmax in float32.

    Args:
        queries: [rows, heads, qk_dim].
        keys: [prefix + rows, kv_heads, qk_dim].
        values: [prefix + rows, kv_heads, v_dim].
        scaling: factor of the scores.
        span: the request; its mask is used when `causal`.
        causal: whether row i sees keys up to prefix + i only (or its mask); else all.

    Returns:
        [rows, heads, v_dim], dtype of `queries`.
    """
    rows, heads, _ = queries.shape
    kv_heads = keys.shape[1]
    keys_t = keys.permute(1, 2, 0)
    values_t = values.transpose(0, 1)
    parts = []
    for start in range(0, rows, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, rows)
        visible = span.prefix + stop if causal and span.mask is None else keys.shape[0]
        block = queries[start:stop].reshape(stop - start, kv_heads, heads // kv_heads, -1)
        # [kv_heads, block * group, qk_dim]
        block = block.transpose(0, 1).reshape(kv_heads, -1, queries.shape[2])
        scores = (block @ keys_t[..., :visible]).float() * scaling
        if causal:
            allowed = _allowed(span, start, stop, visible)
            if allowed is not None:
                shaped = scores.view(kv_heads, stop - start, heads // kv_heads, visible)
                shaped.masked_fill_(~allowed[:, None, :], float("-inf"))
        weighted = scores.softmax(-1).to(queries.dtype) @ values_t[:, :visible]
        weighted = weighted.view(kv_heads, stop - start, heads // kv_heads, -1)
        parts.append(weighted.transpose(0, 1).reshape(stop - start, heads, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _allowed(span: RequestSpan, start: int, stop: int, visible: int) -> torch.Tensor | None:
    """[stop - start, visible] bool pairs, or None where every pair is allowed."""
    if span.mask is not None:
        return span.mask[start:stop]
    if stop - start == 1:
        return None
    return torch.ones(stop - start, visible, dtype=torch.bool).tril(span.prefix + start)


def _host_list(host: Any, device: torch.Tensor) -> list[int]:
    """Values as integers, from the host copy if SGLang made one."""
    if host is None:
        return device.tolist()
    return host if isinstance(host, list) else host.tolist()


def _install_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(BACKEND_NAME)(OverstoryCpuAttention)


def _backend_taken() -> bool:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS.get(BACKEND_NAME) is OverstoryCpuAttention


def _absorbed(attention: Any, forward_batch: Any) -> Any:
    """Absorbed MLA for every forward: one arithmetic for prefill, chunks, prefix hits and verify."""
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

"""Absorbed MLA attention over a paged KV cache: one latent key per slot, shared by all heads.

Keys are rows of the cache as they are (512 latent + 64 rope for DeepSeek models), values their
first `v_head_dim` columns. Two plain matmuls per request, float32 softmax (float64 for float64
queries), the shared head never expanded.
"""

from __future__ import annotations

import itertools

import torch

from .kv_fp8 import dequantize_kv, is_fp8

_BLOCK = 128
"""Query rows at a time, so that a prefill's scores stay small."""


def verify_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    *,
    scale: float,
    v_head_dim: int = 512,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    kv_scale: float = 1.0,
    kv_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each request's rows to its prefix and to its own rows (the tail).

    Serves tree verify (with a mask), chain verify and prefill (causal), and blocks without
    order (`causal=False`). The tail's keys are in the cache already, at `out_cache_loc`.

    Args:
        q: [tokens, heads, D] float, requests after one another.
        kv: [slots, 1, D] (or [slots, D]), the cache: float, or e4m3 (`kv_fp8`).
        qo_indptr: [bs + 1] int: request b has rows qo_indptr[b] .. qo_indptr[b + 1] - 1.
        kv_indptr: [bs + 1] int: its prefix is kv_indices[kv_indptr[b] : kv_indptr[b + 1]].
        kv_indices: [>= kv_indptr[-1]] int, slots of the prefixes, without the tail.
        out_cache_loc: [tokens] int, slot of each row.
        custom_mask: flat bool in FULL_MASK layout (`mask.full_mask`): request b begins at
            mask_indptr[b] and has rows of prefix + tail columns. Only the tail columns are read:
            the prefix is visible to all rows. None: see `causal`.
        mask_indptr: [>= bs] int, required with `custom_mask`.
        scale: factor of the scores.
        v_head_dim: leading columns of a cache row that are its value.
        causal: without a mask, row i sees tail rows 0..i (True) or all of them (False).
        lse: [tokens, heads] float, receives the log-sum-exp of the scaled scores (natural
            logarithm) where given.
        kv_scale: of an e4m3 cache: its numbers times this are keys and values, of prefix and tail
            alike (SGLang's Triton kernel takes the tail's keys before they are rounded).
        kv_ends: [bs] int like kv_indptr, which then needs no last element: the prefix of request b
            is kv_indices[kv_indptr[b] : kv_ends[b]], and prefixes may overlap.

    Returns:
        [tokens, heads, v_head_dim] in q's dtype. A row that sees nothing gives 0 (lse -inf).
        What a row does not see has no influence: NaN there does not reach its output.

    Raises:
        ValueError: `custom_mask` without `mask_indptr` or the reverse, or too short a mask; a
            `kv_scale` that is no positive number, or one for a cache without scale.
    """
    if (custom_mask is None) != (mask_indptr is None):
        raise ValueError("custom_mask and mask_indptr go together")
    cache = kv.view(kv.shape[0], kv.shape[-1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], v_head_dim)
    rows_of, begins = qo_indptr.tolist(), kv_indptr.tolist()
    ends = begins[1:] if kv_ends is None else kv_ends.tolist()
    masks_of = [] if mask_indptr is None else mask_indptr.tolist()
    for b, (first, end) in enumerate(itertools.pairwise(rows_of)):
        n, prefix = end - first, ends[b] - begins[b]
        slots = torch.cat((kv_indices[begins[b] : ends[b]], out_cache_loc[first:end]))
        keys = _gather(cache, slots, dtype, kv_scale)
        for start in range(0, n, _BLOCK):
            stop = min(start + _BLOCK, n)
            rows = slice(first + start, first + stop)
            if custom_mask is not None:
                tail = _tail_of_mask(custom_mask, masks_of[b], n, prefix)[start:stop]
                seen = keys
            elif causal:
                tail = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).tril(start)
                seen = keys[: prefix + stop]
            else:
                tail, seen = None, keys
            _attend(q[rows], seen, tail, scale, out[rows], _part(lse, rows))
    return out


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    scale: float,
    v_head_dim: int = 512,
    lse: torch.Tensor | None = None,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """Plain decoding: one row per request, which sees all of the request's slots.

    Args:
        q: [bs, heads, D] float.
        kv: [slots, 1, D] (or [slots, D]), the cache: float, or e4m3 (`kv_fp8`).
        kv_indptr: [bs + 1] int: request b sees kv_indices[kv_indptr[b] : kv_indptr[b + 1]].
        kv_indices: [>= kv_indptr[-1]] int, slots, the row's own included.
        scale, v_head_dim, lse, kv_scale: as for `verify_attention`.

    Returns:
        [bs, heads, v_head_dim] in q's dtype; a request without slots gives 0 (lse -inf).
    """
    cache = kv.view(kv.shape[0], kv.shape[-1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], v_head_dim)
    bounds = kv_indptr.tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        keys = _gather(cache, kv_indices[begin:end], dtype, kv_scale)
        row = slice(b, b + 1)
        _attend(q[row], keys, None, scale, out[row], _part(lse, row))
    return out


def _gather(
    cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, kv_scale: float
) -> torch.Tensor:
    """[len(slots), D] keys."""
    rows = cache.index_select(0, slots)
    if is_fp8(cache):
        return dequantize_kv(rows, kv_scale, dtype)
    if kv_scale != 1.0:
        raise ValueError(f"kv_scale is {kv_scale}, but the cache is {cache.dtype}; want 1")
    return rows.to(dtype)


def _part(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[rows]


def _tail_of_mask(custom_mask: torch.Tensor, begin: int, n: int, prefix: int) -> torch.Tensor:
    size = n * (prefix + n)
    if begin + size > custom_mask.numel():
        raise ValueError(
            f"custom_mask has {custom_mask.numel()} elements; a request of {n} rows and "
            f"{prefix} prefix slots that begins at {begin} needs {begin + size}"
        )
    return custom_mask[begin : begin + size].view(n, prefix + n)[:, prefix:]


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    tail: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Rows q [m, heads, D] over keys [s, D] into `out` and `lse`.

    `tail` [m, t] bool masks the last t keys; all rows see those before.
    """
    m, heads, width = q.shape
    count, values = keys.shape[0], keys[:, : out.shape[-1]]
    masked = 0 if tail is None else tail.shape[1]
    # 0 * NaN is NaN: a masked key that is not finite must stay out of the second matmul.
    if tail is not None and not bool(torch.isfinite(keys[count - masked :].sum())):
        for i in range(m):
            visible = torch.cat((tail.new_ones(count - masked), tail[i]))
            row = slice(i, i + 1)
            _attend(q[row], keys[visible], None, scale, out[row], _part(lse, row))
        return
    scores = (q.to(keys.dtype).reshape(m * heads, width) * scale) @ keys.T
    if tail is not None:
        by_row = scores.view(m, heads, count)[:, :, count - masked :]
        by_row.masked_fill_(~tail.unsqueeze(1), -torch.inf)
    if lse is not None:
        lse.copy_(torch.logsumexp(scores, dim=1).view(m, heads))
    weights = torch.softmax(scores, dim=1)
    if tail is not None and masked == count:
        weights.view(m, heads, count)[~tail.any(dim=1)] = 0.0
    out.copy_((weights @ values).view(m, heads, -1))

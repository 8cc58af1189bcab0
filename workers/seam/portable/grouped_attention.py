"""Attention with several key heads (MHA, GQA) over a paged cache, for the drafter on a CPU."""

from __future__ import annotations

import torch

_BLOCK = 128
"""Query rows at a time, so that a prefill's scores stay small."""


def block_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    prefixes: list[int],
    counts: list[int],
    slots: list[torch.Tensor],
    *,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each request's rows to its prefix and to its own rows.

    Args:
        q: [rows, heads, d], requests after one another.
        keys: [slots, kv_heads, d] cache; the own rows are in it already.
        values: [slots, kv_heads, dv] cache.
        prefixes: keys per request before its first row.
        counts: rows per request.
        slots: per request, [prefix + count] int64.
        scale: factor of the scores.
        causal: row i sees own rows 0..i; else all of them.
        mask: flat bool, per request count x (prefix + count), in place of the causal one.

    Returns:
        [rows, heads, dv] in q's dtype.
    """
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[-1])
    first = mask_first = 0
    for prefix, count, own in zip(prefixes, counts, slots, strict=True):
        request_keys = keys.index_select(0, own).to(q.dtype).permute(1, 2, 0)
        request_values = values.index_select(0, own).to(q.dtype).transpose(0, 1)
        allowed = _allowed(prefix, count, causal, mask, mask_first)
        for start in range(0, count, _BLOCK):
            stop = min(start + _BLOCK, count)
            rows = slice(first + start, first + stop)
            seen = None if allowed is None else allowed[start:stop]
            out[rows] = _attend(q[rows], request_keys, request_values, seen, scale)
        first += count
        mask_first += count * (prefix + count)
    return out


def _allowed(
    prefix: int, count: int, causal: bool, mask: torch.Tensor | None, mask_first: int
) -> torch.Tensor | None:
    """[count, prefix + count] bool pairs, or None where all are allowed."""
    total = prefix + count
    if mask is not None:
        return mask[mask_first : mask_first + count * total].view(count, total)
    if not causal or count == 1:
        return None
    return torch.ones(count, total, dtype=torch.bool).tril(prefix)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """q [m, heads, d] over keys [kv_heads, d, s] and values [kv_heads, s, dv]."""
    m, heads, width = q.shape
    kv_heads = keys.shape[0]
    by_head = q.view(m, kv_heads, heads // kv_heads, width).transpose(0, 1)
    scores = (by_head.reshape(kv_heads, -1, width) @ keys).float() * scale
    if allowed is not None:
        shaped = scores.view(kv_heads, m, heads // kv_heads, -1)
        shaped.masked_fill_(~allowed[:, None, :], float("-inf"))
    weighted = scores.softmax(-1).to(q.dtype) @ values
    return weighted.view(kv_heads, m, heads // kv_heads, -1).transpose(0, 1).flatten(1, 2)

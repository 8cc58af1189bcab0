"""Attention with several key heads against torch's own, request by request."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from overstory.workers.seam.portable.grouped_attention import block_attention


def _inputs(
    heads: int, kv_heads: int, prefixes: list[int], counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(heads + sum(prefixes))
    keys, values = torch.randn(400, kv_heads, 8), torch.randn(400, kv_heads, 6)
    sizes = [p + n for p, n in zip(prefixes, counts, strict=True)]
    slots = list(torch.randperm(400)[: sum(sizes)].split(sizes))
    return torch.randn(sum(counts), heads, 8), keys, values, slots


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("kind", ["causal", "all", "mask"])
@pytest.mark.parametrize(
    ("prefixes", "counts"), [([0], [5]), ([7, 0, 31], [8, 8, 8]), ([3], [140])]
)
def test_against_torch(
    heads: int, kv_heads: int, kind: str, prefixes: list[int], counts: list[int]
) -> None:
    q, keys, values, slots = _inputs(heads, kv_heads, prefixes, counts)
    masks = []
    for prefix, count in zip(prefixes, counts, strict=True):
        causal = torch.ones(count, prefix + count, dtype=torch.bool).tril(prefix)
        masks.append(
            {
                "causal": causal,
                "all": torch.ones_like(causal),
                "mask": causal & (torch.rand(causal.shape) < 0.7) | causal.triu(prefix),
            }[kind]
        )
    got = block_attention(
        q,
        keys,
        values,
        prefixes,
        counts,
        slots,
        scale=0.3,
        causal=kind != "all",
        mask=torch.cat([m.flatten() for m in masks]) if kind == "mask" else None,
    )
    first = 0
    for mask, count, own in zip(masks, counts, slots, strict=True):
        rows = slice(first, first + count)
        want = scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            keys[own].transpose(0, 1)[None],
            values[own].transpose(0, 1)[None],
            attn_mask=mask,
            scale=0.3,
            enable_gqa=heads != kv_heads,
        )
        torch.testing.assert_close(got[rows], want[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
        first += count

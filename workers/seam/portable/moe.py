"""Mixture-of-experts layer in plain torch, for few rows on a CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn import functional as F


def moe_forward(
    layer: torch.nn.Module, x: torch.Tensor, topk_output: Any, moe_runner_config: Any
) -> torch.Tensor:
    """Stands in for SGLang's `moe_forward_native`, which builds a module and copies per expert.

    Args:
        layer: has `w13_weight` [experts, 2*width, hidden], `w2_weight` [experts, hidden, width].
        x: [rows, hidden].
        topk_output: (weights [rows, k] float, expert ids [rows, k], router logits).
        moe_runner_config: SGLang's; only the SiLU-gated form without router weights on the input.

    Returns:
        [rows, hidden], dtype of `x`.

    Raises:
        NotImplementedError: another activation, biases, or router weights on the input.
    """
    _refuse_unsupported(layer, moe_runner_config)
    weights, ids, _ = topk_output
    return routed_experts(x, layer.w13_weight, layer.w2_weight, weights, ids)


def routed_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Sum over each row's chosen experts of weight * w2(silu(gate) * up).

    Only experts that some row chose are touched, each with two matmuls over just its rows; the rest
    is done once for all. The sum is in float32 at least.

    Args:
        x: [rows, hidden].
        w13: [experts, 2*width, hidden], gate rows first.
        w2: [experts, hidden, width].
        weights: [rows, k].
        ids: [rows, k] integer.

    Returns:
        [rows, hidden], dtype of `x`.
    """
    dtype = torch.promote_types(x.dtype, weights.dtype)
    if x.shape[0] == 1:
        return _one_row(x, w13, w2, weights.to(dtype), ids).to(x.dtype)
    return _many_rows(x, w13, w2, weights.to(dtype), ids).to(x.dtype)


def _one_row(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """The plain decode step: no sorting."""
    total = torch.zeros(x.shape, dtype=weights.dtype)
    for place, expert in enumerate(ids[0].tolist()):
        gate, up = F.linear(x, w13[expert]).chunk(2, dim=-1)
        total += F.linear(F.silu(gate) * up, w2[expert]) * weights[0, place]
    return total


def _many_rows(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Pairs of row and expert, sorted by expert."""
    experts = ids.flatten().tolist()
    order = torch.tensor(sorted(range(len(experts)), key=experts.__getitem__))
    touched = sorted(Counter(experts).items())
    rows = order // ids.shape[1]
    both = _by_expert(x.index_select(0, rows), w13, touched)
    gate, up = both.chunk(2, dim=-1)
    parts = _by_expert(F.silu(gate) * up, w2, touched)
    parts = parts * weights.flatten()[order].unsqueeze(1)
    return torch.zeros(x.shape, dtype=parts.dtype).index_add_(0, rows, parts)


def _by_expert(x: torch.Tensor, w: torch.Tensor, touched: list[tuple[int, int]]) -> torch.Tensor:
    """x [pairs, in] sorted by expert, times w [experts, out, in].

    `touched`: each expert and the number of its pairs.
    """
    out = x.new_empty(x.shape[0], w.shape[1])
    sizes = [count for _, count in touched]
    for (expert, _), some, place in zip(touched, x.split(sizes), out.split(sizes), strict=True):
        torch.mm(some, w[expert].t(), out=place)
    return out


def _refuse_unsupported(layer: torch.nn.Module, config: Any) -> None:
    unsupported = [
        name
        for name, present in (
            (f"activation {config.activation!r}", config.activation != "silu"),
            ("gemm1_alpha", config.gemm1_alpha is not None),
            ("apply_router_weight_on_input", config.apply_router_weight_on_input),
            ("expert biases", getattr(layer, "w13_weight_bias", None) is not None),
        )
        if present
    ]
    if unsupported:
        raise NotImplementedError(f"MoE on a plain CPU does not do {', '.join(unsupported)}")

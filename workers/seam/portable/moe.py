"""Mixture-of-experts layer in plain torch, for few rows on a CPU."""

from __future__ import annotations

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

    One pass per expert that some row chose, over just its rows. The sum is in float32 at least.

    Args:
        x: [rows, hidden].
        w13: [experts, 2*width, hidden], gate rows first.
        w2: [experts, hidden, width].
        weights: [rows, k].
        ids: [rows, k] integer.

    Returns:
        [rows, hidden], dtype of `x`.
    """
    rows, chosen = ids.shape
    total = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype))
    by_expert: dict[int, list[int]] = {}
    for position, expert in enumerate(ids.flatten().tolist()):
        by_expert.setdefault(expert, []).append(position)
    flat_weights = weights.flatten()
    for expert, positions in by_expert.items():
        if rows == 1:
            part = _expert(x, w13[expert], w2[expert]) * flat_weights[positions[0]]
            total += part
            continue
        index = torch.tensor(positions)
        row_index = index // chosen
        part = _expert(x[row_index], w13[expert], w2[expert])
        total.index_add_(0, row_index, part * flat_weights[index].unsqueeze(1))
    return total.to(x.dtype)


def _expert(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, w13).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w2)


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

"""RMS normalisation by torch's own op, where it is the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def rms_norm(
    original: Callable[..., Any],
    layer: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
) -> Any:
    """Around SGLang's `RMSNorm.forward_native`, which does with ten ops what torch does with one.

    Args:
        original: SGLang's method; called for all but plain float32 layers.
        layer: SGLang's RMSNorm: `weight`, `variance_epsilon`, `hidden_size`.
        x: [rows, hidden].
        residual: added to `x` first where given.
        post_residual_addition: as for `original`.

    Returns:
        [rows, hidden]; with a residual, a pair: the normalised and the plain sum.
    """
    plain = (
        x.dtype is torch.float32
        and layer.weight.dtype is torch.float32
        and post_residual_addition is None
        and layer.variance_size_override is None
        and x.shape[-1] == layer.hidden_size
    )
    if not plain:
        return original(layer, x, residual, post_residual_addition)
    if residual is not None:
        x = x + residual
    normalised = F.rms_norm(x, (layer.hidden_size,), layer.weight, layer.variance_epsilon)
    return normalised if residual is None else (normalised, x)

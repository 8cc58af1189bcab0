"""Layers shared by the target and the drafter: norm, rotary embedding, gated feed-forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., width]; keeps its dtype."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


def linear(width_in: int, width_out: int) -> nn.Linear:
    """A linear layer without bias."""
    return nn.Linear(width_in, width_out, bias=False)


class GatedMLP(nn.Module):
    """SiLU-gated feed-forward network."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(width, inner)
        self.up_proj = linear(width, inner)
        self.down_proj = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., width] to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_table(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `positions` [...]: two float32 tensors [..., width / 2]."""
    index = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * (1.0 / theta ** (index / width))
    return angles.cos(), angles.sin()


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs, with halves out, as DeepSeek-V3 in transformers.

    The order of the output elements does not matter as long as queries and keys agree.
    """
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the two halves (the "NeoX" style of Qwen3)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

"""The drafter: a DFlash block-diffusion model over the target's hidden states.

A block of `block_size` tokens starts with a token already chosen, followed by mask tokens. The
block sees the projected target features of all earlier positions and, both ways, itself; its row
`k` predicts the token at `k` places after the first. Embeddings and head are the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import DrafterConfig
from .layers import GatedMLP, RMSNorm, linear, rotary_table, rotate_halves

Rope = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries over keys and values, each [batch, heads, rows, head_dim]."""


def masked_attention(mask: Tensor) -> Attend:
    """Attention under a mask that broadcasts to [batch, heads, queries, keys], bool or additive."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


class BlockAttention(nn.Module):
    """Attention of block rows over context keys and the block's own keys."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, self.heads, self.head_dim = (
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
        )
        inner = self.heads * self.head_dim
        assert config.num_key_value_heads == self.heads, "grouped keys are not implemented"
        self.q_proj = linear(width, inner)
        self.k_proj = linear(width, inner)
        self.v_proj = linear(width, inner)
        self.o_proj = linear(inner, width)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim))

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, rows, head_dim] of `x` [batch, rows, hidden]."""
        k = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return rotate_halves(k, *rope), self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(
        self, x: Tensor, rope: Rope, context: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Attend from block rows `x` to `context` keys and values, then to the block itself."""
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)
        k, v = self.keys_values(x, rope)
        k, v = torch.cat([context[0], k], 2), torch.cat([context[1], v], 2)
        out = attend(rotate_halves(q, *rope), k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DrafterLayer(nn.Module):
    """One transformer layer of the drafter."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: Rope, context: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Map block rows `x` [batch, rows, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), rope, context, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class DrafterModel(nn.Module):
    """The whole drafter. Weights are drawn at random on construction (seed them outside)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = linear(config.hidden_size * len(config.target_layer_ids), config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        depth = math.sqrt(2 * config.num_hidden_layers)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                scale = depth if "o_proj" in name or "down_proj" in name else 1.0
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5 / scale)

    def rope(self, positions: Tensor) -> Rope:
        """Rotary table of `positions` [batch or 1, rows], with a dimension for the heads."""
        cos, sin = rotary_table(positions, self.config.head_dim, self.config.rope_theta)
        return cos[:, None], sin[:, None]

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Context keys and values per layer.

        `features` [batch, rows, layers * hidden] are target features at `positions`
        [batch or 1, rows].
        """
        states, rope = self.hidden_norm(self.fc(features)), self.rope(positions)
        layers = [cast(DrafterLayer, layer) for layer in self.layers]
        return [layer.self_attn.keys_values(states, rope) for layer in layers]

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context: list[tuple[Tensor, Tensor]],
        attend: Attend,
    ) -> Tensor:
        """Final states [batch, rows, hidden] of block rows.

        `embeddings` [batch, rows, hidden] are the target's embeddings of the block tokens at
        `positions` [batch, rows]; `attend` sees context keys first, then the block rows' keys.
        """
        x, rope = embeddings, self.rope(positions)
        for layer, keys_values in zip(self.layers, context, strict=True):
            x = layer(x, rope, keys_values, attend)
        return self.norm(x)

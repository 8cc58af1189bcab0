"""Target hidden states to drafter KV in few operations, on a CPU.

SGLang's DFLASH worker does this layer by layer, and fuses it by Triton on CUDA only. Here the
layers' projections are one matrix product, their norms one, their rotations one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


class StackedDrafterKv:
    """The KV projections of all drafter layers at once.

    Holds a copy of the K and V rows of each layer's fused projection (layers * 2 * kv_size *
    hidden).
    """

    def __init__(self, draft_model: Any) -> None:
        layers = [layer.self_attn for layer in draft_model.layers]
        first = layers[0]
        self._kv_heads, self._head_dim = int(first.num_kv_heads), int(first.head_dim)
        self._layers = len(layers)
        kv = slice(first.q_size, first.q_size + 2 * first.kv_size)
        self._weight = torch.cat([attention.qkv_proj.weight[kv] for attention in layers])
        self._norm = torch.stack([attention.k_norm.weight for attention in layers]).unsqueeze(1)
        self._epsilon = float(first.k_norm.variance_epsilon)
        self._rotary = first.rotary_emb

    @staticmethod
    def fits(draft_model: Any) -> bool:
        """Whether this drafter is of the plain kind that can be stacked."""
        layers = [layer.self_attn for layer in draft_model.layers]
        return bool(layers) and all(
            torch.is_floating_point(attention.qkv_proj.weight)
            and attention.qkv_proj.weight.dim() == 2
            and attention.qkv_proj.bias is None
            and getattr(draft_model, "supports_fused_context_kv", True)
            for attention in layers
        )

    def project(
        self, context: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normalised and rotated) and values of ``context`` [rows, hidden] for every layer.

        Returns:
            two tensors [layers, rows, kv_heads, head_dim].
        """
        rows = context.shape[0]
        shape = (rows, self._layers, 2, self._kv_heads, self._head_dim)
        stacked = F.linear(context, self._weight).view(shape)
        keys = F.rms_norm(stacked[:, :, 0].float(), (self._head_dim,), eps=self._epsilon)
        keys = (keys * self._norm).to(context.dtype).reshape(rows, -1)
        # The rotation wants queries as well: one head of them will do.
        unused = keys.new_empty((rows, self._head_dim))
        _, keys = self._rotary(positions, unused, keys)
        keys = keys.view(rows, self._layers, self._kv_heads, self._head_dim)
        return keys.transpose(0, 1), stacked[:, :, 1].transpose(0, 1)

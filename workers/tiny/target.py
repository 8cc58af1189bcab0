"""The target: a DeepSeek-V3-architecture language model in plain PyTorch.

One implementation serves training (`TargetModel.forward`: whole sequences, causal) and decoding
(`TargetModel.extend`: rows with explicit positions, cache slots and mask, which covers prefill,
plain steps, chains and trees).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import TargetConfig
from .layers import GatedMLP, RMSNorm, linear, rotary_table, rotate_interleaved


class MixtureOfExperts(nn.Module):
    """Top-k experts computed as one wide feed-forward network, masked by the routing weights.

    The result is that of a sparse mixture; the dense form has no gather and compiles well. Expert
    `e` owns rows `e * inner ... (e + 1) * inner` of `gate_proj` and `up_proj`, and the same columns
    of `down_proj`.
    """

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.experts = config.n_routed_experts
        self.inner = config.moe_intermediate_size
        self.chosen = config.num_experts_per_tok
        self.scale = config.routed_scaling_factor
        width, wide = config.hidden_size, self.experts * self.inner
        self.router = nn.Parameter(torch.empty(self.experts, width))
        self.register_buffer("correction", torch.zeros(self.experts))
        self.gate_proj = linear(width, wide)
        self.up_proj = linear(width, wide)
        self.down_proj = linear(wide, width)
        self.shared_experts = GatedMLP(width, self.inner * config.n_shared_experts)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routing weights [..., experts] (zero where not chosen) and the 0/1 choice, float32."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.router.float()).sigmoid()
        best = (scores + cast(Tensor, self.correction)).topk(self.chosen, -1).indices
        choice = F.one_hot(best, self.experts).sum(-2).to(scores.dtype)
        weights = scores * choice
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale, choice

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output like `x` [..., hidden], and the load [experts]: the share of rows per expert."""
        weights, choice = self.route(x)
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        inner = inner.unflatten(-1, (self.experts, self.inner)) * weights[..., None].to(inner.dtype)
        out = self.down_proj(inner.flatten(-2)) + self.shared_experts(x)
        return out, choice.flatten(0, -2).mean(0)


@dataclass
class TargetCache:
    """Expanded keys [batch, slots, heads, 96] and values [batch, slots, heads, 32], per layer."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def empty(
        cls, model: TargetModel, batch: int, slots: int, dtype: torch.dtype | None = None
    ) -> TargetCache:
        """An empty cache on the model's device, in `dtype` (the model's own if none is given)."""
        config, like = model.config, model.embed_tokens.weight

        def make(width: int) -> list[Tensor]:
            shape = (batch, slots, config.num_attention_heads, width)
            return [
                torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)
                for _ in range(config.num_hidden_layers)
            ]

        return cls(make(config.qk_head_dim), make(config.v_head_dim))


class LatentAttention(nn.Module):
    """Multi-head latent attention, in the expanded form (keys and values per head)."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.hidden_size, config.num_attention_heads
        self.q_a_proj = linear(width, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(width, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim)
        )
        self.o_proj = linear(heads * config.v_head_dim, width)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, rows, width] of `x` [batch, rows, hidden]."""
        c = self.config
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (heads, c.qk_head_dim)).transpose(1, 2)
        q = torch.cat([q[..., :nope], rotate_interleaved(q[..., nope:], *rope)], -1)
        latent, rotary = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        shared = rotate_interleaved(rotary[:, None], *rope).expand(-1, heads, -1, -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.unflatten(-1, (heads, nope + c.v_head_dim)).transpose(1, 2)
        return q, torch.cat([kv[..., :nope], shared], -1), kv[..., nope:]

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Causal attention over whole sequences `x` [batch, rows, hidden]."""
        c = self.config
        q, k, v = self.project(x, rope)
        # Values are padded to the width of the keys: fused attention kernels want them equal.
        v = F.pad(v, (0, c.qk_head_dim - c.v_head_dim))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.qk_head_dim**-0.5)
        return self.o_proj(out[..., : c.v_head_dim].transpose(1, 2).flatten(2))

    def extend(
        self, x: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, where: Where
    ) -> Tensor:
        """Attention of new rows over the cache, after writing them into it."""
        q, k, v = self.project(x, rope)
        keys[where.rows, where.slots] = k.transpose(1, 2).to(keys.dtype)
        values[where.rows, where.slots] = v.transpose(1, 2).to(values.dtype)
        span = where.mask.shape[-1]
        out = F.scaled_dot_product_attention(
            q.to(keys.dtype),
            keys[:, :span].transpose(1, 2),
            values[:, :span].transpose(1, 2),
            attn_mask=where.mask,
            scale=self.config.qk_head_dim**-0.5,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Where:
    """Where new rows go in the cache and what they may see."""

    rows: Tensor
    """Batch index [batch, 1], int64."""
    slots: Tensor
    """Cache slot of each new row [batch, n], int64."""
    mask: Tensor
    """True where a new row sees a slot [batch, 1, n, span], bool; slots past `span` are unseen."""


class TargetLayer(nn.Module):
    """One transformer layer; dense below `first_k_dense_replace`, mixture of experts above."""

    def __init__(self, config: TargetConfig, index: int) -> None:
        super().__init__()
        self.self_attn = LatentAttention(config)
        self.is_sparse = index >= config.first_k_dense_replace
        self.mlp: nn.Module = (
            MixtureOfExperts(config)
            if self.is_sparse
            else GatedMLP(config.hidden_size, config.intermediate_size)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The second half of the layer: its output, and the expert load if it has experts."""
        out = self.mlp(self.post_attention_layernorm(x))
        return (x + out[0], out[1]) if self.is_sparse else (x + out, None)


@dataclass
class TargetOutput:
    """What a forward pass over whole sequences gives."""

    hidden: Tensor
    """Final normed states [batch, rows, hidden]."""
    features: Tensor | None
    """Outputs of the asked-for layers, side by side [batch, rows, layers * hidden]."""
    loads: Tensor
    """Share of rows per expert [sparse layers, experts], float32."""


class TargetModel(nn.Module):
    """The whole target. Weights are drawn at random on construction (seed them outside)."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self._draw_weights()

    def _draw_weights(self) -> None:
        depth = math.sqrt(2 * self.config.num_hidden_layers)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            small = "embed" in name or "lm_head" in name or "router" in name
            std = 0.02 if small else weight.shape[1] ** -0.5
            if name.endswith("mlp.down_proj.weight") and weight.shape[1] > 512:
                std = self.config.moe_intermediate_size**-0.5
            if "o_proj" in name or "down_proj" in name:
                std /= depth
            nn.init.normal_(weight, std=std)

    @property
    def sparse_layers(self) -> list[MixtureOfExperts]:
        """The mixtures of experts, from the first layer up."""
        layers = [cast(TargetLayer, layer) for layer in self.layers]
        return [cast(MixtureOfExperts, layer.mlp) for layer in layers if layer.is_sparse]

    def _embed(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        return x.to(torch.get_autocast_dtype(x.device.type)) if _autocasting(x) else x

    def forward(self, ids: Tensor, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        """Run whole sequences `ids` [batch, rows], causally, from position 0."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        rope = rotary_table(positions, self.config.qk_rope_head_dim, self.config.rope_theta)
        x, loads, features = self._embed(ids), [], []
        for i, module in enumerate(self.layers):
            layer = cast(TargetLayer, module)
            x, load = layer.feed_forward(x + layer.self_attn(layer.input_layernorm(x), rope))
            if load is not None:
                loads.append(load)
            if i in feature_layers:
                features.append(x)
        return TargetOutput(
            self.norm(x), torch.cat(features, -1) if features else None, torch.stack(loads)
        )

    def extend(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: TargetCache,
        slots: Tensor,
        mask: Tensor,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run new rows against the cache, writing their keys and values at `slots`.

        `ids`, `positions` (rotary) and `slots` are [batch, n] int64; `mask` [batch, n, span] bool
        is true where a row sees a slot, itself included. Returns logits [batch, n, vocab] and the
        features [batch, n, layers * hidden] of the asked-for layers.
        """
        cos, sin = rotary_table(positions, self.config.qk_rope_head_dim, self.config.rope_theta)
        rope = (cos[:, None], sin[:, None])
        batch = torch.arange(ids.shape[0], device=ids.device)[:, None]
        where = Where(batch, slots, mask[:, None])
        x, features = self._embed(ids), []
        for i, module in enumerate(self.layers):
            layer = cast(TargetLayer, module)
            normed = layer.input_layernorm(x)
            x = x + layer.self_attn.extend(normed, rope, cache.keys[i], cache.values[i], where)
            x, _ = layer.feed_forward(x)
            if i in feature_layers:
                features.append(x)
        logits = self.lm_head(self.norm(x))
        return logits, torch.cat(features, -1) if features else None


def _autocasting(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)

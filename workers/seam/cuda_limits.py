"""Which models the attention kernels serve, and how much scratch they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from overstory.kernels.ops.attention import MAX_ROWS, attention_workspace
from overstory.kernels.ops.attention_checks import HEADS, VALUES, WIDTH

__all__ = ["CACHES", "MAX_ROWS", "AttentionShape", "attention_shape"]

CACHES = (torch.bfloat16, torch.float8_e4m3fn)
"""Types of a KV cache that the kernels read."""


@dataclass(frozen=True)
class AttentionShape:
    """What is fixed for the attention of one engine.

    Attributes:
        heads: of one rank.
        max_rows: most rows of a request in a verify forward; 1 without speculation.
    """

    heads: int
    max_rows: int

    def workspace(self, device: torch.device) -> torch.Tensor:
        """Scratch for forwards of any number of rows, one forward at a time: extends have as many
        as the kernel takes.

        Which number needs most is up to the kernel's tiles: all are asked.
        """
        largest = attention_workspace(device, self.heads, 1)
        for rows in range(2, MAX_ROWS + 1):
            other = attention_workspace(device, self.heads, rows)
            largest = other if other.numel() > largest.numel() else largest
        return largest


def attention_shape(model_runner: Any) -> AttentionShape:
    """The shape of the engine of ``model_runner``.

    Raises:
        ValueError: a model or cache that the kernels are not made for; names it and the way out.
    """
    config, arguments = model_runner.model_config, model_runner.server_args
    instead = "use attention_backend=triton"
    if not model_runner.use_mla_backend:
        raise ValueError(f"attention_backend=overstory is for MLA models: {instead} for this one")
    widths = (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank)
    if widths != (WIDTH, VALUES):
        raise ValueError(
            f"attention_backend=overstory is made for keys of {WIDTH} and values of {VALUES} "
            f"columns, this model has {widths[0]} and {widths[1]}: {instead}"
        )
    heads = int(config.num_attention_heads) // int(arguments.tp_size)
    if heads not in HEADS:
        raise ValueError(
            f"attention_backend=overstory is made for {HEADS} heads per rank, this engine has "
            f"{heads}: choose another tp_size or {instead}"
        )
    cache = model_runner.token_to_kv_pool.dtype
    if model_runner.dtype != torch.bfloat16 or cache not in CACHES:
        raise ValueError(
            f"attention_backend=overstory computes in bfloat16, got dtype {model_runner.dtype} "
            f"and a KV cache of {cache}: set dtype to bfloat16 and kv_cache_dtype to bfloat16 or "
            f"fp8_e4m3, or {instead}"
        )
    return AttentionShape(heads, int(arguments.speculative_num_draft_tokens or 1))

"""Bytes of a weight, read from a checkpoint's `quantization_config`. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Modules that stand for their kind: whether a scheme leaves them out is asked by name.
_PROBES = {
    "experts": "model.layers.1.mlp.experts.0.down_proj",
    "attention": "model.layers.1.self_attn.o_proj",
    "shared": "model.layers.1.mlp.shared_experts.down_proj",
    "dense": "model.layers.0.mlp.down_proj",
}
_FOUR_BITS = 0.5 + 2.0 / 32


@dataclass(frozen=True)
class WeightWidths:
    """Bytes per element, scales included, of each kind of linear layer.

    Embeddings, head, norms and router are in the checkpoint's own type under every scheme read
    here.
    """

    experts: float
    attention: float
    shared: float
    dense: float


def _left_out(name: str, ignore: object) -> bool:
    for entry in ignore if isinstance(ignore, list | tuple) else ():
        text = str(entry)
        if text.startswith("re:") and re.match(text[3:], name):
            return True
        if text == name or name.startswith(text + "."):
            return True
    return False


def _packed_width(quantization: Mapping[str, Any]) -> float:
    """`compressed-tensors`: bits of a weight and a 2-byte scale for each group."""
    groups = quantization.get("config_groups") or {}
    given = [group["weights"] for group in groups.values() if group.get("weights")]
    weights: Mapping[str, Any] = given[0] if given else {}
    bits, group = weights.get("num_bits", 4), weights.get("group_size")
    return bits / 8 + (2.0 / group if group and group > 0 else 0.0)


def packed_integers(quantization: Mapping[str, Any]) -> bool:
    """Whether experts are packed integers with activations as they are (W4A16 and the like)."""
    groups = [group for group in (quantization.get("config_groups") or {}).values() if group]
    return quantization.get("quant_method") == "compressed-tensors" and any(
        (group.get("weights") or {}).get("type") == "int" and not group.get("input_activations")
        for group in groups
    )


def weight_widths(quantization: Mapping[str, Any], plain: float) -> WeightWidths:
    """Widths under a scheme; `plain` bytes where nothing is quantised.

    `fp8` in blocks keeps a 4-byte scale for each. `compressed-tensors` says itself which layers it
    leaves out. Any other scheme counts as 4-bit experts in groups of 32 with the rest plain, the
    form in which models of this shape are published.
    """
    method = str(quantization.get("quant_method", ""))
    if not quantization:
        return WeightWidths(plain, plain, plain, plain)
    if "fp8" in method:
        rows, columns = quantization.get("weight_block_size") or (0, 0)
        width = 1.0 + (4.0 / (rows * columns) if rows and columns else 0.0)
        return WeightWidths(width, width, width, width)
    if method == "compressed-tensors":
        width, ignore = _packed_width(quantization), quantization.get("ignore")
        return WeightWidths(
            **{kind: plain if _left_out(name, ignore) else width for kind, name in _PROBES.items()}
        )
    return WeightWidths(_FOUR_BITS, plain, plain, plain)

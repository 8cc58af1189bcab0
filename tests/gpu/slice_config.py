"""Configs of one tensor-parallel rank of a published model, as a model of its own. Pure.

A rank of n holds 1/n of the heads, of every expert's and MLP's width, and of the vocabulary; the
hidden size, the latent KV and the number of experts stay. A checkpoint-free engine of TP 1 with
such a config therefore runs the rank's shapes; what it lacks is the exchange between ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parents[2] / "orchestrator" / "published_models"

_SPLIT = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
"""Sizes of which a rank has its part."""

# What the published files leave out. None of it changes the shape of a launch.
_TARGET_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rope_interleave": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
}
_DRAFTER_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
}


def published(name: str) -> dict[str, Any]:
    """The text config of a file of `orchestrator/published_models`."""
    config: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text())["config"]
    return dict(config.get("text_config", config))


def toy() -> tuple[dict[str, Any], dict[str, Any]]:
    """A pair of the same kinds at sizes that a CPU runs; two ranks can share it."""
    target = published("kimi-k2.6") | {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "max_position_embeddings": 8192,
    }
    drafter = published("kimi-k2.6-dflash") | {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_target_layers": 5,
        "max_position_embeddings": 8192,
    }
    return target, drafter


def rank_target(
    config: dict[str, Any], ranks: int, layers: int | None = None, quantised: bool = True
) -> dict[str, Any]:
    """The target as one of ``ranks`` tensor-parallel ranks holds it.

    Args:
        config: of the whole model.
        layers: how many of them to keep; None keeps all.
        quantised: keep the INT4 experts; else all weights are bf16.

    Raises:
        ValueError: a size that does not divide by ``ranks``.
    """
    made = _TARGET_DEFAULTS | {k: v for k, v in config.items() if k != "quantization_config"}
    for name in _SPLIT:
        made[name] = _part(config, name, ranks)
    made["num_key_value_heads"] = made["num_attention_heads"]
    made["num_hidden_layers"] = layers or config["num_hidden_layers"]
    made["architectures"], made["model_type"] = ["DeepseekV3ForCausalLM"], "deepseek_v3"
    made["dtype"] = made["torch_dtype"] = "bfloat16"
    length = config["max_position_embeddings"]
    made["rope_scaling"] = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": length,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    if quantised:
        made["quantization_config"] = config["quantization_config"]
    return made


def rank_drafter(config: dict[str, Any], target: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The drafter as one rank holds it, for a target of `rank_target`.

    Args:
        config: of the whole drafter.
        target: its layers may be fewer than those of the whole; the layers that the drafter reads
            are then spread over those that are there.
    """
    made = _DRAFTER_DEFAULTS | config
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        made[name] = _part(config, name, ranks)
    readable = target["num_hidden_layers"] - 1  # SGLang captures all but the last
    wanted = [i for i in config["dflash_config"]["target_layer_ids"] if i < readable]
    if len(wanted) < len(config["dflash_config"]["target_layer_ids"]):
        wanted = list(range(readable))[: len(config["dflash_config"]["target_layer_ids"])]
    made["dflash_config"] = {
        "target_layer_ids": wanted,
        "mask_token_id": min(2, made["vocab_size"] - 1),
        "mask_token": "<|mask|>",
    }
    made["num_target_layers"] = target["num_hidden_layers"]
    made["layer_types"] = ["full_attention"] * made["num_hidden_layers"]
    made["max_window_layers"] = made["num_hidden_layers"]
    made["tie_word_embeddings"] = False
    made["torch_dtype"] = "bfloat16"
    return made


def write_pair(folder: Path, target: dict[str, Any], drafter: dict[str, Any]) -> tuple[str, str]:
    """Writes both configs; returns the folders to start an engine with (``load_format=dummy``)."""
    made = []
    for name, config in (("target", target), ("drafter", drafter)):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(config))
        made.append(str(place))
    return made[0], made[1]


def _part(config: dict[str, Any], name: str, ranks: int) -> int:
    whole = int(config[name])
    if whole % ranks:
        raise ValueError(f"{name}={whole} cannot be shared by {ranks} ranks")
    return whole // ranks

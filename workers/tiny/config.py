"""Architectures of the built-in pair, as Hugging Face configurations.

The target is DeepSeek-V3 in small: MLA with the real latent sizes (kv_lora_rank 512, rope 64), one
dense layer, then mixture-of-experts layers with a shared expert and sigmoid routing. The drafter is
a DFlash block-diffusion model on the target's hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

BOS, EOS, MASK, USER, ASSISTANT = range(5)
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|mask|>", "<|user|>", "<|assistant|>")
"""Special tokens in the order of their ids (`BOS` ... `ASSISTANT`)."""

MAX_POSITIONS = 8192


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of the target; field names are those of `DeepseekV3Config`."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    n_shared_experts: int = 1
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    kv_lora_rank: int = 512
    q_lora_rank: int = 128
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 32
    v_head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head, in elements."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> TargetConfig:
        """Read the sizes out of a `config.json`; keys that the model does not use are ignored."""
        rope = config.get("rope_parameters") or {}
        known = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        known |= {f.name: config[f.name] for f in fields(cls) if f.name in config}
        return cls(**known)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers and SGLang read.

        The rope scaling is YaRN with factor 1, which is plain rope: SGLang's CPU engine insists on
        a scaling for MLA models.
        """
        sizes = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **sizes,
            "num_key_value_heads": self.num_attention_heads,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITIONS,
            "rope_interleave": True,
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": MAX_POSITIONS,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": None,
            "pretraining_tp": 1,
            "use_cache": True,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of the drafter; field names are those of SGLang's `DFlashDraftModel` configuration.

    `target_layer_ids` are the target layers whose outputs feed the drafter. The last target layer
    cannot be among them: SGLang captures "before layer id + 1".
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    block_size: int = 8
    num_target_layers: int = 4
    target_layer_ids: tuple[int, ...] = (0, 1, 2)
    mask_token_id: int = MASK

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DrafterConfig:
        """Read the sizes out of a `config.json`; keys that the model does not use are ignored."""
        rope = config.get("rope_parameters") or {}
        known = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        merged = config | config.get("dflash_config", {})
        known |= {f.name: merged[f.name] for f in fields(cls) if f.name in merged}
        known["target_layer_ids"] = tuple(known["target_layer_ids"])
        return cls(**known)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that SGLang's `DFlashDraftModel` reads."""
        nested = ("target_layer_ids", "mask_token_id")
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in nested}
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **sizes,
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
                "mask_token": SPECIAL_TOKENS[self.mask_token_id],
            },
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITIONS,
            "rope_scaling": None,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_hidden_layers,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "use_cache": True,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }

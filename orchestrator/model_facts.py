"""What planning needs to know of a model and its drafter, read from their `config.json`."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overstory.orchestrator.errors import UserFault

_DFLASH_ARCHITECTURE = "DFlashDraftModel"
# SGLang's own, where a DFlash config names none.
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_POSITIONS = 32768


class PlanError(UserFault, ValueError):
    """A deployment that cannot run as written. `problems` has one line for each fault."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True)
class TargetFacts:
    """An MLA + MoE target (DeepSeek-V3-shaped). Sizes in elements, not bytes."""

    path: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    """0 where queries are projected in one step."""
    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    dense_layers: int
    dense_width: int
    routed_experts: int
    shared_experts: int
    expert_width: int
    tied_head: bool
    max_positions: int
    dtype: str
    quantization: Mapping[str, Any]
    experts_per_token: int = 0
    vision_elements: int = 0
    """Weights of a multimodal model's vision tower and projector."""
    vision_attention: int = 0
    """Those of them that are the tower's attention."""
    vision_layers: int = 0
    vision_hidden: int = 0

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_layers - self.dense_layers


@dataclass(frozen=True)
class DrafterFacts:
    """A DFlash drafter. Sizes in elements, not bytes."""

    path: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    block_size: int
    num_target_layers: int | None
    target_layer_ids: tuple[int, ...]
    mask_token_id: int | None
    max_positions: int = 0


def _read_config(key: str, path: str) -> dict[str, Any]:
    folder = Path(path)
    if not folder.is_dir():
        raise PlanError(
            f"{key}: no folder {path!r}; give a built-in name or a folder in Hugging Face format "
            "(download a hub model first, on every node)"
        )
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise PlanError(f"{key}: {file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise PlanError(f"{key}: {file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{key}: {file} holds {type(config).__name__}, wanted an object")
    return config


def _reader(key: str, path: str, config: Mapping[str, Any]) -> Callable[..., int]:
    """A function that takes a whole number out of `config`, or says which one is not there."""

    def read(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise PlanError(
                f"{key}: {path}/config.json: {name} is {config.get(name)!r}, wanted a whole number"
            )
        return value

    return read


def _vision_elements(vision: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of a MoonViT tower with its patch merger, the one kind that MLA models come with; of
    these, those of its attention."""
    hidden, width = vision.get("vt_hidden_size"), vision.get("vt_intermediate_size")
    if not hidden or not width:
        return 0, 0
    attention = vision["vt_num_hidden_layers"] * 4 * hidden * hidden
    layers = attention + vision["vt_num_hidden_layers"] * 2 * hidden * width
    patches = hidden * (
        3 * vision["patch_size"] ** 2 + vision["init_pos_emb_height"] * vision["init_pos_emb_width"]
    )
    down, right = vision["merge_kernel_size"]
    merged = vision["mm_hidden_size"] * down * right
    whole = layers + patches + merged * merged + merged * vision["text_hidden_size"]
    return whole, attention


def read_target(path: str) -> TargetFacts:
    """Facts of the target in folder `path`; see `target_from_config`.

    Raises:
        PlanError: no such folder, no readable config, or not an MLA model.
    """
    return target_from_config(path, _read_config("model", path))


def target_from_config(path: str, config: Mapping[str, Any]) -> TargetFacts:
    """Facts of a target from its `config.json`; `path` is where it lies or would lie.

    A multimodal model's language part (`text_config`) is taken.

    Raises:
        PlanError: not an MLA model, or a number is missing.
    """
    if _DFLASH_ARCHITECTURE in (config.get("architectures") or []):
        raise PlanError(f"model: {path!r} is a DFlash drafter; name it under `drafter`")
    outer, config = config, config.get("text_config") or config
    if not config.get("kv_lora_rank"):
        raise PlanError(
            f"model: {path!r} ({', '.join(outer.get('architectures') or ['unknown'])}) has no "
            "kv_lora_rank: Overstory serves MLA models (DeepSeek-V3-shaped)"
        )
    read = _reader("model", path, config)
    layers = read("num_hidden_layers")
    experts = read("n_routed_experts", 0)
    tower = outer.get("vision_config") or {}
    vision, vision_attention = _vision_elements(tower)
    return TargetFacts(
        path=path,
        vocab_size=read("vocab_size"),
        hidden_size=read("hidden_size"),
        num_layers=layers,
        num_heads=read("num_attention_heads"),
        q_lora_rank=read("q_lora_rank", 0),
        kv_lora_rank=read("kv_lora_rank"),
        rope_dim=read("qk_rope_head_dim"),
        nope_dim=read("qk_nope_head_dim"),
        value_dim=read("v_head_dim"),
        dense_layers=min(layers, read("first_k_dense_replace", 0)) if experts else layers,
        dense_width=read("intermediate_size"),
        routed_experts=experts,
        shared_experts=read("n_shared_experts", 0),
        expert_width=read("moe_intermediate_size", 0),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        max_positions=read("max_position_embeddings"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or outer.get("dtype")),
        quantization=config.get("quantization_config") or outer.get("quantization_config") or {},
        experts_per_token=read("num_experts_per_tok", 0),
        vision_elements=vision,
        vision_attention=vision_attention,
        vision_layers=tower.get("vt_num_hidden_layers", 0) if vision else 0,
        vision_hidden=tower.get("vt_hidden_size", 0) if vision else 0,
    )


def read_drafter(path: str) -> DrafterFacts:
    """Facts of the DFlash drafter in folder `path`.

    Raises:
        PlanError: no such folder, no readable config, or not a DFlash drafter.
    """
    return drafter_from_config(path, _read_config("drafter", path))


def drafter_from_config(path: str, config: Mapping[str, Any]) -> DrafterFacts:
    """Facts of a DFlash drafter from its `config.json`; `path` is where it lies or would lie.

    Raises:
        PlanError: not a DFlash drafter, or a number is missing.
    """
    architectures = config.get("architectures") or []
    if _DFLASH_ARCHITECTURE not in architectures:
        raise PlanError(
            f"drafter: {path!r} is {', '.join(architectures) or 'of no known architecture'}, "
            f"wanted {_DFLASH_ARCHITECTURE} (a DFlash drafter trained for this model)"
        )
    # dflash_config wins over the top level, as in SGLang's own reading.
    dflash = config.get("dflash_config") or {}
    read = _reader("drafter", path, {**config, **dflash})
    layers, heads = read("num_hidden_layers"), read("num_attention_heads")
    merged = {**config, **dflash}
    targets = merged.get("num_target_layers")
    block_size = read("block_size", _DEFAULT_BLOCK_SIZE)
    if block_size < 2:
        raise PlanError(f"drafter: {path!r}: block_size is {block_size}, wanted at least 2")
    ids = merged.get("target_layer_ids")
    return DrafterFacts(
        path=path,
        vocab_size=read("vocab_size"),
        hidden_size=read("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read("num_key_value_heads", heads),
        head_dim=read("head_dim", read("hidden_size") // max(heads, 1)),
        mlp_width=read("intermediate_size"),
        block_size=block_size,
        num_target_layers=None if targets is None else read("num_target_layers"),
        target_layer_ids=tuple(ids or ()),
        mask_token_id=merged.get("mask_token_id"),
        max_positions=read("max_position_embeddings", _DEFAULT_POSITIONS),
    )

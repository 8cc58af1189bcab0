"""What a drafter's checkpoint says about itself, and whether it fits its target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class DrafterConfig:
    """The part of a DFlash drafter's config that DDTREE depends on.

    Attributes:
        block_size: positions per draft block, root included.
        vocab_size, hidden_size: must equal the target's: its embedding and head are used.
        mask_token_id: id that stands for a position to be drafted.
        target_layer_ids: target layers whose hidden states the drafter reads.
    """

    block_size: int
    vocab_size: int
    hidden_size: int
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...]


def read_drafter(path: str) -> DrafterConfig:
    """Config of the drafter in a local folder or on the Hugging Face hub.

    Raises:
        ValueError: not found, not a DFlash drafter, or a field is missing.
    """
    config = _read_config(path, "speculative_draft_model_path")
    if ARCHITECTURE not in config.get("architectures", []):
        raise ValueError(
            f"speculative_draft_model_path {path!r} holds {config.get('architectures')}, "
            f"DDTREE needs a DFlash drafter ({ARCHITECTURE})"
        )
    dflash = config.get("dflash_config") or {}
    block_size = dflash.get("block_size", config.get("block_size"))
    if not isinstance(block_size, int) or block_size < 2:
        raise ValueError(
            f"the drafter at {path!r} states block_size {block_size!r}; it must be 2 or more"
        )
    return DrafterConfig(
        block_size=block_size,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        mask_token_id=dflash.get("mask_token_id"),
        target_layer_ids=tuple(dflash.get("target_layer_ids") or ()),
    )


def check_pair(drafter: DrafterConfig, target_path: str) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        ValueError: names the sizes that differ.
    """
    target = _read_config(target_path, "model_path")
    target = target.get("text_config") or target
    for name, drafted in (
        ("vocab_size", drafter.vocab_size),
        ("hidden_size", drafter.hidden_size),
    ):
        expected = int(target[name])
        if drafted != expected:
            raise ValueError(
                f"the drafter's {name} is {drafted}, that of the target {target_path!r} is "
                f"{expected}: use the drafter that was trained for this target"
            )
    if drafter.mask_token_id is not None and not 0 <= drafter.mask_token_id < drafter.vocab_size:
        raise ValueError(
            f"the drafter's mask_token_id {drafter.mask_token_id} is outside of its vocabulary of "
            f"{drafter.vocab_size}"
        )
    last = int(target["num_hidden_layers"]) - 1
    unusable = [layer for layer in drafter.target_layer_ids if not 0 <= layer < last]
    if unusable:
        raise ValueError(
            f"the drafter reads target layers {unusable}; SGLang captures layers 0 to {last - 1} "
            f"of the {last + 1} of {target_path!r}"
        )


def _read_config(path: str, setting: str) -> dict[str, Any]:
    folder = Path(path)
    try:
        config = (
            json.loads((folder / "config.json").read_text())
            if folder.is_dir()
            else _hub_config(path)
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{setting} {path!r} is neither a folder with a config.json nor a known model: {error}"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{setting} {path!r}: config.json does not hold an object")
    return config


def _hub_config(name: str) -> dict[str, Any]:
    """Config of a model that the Hugging Face cache or hub knows by name."""
    from transformers import PretrainedConfig

    return dict(PretrainedConfig.get_config_dict(name)[0])

"""Reading and writing both models in Hugging Face format (`config.json`, `model.safetensors`)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import BOS, EOS, DrafterConfig, TargetConfig
from .drafter import DrafterModel
from .target import TargetModel

_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


def _expert_part(name: str) -> tuple[str, str] | None:
    """`("model.layers.1.mlp", "gate_proj")` if `name` is a fused expert weight, else None."""
    for part in _EXPERT_PARTS:
        tail = f".mlp.{part}.weight"
        if name.endswith(tail):
            return name[: -len(tail)] + ".mlp", part
    return None


def _target_to_hf(model: TargetModel) -> dict[str, Tensor]:
    """Weights under transformers' names, experts apart."""
    sparse = {
        f"model.layers.{i}.mlp": layer.mlp
        for i, layer in enumerate(model.layers)
        if layer.is_sparse
    }
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        name = name if name.startswith("lm_head") else f"model.{name}"
        fused = _expert_part(name)
        if fused is not None and fused[0] in sparse:
            dim = 1 if fused[1] == "down_proj" else 0
            pieces = value.chunk(model.config.n_routed_experts, dim)
            for expert, piece in enumerate(pieces):
                out[f"{fused[0]}.experts.{expert}.{fused[1]}.weight"] = piece
        elif name.endswith(".router"):
            out[name.replace(".router", ".gate.weight")] = value
        elif name.endswith(".correction"):
            out[name.replace(".correction", ".gate.e_score_correction_bias")] = value
        else:
            out[name] = value
    return out


def _target_from_hf(model: TargetModel, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_target_to_hf`, for a model of the same sizes."""
    out: dict[str, Tensor] = {}
    for own in model.state_dict():
        name = own if own.startswith("lm_head") else f"model.{own}"
        fused = _expert_part(name)
        if name in stored:
            out[own] = stored[name]
        elif fused is not None:
            pieces = [
                stored[f"{fused[0]}.experts.{e}.{fused[1]}.weight"]
                for e in range(model.config.n_routed_experts)
            ]
            out[own] = torch.cat(pieces, 1 if fused[1] == "down_proj" else 0)
        elif name.endswith(".router"):
            out[own] = stored[name.replace(".router", ".gate.weight")]
        else:
            out[own] = stored[name.replace(".correction", ".gate.e_score_correction_bias")]
    return out


def _write(folder: Path, config: dict[str, object], weights: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # The routing correction stays float32: transformers and SGLang keep it so.
    kept = {
        name: value.detach()
        .to("cpu", torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        .contiguous()
        for name, value in weights.items()
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_target(model: TargetModel, folder: Path) -> None:
    """Write the target in bfloat16, with its `generation_config.json`."""
    _write(folder, model.config.to_hf(), _target_to_hf(model))
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def save_drafter(model: DrafterModel, folder: Path) -> None:
    """Write the drafter in bfloat16."""
    _write(folder, model.config.to_hf(), model.state_dict())


def _read(folder: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    return config, {name: value.float() for name, value in weights.items()}


def load_target(folder: Path, device: str = "cpu") -> TargetModel:
    """The stored target in float32, in evaluation mode, without gradients."""
    config, stored = _read(folder)
    model = TargetModel(TargetConfig.from_hf(config))
    model.load_state_dict(_target_from_hf(model, stored))
    return model.to(device).eval().requires_grad_(False)


def load_drafter(folder: Path, device: str = "cpu") -> DrafterModel:
    """The stored drafter in float32, in evaluation mode, without gradients."""
    config, stored = _read(folder)
    model = DrafterModel(DrafterConfig.from_hf(config))
    model.load_state_dict(stored)
    return model.to(device).eval().requires_grad_(False)

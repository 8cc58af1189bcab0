"""A pair of models whose step takes as long as that of models people run, made without a download.

The built-in pair with more layers, wider; its tokenizer; no weights: engines start it with
`load_format: dummy`, on made-up ones. What it writes is nonsense; what a step launches and reads is
that of a model of this shape. Not collected: it holds no test.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overstory.workers.tiny.paths import resolve_model


@dataclass(frozen=True)
class Shape:
    """Of the target; the drafter is as wide and keeps its layers. The default has 13 G parameters:
    61 layers, as DeepSeek-V3 and Kimi-K2, so that a step launches what one of theirs launches."""

    layers: int = 61
    hidden: int = 2048
    heads: int = 16
    experts: int = 32
    expert_width: int = 1024

    def target(self, config: dict[str, Any]) -> dict[str, Any]:
        """The built-in target's config at this shape."""
        return config | {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_routed_experts": self.experts,
            "moe_intermediate_size": self.expert_width,
            "num_experts_per_tok": min(8, self.experts),
        }

    def drafter(self, config: dict[str, Any]) -> dict[str, Any]:
        """The built-in drafter's config for that target."""
        taken = [round((self.layers - 2) * share) for share in (0, 0.5, 1)]
        return config | {
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_attention_heads": self.hidden // 64,
            "num_key_value_heads": self.hidden // 64,
            "num_target_layers": self.layers,
            "dflash_config": config["dflash_config"] | {"target_layer_ids": taken},
        }


def write_pair(folder: Path, shape: Shape) -> tuple[Path, Path]:
    """Folders of target and drafter below `folder`."""
    made = []
    for name, built_in, adapt in (
        ("target", "overstory-tiny", shape.target),
        ("drafter", "overstory-tiny-drafter", shape.drafter),
    ):
        source, new = Path(resolve_model(built_in)), folder / name
        new.mkdir(parents=True)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (source / file).exists():
                shutil.copy(source / file, new)
        config = json.loads((source / "config.json").read_text())
        (new / "config.json").write_text(json.dumps(adapt(config), indent=1))
        made.append(new)
    return made[0], made[1]

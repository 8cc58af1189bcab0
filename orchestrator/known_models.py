"""Shapes of published models, for planning where their folders are not at hand.

Each file in `published_models/` holds the fields of a model's `config.json` that planning reads,
and where each comes from. Nothing starts with them: a rank needs the model's folder.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "published_models"


@dataclass(frozen=True)
class KnownModel:
    """A published model.

    Attributes:
        repository: its name on the Hugging Face hub.
        names: last parts of a path that mean it (its own and those of models of the same shape).
        config: the fields of its `config.json`.
        sources: rows of `fields` and `source`.
        weight_bytes: size of its weight files where that is published, else 0.
    """

    repository: str
    names: tuple[str, ...]
    config: dict[str, Any]
    sources: tuple[dict[str, str], ...]
    weight_bytes: int = 0


@functools.cache
def known_models() -> tuple[KnownModel, ...]:
    """All of them, by file name."""
    found = []
    for file in sorted(FOLDER.glob("*.json")):
        row = json.loads(file.read_text())
        size = row.get("weight_bytes", {}).get("value", 0)
        found.append(
            KnownModel(
                row["repository"], tuple(row["names"]), row["config"], tuple(row["sources"]), size
            )
        )
    return tuple(found)


def known_model(name_or_path: str) -> KnownModel | None:
    """The model that the last part of a path names, whatever its letters' case; None if unknown."""
    last = name_or_path.rstrip("/").rsplit("/", 1)[-1].lower()
    for model in known_models():
        if last in {name.lower() for name in model.names}:
            return model
    return None

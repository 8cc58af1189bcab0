"""Names of the built-in models and where their files are."""

from __future__ import annotations

from pathlib import Path

PAIR_FOLDER = Path(__file__).parent / "pair"

BUILT_IN = {
    "overstory-tiny": PAIR_FOLDER / "target",
    "overstory-tiny-drafter": PAIR_FOLDER / "drafter",
}
"""Built-in model names and their folders in Hugging Face format."""


def resolve_model(name_or_path: str) -> str:
    """The folder of a built-in model; any other name or path comes back unchanged."""
    folder = BUILT_IN.get(name_or_path)
    return name_or_path if folder is None else str(folder)

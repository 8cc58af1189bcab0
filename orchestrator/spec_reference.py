"""The reference of `deployment.yaml` as Markdown, made from the settings themselves.

python -m overstory.orchestrator.spec_reference > docs/configuration.md
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from overstory.orchestrator.spec import DeploymentSpec

HEADER = """\
# deployment.yaml

<!-- made by `python -m overstory.orchestrator.spec_reference > docs/configuration.md` -->

One file is one deployment. Unknown keys are refused with the nearest known one; `--set KEY=VALUE`
changes a key for a single run. Keys under `engine:` are SGLang's own `ServerArgs` names, checked
against the pinned version.
"""


_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


def _kind(annotation: Any) -> str:
    text = getattr(annotation, "__name__", None) or str(annotation)
    if "Literal[" in str(annotation):
        text = str(annotation)
    return text.replace("typing.", "").replace("NoneType", "null").replace("|", "\\|")


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if value is None or value == "":
        return "unset"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        bounds = ", ".join(
            f"{word} {getattr(rule, attribute)}"
            for rule in field.metadata
            for attribute, word in _BOUNDS
            if hasattr(rule, attribute)
        )
        told = " ".join((field.description or "").split()).replace("|", "\\|")
        kind = _kind(field.annotation) + (f", {bounds}" if bounds else "")
        yield f"| `{prefix}{name}` | {kind} | {_default(field)} | {told} |"


def _table(section: type[BaseModel], prefix: str) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    yield from _rows(section, prefix)
    yield ""


def reference() -> str:
    """The page, with a trailing newline."""
    lines = [HEADER, *_table(DeploymentSpec, "")]
    for name, field in DeploymentSpec.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            lines += [f"## {name}", "", " ".join((kind.__doc__ or "").split()), ""]
            lines += _table(kind, f"{name}.")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(reference(), end="")

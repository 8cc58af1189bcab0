"""Writes the table of SGLang's `ServerArgs` that `engine_args` checks against.

Importing `ServerArgs` takes many seconds, so a deployment file is checked against a committed
table instead; `tests/engine/test_engine_args_table.py` compares the two. After a change of the
pinned SGLang: `python -m overstory.orchestrator.engine_args_table`.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

TABLE_PATH = Path(__file__).with_name("engine_args_table.json")

_SCALARS: dict[Any, str] = {str: "str", int: "int", float: "float", bool: "bool"}


def _unwrap_optional(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        args = typing.get_args(annotation)
        present = [arg for arg in args if arg is not type(None)]
        nullable = len(present) < len(args)
        return (present[0] if len(present) == 1 else Any), nullable
    return annotation, False


def _kind(annotation: Any) -> str:
    """Name of a type as the table spells it: a scalar, `list[scalar]`, `dict` or `any`."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Literal:
        values = [value for value in typing.get_args(annotation) if value is not None]
        kinds = {_SCALARS.get(type(value), "any") for value in values}
        return kinds.pop() if len(kinds) == 1 else "any"
    if origin in (list, tuple, set):
        (item, *_) = (*typing.get_args(annotation), Any)
        inner = _SCALARS.get(item)
        return f"list[{inner}]" if inner else "list"
    return "dict" if origin is dict else "any"


def _describe(annotation: Any) -> dict[str, Any]:
    metadata: tuple[Any, ...] = ()
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *rest = typing.get_args(annotation)
        metadata = tuple(rest)
    bare, nullable = _unwrap_optional(annotation)
    row: dict[str, Any] = {"kind": _kind(bare)}
    if nullable:
        row["nullable"] = True
    if typing.get_origin(bare) is typing.Literal:
        values = typing.get_args(bare)
        row["choices"] = [value for value in values if value is not None]
        if None in values:
            row["nullable"] = True
    for arg in metadata:
        if getattr(arg, "choices", None):
            is_set = isinstance(arg.choices, set | frozenset)
            row["choices"] = sorted(arg.choices) if is_set else list(arg.choices)
        names = [*(getattr(arg, "aliases", None) or []), getattr(arg, "cli_name", None)]
        aliases = [name.lstrip("-").replace("-", "_") for name in names if name]
        if aliases:
            row["aliases"] = aliases
        parser = getattr(arg, "type_parser", None)
        if getattr(parser, "__name__", "") == "human_readable_int":
            row["suffixes"] = True
    return row


def describe_server_args() -> dict[str, Any]:
    """The table, from the installed SGLang (slow import): `{"sglang": version, "fields": {...}}`.

    Each field has `kind`, and where they apply `nullable`, `choices`, `aliases` (other spellings
    of its command-line flag) and `suffixes` (true where SGLang reads "32k" as a number).
    """
    from importlib.metadata import version

    from sglang.srt.server_args import ServerArgs

    hints = typing.get_type_hints(ServerArgs, include_extras=True)
    fields = {f.name: _describe(hints[f.name]) for f in dataclasses.fields(ServerArgs)}
    for name, row in fields.items():
        row["aliases"] = [alias for alias in row.get("aliases", []) if alias != name]
        if not row["aliases"]:
            del row["aliases"]
    return {"sglang": version("sglang"), "fields": fields}


def _write_table() -> None:
    table = describe_server_args()
    rows = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in table["fields"].items()]
    text = (
        f'{{\n  "sglang": "{table["sglang"]}",\n  "fields": {{\n' + ",\n".join(rows) + "\n  }\n}\n"
    )
    TABLE_PATH.write_text(text)


if __name__ == "__main__":
    _write_table()

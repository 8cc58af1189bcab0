"""Parameters of the launchers, read from the sources that define them.

A launcher is `extern "C" int overstory_<op>(...)` over pointers, integers and floats; one that
answers a size in bytes returns `int64_t`. Calls name every argument, so a binding that has fallen
behind its source fails with the names that differ, and not by shifted arguments.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LAUNCHER = re.compile(r'extern\s+"C"\s+(\w+)\s+overstory_(\w+)\s*\(([^)]*)\)\s*\{')
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SCALARS: dict[str, Any] = {
    "int": ctypes.c_int32,
    "int32_t": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "long long": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
}
_RESULTS = {"int": ctypes.c_int32, "int64_t": ctypes.c_int64}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a launcher."""

    name: str
    is_pointer: bool
    c_type: Any
    """The ctypes class; c_void_p for pointers."""


@dataclass(frozen=True)
class Launcher:
    """What a launcher takes and returns."""

    parameters: list[Parameter]
    result: Any
    """The ctypes class: c_int32 for an error code or a count, c_int64 for bytes."""


def launchers_of(source: Path) -> dict[str, Launcher]:
    """Launchers of a .cu file by the op's name, without the prefix `overstory_`.

    Raises:
        ValueError: a parameter of a type that is not in the table, or a result that is neither
            int nor int64_t.
    """
    text = _COMMENT.sub("", source.read_text())
    return {
        name: _launcher(result, inside, f"{source.name}: overstory_{name}")
        for result, name, inside in _LAUNCHER.findall(text)
    }


def _launcher(result: str, inside: str, where: str) -> Launcher:
    if result not in _RESULTS:
        raise ValueError(f"{where} returns {result}; want {' or '.join(_RESULTS)}")
    return Launcher([_parameter(part, where) for part in _split(inside)], _RESULTS[result])


def _split(inside: str) -> list[str]:
    parts = [" ".join(part.split()) for part in inside.split(",")]
    return [part for part in parts if part and part != "void"]


def _parameter(text: str, where: str) -> Parameter:
    before, name = re.fullmatch(r"(.*?)(\w+)", text).groups()  # type: ignore[union-attr]
    if "*" in before:
        return Parameter(name, True, ctypes.c_void_p)
    scalar = before.replace("const ", "").replace("std::", "").strip()
    if scalar not in _SCALARS:
        raise ValueError(f"{where}: parameter {text!r} is of no type a launcher may take")
    return Parameter(name, False, _SCALARS[scalar])

"""A change to SGLang: its name, its reason, how it is made, and how to see that it took.

SGLang logs and swallows a plugin's exceptions and skips hooks that it cannot apply, so every change
carries its own proof, read back by `plugin.verify_installed`.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

HookKind = Literal["before", "after", "around", "replace"]


@dataclass(frozen=True)
class Patch:
    """One change to SGLang in this process.

    Attributes:
        name: unique; what is changed.
        reason: what goes wrong without it.
        install: makes the change, or registers it to be made by SGLang's `apply_hooks`.
        taken: whether the change stands now.
    """

    name: str
    reason: str
    install: Callable[[], None]
    taken: Callable[[], bool]


def hook(target: str, kind: HookKind, function: Callable[..., Any], reason: str) -> Patch:
    """A change by SGLang's HookRegistry, which applies it after all plugins have run.

    Args:
        target: dotted path of a function or method.
        kind: SGLang's hook type.
        function: called as that type asks (see `HookRegistry.register`).
        reason: what goes wrong without it.
    """

    def install() -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(target, function, HookType(kind))

    return Patch(target, reason, install, functools.partial(hook_taken, target, function))


def hook_taken(target: str, function: Callable[..., Any]) -> bool:
    """Whether `function` is in the chain of wrappers that `target` resolves to now."""
    try:
        current = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return any(function in _closure_values(link) for link in _wrapper_chain(current))


def _wrapper_chain(function: Any) -> Iterator[Any]:
    """`function` and all that it wraps."""
    while function is not None:
        yield getattr(function, "__func__", function)
        function = getattr(function, "__wrapped__", None)


def _closure_values(function: Any) -> list[Any]:
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return []
    return [cell.cell_contents for cell in function.__closure__ if _filled(cell)]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True

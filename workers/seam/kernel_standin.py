"""Stand-in for `sgl_kernel`, SGLang's compiled kernel package, which needs libcuda to be imported.

Names resolve to a portable torch implementation where one exists (`portable/kernel_ops.py`) and
else to a callable that raises `MissingKernelError`: importing a name is harmless, calling it is
never silent. An import hook, put in place before any import of the package.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from overstory.workers.seam.errors import MissingKernelError, SeamError

PACKAGE = "sgl_kernel"


class MissingOp:
    """Takes the place of one compiled op that has no portable implementation. Calling it raises."""

    def __init__(self, name: str):
        self.__name__ = self.name = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Always raises.

        Raises:
            MissingKernelError: names the op.
        """
        raise MissingKernelError(
            f"SGLang called {self.name}, an op of its compiled kernel package, on a plain CPU; "
            "Overstory has no portable implementation of it (workers/seam/portable/kernel_ops.py)"
        )

    def __getattr__(self, name: str) -> MissingOp:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingOp(f"{self.name}.{name}")

    def __repr__(self) -> str:
        return f"<no portable {self.name}>"


class StandinModule(ModuleType):
    """`sgl_kernel` or a submodule of it, made of portable ops and `MissingOp`s."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from overstory.workers.seam.portable import kernel_ops

        op = kernel_ops.OPS.get(name)
        value = MissingOp(f"{self.__name__}.{name}") if op is None else op
        setattr(self, name, value)
        return value


class _StandinFinder:
    """Import hook serving `sgl_kernel` and everything under it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Spec of a stand-in for our package, None for all others."""
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A new, empty stand-in."""
        return StandinModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names resolve when asked for."""


def install_standin() -> None:
    """Puts the import hook in place. Idempotent.

    Raises:
        SeamError: the real package is loaded already.
    """
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None and not isinstance(loaded, StandinModule):
        raise SeamError(
            f"the compiled {PACKAGE} is loaded already: this is not a plain CPU process"
        )
    if not standin_active():
        sys.meta_path.insert(0, _StandinFinder())  # type: ignore[arg-type]


def standin_active() -> bool:
    """Whether importing `sgl_kernel` in this process gives the stand-in."""
    return any(isinstance(finder, _StandinFinder) for finder in sys.meta_path)

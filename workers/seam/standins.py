"""Stand-ins for packages that SGLang imports and that a plain CPU process cannot or need not have.

`sgl_kernel`, SGLang's compiled kernel package, cannot be imported without libcuda; some others can,
but cost seconds of start-up in every process and are never called here. A name of a stand-in
resolves to a portable torch implementation where there is one (`portable/kernel_ops.py`) and else
to a callable that raises `MissingOpError`: importing it is harmless, calling it is never silent.
An import hook, put in place before SGLang is imported; light until a package is asked for.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from overstory.workers.seam.errors import MissingOpError, SeamError

KERNEL_PACKAGE = "sgl_kernel"

#: Packages replaced by a stand-in, and why.
STANDINS = {
    KERNEL_PACKAGE: "SGLang's compiled kernels need libcuda",
    "torchvision": "SGLang imports a JPEG decoder; loads torch's compiler with it",
    "gguf": "SGLang imports a reader of a weight format",
    "IPython": "SGLang imports a notebook widget",
}

#: Names of a stand-in that others call, and what answers: Ray asks whether it is in a notebook.
ANSWERS = {"IPython.get_ipython": lambda: None}

#: Packages that look as if they were not installed: their importers then do without.
HIDDEN = {
    "sklearn": "transformers tunes assisted generation with it; loads pandas and scipy.stats",
    "flashinfer": "CUDA kernels; loads the CUTLASS compiler",
    "torchao": "quantisation that a CPU rank does not do",
    "torchaudio": "transformers' losses for speech",
}


class MissingOp:
    """Takes the place of one name of a stand-in that has no implementation. Calling it raises."""

    def __init__(self, name: str):
        self.__name__ = self.name = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Always raises.

        Raises:
            MissingOpError: names the op and why it is missing.
        """
        package = self.name.partition(".")[0]
        raise MissingOpError(
            f"{self.name} was called, but {package} is only a stand-in in a plain CPU process "
            f"({STANDINS[package]}) and Overstory has no portable implementation of this name "
            "(workers/seam/portable/kernel_ops.py)"
        )

    def __getattr__(self, name: str) -> MissingOp:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingOp(f"{self.name}.{name}")

    def __repr__(self) -> str:
        return f"<no portable {self.name}>"


class StandinModule(ModuleType):
    """A package of `STANDINS` or a submodule of one, made of portable ops and `MissingOp`s."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        value: Any = ANSWERS.get(path) or MissingOp(path)
        if self.__name__ == KERNEL_PACKAGE:
            from overstory.workers.seam.portable import kernel_ops

            value = kernel_ops.OPS.get(name, value)
        setattr(self, name, value)
        return value


class _StandinFinder:
    """Import hook that serves the stand-ins and everything under them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Spec of a stand-in for one of our packages, None for all others."""
        if fullname.partition(".")[0] not in STANDINS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A new, empty stand-in."""
        return StandinModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names resolve when asked for."""


def install_standins() -> None:
    """Puts the import hook in place and hides packages. Idempotent.

    Packages of a caller that are loaded already stay as they are, all but SGLang's kernels.

    Raises:
        SeamError: the real kernel package is loaded already.
    """
    loaded = sys.modules.get(KERNEL_PACKAGE)
    if loaded is not None and not isinstance(loaded, StandinModule):
        raise SeamError(
            f"the compiled {KERNEL_PACKAGE} is loaded already: this is not a plain CPU process"
        )
    if standins_active():
        return
    sys.meta_path.insert(0, _StandinFinder())
    for name in HIDDEN:
        # None makes both `import` and `find_spec` answer that there is no such package.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def standins_active() -> bool:
    """Whether importing a package of `STANDINS` in this process gives the stand-in."""
    return any(isinstance(finder, _StandinFinder) for finder in sys.meta_path)

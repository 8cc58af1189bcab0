"""A built library in this process: launchers called by name with tensors, numbers and a stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .build import Target, build_library, cuda_target, simulator_target, sources
from .errors import KernelError, LaunchError, NoDeviceError
from .signatures import Launcher, Parameter, launchers_of

MIN_CAPABILITY = (9, 0)
"""Oldest GPU that the sources are for (programmatic dependent launch)."""


class KernelLibrary:
    """Launchers of one library.

    Attributes:
        path: the shared library.
        target: what it was built for.
    """

    def __init__(self, target: Target, of: Sequence[Path] | None = None) -> None:
        chosen = sources() if of is None else list(of)
        self.target = target
        self.path = build_library(target, chosen)
        self._loaded = ctypes.CDLL(str(self.path))
        self._launchers = {
            name: _Launcher(name, getattr(self._loaded, f"overstory_{name}"), signature)
            for source in chosen
            for name, signature in launchers_of(source).items()
        }

    def names(self) -> list[str]:
        """Names of the launchers, without the prefix `overstory_`."""
        return sorted(self._launchers)

    def parameters(self, name: str) -> list[Parameter]:
        """Parameters of a launcher, in order."""
        return self._launcher(name).parameters

    def query(self, name: str, **arguments: Any) -> int:
        """What a launcher that only computes a number (a size) returns."""
        return self._launcher(name).call(arguments)

    def launch(self, name: str, **arguments: Any) -> None:
        """Run a launcher; see `_Launcher.call` for the arguments.

        `stream` need not be named: it is the current stream of the current device.

        Raises:
            TypeError: other names than the launcher has.
            LaunchError: the launcher returned a CUDA error.
        """
        arguments.setdefault("stream", self._stream())
        code = self._launcher(name).call(arguments)
        if code:
            raise LaunchError(f"{name}: CUDA error {code} ({self._text_of(code)})")

    def seed_simulator(self, seed: int) -> None:
        """Choose another order of the simulated threads.

        Raises:
            KernelError: the library is for a GPU or holds no kernel.
        """
        seed_function = getattr(self._loaded, "overstory_sim_seed", None)
        if seed_function is None:
            raise KernelError(f"{self.path} has no simulator to seed")
        seed_function(ctypes.c_uint64(seed))

    def _launcher(self, name: str) -> _Launcher:
        if name not in self._launchers:
            raise KernelError(f"no launcher overstory_{name}; the library has {self.names()}")
        return self._launchers[name]

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.target.is_cuda else 0

    def _simulator_says(self) -> str:
        function = getattr(self._loaded, "overstory_sim_error", None)
        if function is None:
            return "no simulator in this library"
        function.restype = ctypes.c_char_p
        return str(function().decode())

    def _text_of(self, code: int) -> str:
        if not self.target.is_cuda:
            return self._simulator_says()
        runtime = torch.cuda.cudart()
        try:
            return str(runtime.cudaGetErrorString(runtime.cudaError(code)))
        except (TypeError, ValueError):
            return "a code that this torch has no text for"


class _Launcher:
    def __init__(self, name: str, function: Any, signature: Launcher) -> None:
        self.name = name
        self.parameters = signature.parameters
        self._function = function
        self._function.restype = signature.result
        self._function.argtypes = [parameter.c_type for parameter in self.parameters]
        self._names = frozenset(parameter.name for parameter in self.parameters)

    def call(self, arguments: dict[str, Any]) -> int:
        """Call with every parameter named; tensors give their address, None is the null pointer."""
        if arguments.keys() != self._names:
            raise TypeError(
                f"overstory_{self.name}: missing {sorted(self._names - arguments.keys())}, "
                f"unknown {sorted(arguments.keys() - self._names)}"
            )
        values = [_value(arguments[parameter.name]) for parameter in self.parameters]
        return int(self._function(*values))


def _value(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def arch_of(device: torch.device | int | None = None) -> str:
    """The architecture to build for, say "sm_90", of a GPU (default: the current one).

    Raises:
        NoDeviceError: no GPU that torch can use, or one older than the sources are for.
    """
    if not torch.cuda.is_available():
        raise NoDeviceError(
            "CUDA kernels were asked for, but torch sees no GPU: check nvidia-smi and that this "
            "torch is built for CUDA, or take the plain torch ops (OVERSTORY_KERNELS=reference)"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise NoDeviceError(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; the kernels are for {MIN_CAPABILITY[0]}.0 and newer"
        )
    return f"sm_{capability[0]}{capability[1]}"


def cuda_library(device: torch.device | int | None = None) -> KernelLibrary:
    """All kernels of the package for a GPU, built on first use.

    Raises:
        NoDeviceError, NoCompilerError, CompileError, OSError: as `arch_of`, `build_library`.
    """
    return _cuda_library(arch_of(device))


@functools.cache
def _cuda_library(arch: str) -> KernelLibrary:
    return KernelLibrary(cuda_target(arch))


def simulator_library(
    of: Sequence[Path] | None = None, defines: Sequence[str] = ()
) -> KernelLibrary:
    """The same sources (or those of `of`) for CPU tensors, run by the simulator.

    Args:
        of: sources, default all.
        defines: macros set to 1.

    Raises:
        NoCompilerError, CompileError, OSError: as `build_library`.
    """
    return KernelLibrary(simulator_target(defines), of)

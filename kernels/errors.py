"""What can go wrong between a CUDA source and its first launch, each with the way out."""

from __future__ import annotations


class KernelError(RuntimeError):
    """Base of every error of building, loading or launching our kernels."""


class NoCompilerError(KernelError):
    """No compiler of the wanted kind on this machine, or one that does not run."""


class NoDeviceError(KernelError):
    """CUDA kernels were asked for where no GPU can run them."""


class CompileError(KernelError):
    """The compiler refused a source; the message holds the command and what it printed."""


class LaunchError(KernelError):
    """A launcher returned a CUDA error code."""

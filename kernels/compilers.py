"""Where the compilers are, and what they call themselves."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from .errors import NoCompilerError

NVCC_VARIABLE = "OVERSTORY_NVCC"
CXX_VARIABLE = "CXX"


def find_nvcc() -> Path:
    """nvcc of $OVERSTORY_NVCC, $CUDA_HOME/bin, $PATH or /usr/local/cuda/bin, in this order.

    Raises:
        NoCompilerError: none of them, or $OVERSTORY_NVCC names none.
    """
    named = os.environ.get(NVCC_VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise NoCompilerError(f"{NVCC_VARIABLE} is {named!r}, which is no program")
        return Path(found)
    home = os.environ.get("CUDA_HOME")
    candidates = [*([f"{home}/bin/nvcc"] if home else []), "nvcc", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found is not None:
            return Path(found)
    raise NoCompilerError(
        f"no nvcc (looked for {', '.join(candidates)}). The CUDA kernels are built on first use: "
        "install the CUDA toolkit (12.8 or newer for sm_120), or name its compiler in "
        f"{NVCC_VARIABLE}, or take the plain torch ops (OVERSTORY_KERNELS=reference)"
    )


def find_cxx() -> Path:
    """The C++ compiler of $CXX, else g++ of $PATH (the simulator is built with it).

    Raises:
        NoCompilerError: there is none.
    """
    named = os.environ.get(CXX_VARIABLE) or "g++"
    found = shutil.which(named)
    if found is None:
        raise NoCompilerError(f"no C++ compiler {named!r}: install g++ or name one in CXX")
    return Path(found)


def version_of(compiler: Path) -> str:
    """What `--version` prints.

    Raises:
        NoCompilerError: it does not run.
    """
    status = compiler.stat()
    return _version(compiler, status.st_mtime_ns, status.st_size)


@functools.cache
def _version(compiler: Path, _modified: int, _size: int) -> str:
    try:
        done = subprocess.run(
            [str(compiler), "--version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCompilerError(f"{compiler} --version does not run: {error}") from error
    return done.stdout.strip()

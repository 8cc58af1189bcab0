"""CUDA sources compiled for the CPU simulator, loaded with ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
CUDA = REPOSITORY / "kernels" / "cuda"
FLAGS = ["-x", "c++", "-std=c++17", "-O2", "-DOVERSTORY_SIM", "-fno-strict-aliasing"]
FLAGS += ["-ftrivial-auto-var-init=pattern", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]


@functools.cache
def simulated(*sources: Path) -> ctypes.CDLL:
    """The library of these sources; made anew where they or a header changed."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the CUDA sources for the simulator")
    headers = sorted([*CUDA.glob("*.cuh"), *CUDA.glob("sim/*.h")])
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in (*sources, *headers):
        digest.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"overstory-sim-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    library = folder / f"{digest.hexdigest()[:24]}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, f"-I{CUDA}", *map(str, sources), "-o", str(unfinished)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        unfinished.replace(library)
    loaded = ctypes.CDLL(str(library))
    loaded.overstory_sim_error.restype = ctypes.c_char_p
    loaded.overstory_sim_seed.argtypes = [ctypes.c_uint64]
    return loaded


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Address of a contiguous tensor's data; null for none."""
    if tensor is None:
        return ctypes.c_void_p(None)
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())

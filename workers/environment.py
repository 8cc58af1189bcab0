"""Environment of a process that hosts SGLang. Standard library only: import it first.

SGLang decides at import time what machine it is on, so these settings must stand before
`import sglang` in every process, those it spawns by itself included.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

DeviceName = Literal["cpu", "cuda"]

#: Names the device that `prepare_process` was given, for this process and all that it spawns.
DEVICE_VARIABLE = "OVERSTORY_DEVICE"

#: Folder holding our `sitecustomize`, put on PYTHONPATH of CPU processes.
SITECUSTOMIZE_FOLDER = Path(__file__).parent / "seam" / "sitecustomize"

#: SGLang model modules a CPU rank registers. Importing all costs about 6 s and 90 MB a process.
CPU_MODEL_MODULES = ("deepseek_v2", "dflash")


def rank_environment(
    device: str, threads: int = 1, models: Iterable[str] = CPU_MODEL_MODULES
) -> dict[str, str]:
    """Environment variables that a rank process needs before it imports SGLang.

    Variables of the caller's own environment that a user may set on purpose (the list of disabled
    models) are left out of the result when they are set already.

    Args:
        device: "cpu" or "cuda".
        threads: OpenMP threads of one rank. They spin: more than cores / ranks hurts.
        models: names of the modules under `sglang.srt.models` to register (CPU only).

    Raises:
        ValueError: unknown device, or fewer than one thread.
    """
    checked = _checked_device(device)
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    environment: dict[str, str] = {DEVICE_VARIABLE: checked}
    if checked == "cuda":
        return environment
    environment |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        # SGLang takes a visible GPU over its own device argument in many places.
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Compiling small ops costs 20 s at the first request and gains nothing at these sizes.
        "TORCHDYNAMO_DISABLE": "1",
        # SGLang builds a NCCL communicator at TP > 1 wherever it finds the library, GPU or not.
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        "PYTHONPATH": _python_path(os.environ.get("PYTHONPATH", "")),
    }
    if "SGLANG_DISABLED_MODEL_ARCHS" not in os.environ:
        environment["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(_other_model_modules(models))
    return environment


def prepare_process(device: str, threads: int = 1) -> None:
    """Makes this process, and all that it spawns, ready to import SGLang on `device`.

    Sets `rank_environment` and, on a CPU, puts the stand-in for SGLang's compiled kernel package in
    place. Idempotent. Call it before importing sglang.

    Raises:
        ValueError: as `rank_environment`.
        SeamError: SGLang was imported already without these settings.
    """
    from overstory.workers.seam.standins import install_standins, standins_active

    wanted = rank_environment(device, threads)
    if os.environ.get(DEVICE_VARIABLE) != device and "sglang.srt.utils" in sys.modules:
        from overstory.workers.seam.errors import SeamError

        raise SeamError(
            f"prepare_process({device!r}) came after `import sglang`: "
            "SGLang has already decided what machine it is on; call it first"
        )
    os.environ.update(wanted)
    if device == "cpu":
        install_standins()
        assert standins_active()
        if "torch" in sys.modules:  # OMP_NUM_THREADS is read once, when torch is loaded.
            sys.modules["torch"].set_num_threads(threads)


def is_cpu_process() -> bool:
    """Whether this process was prepared, here or by its parent, to run SGLang on a plain CPU."""
    return os.environ.get(DEVICE_VARIABLE) == "cpu"


def cpu_engine_defaults() -> dict[str, object]:
    """SGLang ServerArgs fields that a CPU rank needs; a deployment's own values may go over them.

    The attention backend keeps the name `torch_native`: SGLang takes every other name but
    `intel_amx` to run Triton kernels. The class behind it is ours (`seam/attention.py`).
    """
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        # bfloat16 is emulated without AVX512: about 5 times slower than float32.
        "dtype": "float32",
        "skip_server_warmup": True,
        "max_total_tokens": 32768,
        "max_running_requests": 16,
        "page_size": 1,
    }


def _checked_device(device: str) -> DeviceName:
    if device == "cpu":
        return "cpu"
    if device == "cuda":
        return "cuda"
    raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")


def _python_path(current: str) -> str:
    """`current` with our sitecustomize folder in front, once."""
    ours = str(SITECUSTOMIZE_FOLDER)
    return os.pathsep.join([ours, *(p for p in current.split(os.pathsep) if p and p != ours)])


def _other_model_modules(wanted: Iterable[str]) -> list[str]:
    """Every model module of the installed SGLang but `wanted`. Imports nothing."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(next(iter(spec.submodule_search_locations))) / "srt" / "models"
    keep = set(wanted) | {"registry", "__init__"}
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in keep)

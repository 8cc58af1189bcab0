"""SGLang's own CUDA modules that the rank slice uses: built where no GPU is, checked where one is.

    slice_modules.py build CACHE      # into CACHE/tvm-ffi and CACHE/python; needs nvcc
    slice_modules.py check RESULT     # JSON: which are there and load, which are missing

SGLang compiles a module at its first use, the one for INT4 experts for minutes. It loads one that
lies at TVM_FFI_CACHE_DIR/NAME/FILE without asking ninja, where the name tells the sources' content,
GPU architecture and tvm-ffi (`sglang.kernels.jit.utils.compile.load_jit`); paths and times of files
do not matter. Here SGLang's own functions name, compile and load them. FlashInfer's norms are laid
out as its package of prebuilt modules, `flashinfer_jit_cache`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slice_config import published

CAPABILITY = (9, 0)
"""Of an H200; SGLang makes 9.0a of it."""
SLOW = "moe_wna16_marlin"
"""Compiles for some 4 minutes (all of its kernels: its name is a hash of its whole source); each of
the others takes 10 to 20 s."""
OPS = "sglang.kernels.ops"
PACKAGE = "flashinfer_jit_cache"


@dataclass(frozen=True)
class Module:
    """A function of SGLang that compiles or loads a module, and what the slice calls it with."""

    where: str
    function: str
    arguments: tuple[Any, ...] = ()

    def load(self) -> Any:
        """What the function returns."""
        return getattr(importlib.import_module(f"{OPS}.{self.where}"), self.function)(
            *self.arguments
        )


class WouldCompileError(Exception):
    """A module is not in the cache. Its argument is the module's name."""


def modules(dtype: Any) -> tuple[Module, ...]:
    """Those of the roles, by the shapes of a rank of eight; of ``dtype``, which is bfloat16.

    Found in what roles had compiled (kernels_built.txt of their sessions).
    """
    target, drafter = published("kimi-k2.6"), published("kimi-k2.6-dflash")
    hidden, rope = target["hidden_size"], target["qk_rope_head_dim"]
    latent, head = target["kv_lora_rank"], drafter["head_dim"]
    projected = target["q_lora_rank"] + latent + rope
    drafter_row = drafter["num_key_value_heads"] // 8 * head * 2
    experts = target["n_routed_experts"]
    return (
        Module("moe.moe_wna16_marlin", "_jit_moe_wna16_marlin_module", (dtype, False, False)),
        Module("quantization.gptq_marlin_repack", "_jit_gptq_marlin_repack_module"),
        Module("moe.moe_align_single_token", "_jit_align_single_token_module"),
        Module("activation.activation", "activation_module", (dtype,)),
        Module("attention.clamp_position", "_jit_clamp_position_module", (_int64(),)),
        Module("gemm.dsv3_fused_a_gemm", "dsv3_fused_a_gemm_module", (hidden, projected, True)),
        Module("gemm.dsv3_router_gemm", "dsv3_router_gemm_module", (experts, hidden, True, True)),
        Module("attention.rope", "_jit_fused_rope_module", (False, rope, dtype, dtype)),
        Module("attention.rope", "_jit_fused_rope_module", (True, head, dtype, dtype)),
        Module("layernorm.norm", "_jit_qknorm_module", (head, dtype)),
        Module("kvcache.kvcache", "_jit_kvcache_module", (drafter_row, drafter_row)),
        Module(
            "kvcache.set_mla_kv_buffer", "set_mla_kv_buffer_module", (2 * latent, 2 * rope, True)
        ),
    )


def _int64() -> Any:
    import torch

    return torch.int64


@contextmanager
def instead_of_compiling(act: Callable[[str, dict[str, Any]], Any]) -> Iterator[None]:
    """SGLang calls ``act`` with a module's name and tvm-ffi's arguments where it would compile."""
    import tvm_ffi.cpp

    kept = tvm_ffi.cpp.load_inline
    tvm_ffi.cpp.load_inline = lambda name, **given: act(name, given)
    try:
        yield
    finally:
        tvm_ffi.cpp.load_inline = kept


def _refuse(name: str, given: dict[str, Any]) -> Any:
    del given
    raise WouldCompileError(name)


def check(wanted: Sequence[Module]) -> dict[str, str]:
    """Of each module that does not load from the cache: what it is, and why. Compiles nothing."""
    missing = {}
    with instead_of_compiling(_refuse):
        for module in wanted:
            try:
                module.load()
            except WouldCompileError as error:
                missing[str(error)] = "not in the cache, or does not load"
            except Exception as error:  # SGLang of another version
                missing[f"{module.where}.{module.function}"] = f"{type(error).__name__}: {error}"
    return missing


def build(wanted: Sequence[Module], cache: Path) -> dict[str, float]:
    """Compiles into ``cache`` what is not there; seconds by name."""
    from tvm_ffi.cpp import build_inline

    took: dict[str, float] = {}

    def compile_one(name: str, given: dict[str, Any]) -> None:
        begun = time.monotonic()
        built = Path(build_inline(name, **given))
        for other in built.parent.iterdir():  # SGLang reads the library alone
            if other != built:
                other.unlink()
        took[name] = round(time.monotonic() - begun, 1)
        print(f"{took[name]:7.1f} s  {name}", flush=True)

    os.environ["TVM_FFI_CACHE_DIR"] = str(cache)
    with instead_of_compiling(compile_one):
        for module in wanted:
            module.load()
    return took


@contextmanager
def something_to_link_with() -> Iterator[None]:
    """A libcudart.so, which wheels do not have by that name, and an empty libcuda.so: the driver's
    is there where the modules are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "libcudart.so").symlink_to(next(_wheels("lib/libcudart.so.*")))
        driver = ["-Wl,-soname,libcuda.so.1", "-o", str(Path(folder) / "libcuda.so")]
        subprocess.run(["c++", "-shared", "-x", "c++", "/dev/null", *driver], check=True)
        os.environ["LIBRARY_PATH"] = folder
        yield


def _wheels(pattern: str) -> Iterator[Path]:
    """Files of that name in NVIDIA's wheels."""
    package = importlib.util.find_spec("nvidia")
    for root in (package and package.submodule_search_locations) or ():
        yield from Path(root).glob(f"*/{pattern}")


def build_norms(folder: Path) -> None:
    """FlashInfer's norms as the package that it looks for them in, in ``folder``."""
    if (folder / PACKAGE / "norm" / "norm.so").exists():
        return
    with tempfile.TemporaryDirectory() as work:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = work
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"
        os.environ["CPLUS_INCLUDE_PATH"] = str(next(_wheels("include/cublasLt.h")).parent)
        from flashinfer.jit.norm import gen_norm_module
        from flashinfer.version import __version__

        spec = gen_norm_module()
        begun = time.monotonic()
        spec.build(verbose=False)
        place = folder / PACKAGE / "norm"
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, place / "norm.so")
        (folder / PACKAGE / "__init__.py").write_text(
            f'__version__ = "{__version__}"\n\n\ndef get_jit_cache_dir():\n    return __path__[0]\n'
        )
        print(f"{time.monotonic() - begun:7.1f} s  norm", flush=True)


def main() -> None:
    what, place = sys.argv[1], Path(sys.argv[2]).resolve()
    import torch
    from sglang.kernels.jit.utils.arch import override_jit_cuda_arch

    here = nullcontext() if torch.cuda.is_available() else override_jit_cuda_arch(*CAPABILITY)
    with here:
        wanted = modules(torch.bfloat16)
        if what == "build":
            with something_to_link_with():
                build(wanted, place / "tvm-ffi")
                build_norms(place / "python")
        else:
            begun = time.monotonic()
            found = {"missing": check(wanted), "seconds": round(time.monotonic() - begun, 1)}
            place.write_text(json.dumps(found))
            print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""The changes that let SGLang run on a plain CPU, each with its reason."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from overstory.workers.seam.patches import Patch, hook
from overstory.workers.seam.portable import page_ops
from overstory.workers.seam.portable.gloo import gloo_device_shared, share_gloo_device
from overstory.workers.seam.portable.moe import moe_forward
from overstory.workers.seam.portable.norm import rms_norm

if TYPE_CHECKING:
    import torch

_SPECULATIVE = "sglang.srt.arg_groups.speculative_hook"
_DRAFT_WORKER = "sglang.srt.speculative.draft_worker_common"
_XGRAMMAR = "sglang.srt.constrained.xgrammar_backend"
BACKEND_NAME = "torch_native"


def _dflash_arguments(original: Any, server_args: Any) -> Any:
    """Lets SGLang's own checks of DFLASH arguments run, with the device check satisfied."""
    device = server_args.device
    server_args.device = "cuda"
    try:
        return original(server_args)
    finally:
        server_args.device = device


def _draft_backend(server_args: Any) -> None:
    server_args.speculative_draft_attention_backend = BACKEND_NAME


def _no_kv_copy_warmup(pool: Any) -> None:
    pool._kv_copy_config = None
    pool.use_native_move_kv_cache = True


def _all_gather_into_tensor(group: Any, output: torch.Tensor, input_: torch.Tensor) -> None:
    group._all_gather_into_tensor(output, input_)


def _unpinned_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)


def _apply_bitmask(grammar: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    from xgrammar import apply_token_bitmask_inplace

    del grammar
    apply_token_bitmask_inplace(logits, vocab_mask)


def _own_cpus(original: Any, *, tp_rank: int, tp_size: int) -> Any:
    if os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return original(tp_rank=tp_rank, tp_size=tp_size)
    return ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))


def _install_draft_backend_name() -> None:
    import sglang.srt.speculative.draft_worker_common as module

    names = module._SUPPORTED_DRAFT_BACKENDS
    if BACKEND_NAME not in names:
        module._SUPPORTED_DRAFT_BACKENDS = (*names, BACKEND_NAME)


def _draft_backend_name_taken() -> bool:
    import sglang.srt.speculative.draft_worker_common as module

    return BACKEND_NAME in module._SUPPORTED_DRAFT_BACKENDS


def _record_stream(tensor: torch.Tensor, stream: Any) -> None:
    if tensor.device.type != "cpu":
        _record_stream.original(tensor, stream)  # type: ignore[attr-defined]


def _install_record_stream() -> None:
    import torch

    if torch.Tensor.record_stream is not _record_stream:
        _record_stream.original = torch.Tensor.record_stream  # type: ignore[attr-defined]
        torch.Tensor.record_stream = _record_stream


def _record_stream_taken() -> bool:
    import torch

    return torch.Tensor.record_stream is _record_stream


def _standin_taken() -> bool:
    import sgl_kernel

    from overstory.workers.seam.standins import StandinModule

    return isinstance(sgl_kernel, StandinModule)


def patches() -> list[Patch]:
    """Every change of this module, in the order to make them."""
    return [
        Patch(
            "sgl_kernel",
            "the compiled kernel package needs libcuda",
            lambda: (
                None
            ),  # in place since `prepare_process` or sitecustomize: SGLang imports it first
            _standin_taken,
        ),
        hook(
            f"{_SPECULATIVE}._handle_dflash",
            "around",
            _dflash_arguments,
            "refuses every device but CUDA and NPU",
        ),
        hook(
            f"{_SPECULATIVE}._resolve_dflash_draft_attention_backend",
            "replace",
            _draft_backend,
            "puts FlashInfer in place of a drafter backend that it does not list",
        ),
        Patch(
            f"{_DRAFT_WORKER}._SUPPORTED_DRAFT_BACKENDS",
            "a second list with the same fallback to FlashInfer",
            _install_draft_backend_name,
            _draft_backend_name_taken,
        ),
        hook(
            "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
            "replace",
            _no_kv_copy_warmup,
            "calls a compiled copy op at start-up; rows are moved by the pool's own torch path",
        ),
        Patch(
            "kernels of PagedTokenToKVPoolAllocator",
            "pages of slots are handed out by Triton kernels",
            page_ops.install,
            page_ops.installed,
        ),
        hook(
            f"{_XGRAMMAR}._allocate_token_bitmask",
            "replace",
            _unpinned_bitmask,
            "pins memory, which takes a GPU's driver",
        ),
        hook(
            f"{_XGRAMMAR}.XGrammarGrammar.apply_vocab_mask",
            "replace",
            _apply_bitmask,
            "refuses CPU tensors; xgrammar itself does not",
        ),
        Patch(
            "torch.Tensor.record_stream",
            "the DFLASH worker calls it on CPU tensors, where torch has no streams",
            _install_record_stream,
            _record_stream_taken,
        ),
        Patch(
            "torch.distributed.distributed_c10d.ProcessGroupGloo",
            "a thread that polls for each of SGLang's groups: an idle rank uses twice the CPU",
            share_gloo_device,
            gloo_device_shared,
        ),
        hook(
            "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
            "replace",
            _all_gather_into_tensor,
            "goes through a custom op that has no CPU implementation",
        ),
        hook(
            "sglang.srt.utils.numa_utils.init_threads_binding",
            "around",
            _own_cpus,
            "refuses more ranks than NUMA nodes, though it binds nothing without AMX",
        ),
        hook(
            "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
            "replace",
            moe_forward,
            "builds a module and several copies per expert and call",
        ),
        hook(
            "sglang.srt.layers.layernorm.RMSNorm.forward_native",
            "around",
            rms_norm,
            "spends ten ops on what torch does in one",
        ),
    ]

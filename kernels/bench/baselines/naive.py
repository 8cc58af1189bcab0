"""The naive kernel: one block per head of a row (naive_verify.cu, built like the others)."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from overstory.kernels.bench.inputs import AttentionInputs
from overstory.kernels.bench.timing import Launch
from overstory.kernels.build import cuda_target
from overstory.kernels.cuda_library import KernelLibrary, arch_of


@functools.cache
def _library() -> KernelLibrary:
    return KernelLibrary(cuda_target(arch_of()), [Path(__file__).parent / "naive_verify.cu"])


def naive(inputs: AttentionInputs) -> Launch:
    """The whole op for bf16, int32 indptr, int64 slots, every request of equally many rows."""
    masked = inputs.case.tail > 0
    mask = inputs.custom_mask.view(torch.uint8) if masked else None
    mask_indptr = inputs.mask_indptr if masked else None
    return lambda: _library().launch(
        "naive_verify",
        q=inputs.q,
        kv=inputs.kv,
        kv_indptr=inputs.kv_indptr,
        kv_indices=inputs.kv_indices,
        out_cache_loc=inputs.out_cache_loc,
        mask=mask,
        mask_indptr=mask_indptr,
        out=inputs.out,
        tokens=inputs.q.shape[0],
        rows=inputs.case.q,
        heads=inputs.case.heads,
        scale=inputs.scale,
    )

"""SGLang's own verify: the prefill kernel with a mask, and the shared-KV split kernel."""

from __future__ import annotations

from typing import Any

import torch

from overstory.kernels.bench.inputs import AttentionInputs
from overstory.kernels.bench.timing import Launch

from .foreign_sglang import ForeignSglang


def extend(sglang: ForeignSglang, inputs: AttentionInputs) -> Launch:
    """`extend_attention_fwd` as `--attention-backend triton` calls it for a tree."""
    forward = sglang.module("extend_attention").extend_attention_fwd
    return _call(forward, inputs)


def shared_kv(sglang: ForeignSglang, inputs: AttentionInputs) -> Launch:
    """`verify_shared_kv_fwd`, which SGLang takes on other hardware only: a chain, no tree mask.

    Raises:
        RuntimeError: it refuses the shape.
    """
    forward = sglang.module("verify_mla").verify_shared_kv_fwd
    call = _call(forward, inputs)

    def launch() -> None:
        if not call():
            raise RuntimeError("verify_shared_kv_fwd refuses this shape")

    return launch


def _call(forward: Any, inputs: AttentionInputs) -> Launch:
    key = inputs.tail
    value = key[..., : inputs.out.shape[-1]].contiguous()
    values = inputs.kv[..., : inputs.out.shape[-1]]
    arguments = (
        inputs.q,
        key,
        value,
        inputs.out,
        inputs.kv,
        values,
        inputs.qo_indptr,
        inputs.kv_indptr,
        inputs.kv_indices,
        inputs.custom_mask.view(torch.uint8),
        True,
        inputs.mask_indptr,
        inputs.case.q,
        1.0,
        1.0,
    )
    return lambda: forward(*arguments, sm_scale=inputs.scale)

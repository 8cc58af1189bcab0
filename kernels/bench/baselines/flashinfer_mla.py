"""FlashInfer's paged MLA attention: a chain, as it has no tree mask.

Its two kernels that a Hopper GPU runs: `fa2`, of the same tensor-core instructions as ours, and
`fa3`, of instructions that only Hopper has. Planning, which FlashInfer does on the host once a
step, is not in the time.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from overstory.kernels.bench.inputs import AttentionInputs
from overstory.kernels.bench.timing import Launch

BACKENDS = ("fa2", "fa3")
_WORKSPACE_BYTES = 256 << 20


def installed() -> bool:
    """Whether `flashinfer` can be imported; it builds or finds its kernels at their first use."""
    return importlib.util.find_spec("flashinfer") is not None


def version() -> str:
    """FlashInfer's own word."""
    return str(importlib.import_module("flashinfer").__version__)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Of partial results; launches of one stream may share it."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def chain(inputs: AttentionInputs, backend: str) -> Launch:
    """Causal attention of the rows over prefix and tail, all by slots of the one cache."""
    import flashinfer.mla

    case, device = inputs.case, inputs.q.device
    slots = torch.cat(
        [
            inputs.kv_indices.view(case.bs, case.context),
            inputs.out_cache_loc.view(case.bs, case.tail),
        ],
        dim=1,
    )
    length = case.context + case.tail
    wrapper: Any = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(device), backend=backend)
    values = inputs.out.shape[-1]
    wrapper.plan(
        inputs.qo_indptr,
        torch.arange(0, case.bs * length + 1, length, dtype=torch.int32, device=device),
        slots.flatten().int(),
        torch.full((case.bs,), length, dtype=torch.int32, device=device),
        case.heads,
        values,
        inputs.q.shape[-1] - values,
        1,
        True,
        inputs.scale,
        inputs.q.dtype,
        inputs.kv.dtype,
    )
    query, rope = inputs.q.split([values, inputs.q.shape[-1] - values], dim=-1)
    latent, keys = inputs.kv.split([values, inputs.kv.shape[-1] - values], dim=-1)

    def launch() -> None:
        wrapper.run(query, rope, latent, keys, out=inputs.out)

    return launch

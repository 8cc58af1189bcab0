"""Our attention over a set of inputs, with the defaults or with given tunables."""

from __future__ import annotations

from functools import lru_cache, partial

from overstory.kernels import ops
from overstory.kernels.ops import Schedule

from .inputs import AttentionInputs
from .timing import Launch

_workspace = lru_cache(maxsize=1)(ops.attention_workspace)


def ours(inputs: AttentionInputs, schedule: Schedule | None = None) -> Launch:
    """One call as an engine makes it under capture: result and workspace allocated before.

    All sets share the workspace, as the layers of a model do.
    """
    case = inputs.case
    workspace = _workspace(inputs.q.device, case.heads, case.q, schedule)
    options = {
        "out": inputs.out,
        "workspace": workspace,
        "schedule": schedule,
        "kv_scale": inputs.kv_scale,
    }
    if not case.tail:
        arguments = (inputs.q, inputs.kv, inputs.kv_indptr, inputs.kv_indices)
        return partial(ops.decode_attention, *arguments, scale=inputs.scale, **options)
    return partial(
        ops.verify_attention,
        inputs.q,
        inputs.kv,
        inputs.qo_indptr,
        inputs.kv_indptr,
        inputs.kv_indices,
        inputs.out_cache_loc,
        inputs.custom_mask,
        inputs.mask_indptr,
        scale=inputs.scale,
        max_q=case.q,
        **options,
    )

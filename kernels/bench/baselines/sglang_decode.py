"""SGLang's Triton split decode, the tree's rows folded into its head axis.

With the rows as heads of one token, every 16 of them share one pass over the prefix. It covers the
prefix only: no tail, no mask, no merge of the two. For decoding (one row) it is the whole op, with
SGLang's own number of splits among those tried.
"""

from __future__ import annotations

import torch

from overstory.kernels.bench.inputs import AttentionInputs
from overstory.kernels.bench.timing import Launch

from .foreign_sglang import ForeignSglang

SPLITS = (8, 32, 128)
"""Numbers of splits to take the best of; each is a compilation of its own per number of rows."""


def likely_best_splits(context: int) -> int:
    """Of `SPLITS`, by what one H200 took least time with at 9 rows and a batch of one."""
    return 8 if context < 4096 else 32 if context < 32_768 else 128


def folded_decode(sglang: ForeignSglang, inputs: AttentionInputs, splits: int) -> Launch:
    """`decode_attention_fwd` over [bs, q * heads, 576] with `splits` splits for every request."""
    forward = sglang.module("decode_attention").decode_attention_fwd
    case, device = inputs.case, inputs.q.device
    rows = case.q * case.heads
    width = inputs.out.shape[-1]
    f32 = {"dtype": torch.float32, "device": device}
    arguments = (
        inputs.q.view(case.bs, rows, inputs.q.shape[-1]),
        inputs.kv,
        inputs.kv[..., :width],
        inputs.out.view(case.bs, rows, width),
        inputs.kv_indptr,
        inputs.kv_indices,
        torch.empty(case.bs, rows, splits, width, **f32),
        torch.empty(case.bs, rows, splits, **f32),
        torch.full((case.bs,), splits, dtype=torch.int32, device=device),
        splits,
        inputs.scale,
        1.0,
        1.0,
    )
    # As for every MLA model: values are taken from the keys' tile, not loaded again.
    return lambda: forward(*arguments, has_mla=True)

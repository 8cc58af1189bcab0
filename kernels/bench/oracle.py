"""Whether an implementation computed attention at all: no number for a wrong answer."""

from __future__ import annotations

import torch

from overstory.kernels.reference.kv_fp8 import dequantize_kv, is_fp8

from .inputs import AttentionInputs

MOST_ERROR = 2e-2
"""Relative, of a bf16 output with bf16 weights; a wrong mask or split is far above."""


def check_output(inputs: AttentionInputs) -> None:
    """Compare `inputs.out` of the first request with float32 attention.

    Raises:
        ArithmeticError: it is further off than rounding explains.
    """
    error = _relative_error(inputs)
    if not error < MOST_ERROR:
        raise ArithmeticError(f"wrong result: relative error {error:.3g} (at most {MOST_ERROR})")


def _relative_error(inputs: AttentionInputs) -> float:
    case = inputs.case
    slots = inputs.kv_indices[: case.context]
    if case.tail:
        slots = torch.cat((slots, inputs.out_cache_loc[: case.tail]))
    keys = inputs.kv[slots, 0]
    keys = (dequantize_kv(keys, inputs.kv_scale) if is_fp8(keys) else keys).float()
    rows = inputs.q[: case.q].float()
    scores = torch.einsum("qhd,sd->qhs", rows, keys) * inputs.scale
    if case.tail:
        mask = inputs.custom_mask[: case.q * (case.context + case.q)].view(case.q, -1)
        scores[:, :, case.context :].masked_fill_(~mask[:, case.context :].unsqueeze(1), -torch.inf)
    values = keys[:, : inputs.out.shape[-1]]
    wanted = torch.softmax(scores, dim=2) @ values
    return float((inputs.out[: case.q].float() - wanted).norm() / wanted.norm())

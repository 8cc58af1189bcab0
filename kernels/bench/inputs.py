"""Rotating inputs of attention: one big cache, sets of distinct random slots."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from overstory.kernels.reference import quantize_kv

from .cases import FP8, KEY_WIDTH, MAX_SLOTS, VALUE_WIDTH, AttentionCase

KV_SCALE = 0.02
"""Of a cache in e4m3."""
SETS = (4, 64)
"""Fewest and most sets."""


@dataclass(frozen=True)
class AttentionInputs:
    """One call's arguments as SGLang holds them: int32 indptr, int64 slots, FULL_MASK bytes."""

    case: AttentionCase
    q: torch.Tensor
    kv: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    custom_mask: torch.Tensor
    mask_indptr: torch.Tensor
    out: torch.Tensor

    @property
    def scale(self) -> float:
        """Of a head of 128 + 64 columns before absorption."""
        return (128 + 64) ** -0.5

    @property
    def kv_scale(self) -> float:
        """1 but for a cache in e4m3."""
        return KV_SCALE if self.case.kv_dtype == FP8 else 1.0

    @property
    def tail(self) -> torch.Tensor:
        """[tokens, 1, 576] the cached rows of the request's own rows, as SGLang passes them."""
        return self.kv[self.out_cache_loc]


@functools.lru_cache(maxsize=2)
def _cache_of(device: str, kv_dtype: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float8_e4m3fn if kv_dtype == FP8 else torch.bfloat16
    kv = torch.empty(MAX_SLOTS, 1, KEY_WIDTH, dtype=dtype, device=device)
    for part in kv.split(1 << 18):  # randn of the whole would need as much again
        rows = torch.randn(part.shape, device=device, generator=generator, dtype=torch.bfloat16)
        part.copy_(quantize_kv(rows, KV_SCALE) if kv_dtype == FP8 else rows)
    return kv


def number_of_sets(case: AttentionCase, l2_bytes: int) -> int:
    """So many that their cache rows are twice the L2, within `SETS` and `MAX_SLOTS`."""
    wanted = -(-2 * l2_bytes // case.kv_bytes)
    fitting = MAX_SLOTS // (case.bs * (case.context + case.tail))
    return max(SETS[0], min(wanted, fitting, SETS[1]))


def draw_inputs(case: AttentionCase, device: str = "cuda", run: int = 1) -> list[AttentionInputs]:
    """Sets for one case, each with slots of its own in runs of `run`; the same at every call."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    count = number_of_sets(case, l2)
    kv = _cache_of(device, case.kv_dtype)
    generator = torch.Generator(device).manual_seed(1)
    slots = slots_in_runs(MAX_SLOTS, run, generator)
    return [_one_set(case, kv, part, generator) for part in _parts(case, slots, count)]


def slots_in_runs(slots: int, run: int, generator: torch.Generator) -> torch.Tensor:
    """[at most `slots`] int64: stretches of `run` neighbours, in random order."""
    device = generator.device
    starts = torch.randperm(slots // run, device=device, generator=generator) * run
    return (starts.unsqueeze(1) + torch.arange(run, device=device)).flatten()


def _parts(case: AttentionCase, slots: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    size = case.bs * (case.context + case.tail)
    return (slots[i * size : (i + 1) * size] for i in range(count))


def _one_set(
    case: AttentionCase, kv: torch.Tensor, slots: torch.Tensor, generator: torch.Generator
) -> AttentionInputs:
    device, prefix = kv.device, case.bs * case.context
    ints = {"dtype": torch.int32, "device": device}
    requests = torch.arange(case.bs + 1, device=device)
    mask_size = case.q * (case.context + case.q)
    tokens = case.bs * case.q
    shape = (tokens, case.heads, KEY_WIDTH)
    return AttentionInputs(
        case,
        torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator),
        kv,
        torch.arange(0, tokens + 1, case.q, **ints),
        torch.arange(0, prefix + 1, case.context, **ints),
        slots[:prefix].contiguous(),
        slots[prefix:].contiguous(),
        _mask(case, device) if case.tail else torch.empty(0, dtype=torch.bool, device=device),
        requests * mask_size,
        torch.empty(tokens, case.heads, VALUE_WIDTH, device=device, dtype=torch.bfloat16),
    )


def _mask(case: AttentionCase, device: torch.device) -> torch.Tensor:
    """A binary tree in every request; the prefix columns hold garbage that nobody may read."""
    tail = torch.eye(case.q, dtype=torch.bool)
    for row in range(1, case.q):
        tail[row] |= tail[(row - 1) // 2]
    width = case.context + case.q
    mask = torch.ones(case.bs, case.q, width, dtype=torch.bool, device=device)
    mask[:, ::2, : case.context] = False
    mask[:, :, case.context :] = tail.to(device)
    return mask.flatten()

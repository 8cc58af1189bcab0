"""The attention ops over a cache in e4m3 on a GPU against the reference in float64."""

from __future__ import annotations

import attention_fp8
import pytest
import torch
from attention_cases import (
    Case,
    Tail,
    chain,
    diagonal,
    everything,
    nothing,
    random_bits,
    random_tree,
    star,
)
from attention_hazards import check, verify

from overstory.kernels import ops

LENGTHS = (0, 1, 15, 16, 17, 31, 33, 255, 256, 1024, 8192)


@pytest.mark.parametrize("q", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 64])
def test_lengths(q: int) -> None:
    attention_fp8.check_lengths("cuda", q, LENGTHS, 0.37)


@pytest.mark.parametrize("q", [1, 9, 64])
@pytest.mark.parametrize("length", [65_536, 200_000])
def test_long_contexts(q: int, length: int) -> None:
    case = Case([(length, q)], device="cuda", seed=q, kv_scale=0.02)
    check(verify(case), case.expected())


@pytest.mark.parametrize("tail", [chain, star, diagonal, everything, random_tree, random_bits])
@pytest.mark.parametrize("mask", ["bytes", "words"])
def test_masks(tail: Tail, mask: str) -> None:
    attention_fp8.check_masks("cuda", tail, mask)


@pytest.mark.parametrize(("mask", "tail"), [("causal", chain), ("none", everything)])
def test_without_a_mask(mask: str, tail: Tail) -> None:
    attention_fp8.check_masks("cuda", tail, mask)


def test_rows_that_see_nothing() -> None:
    attention_fp8.check_masks("cuda", nothing, "bytes")


@pytest.mark.parametrize("heads", [2, 4, 8, 16])
def test_decode(heads: int) -> None:
    attention_fp8.check_decode("cuda", [*LENGTHS, 0], heads)
    attention_fp8.check_decode("cuda", [8192] * 32, heads)


def test_every_number() -> None:
    attention_fp8.check_every_number("cuda")


def test_nan() -> None:
    attention_fp8.check_nan("cuda")


@pytest.mark.parametrize("prefix", [60, 20_000])
def test_near_bf16(prefix: int) -> None:
    attention_fp8.check_near_bf16("cuda", prefix)


def test_repeatable() -> None:
    attention_fp8.check_repeatable("cuda", 20_000, 20)


def test_slots_beyond_32_bits() -> None:
    """Slot * 576 passes 2^31 bytes."""
    case = Case([(700, 9)], device="cuda", kv_scale=0.02)
    slots = 4_000_000
    if torch.cuda.mem_get_info()[0] < slots * 576 + (8 << 30):
        pytest.skip("needs 11 GB of free GPU memory")
    expected, keys = case.expected(), case.kv
    case.kv = torch.full((slots, 576), 0x7F, dtype=torch.uint8, device="cuda")
    case.kv[-len(keys) :] = keys.view(torch.uint8)
    case.kv_indices += slots - len(keys)
    case.out_cache_loc += slots - len(keys)
    check(verify(case), expected)


@pytest.mark.parametrize("blocks", [1, 7, 132, 1000])
def test_any_schedule(blocks: int) -> None:
    case = Case([(3000, 9), (40, 3), (0, 1)], device="cuda", kv_scale=0.02)
    check(verify(case, schedule=ops.Schedule(blocks, 0)), case.expected())

"""The attention ops on a GPU against the reference in float64: lengths, masks, layouts, hazards.

The simulator's tests (tests/kernels/test_cuda_sim_attention.py) try the same kernels on small
inputs; here are real lengths, real concurrency, and addresses beyond 32 bits. Captured graphs are
tested in test_gpu_graphs.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_cases import (
    WIDTH,
    Case,
    DecodeCase,
    Tail,
    chain,
    diagonal,
    everything,
    nothing,
    random_bits,
    random_tree,
    star,
)
from attention_hazards import Outputs, check, verify

from overstory.kernels import ops

LENGTHS = (0, 1, 15, 16, 17, 31, 33, 255, 256, 1024, 8192)
ROWS = (1, 2, 8, 9, 16, 17, 33, 63, 64)

gpu_case = functools.partial(Case, device="cuda")
gpu_decode = functools.partial(DecodeCase, device="cuda")


def decode(case: DecodeCase, **options: Any) -> Outputs:
    lse = torch.full(case.q.shape[:2], torch.nan, device="cuda")
    arguments = (case.q, case.kv, case.kv_indptr, case.kv_indices)
    return ops.decode_attention(*arguments, scale=case.scale, lse=lse, **options), lse


@pytest.mark.parametrize("q", ROWS)
def test_lengths(q: int) -> None:
    case = gpu_case([(length, q) for length in LENGTHS], seed=q, unowned=2)
    check(verify(case), case.expected())


@pytest.mark.parametrize("q", ROWS)
@pytest.mark.parametrize("length", [65_536, 200_000, 262_080])
def test_long_contexts(q: int, length: int) -> None:
    case = gpu_case([(length, q)], seed=q)
    check(verify(case), case.expected())


@pytest.mark.parametrize("heads", [2, 4, 16])
@pytest.mark.parametrize("q", [1, 5, 9, 33, 64])
def test_other_numbers_of_heads(heads: int, q: int) -> None:
    requests = [(1000, q), (0, q), (77, max(1, q // 2)), (4096, q)]
    case = gpu_case(requests, heads=heads, seed=q, tail=random_bits)
    check(verify(case), case.expected())


@pytest.mark.parametrize(
    "tail",
    [chain, star, diagonal, everything, random_tree, random_bits, nothing],
    ids=lambda tail: tail.__name__,
)
@pytest.mark.parametrize("mask", ["bytes", "words"])
def test_masks(tail: Tail, mask: str) -> None:
    case = gpu_case([(500, 33), (0, 9), (16, 64), (3, 1)], tail=tail)
    check(verify(case, mask), case.expected())


@pytest.mark.parametrize(("mask", "tail"), [("causal", chain), ("none", everything)])
def test_without_a_mask(mask: str, tail: Tail) -> None:
    case = gpu_case([(300, 64), (0, 9)], tail=tail)
    check(verify(case, mask), case.expected())


def ragged(bs: int, seed: int) -> Sequence[tuple[int, int]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(bs, generator=draw) ** 3 * 6000).int()
    rows = torch.randint(0, 17, (bs,), generator=draw)
    lengths[::7] = 0
    return list(zip(lengths.tolist(), rows.tolist(), strict=True))


@pytest.mark.parametrize("bs", [1, 4, 32, 64, 100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ragged_batches(bs: int, dtype: torch.dtype) -> None:
    case = gpu_case(ragged(bs, bs), seed=bs, unowned=5, index_dtype=dtype, tail=random_bits)
    check(verify(case, dense=dtype is torch.int32), case.expected())


@pytest.mark.parametrize("blocks", [1, 7, 132, 1000])
@pytest.mark.parametrize("min_chunk", [0, 1, 3, 64])
def test_any_schedule(blocks: int, min_chunk: int) -> None:
    case = gpu_case([(3000, 9), (40, 3), (0, 1)])
    check(verify(case, schedule=ops.Schedule(blocks, min_chunk)), case.expected())


@pytest.mark.parametrize("q", range(1, 10))
def test_every_number_of_tiles(q: int) -> None:
    case = gpu_case([(3000, q), (40, 1), (700, q)], seed=q, tail=random_bits)
    check(verify(case, schedule=ops.Schedule(20, 0)), case.expected())


def test_fewer_rows_than_max_q() -> None:
    case = gpu_case([(3000, 4), (100, 1)], unowned=59)
    for max_q in (4, 9, 10, 33, 64):
        check(verify(case, max_q=max_q), case.expected())


def test_slots_beyond_32_bits() -> None:
    """Slot * 576 passes 2^31 elements, slot * 1152 passes 2^32 bytes."""
    case = gpu_case([(700, 9)])
    slots = 4_000_000
    if torch.cuda.mem_get_info()[0] < slots * WIDTH * 2 + (8 << 30):
        pytest.skip("needs 13 GB of free GPU memory")
    expected, keys = case.expected(), case.kv
    case.kv = torch.empty(slots, WIDTH, dtype=torch.bfloat16, device="cuda")
    case.kv[-len(keys) :] = keys
    case.kv[: len(keys)] = torch.nan
    case.kv_indices += slots - len(keys)
    case.out_cache_loc += slots - len(keys)
    check(verify(case), expected)


def test_mask_offsets_beyond_32_bits() -> None:
    case = gpu_case([(700, 9), (20, 5)], tail=random_bits)
    flat, indptr = case.mask_bytes()
    far = (1 << 31) + 5
    mask = torch.empty(far + len(flat), dtype=torch.uint8, device="cuda")
    mask[far:] = flat
    check(verify(case, "far", custom_mask=mask, mask_indptr=indptr + far), case.expected())


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_values_where_nothing_may_see_them(broken: float) -> None:
    """Slot 0, slots of nobody, tail keys that a row does not see."""
    case = gpu_case([(1000, 9), (5, 9)], tail=star)
    keep = [i for i in range(18) if i not in (4, 13)]
    expected, expected_lse = case.expected()
    unused = torch.ones(len(case.kv), dtype=torch.bool, device="cuda")
    unused[case.kv_indices] = False
    unused[case.out_cache_loc] = False
    case.kv[unused] = broken
    case.kv[case.out_cache_loc[[4, 13]]] = broken
    out, lse = verify(case)
    check((out[keep], lse[keep]), (expected[keep], expected_lse[keep]))
    assert not bool(torch.isfinite(out[[4, 13]]).any())


def test_unit_weights_give_exact_means() -> None:
    case = gpu_case([(300, 33), (0, 64), (8000, 9)])
    case.q.zero_()
    case.kv = torch.randint(-8, 9, case.kv.shape, device="cuda").bfloat16()
    out, lse = verify(case)
    want, want_lse = case.expected()
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("scale", [30.0, 3000.0])
def test_extreme_logits(scale: float) -> None:
    """Up to 3e5, where float32 scores have steps of 1/32."""
    case = gpu_case([(2000, 9)], scale=scale)
    out, lse = verify(case)
    want, want_lse = case.expected()
    assert bool(torch.isfinite(out).all())
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0.2)
    close = (out.double() - want).abs().amax(dim=-1) < 0.1
    assert close.float().mean() > 0.9


def test_bitwise_repeatable() -> None:
    case = gpu_case([(20_000, 9), (300, 4), (0, 9)])
    first = verify(case)
    for _ in range(20):
        again = verify(case)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_two_streams() -> None:
    """Calls that overlap, each with a workspace of its own."""
    cases = [gpu_case([(9000, 9), (100, 9)], seed=seed) for seed in (1, 2)]
    expected = [case.expected() for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    spaces = [ops.attention_workspace("cuda", 8, 9) for _ in cases]
    torch.cuda.synchronize()
    got: list[list[Outputs]] = [[], []]
    for _ in range(10):
        for case, stream, space, results in zip(cases, streams, spaces, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(verify(case, workspace=space))
    torch.cuda.synchronize()
    for results, want in zip(got, expected, strict=True):
        for result in results:
            check(result, want)


@pytest.mark.parametrize("heads", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode(heads: int, dtype: torch.dtype) -> None:
    case = gpu_decode([*LENGTHS, 0], heads=heads, index_dtype=dtype)
    check(decode(case), case.expected())


@pytest.mark.parametrize("lengths", [[200_000], [8192] * 32, [100] * 64])
def test_decode_at_size(lengths: list[int]) -> None:
    case = gpu_decode(lengths)
    check(decode(case), case.expected())

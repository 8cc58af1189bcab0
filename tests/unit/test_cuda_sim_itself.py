"""The simulator of the CUDA sources: right kernels run right, broken ones are caught."""

import ctypes
import re
from pathlib import Path

import pytest
import torch
from sim_library import pointer, simulated

SELF_TEST = Path(__file__).parent / "cuda_sim" / "self_test.cu"
LAUNCH_FAILURE, INVALID_VALUE = 719, 1
SEEDS = range(8)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return simulated(SELF_TEST)


def said(library: ctypes.CDLL) -> str:
    return str(library.overstory_sim_error().decode())


def reversed_by(library: ctypes.CDLL, seed: int, synchronised: bool, in_warp: bool) -> bool:
    values = torch.arange(256, dtype=torch.int32)
    out = torch.zeros_like(values)
    library.overstory_sim_seed(seed)
    assert library.test_reverse(pointer(values), pointer(out), 256, synchronised, in_warp) == 0
    want = values.view(8, 32).flip(1).flatten() if in_warp else values.flip(0)
    return torch.equal(out, want)


@pytest.mark.parametrize("in_warp", [False, True])
def test_a_missing_barrier_gives_a_wrong_result(library: ctypes.CDLL, in_warp: bool) -> None:
    assert all(reversed_by(library, seed, True, in_warp) for seed in SEEDS)
    assert not any(reversed_by(library, seed, False, in_warp) for seed in SEEDS)


@pytest.mark.parametrize(("wait", "enough"), [(0, True), (1, True), (4, False)])
def test_a_copy_lands_at_the_wait_that_covers_it(
    library: ctypes.CDLL, wait: int, enough: bool
) -> None:
    threads, stages = 64, 4
    rows = torch.randint(0, 1 << 20, (threads, stages, 4), dtype=torch.int32)
    out = torch.zeros(threads, dtype=torch.int32)
    assert library.test_copy_sum(pointer(rows), pointer(out), threads, stages, wait) == 0
    rows[:, 1] = 0  # copied with valid = false
    assert torch.equal(out, rows.sum(dim=(1, 2), dtype=torch.int32)) == enough


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (1, r"deadlock: .* sync_block at .*self_test.cu:\d+"),
        (2, r"divergent: sync_block at .*self_test.cu:\d+, but"),
        (3, r"shfl_xor at .*self_test.cu:\d+"),
        (4, r"divergent: (ballot|shfl) at .*self_test.cu:\d+, but"),
        (5, r"divergent: .*self_test.cu:\d+"),
        (6, "cp.async that it never waited for"),
        (7, "just outside of the shared memory"),
        (8, "memory fault"),
        (9, r"ldmatrix_x4 at .*self_test.cu:\d+: .* from the start of 4096 bytes"),
        (10, r"ldmatrix_x2 at .*self_test.cu:\d+: .* not 16-byte aligned"),
        (11, r"sync_named at .*self_test.cu:\d+: divergent: part of a warp"),
        (12, r"deadlock: .* sync_named at .*self_test.cu:\d+"),
        (13, "memory fault"),
        (14, "memory fault"),
    ],
)
def test_a_broken_kernel_is_an_error_with_its_place(
    library: ctypes.CDLL, fault: int, reason: str
) -> None:
    out = torch.zeros(256, dtype=torch.int32)
    for seed in SEEDS:
        library.overstory_sim_seed(seed)
        assert library.test_broken(fault, pointer(out)) == LAUNCH_FAILURE
        message = said(library)
        assert re.search(reason, message), message
        assert "block (0, 0)" in message
    assert library.test_broken(0, pointer(out)) == 0
    assert said(library) == ""
    assert torch.equal(out, torch.arange(256, dtype=torch.int32))


def test_thousands_of_collectives(library: ctypes.CDLL) -> None:
    values = torch.arange(256, dtype=torch.int64)
    want = values.view(8, 32)
    for _ in range(500):
        want = want.sum(dim=1, keepdim=True).expand(8, 32) & 0xFFFFFFFF
    got = torch.arange(256, dtype=torch.int32)
    assert library.test_butterfly(pointer(got), 256, 500) == 0
    assert torch.equal(got.to(torch.int64) & 0xFFFFFFFF, want.flatten())


def test_named_barriers_between_different_lines(library: ctypes.CDLL) -> None:
    values = torch.arange(320, dtype=torch.int32)
    for seed in SEEDS:
        out = torch.zeros_like(values)
        library.overstory_sim_seed(seed)
        assert library.test_pass_on(pointer(values), pointer(out), 10) == 0, said(library)
        assert torch.equal(out, values.view(10, 32).flip(1).flatten())


def test_shuffles_and_votes(library: ctypes.CDLL) -> None:
    values = torch.randint(0, 1 << 31, (32,), dtype=torch.int64)
    out = torch.zeros(8, 32, dtype=torch.int32)
    assert library.test_votes(pointer(values.to(torch.int32)), pointer(out)) == 0
    got = out.to(torch.int64) & 0xFFFFFFFF
    lanes = torch.arange(32)
    thirds = sum(1 << i for i in range(32) if int(values[i]) % 3 == 0)
    assert torch.equal(got[0], values[values % 32])
    assert torch.equal(got[1], values[torch.where(lanes >= 3, lanes - 3, lanes)])
    assert torch.equal(got[2], values[torch.where(lanes < 27, lanes + 5, lanes)])
    want = [thirds, thirds != 0, thirds == 0xFFFFFFFF, int(values.max()), int(values.min())]
    assert got[3:].tolist() == [[int(value)] * 32 for value in want]


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_matrix_fragments_against_matmul(library: ctypes.CDLL, kind: int) -> None:
    """bf16, bf16 with B loaded transposed, e4m3: whole numbers, so the sums are exact."""
    k, dtype = (128, torch.float8_e4m3fn) if kind == 2 else (64, torch.bfloat16)
    a = torch.randint(-8, 9, (16, k)).float()
    b = torch.randint(-8, 9, (k, 8)).float()
    given_b = b if kind == 1 else b.t()
    out = torch.zeros(16, 8)
    bits_a, bits_b = (m.contiguous().to(dtype).view(torch.uint8) for m in (a, given_b))
    assert library.test_matmul(pointer(bits_a), pointer(bits_b), pointer(out), kind) == 0
    assert torch.equal(out, a @ b)


def test_transposed_fragments_hold_columns(library: ctypes.CDLL) -> None:
    """Lane l holds of matrix m the elements (2 (l % 4), l / 4) and the one below."""
    matrices = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    out = torch.zeros(32, 4, dtype=torch.int32)
    assert library.test_transpose(pointer(matrices), pointer(out)) == 0
    for lane in range(32):
        row, column = 2 * (lane % 4), lane // 4
        want = [int(m[row, column]) | int(m[row + 1, column]) << 16 for m in matrices]
        assert out[lane].tolist() == want


def test_conversions_round_to_even(library: ctypes.CDLL) -> None:
    every_e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    steps = every_e4m3[every_e4m3.isfinite()].sort().values
    halves = (steps[1:] + steps[:-1]) / 2
    random = torch.randn(4096) * torch.logspace(-6, 2, 4096)
    values = torch.cat([steps, halves, random])
    values = values[values.abs() <= 448]
    values = values[: len(values) // 128 * 128].contiguous()
    bf16 = torch.zeros(len(values) // 2, dtype=torch.int32)
    e4m3 = torch.zeros(len(values) // 2, dtype=torch.int16)
    back = torch.zeros_like(values)
    arguments = [pointer(t) for t in (values, bf16, e4m3, back)]
    assert library.test_convert(*arguments, len(values) // 128) == 0
    assert torch.equal(bf16.view(torch.bfloat16), values.to(torch.bfloat16))
    want = values.to(torch.float8_e4m3fn)
    assert torch.equal(e4m3.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(back, want.float())


def test_every_block_runs_once(library: ctypes.CDLL) -> None:
    total = torch.zeros(1, dtype=torch.int32)
    seen = torch.full((7, 5), -1, dtype=torch.int32)
    assert library.test_count_blocks(pointer(total), pointer(seen), 5, 7) == 0
    assert int(total) == 35
    assert torch.equal(seen, (torch.arange(7)[:, None] * 1000 + torch.arange(5)).int())
    assert library.test_count_blocks(pointer(total), pointer(seen), 0, 7) == 0
    assert int(total) == 35


def test_shared_memory_starts_as_nan_and_has_limits(library: ctypes.CDLL) -> None:
    out = torch.zeros(2, dtype=torch.uint8)
    assert library.test_touch(pointer(out), 49153, 0) == INVALID_VALUE
    assert library.test_touch(pointer(out), 101377, 1) == INVALID_VALUE
    assert library.test_touch(pointer(out), 101376, 1) == 0
    assert out.tolist() == [0xFF, 1]
    poison = torch.tensor([0xFF, 0x7F] * 2, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert bool(poison.view(dtype).float().isnan().all())

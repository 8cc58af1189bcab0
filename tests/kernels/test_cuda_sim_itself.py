"""The simulator of the CUDA sources: right kernels run right, broken ones are caught."""

import shutil
from pathlib import Path

import pytest
import torch

from overstory.kernels.cuda_library import KernelLibrary, simulator_library
from overstory.kernels.errors import LaunchError

SELF_TEST = Path(__file__).parent / "cuda_sim" / "self_test.cu"
SEEDS = range(8)


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA sources for the simulator")
    return simulator_library([SELF_TEST])


def reversed_by(library: KernelLibrary, seed: int, synchronised: bool, in_warp: bool) -> bool:
    values = torch.arange(256, dtype=torch.int32)
    out = torch.zeros_like(values)
    library.seed_simulator(seed)
    how = {"threads": 256, "synchronised": synchronised, "in_warp": in_warp}
    library.launch("test_reverse", values=values, out=out, **how)
    want = values.view(8, 32).flip(1).flatten() if in_warp else values.flip(0)
    return torch.equal(out, want)


@pytest.mark.parametrize("in_warp", [False, True])
def test_a_missing_barrier_gives_a_wrong_result(library: KernelLibrary, in_warp: bool) -> None:
    assert all(reversed_by(library, seed, True, in_warp) for seed in SEEDS)
    assert not any(reversed_by(library, seed, False, in_warp) for seed in SEEDS)


@pytest.mark.parametrize(("wait", "enough"), [(0, True), (1, True), (4, False)])
def test_a_copy_lands_at_the_wait_that_covers_it(
    library: KernelLibrary, wait: int, enough: bool
) -> None:
    threads, stages = 64, 4
    rows = torch.randint(0, 1 << 20, (threads, stages, 4), dtype=torch.int32)
    out = torch.zeros(threads, dtype=torch.int32)
    library.launch("test_copy_sum", rows=rows, out=out, threads=threads, stages=stages, wait=wait)
    rows[:, 1] = 0  # copied with valid = false
    assert torch.equal(out, rows.sum(dim=(1, 2), dtype=torch.int32)) == enough


@pytest.mark.parametrize(("rounds", "awaited"), [(7, True), (2, False)])
def test_a_bulk_copy_lands_at_the_wait_for_it(
    library: KernelLibrary, rounds: int, awaited: bool
) -> None:
    rows = torch.randint(0, 1 << 20, (rounds, 2, 64), dtype=torch.int32)
    for seed in SEEDS:
        library.seed_simulator(seed)
        out = torch.zeros(rounds, dtype=torch.int32)
        library.launch("test_bulk_sum", rows=rows, out=out, rounds=rounds, awaited=int(awaited))
        assert torch.equal(out, rows.sum(dim=(1, 2), dtype=torch.int32)) == awaited


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
        (15, "ended with a bulk copy that nobody waited for"),
        (16, r"deadlock: .* mbarrier_wait at .*self_test.cu:\d+"),
    ],
)
def test_a_broken_kernel_is_an_error_with_its_place(
    library: KernelLibrary, fault: int, reason: str
) -> None:
    out = torch.zeros(256, dtype=torch.int32)
    for seed in SEEDS:
        library.seed_simulator(seed)
        with pytest.raises(LaunchError, match=rf"error 719 \(block \(0, 0\).*{reason}"):
            library.launch("test_broken", fault=fault, out=out)
    library.launch("test_broken", fault=0, out=out)
    assert torch.equal(out, torch.arange(256, dtype=torch.int32))


def test_thousands_of_collectives(library: KernelLibrary) -> None:
    want = torch.arange(256).view(8, 32)
    for _ in range(500):
        want = want.sum(dim=1, keepdim=True).expand(8, 32) & 0xFFFFFFFF
    got = torch.arange(256, dtype=torch.int32)
    library.launch("test_butterfly", values=got, threads=256, rounds=500)
    assert torch.equal(got.to(torch.int64) & 0xFFFFFFFF, want.flatten())


def test_named_barriers_between_different_lines(library: KernelLibrary) -> None:
    values = torch.arange(320, dtype=torch.int32)
    for seed in SEEDS:
        out = torch.zeros_like(values)
        library.seed_simulator(seed)
        library.launch("test_pass_on", values=values, out=out, rounds=10)
        assert torch.equal(out, values.view(10, 32).flip(1).flatten())


def test_a_barrier_tells_whether_one_thread_said_so(library: KernelLibrary) -> None:
    rounds = torch.arange(40)
    for seed in SEEDS:
        said = torch.zeros(40, dtype=torch.int32)
        library.seed_simulator(seed)
        library.launch("test_block_votes", said=said, rounds=40)
        assert torch.equal(said, torch.where(rounds % 3 != 0, 128, 0).int())


def test_shuffles_and_votes(library: KernelLibrary) -> None:
    values = torch.randint(0, 1 << 31, (32,), dtype=torch.int64)
    out = torch.zeros(9, 32, dtype=torch.int32)
    library.launch("test_votes", values=values.to(torch.int32), out=out)
    got = out.to(torch.int64) & 0xFFFFFFFF
    lanes = torch.arange(32)
    thirds = sum(1 << i for i in range(32) if int(values[i]) % 3 == 0)
    assert torch.equal(got[0], values[values % 32])
    assert torch.equal(got[1], values[torch.where(lanes >= 3, lanes - 3, lanes)])
    assert torch.equal(got[2], values[torch.where(lanes < 27, lanes + 5, lanes)])
    want = [thirds, thirds != 0, thirds == 0xFFFFFFFF, int(values.max()), int(values.min())]
    want.append(int((values & 0xFFFF).sum()))
    assert got[3:].tolist() == [[int(value)] * 32 for value in want]


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_matrix_fragments_against_matmul(library: KernelLibrary, kind: int) -> None:
    """bf16, bf16 with B loaded transposed, e4m3: whole numbers, so the sums are exact."""
    k, dtype = (128, torch.float8_e4m3fn) if kind == 2 else (64, torch.bfloat16)
    a = torch.randint(-8, 9, (16, k)).float()
    b = torch.randint(-8, 9, (k, 8)).float()
    given_b = b if kind == 1 else b.t()
    out = torch.zeros(16, 8)
    bits_a, bits_b = (matrix.contiguous().to(dtype) for matrix in (a, given_b))
    library.launch("test_matmul", a=bits_a, b=bits_b, d=out, kind=kind)
    assert torch.equal(out, a @ b)


def test_transposed_fragments_hold_columns(library: KernelLibrary) -> None:
    """Lane l holds of matrix m the elements (2 (l % 4), l / 4) and the one below."""
    matrices = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    out = torch.zeros(32, 4, dtype=torch.int32)
    library.launch("test_transpose", a=matrices, r=out)
    for lane in range(32):
        row, column = 2 * (lane % 4), lane // 4
        want = [int(m[row, column]) | int(m[row + 1, column]) << 16 for m in matrices]
        assert out[lane].tolist() == want


def test_conversions_round_to_even(library: KernelLibrary) -> None:
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
    results = {"bf16_pair": bf16, "e4m3_pair": e4m3, "back": back}
    library.launch("test_convert", values=values, **results, blocks=len(values) // 128)
    assert torch.equal(bf16.view(torch.bfloat16), values.to(torch.bfloat16))
    want = values.to(torch.float8_e4m3fn)
    assert torch.equal(e4m3.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(back, want.float())


def test_every_block_runs_once(library: KernelLibrary) -> None:
    total = torch.zeros(1, dtype=torch.int32)
    seen = torch.full((7, 5), -1, dtype=torch.int32)
    library.launch("test_count_blocks", sum=total, seen=seen, x=5, y=7)
    assert int(total) == 35
    assert torch.equal(seen, (torch.arange(7)[:, None] * 1000 + torch.arange(5)).int())
    library.launch("test_count_blocks", sum=total, seen=seen, x=0, y=7)
    assert int(total) == 35


def test_shared_memory_starts_as_nan_and_has_limits(library: KernelLibrary) -> None:
    out = torch.zeros(2, dtype=torch.uint8)
    with pytest.raises(LaunchError, match="without raise_shared_limit"):
        library.launch("test_touch", out=out, bytes=49153, raise_limit=False)
    with pytest.raises(LaunchError, match="more than 99 KB"):
        library.launch("test_touch", out=out, bytes=101377, raise_limit=True)
    library.launch("test_touch", out=out, bytes=101376, raise_limit=True)
    assert out.tolist() == [0xFF, 1]
    poison = torch.tensor([0xFF, 0x7F] * 2, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert bool(poison.view(dtype).float().isnan().all())

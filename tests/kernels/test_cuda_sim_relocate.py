"""`kv_relocate.cu` in the simulator against the reference: every overlap of sources and targets."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.build import SOURCES
from overstory.kernels.cuda_library import KernelLibrary, simulator_library
from overstory.kernels.errors import LaunchError, NoCompilerError
from overstory.kernels.reference import kv_relocate
from overstory.workers.defrag.relocate import _copy_rows, _groups

ROW_BYTES = 1152


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    try:
        return simulator_library([SOURCES / "kv_relocate.cu"])
    except NoCompilerError as error:
        pytest.skip(f"no simulator: {error}")


def pools(layers: int, slots: int, row_bytes: int = ROW_BYTES) -> list[torch.Tensor]:
    """[slots, row_bytes] uint8 each; every byte of the lot differs in its neighbourhood."""
    generator = torch.Generator().manual_seed(slots + row_bytes)
    shape = (slots, row_bytes)
    return [
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(layers)
    ]


def relocate(
    library: KernelLibrary,
    buffers: list[torch.Tensor],
    src: torch.Tensor,
    dst: torch.Tensor,
    slots: int | None = None,
) -> int:
    """Moves in place; returns the status word."""
    status = torch.zeros(1, dtype=torch.int32)
    library.launch(
        "kv_relocate",
        layers=torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64),
        num_layers=len(buffers),
        row_bytes=buffers[0].shape[1],
        slots=buffers[0].shape[0] if slots is None else slots,
        source_slots=src,
        target_slots=dst,
        wide_slots=src.dtype == torch.int64,
        moves=src.numel(),
        scratch=torch.full((1,), 7, dtype=torch.int32),
        status=status,
    )
    return int(status)


def check(
    library: KernelLibrary, src: list[int], dst: list[int], buffers: list[torch.Tensor]
) -> None:
    real = [(s, d) for s, d in zip(src, dst, strict=True) if s >= 0 and d >= 0]
    want = [buffer.clone() for buffer in buffers]
    kv_relocate(want, *(torch.tensor([m[i] for m in real], dtype=torch.int64) for i in (0, 1)))
    for dtype in (torch.int32, torch.int64):
        got = [buffer.clone() for buffer in buffers]
        columns = [torch.tensor(slots, dtype=dtype) for slots in (src, dst)]
        assert relocate(library, got, *columns) == 0
        assert all(map(torch.equal, got, want))


CASES = {
    "nothing": ([], []),
    "one": ([3], [5]),
    "identity": ([4, 2, 9], [4, 2, 9]),
    "swap": ([1, 2], [2, 1]),
    "chain downwards": ([1, 2, 3, 4], [0, 1, 2, 3]),
    "chain upwards": ([0, 1, 2, 3], [1, 2, 3, 4]),
    "cycle": ([1, 2, 3, 0], [0, 1, 2, 3]),
    "two cycles and a chain": ([1, 0, 3, 4, 2, 6, 7], [0, 1, 2, 3, 4, 5, 6]),
    "a source for many": ([7, 7, 7, 7], [0, 1, 7, 2]),
    "a cycle with branches": ([1, 0, 0, 1], [0, 1, 5, 6]),
    "padding": ([-1, 1, -1, 2, 8], [-1, 0, 3, 1, -1]),
    "only padding": ([-1] * 5, [-1] * 5),
    "compaction of a window": ([13, 15, 19], [11, 12, 13]),
}


@pytest.mark.parametrize("name", CASES)
def test_overlaps(library: KernelLibrary, name: str) -> None:
    check(library, *CASES[name], pools(3, 20))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_moves_of_any_row_size(library: KernelLibrary, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 30))
    slot = st.integers(0, slots - 1)
    dst = data.draw(st.lists(slot, unique=True))
    src = data.draw(st.lists(st.one_of(slot, st.just(-1)), min_size=len(dst), max_size=len(dst)))
    row_bytes = 16 * data.draw(st.integers(1, 20))
    library.seed_simulator(data.draw(st.integers(0, 5)))
    check(library, src, dst, pools(data.draw(st.integers(1, 3)), slots, row_bytes))


@pytest.mark.parametrize("moves", [128, 200, 500])
def test_a_permutation_of_a_whole_pool(library: KernelLibrary, moves: int) -> None:
    """One, two and four units per thread; long cycles, all within one launch."""
    order = torch.randperm(moves, generator=torch.Generator().manual_seed(moves))
    check(library, order.tolist(), list(range(moves)), pools(1, moves, 272))


@pytest.mark.full
@pytest.mark.parametrize(
    ("moves", "row_bytes"), [(1000, 1152), (4096, 1152), (4096, 576), (8192, 48)]
)
def test_as_many_moves_as_a_launch_takes(
    library: KernelLibrary, moves: int, row_bytes: int
) -> None:
    """Narrower slices, eight units per thread."""
    order = torch.randperm(moves, generator=torch.Generator().manual_seed(moves))
    check(library, order.tolist(), list(range(moves)), pools(1, moves, row_bytes))


@pytest.mark.parametrize("overlap", ["none", "one row", "its own only"])
def test_many_moves_with_and_without_overlap(library: KernelLibrary, overlap: str) -> None:
    """Enough that a kernel looks for overlaps first; whole rows are moved where there is none."""
    moves = 2100
    order = torch.randperm(2 * moves + 5, generator=torch.Generator().manual_seed(9))
    src, dst = order[:moves].tolist(), order[moves : 2 * moves].tolist()
    src[3] = src[4] = src[5]  # a source of several
    src[7], dst[8] = -1, -1
    if overlap == "one row":
        dst[moves - 1] = src[0]
    if overlap == "its own only":
        dst[9] = src[9]
    check(library, src, dst, pools(2, 2 * moves + 5, 48))


def test_more_moves_are_refused(library: KernelLibrary) -> None:
    most = library.query("kv_relocate_max_moves")
    assert most >= 4096
    buffers = pools(1, 4, 16)
    slots = torch.zeros(most + 1, dtype=torch.int32)
    with pytest.raises(LaunchError, match="kv_relocate"):
        relocate(library, buffers, slots, slots)


def test_rows_that_are_no_whole_units_are_refused(library: KernelLibrary) -> None:
    slots = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(LaunchError, match="kv_relocate"):
        relocate(library, pools(1, 4, 24), slots, slots)


@pytest.mark.parametrize(("src", "dst"), [([9], [1]), ([1], [9]), ([-2], [1]), ([1], [-7])])
def test_slots_outside_of_the_buffers_are_reported(
    library: KernelLibrary, src: list[int], dst: list[int]
) -> None:
    buffers = pools(2, 9, 32)
    before = [buffer.clone() for buffer in buffers]
    src, dst = [*src, 2], [*dst, 3]
    assert relocate(library, buffers, torch.tensor(src), torch.tensor(dst)) == 1
    for buffer, old in zip(buffers, before, strict=True):
        old[3] = old[2]  # the move beside the wrong one is made
        assert torch.equal(buffer, old)


def test_the_bytes_around_are_left_alone(library: KernelLibrary) -> None:
    """Rows within a larger allocation: what is not a target keeps its bytes."""
    whole = pools(1, 12, 80)[0]
    before = whole.clone()
    src, dst = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 0])
    assert relocate(library, [whole[4:8]], src, dst) == 0
    assert torch.equal(whole[:4], before[:4])
    assert torch.equal(whole[8:], before[8:])
    assert torch.equal(whole[4:8], before[[7, 4, 5, 6]])


@pytest.mark.parametrize("seed", range(4))
def test_a_pass_moves_the_rows_of_all_pools_by_the_kernel(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Target and drafter with rows of their own sizes, one pool's values a view of its keys; what
    is free stays. As by the reference."""
    draw = torch.Generator().manual_seed(seed)
    size = 80
    table = torch.cat((torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(size, generator=draw)))
    free = 1 + torch.randperm(size, generator=draw)[: 10 * seed]
    allocator = SimpleNamespace(free_pages=free[:5], release_pages=free[5:])
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    moved = {}
    for choice in ("reference", "simulator"):
        monkeypatch.setenv("OVERSTORY_KERNELS", choice)
        target, drafter = pools(3, size + 1), pools(2, size + 1, row_bytes=64)
        buffers = [*target, *drafter, target[1]]
        groups = _groups(buffers)
        assert len(groups) == (2 if choice == "simulator" else 5)
        rows, _ = _copy_rows(scheduler, groups, table)
        moved[choice] = [rows, *(buffer.clone() for buffer in [*target, *drafter])]
    counted, *by_reference = moved["reference"]
    assert counted == moved["simulator"][0]
    held = torch.ones(size + 1, dtype=torch.bool)
    held[table[free]] = False
    for one, other in zip(by_reference, moved["simulator"][1:], strict=True):
        assert torch.equal(one[held], other[held])
    assert not torch.equal(by_reference[0], pools(3, size + 1)[0])

"""`kv_rows.cu` in the simulator against the reference; and a hand-off's pieces by both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels import ops, reference
from overstory.kernels.build import SOURCES
from overstory.kernels.cuda_library import KernelLibrary, simulator_library
from overstory.kernels.errors import LaunchError, NoCompilerError
from overstory.workers.handoff.rows import RowTable


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    try:
        return simulator_library([SOURCES / "kv_rows.cu"])
    except NoCompilerError as error:
        pytest.skip(f"no simulator: {error}")


def pools(layers: int, slots: int, row_bytes: int, seed: int = 1) -> list[torch.Tensor]:
    """[slots, row_bytes] uint8 each."""
    draw = torch.Generator().manual_seed(seed)
    shape = (slots, row_bytes)
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw) for _ in range(layers)]


def launch(
    library: KernelLibrary,
    buffers: list[torch.Tensor],
    slots: torch.Tensor,
    dense: torch.Tensor,
    scatter: bool,
    **other: int,
) -> int:
    """Returns the status word."""
    status = torch.zeros(1, dtype=torch.int32)
    arguments = {
        "layers": torch.tensor([buffer.data_ptr() for buffer in buffers]),
        "num_layers": len(buffers),
        "row_bytes": buffers[0].shape[1],
        "layer_slots": buffers[0].shape[0],
        "slots": slots,
        "wide_slots": slots.dtype == torch.int64,
        "rows": slots.numel(),
        "dense": dense,
        "scatter": scatter,
        "status": status,
    }
    library.launch("kv_rows", **arguments | other)
    return int(status)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_rows_of_any_size(library: KernelLibrary, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    slots = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    row_bytes, layers = 16 * data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    library.seed_simulator(data.draw(st.integers(0, 5)))
    at = torch.tensor(slots, dtype=dtype)
    for scatter in (False, True):
        buffers = pools(layers, count, row_bytes)
        dense = torch.stack(pools(layers, len(slots), row_bytes, seed=2))
        want, want_dense = [buffer.clone() for buffer in buffers], dense.clone()
        reference.kv_rows(want, at, want_dense, scatter=scatter)
        assert launch(library, buffers, at, dense, scatter) == 0
        assert torch.equal(dense, want_dense)
        assert all(map(torch.equal, buffers, want))


def test_more_units_than_threads_take_turns(library: KernelLibrary) -> None:
    """1.1 million of one layer: the largest grid has 1,048,576 threads."""
    rows, row_bytes = 4400, 4000
    buffers = pools(1, 1, row_bytes)
    at = torch.zeros(rows, dtype=torch.int64)
    dense = torch.zeros(1, rows, row_bytes, dtype=torch.uint8)
    assert launch(library, buffers, at, dense, False) == 0
    assert torch.equal(dense[0], buffers[0].expand(rows, -1))


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("slot", [-1, 9, 1 << 40])
def test_a_slot_outside_is_reported_and_its_row_left(
    library: KernelLibrary, scatter: bool, slot: int
) -> None:
    buffers, dense = pools(2, 9, 32), torch.stack(pools(2, 2, 32, seed=2))
    want, want_dense = [buffer.clone() for buffer in buffers], dense.clone()
    reference.kv_rows(want, torch.tensor([4]), want_dense[:, 1:], scatter=scatter)
    assert launch(library, buffers, torch.tensor([slot, 4]), dense, scatter) == 1
    assert torch.equal(dense, want_dense)
    assert all(map(torch.equal, buffers, want))


@pytest.mark.parametrize("other", [{"row_bytes": 24}, {"rows": 1 << 29}, {"num_layers": 70000}])
def test_what_a_launch_cannot_do_is_refused(library: KernelLibrary, other: dict[str, int]) -> None:
    buffers, dense = pools(1, 4, 48), torch.zeros(1, 1, 48, dtype=torch.uint8)
    with pytest.raises(LaunchError, match="kv_rows"):
        launch(library, buffers, torch.tensor([0]), dense, False, **other)
    misaligned = torch.zeros(64, dtype=torch.uint8)[8:56]
    with pytest.raises(LaunchError, match="kv_rows"):
        launch(library, buffers, torch.tensor([0]), misaligned, False)


SHAPES = {
    "mla and a drafter": [(1, 576, torch.bfloat16)] * 3 + [(2, 128, torch.bfloat16)] * 4,
    "an odd one": [(1, 3, torch.int16), (1, 576, torch.bfloat16)],
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_hand_off_s_pieces_are_those_of_the_reference(
    library: KernelLibrary, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One odd row size among them is moved layer by layer: the parts after it are not aligned."""
    slots, others = torch.randperm(60)[:40], torch.randperm(60)[:40]

    def pool(seed: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return [
            torch.randint(-9, 9, (60, heads, width), generator=draw).to(dtype)
            for heads, width, dtype in SHAPES[name]
        ]

    seen = {}
    for choice in ("reference", "simulator"):
        monkeypatch.setenv("OVERSTORY_KERNELS", choice)
        mine, theirs = pool(1), pool(2)
        gather = RowTable(mine).gather(slots, 1 << 14)
        for piece, other in zip(gather, RowTable(theirs).scatter(others, 1 << 14), strict=True):
            staging = torch.zeros(piece.size, dtype=torch.uint8)
            piece.move(staging)
            other.move(staging)
        seen[choice] = theirs
    for mine_, reference_, simulated in zip(pool(1), *seen.values(), strict=True):
        assert torch.equal(reference_, simulated)
        assert torch.equal(simulated[others], mine_[slots])


def test_what_does_not_fit_is_refused() -> None:
    buffers = pools(2, 4, 32)
    with pytest.raises(ValueError, match=r"dense has shape \[2, 2, 32\]; want \[2, 1, 32\]"):
        ops.kv_rows(buffers, torch.tensor([1]), torch.stack(pools(2, 2, 32)), scatter=False)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.reference import kv_relocate, kv_rows


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_overlapping_moves_read_before_they_write(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 30))
    slot = st.integers(0, slots - 1)
    dst = data.draw(st.lists(slot, unique=True))
    src = data.draw(st.lists(slot, min_size=len(dst), max_size=len(dst)))
    kinds = [(torch.float32, (1, 6)), (torch.bfloat16, (3,)), (torch.int64, ())]
    buffers = [torch.randn(slots, *shape).mul(100).to(dtype) for dtype, shape in kinds]
    before = [buffer.clone() for buffer in buffers]
    kv_relocate(
        buffers,
        torch.tensor(src, dtype=torch.int64),
        torch.tensor(dst, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))),
    )
    for buffer, old in zip(buffers, before, strict=True):
        want = old.clone()
        for s, d in zip(src, dst, strict=True):
            want[d] = old[s]
        assert torch.equal(buffer, want)


def test_buffers_that_share_memory_move_once() -> None:
    """A pool may hand out its values as a view of its keys: a cycle must not turn twice."""
    pool = torch.arange(12.0).reshape(3, 4)
    kv_relocate([pool, pool[:, :2]], torch.tensor([1, 2, 0]), torch.tensor([0, 1, 2]))
    assert pool[:, 0].tolist() == [4.0, 8.0, 0.0]
    assert pool[:, 3].tolist() == [7.0, 11.0, 3.0]


def test_nothing_to_move() -> None:
    kv_relocate([torch.zeros(3, 2)], torch.zeros(0, dtype=torch.int64), torch.zeros(0))


def test_bad_moves_change_nothing() -> None:
    small, large = torch.arange(3.0), torch.arange(5.0)
    for src, dst in ([4], [0]), ([0], [4]), ([-1], [0]):
        with pytest.raises(IndexError, match="in a buffer of"):
            kv_relocate([large, small], torch.tensor(src), torch.tensor(dst))
    with pytest.raises(ValueError, match="names a slot twice"):
        kv_relocate([large], torch.tensor([1, 2]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="one length"):
        kv_relocate([large], torch.tensor([1, 2]), torch.tensor([0]))
    assert large.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_rows_to_a_dense_tensor_and_back(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    buffers = [torch.randn(9, 2, 3, generator=draw).mul(9).to(dtype) for _ in range(3)]
    slots = torch.tensor([7, 0, 8], dtype=torch.int32)
    dense = torch.zeros(3, 3, 2, 3).to(dtype)
    kv_rows(buffers, slots, dense, scatter=False)
    for buffer, part in zip(buffers, dense, strict=True):
        for row, slot in enumerate(slots.tolist()):
            assert torch.equal(part[row].float(), buffer[slot].float())
    others = [torch.zeros(9, 2, 3).to(dtype) for _ in buffers]
    kv_rows(others, torch.tensor([1, 2, 5]), dense, scatter=True)
    for buffer, other in zip(buffers, others, strict=True):
        want = torch.zeros(9, 2, 3)
        want[[1, 2, 5]] = buffer.float()[[7, 0, 8]]
        assert torch.equal(other.float(), want)


def test_rows_that_do_not_fit_are_refused() -> None:
    buffers = [torch.zeros(4, 2), torch.zeros(4, 2)]
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2\); want \(2, 1, 2\)"):
        kv_rows(buffers, torch.tensor([1]), torch.zeros(2, 2, 2), scatter=True)
    for slot in (-1, 4):
        with pytest.raises(IndexError, match="buffers of 4"):
            kv_rows(buffers, torch.tensor([slot]), torch.zeros(2, 1, 2), scatter=False)

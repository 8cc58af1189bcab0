import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.reference import kv_relocate


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

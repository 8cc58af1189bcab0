import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.reference import (
    Tree,
    ancestor_matrix,
    chain_tree,
    full_mask,
    packed_mask,
    positions,
)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Random trees of random sizes, padded as documented, up to 64 rows."""
    bs, n = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 33, 63, 64]))
    sizes = draw(st.lists(st.integers(1, n), min_size=bs, max_size=bs))
    random = draw(st.randoms(use_true_random=False))
    parents = [
        [-1, *(random.randrange(row) for row in range(1, size)), *[-1] * (n - size)]
        for size in sizes
    ]
    depths = [[0] * n for _ in sizes]
    for b, size in enumerate(sizes):
        for row in range(1, size):
            depths[b][row] = depths[b][parents[b][row]] + 1
    blank = torch.zeros(bs, n, dtype=torch.int64)
    return Tree(blank, torch.tensor(parents), torch.tensor(depths), blank, torch.tensor(sizes))


def walk_up(tree: Tree, b: int, row: int) -> set[int]:
    seen = set()
    while row >= 0:
        seen.add(row)
        row = int(tree.parents[b, row])
    return seen


@settings(max_examples=60, deadline=None)
@given(trees(), st.data())
def test_every_layout_shows_ancestors_and_self(tree: Tree, data: st.DataObject) -> None:
    bs, n = tree.tokens.shape
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=bs, max_size=bs))
    matrix, words = ancestor_matrix(tree), packed_mask(tree)
    flat, indptr = full_mask(tree, torch.tensor(lengths))
    assert matrix.dtype == flat.dtype == torch.bool
    assert words.dtype == indptr.dtype == torch.int64
    assert indptr[-1] == flat.numel() == sum(n * (length + n) for length in lengths)
    for b in range(bs):
        for row in range(n):
            want = walk_up(tree, b, row)
            assert set(matrix[b, row].nonzero().flatten().tolist()) == want
            word = int(words[b, row]) % (1 << 64)
            assert {j for j in range(64) if word >> j & 1} == want
            start = int(indptr[b]) + row * (lengths[b] + n)
            columns = flat[start : start + lengths[b] + n].nonzero().flatten().tolist()
            assert set(columns) == {*range(lengths[b]), *(lengths[b] + j for j in want)}


def test_chain_is_the_causal_mask() -> None:
    tree = chain_tree(torch.tensor([1]), torch.arange(63).unsqueeze(0))
    assert torch.equal(ancestor_matrix(tree)[0], torch.ones(64, 64).tril().bool())
    assert int(packed_mask(tree)[0, 63]) == -1


def test_padding_sees_prefix_and_itself() -> None:
    tree = chain_tree(torch.tensor([1]), torch.tensor([[5]]), rows=4)
    flat, _ = full_mask(tree, torch.tensor([2]))
    assert flat.view(4, 6).int().tolist()[2:] == [[1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1]]


def test_positions_count_from_the_root() -> None:
    tree = chain_tree(torch.tensor([1, 2]), torch.tensor([[5, 6], [7, 8]]), rows=4)
    assert positions(tree, torch.tensor([10, 0], dtype=torch.int32)).tolist() == [
        [10, 11, 12, 10],
        [0, 1, 2, 0],
    ]


def test_no_requests() -> None:
    tree = chain_tree(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3))
    flat, indptr = full_mask(tree, torch.zeros(0, dtype=torch.int64))
    assert (flat.numel(), indptr.tolist()) == (0, [0])
    assert ancestor_matrix(tree).shape == (0, 4, 4)
    assert positions(tree, torch.zeros(0)).shape == (0, 4)


def test_one_length_per_tree() -> None:
    tree = chain_tree(torch.tensor([1]), torch.tensor([[5]]))
    with pytest.raises(ValueError, match="2 seq_lens for 1 trees"):
        full_mask(tree, torch.tensor([1, 2]))

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.reference import Tree, chain_tree, compaction_moves, kv_relocate, tree_accept


def make_tree(parents: list[list[int]], tokens: list[list[int]], sizes: list[int]) -> Tree:
    depths = []
    for of_request in parents:
        of_rows: list[int] = []
        for parent in of_request:
            of_rows.append(0 if parent < 0 else of_rows[parent] + 1)
        depths.append(of_rows)
    blank = torch.zeros(len(parents), len(parents[0]), dtype=torch.int64)
    fields = [torch.tensor(f).reshape(blank.shape) for f in (tokens, parents, depths)]
    return Tree(*fields, blank, torch.tensor(sizes))


def naive_walk(tree: Tree, targets: torch.Tensor, b: int) -> list[int]:
    path = [0]
    while True:
        wanted = int(targets[b, path[-1]])
        children = [
            row
            for row in range(1, int(tree.sizes[b]))
            if int(tree.parents[b, row]) == path[-1] and int(tree.tokens[b, row]) == wanted
        ]
        if not children:
            return path
        path.append(children[0])


@st.composite
def verified(draw: st.DrawFn) -> tuple[Tree, torch.Tensor]:
    """Random trees over 3 tokens (0 among them; siblings may repeat one) and target tokens."""
    bs, n = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    random = draw(st.randoms(use_true_random=False))
    sizes = [random.randint(1, n) for _ in range(bs)]
    parents = [
        [-1, *(random.randrange(row) for row in range(1, size)), *[-1] * (n - size)]
        for size in sizes
    ]
    tokens, targets = ([[random.randrange(3) for _ in range(n)] for _ in sizes] for _ in "ab")
    return make_tree(parents, tokens, sizes), torch.tensor(targets)


@settings(max_examples=150, deadline=None)
@given(verified())
def test_walk_against_a_naive_one(case: tuple[Tree, torch.Tensor]) -> None:
    tree, targets = case
    accepted = tree_accept(tree, targets)
    width = int(tree.depths.max()) + 1
    assert accepted.rows.shape == accepted.tokens.shape == (len(tree.sizes), width)
    for b in range(len(tree.sizes)):
        path = naive_walk(tree, targets, b)
        emitted = [*(int(tree.tokens[b, row]) for row in path[1:]), int(targets[b, path[-1]])]
        padding = [-1] * (width - len(path))
        assert accepted.rows[b].tolist() == path + padding
        assert accepted.tokens[b].tolist() == emitted + padding
        assert int(accepted.lengths[b]) == len(path) - 1
        assert int(accepted.bonus[b]) == emitted[-1]


@settings(max_examples=60, deadline=None)
@given(verified(), st.integers(1, 25))
def test_a_given_width_pads_or_ends_the_walk(case: tuple[Tree, torch.Tensor], width: int) -> None:
    tree, targets = case
    whole, cut = tree_accept(tree, targets, width=25), tree_accept(tree, targets, width=width)
    assert cut.rows.shape == cut.tokens.shape == (len(tree.sizes), width)
    assert torch.equal(cut.lengths, whole.lengths.clamp(max=width - 1))
    for b, length in enumerate(cut.lengths.tolist()):
        assert cut.rows[b].tolist() == whole.rows[b, : length + 1].tolist() + [-1] * (
            width - 1 - length
        )
        emitted = whole.tokens[b, : length + 1].tolist()
        assert cut.tokens[b].tolist() == emitted + [-1] * (width - 1 - length)
        assert int(cut.bonus[b]) == int(targets[b, int(cut.rows[b, length])]) == emitted[-1]


def test_a_width_has_room_for_the_root() -> None:
    tree = chain_tree(torch.tensor([9]), torch.tensor([[4]]))
    with pytest.raises(ValueError, match="width is 0"):
        tree_accept(tree, torch.tensor([[4, 5]]), width=0)


@settings(max_examples=100, deadline=None)
@given(verified(), st.randoms(use_true_random=False))
def test_compaction_against_a_copy(case: tuple[Tree, torch.Tensor], random: Random) -> None:
    tree, targets = case
    bs, n = tree.tokens.shape
    slots = list(range(bs * n + 7))
    random.shuffle(slots)
    window = torch.tensor(slots[: bs * n]).reshape(bs, n)
    pool = torch.arange(len(slots) * 2.0).reshape(-1, 1, 2)
    before = pool.clone()
    accepted = tree_accept(tree, targets)
    src, dst = compaction_moves(window, accepted)
    kv_relocate([pool], src, dst)
    assert bool((src != dst).all())
    untouched = torch.ones(len(slots), dtype=torch.bool)
    untouched[dst] = False
    assert torch.equal(pool[untouched], before[untouched])
    for b in range(bs):
        path = accepted.rows[b][: int(accepted.lengths[b]) + 1]
        assert torch.equal(pool[window[b, : len(path)]], before[window[b, path]])


def test_a_chain_in_order_needs_no_move() -> None:
    tree = chain_tree(torch.tensor([9]), torch.tensor([[4, 5, 6]]))
    accepted = tree_accept(tree, torch.tensor([[4, 5, 0, 0]]))
    assert accepted.rows.tolist() == [[0, 1, 2, -1]]
    assert accepted.tokens.tolist() == [[4, 5, 0, -1]]
    src, dst = compaction_moves(torch.tensor([[8, 3, 5, 1]]), accepted)
    assert src.numel() == dst.numel() == 0


def test_padding_rows_are_never_accepted() -> None:
    """A padding row holds the root's token: the target repeating it must not match."""
    tree = chain_tree(torch.tensor([4]), torch.tensor([[5]]), rows=6)
    accepted = tree_accept(tree, torch.full((1, 6), 4))
    assert (accepted.lengths.tolist(), accepted.bonus.tolist()) == ([0], [4])
    accepted = tree_accept(tree, torch.tensor([[5, 4, 4, 4, 4, 4]]))
    assert accepted.tokens.tolist() == [[5, 4]]


def test_the_branch_of_the_accepted_parent_only() -> None:
    """Token 7 is a child of row 1 and of row 2: only the one on the path counts."""
    tree = make_tree([[-1, 0, 0, 1, 2]], [[1, 5, 6, 7, 7]], [5])
    accepted = tree_accept(tree, torch.tensor([[6, 0, 7, 0, 8]]))
    assert accepted.rows.tolist() == [[0, 2, 4]]
    assert accepted.tokens.tolist() == [[6, 7, 8]]


def test_no_requests() -> None:
    tree = chain_tree(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3))
    accepted = tree_accept(tree, torch.zeros(0, 4, dtype=torch.int64))
    assert accepted.lengths.shape == accepted.bonus.shape == (0,)
    src, dst = compaction_moves(torch.zeros(0, 4, dtype=torch.int64), accepted)
    assert src.numel() == dst.numel() == 0


def test_target_tokens_of_another_shape() -> None:
    tree = chain_tree(torch.tensor([9]), torch.tensor([[4, 5, 6]]))
    with pytest.raises(ValueError, match=r"shape \(1, 3\)"):
        tree_accept(tree, torch.zeros(1, 3, dtype=torch.int64))

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.reference import Tree, chain_tree, tree_build

Path = tuple[int, ...]


def brute_force(scores: list[list[float]], budget: int, spine_first: bool) -> list[Path]:
    """Every path of ranks, sorted by the documented order; the paths of a tree in row order."""
    paths = []
    for length in range(1, len(scores) + 1):
        for path in itertools.product(range(len(scores[0])), repeat=length):
            score = np.float32(0.0)
            for depth, rank in enumerate(path):
                score = score + np.float32(scores[depth][rank])
            if score > -math.inf:
                paths.append((-float(score), length, path))
    ordered = [path for _, _, path in sorted(paths)]
    if spine_first:
        spine = [path for path in ordered if not any(path)]
        spine.sort(key=len)
        ordered = spine + [path for path in ordered if any(path)]
    return ordered[:budget]


def rank_paths(tree: Tree, b: int) -> list[Path]:
    """Paths of ranks by following parents, with every structural promise checked on the way."""
    size = int(tree.sizes[b])
    parents, ranks = tree.parents[b].tolist(), tree.ranks[b].tolist()
    paths: list[Path] = [()]
    assert (parents[0], ranks[0]) == (-1, -1)
    for row in range(1, size):
        assert 0 <= parents[row] < row
        paths.append((*paths[parents[row]], ranks[row]))
    assert tree.depths[b].tolist()[:size] == [len(path) for path in paths]
    padding = slice(size, tree.rows)
    assert set(parents[padding]) <= {-1}
    assert set(ranks[padding]) <= {-1}
    assert set(tree.depths[b, padding].tolist()) <= {0}
    assert set(tree.tokens[b, padding].tolist()) <= {int(tree.tokens[b, 0])}
    return paths[1:]


@st.composite
def candidates(draw: st.DrawFn) -> list[list[list[float]]]:
    """[bs, depth, k] of few distinct values: many exact ties, some forbidden."""
    bs, depth, k = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    value = st.sampled_from([0.0, -0.25, -0.5, -0.5, -1.0, -3.0, -math.inf])
    row = st.lists(value, min_size=k, max_size=k).map(lambda r: sorted(r, reverse=True))
    return draw(st.lists(st.lists(row, min_size=depth, max_size=depth), min_size=bs, max_size=bs))


@settings(max_examples=150, deadline=None)
@given(candidates(), st.data(), st.booleans())
def test_tree_is_the_sorted_list_of_all_paths(
    scores: list[list[list[float]]], data: st.DataObject, spine_first: bool
) -> None:
    bs, depth, k = len(scores), len(scores[0]), len(scores[0][0])
    budgets = data.draw(st.lists(st.integers(0, 63), min_size=bs, max_size=bs))
    width = data.draw(st.one_of(st.none(), st.integers(1, k + 1)))
    token_ids = torch.arange(bs * depth * k).reshape(bs, depth, k)
    roots = torch.arange(bs) + 1000
    tree = tree_build(
        roots, torch.tensor(scores), token_ids, torch.tensor(budgets), width, spine_first
    )
    assert tree.rows == 1 + max(budgets)
    for b in range(bs):
        narrow = [row[:width] for row in scores[b]]
        want = brute_force(narrow, budgets[b], spine_first)
        assert rank_paths(tree, b) == want
        assert int(tree.sizes[b]) == 1 + len(want)
        tokens = [int(token_ids[b, len(path) - 1, path[-1]]) for path in want]
        assert tree.tokens[b].tolist()[: 1 + len(want)] == [1000 + b, *tokens]


def random_candidates(
    bs: int, depth: int, k: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, depth, 100, generator=generator) * 3
    top = torch.log_softmax(logits, dim=2).topk(k, dim=2)
    return torch.randint(0, 100, (bs,), generator=generator), top.values, top.indices


def test_random_scores_against_brute_force() -> None:
    roots, logprobs, token_ids = random_candidates(4, 4, 5)
    tree = tree_build(roots, logprobs, token_ids, 63)
    for b in range(4):
        assert rank_paths(tree, b) == brute_force(logprobs[b].double().tolist(), 63, False)


@pytest.mark.parametrize("spine_first", [False, True])
def test_a_smaller_tree_is_the_start_of_a_larger_one(spine_first: bool) -> None:
    roots, logprobs, token_ids = random_candidates(1, 7, 8)
    large = tree_build(roots, logprobs, token_ids, 63, spine_first=spine_first)
    for budget in range(63):
        small = tree_build(roots, logprobs, token_ids, budget, spine_first=spine_first)
        for field in ("tokens", "parents", "depths", "ranks"):
            assert torch.equal(getattr(small, field), getattr(large, field)[:, : budget + 1])


def test_spine_first_keeps_the_whole_spine_where_best_first_does_not() -> None:
    logprobs = torch.tensor([[-1.0, -1.1]]).expand(6, 2).unsqueeze(0)
    token_ids = torch.arange(12).reshape(1, 6, 2)
    root = torch.tensor([7])
    assert int(tree_build(root, logprobs, token_ids, 8).depths.max()) < 6
    tree = tree_build(root, logprobs, token_ids, 8, spine_first=True)
    assert tree.parents[0, :7].tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert tree.tokens[0, 1:7].tolist() == [0, 2, 4, 6, 8, 10]


def test_scores_are_sums_in_float32_from_the_root_on() -> None:
    """1 + 2^-25 + 2^-25 is 1 in float32, in this order: a tie, which the lower rank wins."""
    tiny = -(2.0**-25)
    logprobs = torch.tensor([[[-1.0, -1.0], [tiny, 2 * tiny], [tiny, tiny]]])
    tree = tree_build(torch.tensor([0]), logprobs, torch.zeros(1, 3, 2), 14)
    assert rank_paths(tree, 0)[:4] == [(0,), (1,), (0, 0), (0, 1)]


def test_a_score_that_overflows_ends_its_path() -> None:
    logprobs = torch.full((1, 3, 1), -2e38)
    for spine_first in (False, True):
        tree = tree_build(torch.tensor([0]), logprobs, torch.zeros(1, 3, 1), 9, None, spine_first)
        assert tree.sizes.tolist() == [2]


@settings(max_examples=60, deadline=None)
@given(candidates(), st.integers(0, 63), st.booleans())
def test_links_lead_to_the_children_in_row_order(
    scores: list[list[list[float]]], budget: int, spine_first: bool
) -> None:
    logprobs = torch.tensor(scores)
    roots = torch.zeros(len(scores), dtype=torch.int64)
    tree = tree_build(roots, logprobs, torch.zeros_like(logprobs), budget, None, spine_first, 64)
    for b, size in enumerate(tree.sizes.tolist()):
        for row in range(64):
            linked, child = [], int(tree.first_child[b, row])
            while child >= 0:
                linked.append(child)
                child = int(tree.next_sibling[b, child])
            parents = tree.parents[b].tolist()
            assert linked == [r for r in range(size) if parents[r] == row]
        assert set(tree.next_sibling[b, size:].tolist()) <= {-1}
    assert set(tree.next_sibling[:, 0].tolist()) <= {-1}


def test_token_id_zero_is_a_token_like_any_other() -> None:
    tree = tree_build(torch.tensor([0]), torch.tensor([[[-0.1], [-0.1]]]), torch.zeros(1, 2, 1), 5)
    assert tree.sizes.tolist() == [3]
    assert tree.parents.tolist() == [[-1, 0, 1, -1, -1, -1]]


def test_one_token_at_several_depths() -> None:
    logprobs = torch.tensor([[[-0.1, -2.0], [-0.2, -1.0]]])
    tree = tree_build(torch.tensor([3]), logprobs, torch.tensor([[[5, 6], [5, 6]]]), 6)
    assert sorted(rank_paths(tree, 0)) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


def test_budget_zero_is_the_root_alone() -> None:
    roots, logprobs, token_ids = random_candidates(2, 3, 2)
    tree = tree_build(roots, logprobs, token_ids, 0)
    assert tree.tokens.tolist() == roots.unsqueeze(1).tolist()
    assert tree.sizes.tolist() == [1, 1]


def test_rows_pads_to_the_engine_maximum() -> None:
    roots, logprobs, token_ids = random_candidates(2, 3, 2)
    tree = tree_build(roots, logprobs, token_ids, torch.tensor([1, 4]), rows=9)
    assert tree.tokens.shape == (2, 9)
    assert tree.sizes.tolist() == [2, 5]
    assert chain_tree(roots, token_ids[:, :, 0], rows=9).tokens.shape == (2, 9)


@pytest.mark.parametrize(("depth", "k"), [(0, 3), (3, 0)])
def test_nothing_drafted(depth: int, k: int) -> None:
    tree = tree_build(torch.tensor([4]), torch.zeros(1, depth, k), torch.zeros(1, depth, k), 5)
    assert tree.sizes.tolist() == [1]
    assert tree.tokens.tolist() == [[4] * 6]


def test_no_requests() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    tree = tree_build(none, torch.zeros(0, 3, 2), torch.zeros(0, 3, 2), 5)
    assert tree.tokens.shape == (0, 6)
    assert chain_tree(none, torch.zeros(0, 3)).tokens.shape == (0, 4)
    assert tree_build(none, torch.zeros(0, 3, 2), torch.zeros(0, 3, 2), none).rows == 1


def test_chain_equals_the_tree_of_width_one() -> None:
    roots, logprobs, token_ids = random_candidates(3, 7, 4)
    chain = chain_tree(roots, token_ids[:, :, 0])
    tree = tree_build(roots, logprobs, token_ids, 7, width=1)
    for field in ("tokens", "parents", "depths", "ranks", "sizes"):
        assert torch.equal(getattr(chain, field), getattr(tree, field))
        assert getattr(chain, field).dtype == torch.int64


def test_rounding_above_zero_counts_as_zero() -> None:
    """Else a child would order before its parent's equals: (0) (0, 0) (1) instead of this."""
    tree = tree_build(
        torch.tensor([1]), torch.tensor([[[0.0, 0.0], [3e-7, -1.0]]]), torch.zeros(1, 2, 2), 3
    )
    assert rank_paths(tree, 0) == [(0,), (1,), (0, 0)]


def test_bad_input_is_named() -> None:
    roots, logprobs, token_ids = random_candidates(2, 3, 2)
    for budget in (-1, 64):
        with pytest.raises(ValueError, match=f"budget is {budget}"):
            tree_build(roots, logprobs, token_ids, budget)
        with pytest.raises(ValueError, match=f"budget is {budget}"):
            tree_build(roots, logprobs, token_ids, torch.tensor([3, budget]))
    with pytest.raises(ValueError, match="3 budgets for 2 requests"):
        tree_build(roots, logprobs, token_ids, torch.tensor([3, 3, 3]))
    with pytest.raises(ValueError, match="descending"):
        tree_build(roots, logprobs.flip(2), token_ids, 3)
    with pytest.raises(ValueError, match="descending"):
        tree_build(roots, torch.full_like(logprobs, torch.nan), token_ids, 3)
    with pytest.raises(ValueError, match="must be numbers"):
        tree_build(roots, torch.full((2, 3, 1), torch.nan), token_ids[:, :, :1], 3)
    with pytest.raises(ValueError, match="shapes do not fit"):
        tree_build(roots, logprobs, token_ids[:1], 3)
    with pytest.raises(ValueError, match="shapes do not fit"):
        tree_build(roots[:1], logprobs, token_ids, 3)
    with pytest.raises(ValueError, match="width is 0"):
        tree_build(roots, logprobs, token_ids, 3, width=0)
    with pytest.raises(ValueError, match="3 rows per tree; the budget needs 4"):
        tree_build(roots, logprobs, token_ids, 3, rows=3)
    with pytest.raises(ValueError, match="root_tokens has shape"):
        chain_tree(roots[:1], token_ids[:, :, 0])
    with pytest.raises(ValueError, match="65 rows per tree"):
        chain_tree(roots, torch.zeros(2, 64))

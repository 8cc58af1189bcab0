"""What a step computes by tensor operations alone, against the reference that reads values."""

from __future__ import annotations

import random

import pytest
import torch

from overstory.kernels.reference import (
    Accepted,
    Tree,
    chain_tree,
    compaction_moves,
    tree_accept,
    tree_build,
)
from overstory.workers.ddtree.commit import extend_by_paths, extend_by_rows
from overstory.workers.ddtree.device_trees import chain_rows, path_moves
from overstory.workers.ddtree.graph_tiers import GraphTiers, tier_rows
from overstory.workers.seam.cuda_slots import SlotLists

FIELDS = ("tokens", "parents", "depths", "ranks", "sizes", "first_child", "next_sibling")


@pytest.mark.parametrize(("bs", "depth"), [(1, 0), (3, 0), (1, 7), (4, 15)])
def test_chains_are_those_of_the_reference(bs: int, depth: int) -> None:
    roots, drafted = torch.arange(bs), torch.arange(bs * depth).view(bs, depth) + 50
    ours, wanted = chain_rows(roots, drafted), chain_tree(roots, drafted)
    for field in FIELDS:
        assert torch.equal(getattr(ours, field), getattr(wanted, field)), field


@pytest.mark.parametrize("seed", range(20))
def test_moves_are_those_of_the_reference(seed: int) -> None:
    torch.manual_seed(seed)
    tree = _random_tree()
    slots = torch.randperm(1000)[: tree.tokens.numel()].view(tree.tokens.shape)
    accepted = _walk_of(tree, seed)
    source, destination = path_moves(slots, accepted)
    moved = source != -1
    assert torch.equal(moved, destination != -1)
    wanted = compaction_moves(slots, accepted)
    assert torch.equal(source[moved], wanted[0])
    assert torch.equal(destination[moved], wanted[1])


class _DrafterKv:
    """Stands for SGLang's worker: which hidden state went to which slot, at which position."""

    def __init__(self) -> None:
        self.written: dict[int, tuple[int, int]] = {}

    def _append_target_hidden_to_draft_kv_by_loc(
        self,
        target_hidden: torch.Tensor,
        cache_loc: torch.Tensor,
        positions: torch.Tensor,
        cache_loc_2d: torch.Tensor | None = None,
        commit_lens: torch.Tensor | None = None,
    ) -> None:
        kept = torch.ones_like(cache_loc, dtype=torch.bool)
        if commit_lens is not None:
            assert cache_loc_2d is not None
            assert cache_loc_2d.is_contiguous()
            assert torch.equal(cache_loc_2d.view(-1), cache_loc)
            assert commit_lens.dtype == torch.int32
            columns = torch.arange(cache_loc_2d.shape[1])
            kept = (columns < commit_lens.unsqueeze(1)).view(-1)
        rows = zip(cache_loc, target_hidden[:, 0], positions, kept, strict=True)
        for slot, hidden, position, is_kept in rows:
            if is_kept:
                assert int(slot) not in self.written, "a slot is written twice"
                self.written[int(slot)] = int(hidden), int(position)


@pytest.mark.parametrize("seed", range(20))
def test_the_drafter_gets_the_path_and_nothing_else(seed: int) -> None:
    """On a GPU no length is read; on a CPU the path's rows alone are computed."""
    torch.manual_seed(seed)
    tree = _random_tree()
    bs, n = tree.tokens.shape
    slots = torch.randperm(1000)[: bs * n].view(bs, n)
    accepted = _walk_of(tree, seed)
    lengths, last = torch.randint(1, 60, (bs,)), 50
    hidden = torch.arange(bs * n).unsqueeze(1)
    wanted = {
        int(slots[b, depth]): (b * n + row, min(int(lengths[b]) + depth, last))
        for b in range(bs)
        for depth, row in enumerate(accepted.rows[b].tolist())
        if row >= 0
    }
    assert len(wanted) == int((accepted.lengths + 1).sum())
    for extend in (extend_by_rows, extend_by_paths):
        drafter = _DrafterKv()
        extend(drafter, hidden, accepted, slots, lengths, last)
        assert drafter.written == wanted, extend.__name__


def test_slots_are_listed_request_after_request() -> None:
    table = torch.randint(1, 10_000, (7, 40), dtype=torch.int32)
    lists = SlotLists(7, 40, torch.device("cpu"))
    for rows, lengths in (([3, 1, 6], [5, 0, 40]), ([2], [17]), ([0, 0], [1, 1])):
        lists.fill(table, torch.tensor(rows), torch.tensor(lengths))
        bounds = lists.bounds[: len(rows) + 1].tolist()
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            listed = lists.slots[bounds[i] : bounds[i + 1]]
            assert torch.equal(listed, table[row, :length])


def test_more_slots_than_int32_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="lower max_running_requests"):
        SlotLists(1 << 16, 1 << 16, torch.device("meta"))


@pytest.mark.parametrize(
    ("max_rows", "block", "wanted"),
    [
        (8, 8, (1, 8)),
        (16, 8, (1, 8, 16)),
        (20, 8, (1, 8, 16, 20)),
        (64, 8, (1, 8, 16, 24, 32, 48, 64)),
        (32, 16, (1, 16, 24, 32)),
    ],
)
def test_tiers(max_rows: int, block: int, wanted: tuple[int, ...]) -> None:
    assert tier_rows(max_rows, block) == wanted


def test_a_step_takes_the_next_tier() -> None:
    class Runner:
        decode_cuda_graph_runner: object = None

    runner = Runner()
    tiers = GraphTiers(runner, {32: "thirty-two", 1: "one", 8: "eight"})
    assert tiers.rows == (1, 8, 32)
    assert (tiers.select(9), runner.decode_cuda_graph_runner) == (32, "thirty-two")
    assert (tiers.select(8), runner.decode_cuda_graph_runner) == (8, "eight")
    assert (tiers.select(1), runner.decode_cuda_graph_runner) == (1, "one")


def _random_tree() -> Tree:
    logprobs = torch.log_softmax(torch.randn(3, 6, 8), dim=-1)
    best = logprobs.topk(4)
    return tree_build(torch.tensor([1, 2, 3]), best.values, best.indices + 10, 15)


def _walk_of(tree: Tree, seed: int) -> Accepted:
    """Acceptance along children drawn at random."""
    draw = random.Random(seed)
    targets = torch.full_like(tree.tokens, -5)
    for b in range(tree.tokens.shape[0]):
        for row in range(tree.rows):
            children = (tree.parents[b] == row).nonzero().flatten().tolist()
            if children and draw.random() < 0.9:
                targets[b, row] = tree.tokens[b, draw.choice(children)]
    return tree_accept(tree, targets, 7)

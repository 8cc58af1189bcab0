"""Adjusted logits of every node against a loop over its own ancestor path."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.reference import EarlyEnd, Penalties, Tree, adjust_nodes, chain_tree

VOCABULARY = 7


def _random_tree(random: Random, bs: int, n: int) -> Tree:
    sizes = [random.randint(1, n) for _ in range(bs)]
    parents = [
        [-1, *(random.randrange(row) for row in range(1, size)), *[-1] * (n - size)]
        for size in sizes
    ]
    tokens = [
        [random.randrange(VOCABULARY) for _ in range(size)] + [0] * (n - size) for size in sizes
    ]
    depths: list[list[int]] = []
    for of_request in parents:
        rows: list[int] = []
        for parent in of_request:
            rows.append(0 if parent < 0 else rows[parent] + 1)
        depths.append(rows)
    fields = [torch.tensor(field).reshape(bs, n) for field in (tokens, parents, depths)]
    return Tree(*fields, torch.zeros(bs, n, dtype=torch.int64), torch.tensor(sizes))


def _after(
    logits: torch.Tensor, output: list[int], frequency: float, presence: float, repetition: float
) -> list[float]:
    """One row after `output`, token by token in plain Python."""
    adjusted = []
    for token, logit in enumerate(logits.tolist()):
        count = output.count(token)
        if count:
            logit -= count * frequency + presence
            logit = logit * repetition if logit < 0 else logit / repetition
        adjusted.append(logit)
    return adjusted


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 12))
def test_every_node_against_a_loop(random: Random, bs: int, n: int) -> None:
    tree = _random_tree(random, bs, n)
    outputs = [
        [random.randrange(VOCABULARY) for _ in range(random.randrange(6))] for _ in range(bs)
    ]
    asked = [
        (
            random.choice([0.0, 0.75, -1.5]),
            random.choice([0.0, 0.5, -2.0]),
            random.choice([1.0, 1.5, 0.5]),
        )
        for _ in range(bs)
    ]
    bias = torch.tensor(
        [[random.choice([0.0, -100.0, 2.5]) for _ in range(VOCABULARY)] for _ in range(bs)]
    )
    ends = torch.tensor([[random.random() < 0.3 for _ in range(VOCABULARY)] for _ in range(bs)])
    starts = [random.randrange(20) for _ in range(bs)]
    first = [random.randrange(25) for _ in range(bs)]
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    logits = torch.randn(bs * n, VOCABULARY, generator=generator) * 3
    kept = logits.clone()
    counts = torch.stack([torch.bincount(torch.tensor(o, dtype=torch.int64), minlength=VOCABULARY)
                          for o in outputs])  # fmt: skip
    got = adjust_nodes(
        logits,
        tree,
        (torch.tensor(starts).unsqueeze(1) + tree.depths).view(-1),
        Penalties(*(torch.tensor(column) for column in zip(*asked, strict=True)), counts),
        EarlyEnd(ends, torch.tensor(first)),
        bias,
    ).view(bs, n, VOCABULARY)
    assert torch.equal(logits, kept)
    for b in range(bs):
        for row in range(int(tree.sizes[b])):
            path, at = [], row
            while at > 0:
                path.append(int(tree.tokens[b, at]))
                at = int(tree.parents[b, at])
            wanted = torch.tensor(
                _after(logits[b * n + row], [*outputs[b], *reversed(path)], *asked[b])
            )
            if starts[b] + len(path) < first[b]:
                wanted[ends[b]] = -torch.inf
            torch.testing.assert_close(got[b, row], wanted + bias[b])


def test_nothing_asked_changes_nothing() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1))
    tree = chain_tree(torch.tensor([1, 2]), torch.tensor([[1, 1], [2, 3]]))
    neutral = Penalties(
        torch.zeros(2), torch.zeros(2), torch.ones(2), torch.full((2, VOCABULARY), 3)
    )
    positions = torch.arange(6)
    assert torch.equal(adjust_nodes(logits, tree, positions), logits)
    assert torch.equal(adjust_nodes(logits, tree, positions, neutral), logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_adjusted_in_float32(dtype: torch.dtype) -> None:
    logits = torch.full((1, VOCABULARY), 8.0, dtype=dtype)
    tree = chain_tree(torch.tensor([1]), torch.empty((1, 0), dtype=torch.int64))
    bias = torch.full((1, VOCABULARY), 2.0**-12)
    got = adjust_nodes(logits, tree, torch.tensor([0]), bias=bias)
    assert got.dtype == torch.float32
    assert float(got[0, 0]) == 8 + 2.0**-12


def test_a_sibling_is_not_an_ancestor() -> None:
    """Root with children 3 and 4; 4 has a child 3. Presence counts the own path only."""
    tree = Tree(
        torch.tensor([[0, 3, 4, 3]]),
        torch.tensor([[-1, 0, 0, 2]]),
        torch.tensor([[0, 1, 1, 2]]),
        torch.zeros(1, 4, dtype=torch.int64),
        torch.tensor([4]),
    )
    one = torch.ones(1)
    counts = torch.zeros(1, VOCABULARY, dtype=torch.int64)
    got = adjust_nodes(
        torch.zeros(4, VOCABULARY), tree, torch.arange(4), Penalties(one, 0 * one, one, counts)
    )
    assert [got[row, [3, 4]].tolist() for row in range(4)] == [[0, 0], [-1, 0], [0, -1], [-1, -1]]

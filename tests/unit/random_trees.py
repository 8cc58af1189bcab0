"""Random inputs of the tree ops: candidates with ties and gaps, trees of any shape."""

from __future__ import annotations

import random

import torch

from overstory.kernels.reference import Tree


def random_candidates(
    dice: random.Random, bs: int, depth: int, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """root_tokens, logprobs [bs, depth, k] float32 descending, token_ids: one of several kinds.

    Kinds: like a drafter's; of few values, so that many paths tie exactly; of large magnitude; all
    zero. Some have -inf tails, some whole depths of -inf, some numbers just above 0.
    """
    generator = torch.Generator().manual_seed(dice.getrandbits(40))
    shape = (bs, depth, k)
    kind = dice.choice(["drafter", "drafter", "ties", "ties", "halves", "large", "zero"])
    if kind == "drafter":
        logits = torch.randn(bs, depth, max(k, 40), generator=generator) * dice.choice([1, 3, 8])
        values = torch.log_softmax(logits, dim=2).topk(k, dim=2).values
    elif kind == "ties":
        few = torch.tensor([0.0, -0.25, -0.5, -0.5, -1.0, -3.0])
        values = few[torch.randint(0, len(few), shape, generator=generator)]
    elif kind == "halves":
        values = -(torch.randint(0, 40, shape, generator=generator).float() / 2)
    elif kind == "large":
        values = -torch.rand(shape, generator=generator) * 10.0 ** dice.choice([6, 30, 38])
    else:
        values = torch.zeros(shape)
    if dice.random() < 0.4:
        gap = torch.rand(shape, generator=generator) < dice.choice([0.05, 0.4])
        values = values.masked_fill(gap, -torch.inf)
    if dice.random() < 0.1:
        values[:, dice.randrange(depth)] = -torch.inf
    if dice.random() < 0.2:
        values = values + 1e-6
    values = values.sort(dim=2, descending=True).values.contiguous()
    token_ids = torch.randint(0, 1 << 40, shape, generator=generator)
    return torch.randint(0, 1 << 40, (bs,), generator=generator), values, token_ids


def random_tree(dice: random.Random, bs: int, rows: int, vocabulary: int) -> Tree:
    """Trees of any shape (chains of 63, stars, all between), siblings may share a token."""
    reach = dice.choice([1, 2, 5, rows])
    fields: list[list[list[int]]] = []
    sizes = [dice.randint(1, rows) for _ in range(bs)]
    for size in sizes:
        root = dice.randrange(vocabulary)
        of_request = [[-1, 0, -1, root]]
        for row in range(1, size):
            parent = dice.randrange(max(0, row - reach), row)
            rank = sum(parent == other[0] for other in of_request)
            depth = of_request[parent][1] + 1
            of_request.append([parent, depth, rank, dice.randrange(vocabulary)])
        fields.append(of_request + [[-1, 0, -1, root]] * (rows - size))
    packed = torch.tensor(fields, dtype=torch.int64).reshape(bs, rows, 4)
    parents, depths, ranks, tokens = (packed[:, :, i].contiguous() for i in range(4))
    return Tree(tokens, parents, depths, ranks, torch.tensor(sizes, dtype=torch.int64))

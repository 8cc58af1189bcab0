"""The ops together, on a toy model: trees change the speed of the text, never the text.

The toy target's logits depend on the last two tokens of the path and on its length; the toy
drafter sees noisy logits of the argmax path only, as a block-diffusion drafter does.
"""

from dataclasses import dataclass

import pytest
import torch
from chi_square import p_value

from overstory.kernels.reference import (
    Tree,
    ancestor_matrix,
    candidates_topk,
    chain_tree,
    filtered_probs,
    merge_candidates,
    positions,
    sample_nodes,
    tree_accept,
    tree_build,
)

VOCABULARY = 16
DEPTH = 4
GENERATOR = torch.Generator().manual_seed(11)
TABLE = torch.randn(5, VOCABULARY, VOCABULARY, VOCABULARY, generator=GENERATOR) * 2
NOISE = torch.randn(5, VOCABULARY, VOCABULARY, VOCABULARY, generator=GENERATOR)


@dataclass
class Request:
    tokens: list[int]
    """Prompt and output; the last one is the root of the next step."""
    seed: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0


def target_logits(path: list[int]) -> torch.Tensor:
    return TABLE[len(path) % 5, path[-2], path[-1]]


def sample(logits: torch.Tensor, requests: list[Request], at: torch.Tensor) -> torch.Tensor:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(request, name) for request in requests])

    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    return sample_nodes(logits, *(column(name) for name in names), at)


def plain_step(requests: list[Request]) -> None:
    logits = torch.stack([target_logits(request.tokens) for request in requests])
    at = torch.tensor([len(request.tokens) - 1 for request in requests])
    for request, token in zip(requests, sample(logits, requests, at).tolist(), strict=True):
        request.tokens.append(token)


def draft(requests: list[Request], budget: int | str) -> Tree:
    rows = []
    for request in requests:
        path = list(request.tokens)
        for _ in range(DEPTH):
            logits = target_logits(path) + NOISE[len(path) % 5, path[-2], path[-1]]
            rows.append(logits)
            path.append(int(logits.argmax()))
    roots = torch.tensor([request.tokens[-1] for request in requests])
    logprobs, ids = merge_candidates([candidates_topk(torch.stack(rows), 4)], 4)
    logprobs, ids = (x.view(len(requests), DEPTH, 4) for x in (logprobs, ids))
    if budget == "chain":
        return chain_tree(roots, ids[:, :, 0])
    assert isinstance(budget, int)
    return tree_build(roots, logprobs, ids, abs(budget), spine_first=budget < 0)


def tree_step(requests: list[Request], budget: int | str) -> None:
    tree = draft(requests, budget)
    n = tree.rows
    seen = ancestor_matrix(tree)
    logits = []
    for b, request in enumerate(requests):
        for row in range(n):
            # The rows a query sees, by position, are its path: parents precede children.
            path = tree.tokens[b, seen[b, row]].tolist()
            logits.append(target_logits([*request.tokens[:-1], *path]))
    seq_lens = torch.tensor([len(request.tokens) - 1 for request in requests])
    of_rows = [request for request in requests for _ in range(n)]
    at = positions(tree, seq_lens).flatten()
    chosen = sample(torch.stack(logits), of_rows, at).view(len(requests), n)
    accepted = tree_accept(tree, chosen)
    for b, request in enumerate(requests):
        request.tokens += accepted.tokens[b, : int(accepted.lengths[b]) + 1].tolist()


def some_requests() -> list[Request]:
    kinds = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
        {},
    ]
    return [Request([i % VOCABULARY, 3], 1000 + i, **kind) for i, kind in enumerate(kinds)]


def text(requests: list[Request], budget: int | str | None, length: int = 32) -> list[list[int]]:
    while any(len(request.tokens) < length for request in requests):
        plain_step(requests) if budget is None else tree_step(requests, budget)
    return [request.tokens[:length] for request in requests]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return text(some_requests(), None)


@pytest.mark.parametrize("budget", [0, "chain", 2, 15, 31, -15, 63])
def test_the_same_seed_gives_the_same_text_under_any_tree(
    plain: list[list[int]], budget: int | str
) -> None:
    assert text(some_requests(), budget) == plain
    assert plain[0][2:] != plain[7][2:], "two seeds gave one text"


@pytest.mark.parametrize("budget", [0, "chain", -15])
def test_the_text_depends_on_no_other_request(plain: list[list[int]], budget: int | str) -> None:
    assert text(some_requests()[5:6], budget) == plain[5:6]
    assert text(some_requests()[::-1], budget) == plain[::-1]


def test_trees_of_this_test_do_accept_branches() -> None:
    """Were nothing (or only the spine) ever accepted, equality above would prove little."""
    steps = {}
    for budget in (0, "chain", 31):
        requests, count = some_requests(), 0
        while len(requests[0].tokens) < 100:
            tree_step(requests, budget)
            count += 1
        steps[budget] = count
    assert steps[31] < 0.85 * steps["chain"] < 0.85 * 0.9 * steps[0]


@pytest.mark.parametrize("budget", [2, "chain", 20])
def test_the_walk_samples_the_target_exactly(budget: int | str) -> None:
    """Joint distribution of the first two tokens after a fixed prompt, over 20,000 seeds."""
    draws, prompt = 20_000, [2, 9]
    filters = {"top_p": 0.9}
    tree = draft([Request(prompt, 0)], budget)
    n = tree.rows
    seen = ancestor_matrix(tree)[0]
    logits = torch.stack(
        [target_logits([prompt[0], *tree.tokens[0, seen[row]].tolist()]) for row in range(n)]
    )
    seeds = torch.arange(draws)
    chosen = sample_rows(logits.repeat(draws, 1), seeds.repeat_interleave(n), tree, draws, filters)
    accepted = tree_accept(
        Tree(*(getattr(tree, f).expand(draws, *getattr(tree, f).shape[1:]) for f in FIELDS)),
        chosen.view(draws, n),
    )
    first = accepted.tokens[:, 0]
    after = torch.stack([target_logits([*prompt, token]) for token in range(VOCABULARY)])
    # Where the first token was the bonus, the second is drawn in the next step.
    ones = torch.ones(draws)
    off = torch.full((draws,), -1)
    next_step = sample_nodes(after[first], ones, off, ones * 0.9, ones * 0, seeds, off * 0 + 2)
    second = next_step
    if accepted.tokens.shape[1] > 1:
        second = torch.where(accepted.lengths > 0, accepted.tokens[:, 1], next_step)
    assert int((accepted.lengths > 0).sum()) > draws // 20
    wanted = probs_of(target_logits(prompt).unsqueeze(0))[0].unsqueeze(1) * probs_of(after)
    observed = torch.bincount(first * VOCABULARY + second, minlength=VOCABULARY**2)
    assert p_value(observed, wanted.flatten()) > 1e-4


FIELDS = ("tokens", "parents", "depths", "ranks", "sizes")


def sample_rows(
    logits: torch.Tensor, seeds: torch.Tensor, tree: Tree, draws: int, filters: dict[str, float]
) -> torch.Tensor:
    at = positions(tree, torch.tensor([1])).flatten().repeat(draws)
    ones, off = torch.ones(len(seeds)), torch.full((len(seeds),), -1)
    return sample_nodes(logits, ones, off, ones * filters["top_p"], ones * 0, seeds, at)


def probs_of(logits: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(len(logits))
    return filtered_probs(logits, ones, torch.full((len(logits),), -1), ones * 0.9, ones * 0)

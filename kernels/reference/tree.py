"""Draft trees: per-depth candidates to a tree of at most 64 rows per request."""

from __future__ import annotations

import ctypes
import functools
import heapq
import itertools
from dataclasses import dataclass

import torch

MAX_ROWS = 64
"""Rows of a tree, root included: one 64-bit word holds the mask of a row."""

_Node = tuple[int, int, int, int]
"""(parent row, depth, rank, token)."""


@dataclass(frozen=True)
class Tree:
    """Trees of a batch, padded to n rows each; every row is one query of the verify forward.

    Row 0 is the root: the last committed token, whose own logits are not known yet. Rows
    1..sizes-1 are drafted tokens; parents precede their children. A row is in use if and only
    if its index is below `sizes`; no token id has a special meaning.

    Rows from `sizes` on are padding: token = the root's token (legal to embed), parent -1,
    depth 0 (so that its position is that of the root, inside the context), rank -1. No op can
    accept one: a walk only steps to a row whose parent is a row on the path, and -1 is none.
    """

    tokens: torch.Tensor
    """[bs, n] int64."""
    parents: torch.Tensor
    """[bs, n] int64, row of the parent; -1 for root and padding."""
    depths: torch.Tensor
    """[bs, n] int64, 0 for root and padding."""
    ranks: torch.Tensor
    """[bs, n] int64, rank of the candidate at its depth; -1 for root and padding."""
    sizes: torch.Tensor
    """[bs] int64, rows in use, root included."""

    @property
    def rows(self) -> int:
        """n, rows per request with padding."""
        return int(self.tokens.shape[1])

    @functools.cached_property
    def first_child(self) -> torch.Tensor:
        """[bs, n] int64, lowest row whose parent the row is; -1 if none."""
        rows = torch.arange(self.rows, device=self.parents.device)
        return _first(self.parents.unsqueeze(1) == rows.unsqueeze(1))

    @functools.cached_property
    def next_sibling(self) -> torch.Tensor:
        """[bs, n] int64, lowest later row of the same parent; -1 if none, and for the root.

        The children of a row are its first child and that one's siblings, in row order.
        """
        same = self.parents.unsqueeze(2) == self.parents.unsqueeze(1)
        return _first((same & (self.parents >= 0).unsqueeze(2)).triu(1))


def tree_build(
    root_tokens: torch.Tensor,
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    budgets: torch.Tensor | int,
    width: int | None = None,
    spine_first: bool = False,
    rows: int | None = None,
) -> Tree:
    """Best-first tree: the `budgets` most probable paths under the drafter's marginals.

    The candidates of a depth are the same below every parent (a block-diffusion drafter gives
    one distribution per depth), so a node is a path of ranks and its score is the sum of the
    log-probabilities along it, added in float32 from the root on. Order: higher score, then
    lower depth, then lexicographically lower path of ranks. Paths of score -inf never enter;
    where all others are used up, the tree is smaller than its budget.

    Args:
        root_tokens: [bs] int.
        logprobs: [bs, depth, k] float, taken as float32, descending in k; values above 0
            (rounding) count as 0.
        token_ids: [bs, depth, k] int, distinct within a depth.
        budgets: drafted nodes per request (root not counted), 0..63; one for all or [bs].
        width: use only the best `width` candidates of each depth.
        spine_first: rows 1.. are the whole path of rank 0 (as far as the budget goes), and only
            what is left of the budget is best-first.
        rows: pad to this many rows instead of 1 + max(budgets).

    Raises:
        ValueError: shapes do not fit, a budget or `rows` is out of range, log-probabilities are
            NaN or not descending.
    """
    bs, depth, k = logprobs.shape
    _check_candidates(root_tokens, logprobs, token_ids, width)
    per_request = _budget_list(budgets, bs)
    width = k if width is None else min(width, k)
    grow = _grow_spine_first if spine_first else _grow_best_first
    scores = logprobs.float().clamp(max=0.0)[:, :, :width].tolist()
    candidates = token_ids.tolist()
    nodes = [
        grow(scores[b], candidates[b], per_request[b]) if depth and width else [] for b in range(bs)
    ]
    at_most = budgets if isinstance(budgets, int) else max(per_request, default=0)
    return _assemble(root_tokens, nodes, _row_count(at_most, rows))


def chain_tree(root_tokens: torch.Tensor, token_ids: torch.Tensor, rows: int | None = None) -> Tree:
    """The chain as a tree: row i holds the drafted token of depth i.

    Args:
        root_tokens: [bs] int.
        token_ids: [bs, depth] int, the drafted tokens, depth 0..63.
        rows: pad to this many rows instead of 1 + depth.

    Raises:
        ValueError: shapes do not fit, or more rows than `MAX_ROWS`.
    """
    bs, depth = token_ids.shape
    if root_tokens.shape != (bs,):
        raise ValueError(
            f"root_tokens has shape {tuple(root_tokens.shape)}; token_ids wants ({bs},)"
        )
    nodes = [
        [(row, row + 1, 0, token) for row, token in enumerate(chain)]
        for chain in token_ids.tolist()
    ]
    return _assemble(root_tokens, nodes, _row_count(depth, rows))


def _grow_best_first(
    scores: list[list[float]], tokens: list[list[int]], budget: int
) -> list[_Node]:
    frontier = _Frontier(scores, tokens)
    frontier.offer(0.0, 0, 1, 0, 0)
    return frontier.take(budget, [])


def _grow_spine_first(
    scores: list[list[float]], tokens: list[list[int]], budget: int
) -> list[_Node]:
    frontier = _Frontier(scores, tokens)
    spine: list[_Node] = []
    score = 0.0
    for row in range(min(budget, len(scores))):
        below = _add(score, scores[row][0])
        if below == float("-inf"):
            break
        frontier.offer(score, 0, row + 1, 1, row)  # a path of ranks 0 is the number 0
        spine.append((row, row + 1, 0, tokens[row][0]))
        score = below
    return frontier.take(budget, spine)


class _Frontier:
    """Nodes that may enter next: a heap in the order that `tree_build` documents.

    Whoever offers a node orders before it (first child after its parent, next sibling after the
    one before), so nodes leave in the order of all paths sorted.
    """

    def __init__(self, scores: list[list[float]], tokens: list[list[int]]) -> None:
        self.scores = scores
        self.tokens = tokens
        self.base = len(scores[0])
        # (-score, depth, path as a number in base `base`, rank, parent row, parent's score);
        # paths of one depth differ, so comparison ends at the third field.
        self.heap: list[tuple[float, int, int, int, int, float]] = []

    def offer(
        self, parent_score: float, parent_path: int, depth: int, rank: int, parent: int
    ) -> None:
        if depth > len(self.scores) or rank >= self.base:
            return
        score = _add(parent_score, self.scores[depth - 1][rank])
        if score == float("-inf"):
            return
        path = parent_path * self.base + rank
        heapq.heappush(self.heap, (-score, depth, path, rank, parent, parent_score))

    def take(self, budget: int, nodes: list[_Node]) -> list[_Node]:
        """Append the best nodes to `nodes` (rows 1..len are taken already) up to `budget`."""
        while self.heap and len(nodes) < budget:
            key, depth, path, rank, parent, parent_score = heapq.heappop(self.heap)
            nodes.append((parent, depth, rank, self.tokens[depth - 1][rank]))
            self.offer(parent_score, path // self.base, depth, rank + 1, parent)
            self.offer(-key, path, depth + 1, 0, len(nodes))
        return nodes


def _add(a: float, b: float) -> float:
    """Sum of two float32 numbers, rounded to float32.

    The rounding to float64 before it changes nothing: 53 bits are more than twice 24 and one.
    """
    return ctypes.c_float(a + b).value


def _first(flags: torch.Tensor) -> torch.Tensor:
    """Index of the first true of the last dimension, -1 if there is none."""
    if flags.shape[-1] == 0:
        return torch.full(flags.shape[:-1], -1, dtype=torch.int64, device=flags.device)
    first = flags.view(torch.uint8).argmax(dim=-1)  # the first of equal maxima
    return torch.where(flags.any(dim=-1), first, -1)


def _check_candidates(
    root_tokens: torch.Tensor,
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    width: int | None,
) -> None:
    if token_ids.shape != logprobs.shape or root_tokens.shape != logprobs.shape[:1]:
        raise ValueError(
            f"shapes do not fit: root_tokens {tuple(root_tokens.shape)}, "
            f"logprobs {tuple(logprobs.shape)}, token_ids {tuple(token_ids.shape)}; "
            "want [bs], [bs, depth, k], [bs, depth, k]"
        )
    if width is not None and width < 1:
        raise ValueError(f"width is {width}; at least 1 candidate per depth is needed")
    if not bool((logprobs[:, :, :1] == logprobs[:, :, :1]).all()) or not bool(
        (logprobs[:, :, 1:] <= logprobs[:, :, :-1]).all()
    ):
        raise ValueError("logprobs must be numbers in descending order within each depth")


def _budget_list(budgets: torch.Tensor | int, bs: int) -> list[int]:
    per_request = [budgets] * bs if isinstance(budgets, int) else budgets.tolist()
    if len(per_request) != bs:
        raise ValueError(f"{len(per_request)} budgets for {bs} requests")
    for budget in (budgets, *per_request) if isinstance(budgets, int) else per_request:
        if not 0 <= budget < MAX_ROWS:
            raise ValueError(f"tree budget is {budget}; want 0..{MAX_ROWS - 1} drafted nodes")
    return per_request


def _row_count(budget: int, rows: int | None) -> int:
    needed = budget + 1
    rows = needed if rows is None else rows
    if not needed <= rows <= MAX_ROWS:
        raise ValueError(f"{rows} rows per tree; the budget needs {needed}, at most {MAX_ROWS} fit")
    return rows


def _assemble(root_tokens: torch.Tensor, nodes: list[list[_Node]], rows: int) -> Tree:
    fields = []
    for root, of_request in zip(root_tokens.tolist(), nodes, strict=True):
        padding = itertools.repeat((-1, 0, -1, root), rows - 1 - len(of_request))
        fields.append([(-1, 0, -1, root), *of_request, *padding])
    device = root_tokens.device
    packed = torch.tensor(fields, dtype=torch.int64).reshape(len(nodes), rows, 4).to(device)
    sizes = torch.tensor([1 + len(of_request) for of_request in nodes], dtype=torch.int64)
    parents, depths, ranks, tokens = (packed[:, :, i].contiguous() for i in range(4))
    return Tree(tokens, parents, depths, ranks, sizes.to(device))

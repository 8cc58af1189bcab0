"""The walk: which rows of a verified tree the target itself would have produced."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .tree import Tree


class Accepted(NamedTuple):
    """Outcome of the walk; width = deepest row of the batch + 1, unless one was asked for."""

    rows: torch.Tensor
    """[bs, width] int64, rows of the path from the root (0) on, then -1."""
    lengths: torch.Tensor
    """[bs] int64, accepted DRAFTED rows: the root and the bonus token are not counted."""
    bonus: torch.Tensor
    """[bs] int64, the target's token after the last accepted row; its keys are not computed."""
    tokens: torch.Tensor
    """[bs, width] int64, tokens to emit: the accepted drafts, then the bonus, then -1."""


def tree_accept(tree: Tree, target_tokens: torch.Tensor, width: int | None = None) -> Accepted:
    """Follow the target's choices down the tree as far as it was drafted.

    From the root: where the target's token at the current row is the token of one of its
    children, step there (to the first, should siblings share a token); else that token is the
    bonus. So the emitted tokens are those of plain decoding whatever the tree held.

    Args:
        tree: n rows per request.
        target_tokens: [bs, n] int, the token the target chose after each row; what it holds at
            padding rows does not matter.
        width: columns of the result instead of as many as the deepest row needs; at most
            width - 1 drafted rows are accepted, and then the bonus token follows the last.

    Raises:
        ValueError: `target_tokens` has another shape than the tree, or width < 1.
    """
    if target_tokens.shape != tree.tokens.shape:
        raise ValueError(
            f"target_tokens has shape {tuple(target_tokens.shape)}; "
            f"the tree has {tuple(tree.tokens.shape)}"
        )
    bs = tree.tokens.shape[0]
    if width is None:
        width = int(tree.depths.max()) + 1 if bs else 1
    if width < 1:
        raise ValueError(f"width is {width}; the root alone needs 1 column")
    paths, emitted = [], []
    requests = zip(
        tree.tokens.tolist(),
        tree.parents.tolist(),
        tree.sizes.tolist(),
        target_tokens.tolist(),
        strict=True,
    )
    for tokens, parents, size, targets in requests:
        path = _walk(tokens, parents, size, targets)[:width]
        paths.append(path + [-1] * (width - len(path)))
        emitted.append([targets[row] for row in path] + [-1] * (width - len(path)))
    device = tree.tokens.device
    rows = torch.tensor(paths, dtype=torch.int64).reshape(bs, width).to(device)
    out = torch.tensor(emitted, dtype=torch.int64).reshape(bs, width).to(device)
    lengths = (rows >= 0).sum(dim=1) - 1
    return Accepted(rows, lengths, out.gather(1, lengths.unsqueeze(1)).squeeze(1), out)


def _walk(tokens: list[int], parents: list[int], size: int, targets: list[int]) -> list[int]:
    """Parents precede children, so one pass over the rows meets the children in order."""
    path = [0]
    for row in range(1, size):
        if parents[row] == path[-1] and tokens[row] == targets[path[-1]]:
            path.append(row)
    return path

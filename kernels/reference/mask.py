"""Masks and positions of the verify forward: a row sees the prefix, its ancestors and itself."""

from __future__ import annotations

import torch

from .tree import Tree


def packed_mask(tree: Tree) -> torch.Tensor:
    """[bs, n] int64, one word per row: bit j is set if the row sees row j of its tree.

    A padding row sees itself only. Bit 63 is the sign bit: test bits with shift and `& 1`.
    """
    words = []
    for parents in tree.parents.tolist():
        of_request: list[int] = []
        for row, parent in enumerate(parents):
            above = of_request[parent] if parent >= 0 else 0
            of_request.append(above | (1 << row))
        words.append([word - (1 << 64) if word >> 63 else word for word in of_request])
    packed = torch.tensor(words, dtype=torch.int64).reshape(tree.parents.shape)
    return packed.to(tree.parents.device)


def ancestor_matrix(tree: Tree) -> torch.Tensor:
    """[bs, n, n] bool: [b, i, j] is true if row j is row i or an ancestor of it.

    The row of a padding node holds its own diagonal element only.
    """
    bits = torch.arange(tree.rows, device=tree.parents.device)
    return ((packed_mask(tree).unsqueeze(-1) >> bits) & 1).bool()


def full_mask(tree: Tree, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's FULL_MASK layout (`TreeMaskMode.FULL_MASK` of its `eagle_utils`).

    Per request n rows of seq_len + n columns, row-major, requests after one another: true where
    the row (query) sees the column (key). The first seq_len columns are the committed prefix,
    all true; the last n are the rows of the tree.

    Args:
        tree: n rows per request.
        seq_lens: [bs] int, committed tokens, the root not counted.

    Returns:
        the flat mask, bool, and indptr [bs + 1] int64: request b is flat[indptr[b]:indptr[b + 1]].

    Raises:
        ValueError: not one seq_len per tree.
    """
    n = tree.rows
    lengths = seq_lens.tolist()
    if len(lengths) != tree.tokens.shape[0]:
        raise ValueError(f"{len(lengths)} seq_lens for {tree.tokens.shape[0]} trees")
    device = tree.tokens.device
    indptr = [0]
    for length in lengths:
        indptr.append(indptr[-1] + n * (length + n))
    flat = torch.ones(indptr[-1], dtype=torch.bool, device=device)
    for b, tail in enumerate(ancestor_matrix(tree)):
        flat[indptr[b] : indptr[b + 1]].view(n, lengths[b] + n)[:, lengths[b] :] = tail
    return flat, torch.tensor(indptr, dtype=torch.int64, device=device)


def positions(tree: Tree, seq_lens: torch.Tensor) -> torch.Tensor:
    """[bs, n] int64, absolute position of each row: seq_len + depth.

    `seq_lens` [bs] counts the committed tokens without the root, whose keys and values are not
    in the cache yet: they fill positions 0..seq_len-1, so the root stands at seq_len. Padding
    rows have depth 0 and share the root's position.
    """
    return seq_lens.to(torch.int64).unsqueeze(1) + tree.depths

"""What a request asks of its logits before sampling, exact for every node of a tree.

The semantics are those of SGLang (srt/sampling/penaltylib and `SamplingBatchInfo`), with a node's
own ancestor path in place of "the output so far". For a token that occurs c times there,

    x = logit - c * frequency - (c > 0) * presence
    x = x * repetition if x < 0 else x / repetition        (only where c > 0)
    x = -inf                     (tokens that end the request, before it may end)
    x = x + bias

in float32. Prompt tokens do not count, neither here nor there. SGLang adds the frequency penalty
once per occurrence, so its sum may differ from the product in the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .mask import ancestor_matrix
from .tree import Tree


class Penalties(NamedTuple):
    """Penalties of a batch, and what it has put out; rows are requests."""

    frequency: torch.Tensor
    """[bs] float32; 0 for none."""
    presence: torch.Tensor
    """[bs] float32; 0 for none."""
    repetition: torch.Tensor
    """[bs] float32, above 0; 1 for none."""
    counts: torch.Tensor
    """[bs, V] int, how often each token is in the output, the root of the tree included."""


class EarlyEnd(NamedTuple):
    """Which tokens end a request, and from where on they may be drawn; rows are requests."""

    tokens: torch.Tensor
    """[bs, V] bool."""
    first_position: torch.Tensor
    """[bs] int64: rows at lower absolute positions may not draw them."""


def adjust_nodes(
    logits: torch.Tensor,
    tree: Tree,
    positions: torch.Tensor,
    penalties: Penalties | None = None,
    early_end: EarlyEnd | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits that each node's token is drawn from; the arguments stay as they are.

    A node's output is that of `penalties.counts` and then the drafted tokens from the root's child
    to the node itself. Nodes do not see siblings, so a row equals that of plain decoding after the
    same tokens, whatever else the tree holds.

    Args:
        logits: [bs * n, V], any float type.
        tree: n rows per request.
        positions: [bs * n] int64, absolute positions of the rows, as for `sample_nodes`.
        bias: [bs, V] float, added last.

    Returns:
        [bs * n, V] float32.
    """
    bs, n = tree.tokens.shape
    rows = logits.float().view(bs, n, -1)
    if penalties is not None:
        rows = _penalised_rows(rows, tree, penalties)
    if early_end is not None:
        early = positions.view(bs, n) < early_end.first_position.unsqueeze(1)
        rows = rows.masked_fill(early.unsqueeze(2) & early_end.tokens.unsqueeze(1), -torch.inf)
    if bias is not None:
        rows = rows + bias.float().unsqueeze(1)
    return rows.reshape(bs * n, -1)


def _penalised_rows(rows: torch.Tensor, tree: Tree, penalties: Penalties) -> torch.Tensor:
    """[bs, n, V]. Only tokens of the tree differ from node to node: n of V are computed apart."""
    result = _penalised(rows, penalties.counts.unsqueeze(1), penalties)
    bs, n = tree.tokens.shape
    if n > 1:
        path = ancestor_matrix(tree)
        path[:, :, 0] = False  # the root is in `counts`
        same = tree.tokens.unsqueeze(2) == tree.tokens.unsqueeze(1)
        on_path = torch.matmul(path.float(), same.float()).to(penalties.counts.dtype)
        before = penalties.counts.gather(1, tree.tokens).unsqueeze(1)
        tokens = tree.tokens.unsqueeze(1).expand(bs, n, n)
        # A token that is in the tree twice gets the same value twice.
        result.scatter_(2, tokens, _penalised(rows.gather(2, tokens), before + on_path, penalties))
    return result


def _penalised(values: torch.Tensor, counts: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    frequency, presence, repetition = (
        values_of.float().view(-1, 1, 1)
        for values_of in (penalties.frequency, penalties.presence, penalties.repetition)
    )
    seen = counts > 0
    values = values - (counts * frequency + seen * presence)
    scaled = torch.where(values < 0, values * repetition, values / repetition)
    return torch.where(seen, scaled, values)

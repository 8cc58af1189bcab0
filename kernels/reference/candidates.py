"""Draft logits to per-depth candidates: top-k of a vocabulary shard, merge of the shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

PAD_TOKEN_ID = -1
"""Token id of a candidate that does not exist (its log-probability is -inf)."""


class Shard(NamedTuple):
    """Best candidates of one vocabulary shard, each row sorted by logit, ties by token id.

    A shard with fewer than k tokens is filled up with logit -inf and `PAD_TOKEN_ID`.
    """

    logits: torch.Tensor
    """[rows, k] float32."""
    token_ids: torch.Tensor
    """[rows, k] int64, ids of the whole vocabulary."""
    logsumexp: torch.Tensor
    """[rows] float32, over every valid logit of the shard; -inf where it has none."""


def candidates_topk(
    logits: torch.Tensor, k: int, first_token_id: int = 0, num_valid: int | None = None
) -> Shard:
    """Top k of each row, with the normaliser that `merge_candidates` needs.

    Args:
        logits: [rows, V_shard], any float type; -inf forbids a token.
        k: candidates per row, at least 1; it may exceed the number of tokens.
        first_token_id: vocabulary id of column 0.
        num_valid: columns from this one on are padding of the vocabulary and never read.

    Raises:
        ValueError: k < 1, `num_valid` out of range, or a row holds NaN or +inf.
    """
    columns = logits.shape[1]
    valid = columns if num_valid is None else num_valid
    if k < 1:
        raise ValueError(f"k is {k}; at least one candidate per row is needed")
    if not 0 <= valid <= columns:
        raise ValueError(f"num_valid is {valid}; the shard has {columns} columns")
    logits = logits[:, :valid].float()
    logsumexp = torch.logsumexp(logits, dim=1)
    _refuse_rows(~(logsumexp < torch.inf), "draft logits hold NaN or +inf")
    values, columns_of = _topk_lowest_first(logits, min(k, valid))
    shard = Shard(values, columns_of + first_token_id, logsumexp)
    return shard if k <= valid else _fill_up(shard, k)


def merge_candidates(shards: Sequence[Shard] | Shard, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of all shards to the k best of the vocabulary.

    Args:
        shards: one per vocabulary shard in any order, or one `Shard` whose tensors are stacked
            along a leading dimension of shards ([shards, rows, k] and [shards, rows]).
        k: candidates to keep; positions beyond those that exist hold -inf and `PAD_TOKEN_ID`.

    Returns:
        logprobs [rows, k] float32, normalised over the whole vocabulary and never above 0,
        descending; and token_ids [rows, k] int64, the lower id first among equals.

    Raises:
        ValueError: k < 1, no shard, or a row in which every token is forbidden.
    """
    if k < 1:
        raise ValueError(f"k is {k}; at least one candidate per row is needed")
    if not isinstance(shards, Shard):
        if not shards:
            raise ValueError("no shard to merge")
        shards = Shard(*(torch.stack(parts) for parts in zip(*shards, strict=True)))
    count, rows, width = shards.logits.shape
    logsumexp = torch.logsumexp(shards.logsumexp, dim=0)
    _refuse_rows(~(logsumexp > -torch.inf), "every token is forbidden (all logits -inf)")
    logits = shards.logits.transpose(0, 1).reshape(rows, count * width)
    token_ids = shards.token_ids.transpose(0, 1).reshape(rows, count * width)
    if count > 1:
        # Forbidden tokens (-inf) before those that do not exist, as within one shard.
        last = torch.iinfo(torch.int64).max
        by_id = torch.argsort(token_ids.masked_fill(token_ids == PAD_TOKEN_ID, last), dim=1)
        order = torch.sort(logits.gather(1, by_id), dim=1, descending=True, stable=True).indices
        order = by_id.gather(1, order)
        logits, token_ids = logits.gather(1, order), token_ids.gather(1, order)
    best = Shard(logits[:, :k], token_ids[:, :k], logsumexp)
    best = _fill_up(best, k)
    return (best.logits - logsumexp[:, None]).clamp_(max=0.0), best.token_ids


def _topk_lowest_first(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.topk leaves open which of several equal logits it takes: here the lowest index is."""
    probe = min(k + 1, logits.shape[1])
    values, indices = torch.topk(logits, probe, dim=1)
    tied = (values[:, 1:] == values[:, :-1]).any(dim=1)
    values, indices = values[:, :k], indices[:, :k]
    if bool(tied.any()):
        ordered = torch.sort(logits[tied], dim=1, descending=True, stable=True)
        values[tied], indices[tied] = ordered.values[:, :k], ordered.indices[:, :k]
    return values, indices


def _fill_up(shard: Shard, k: int) -> Shard:
    missing = k - shard.logits.shape[1]
    if missing <= 0:
        return shard
    pad = torch.nn.functional.pad
    return Shard(
        pad(shard.logits, (0, missing), value=-torch.inf),
        pad(shard.token_ids, (0, missing), value=PAD_TOKEN_ID),
        shard.logsumexp,
    )


def _refuse_rows(bad: torch.Tensor, what: str) -> None:
    if bool(bad.any()):
        rows = bad.nonzero().flatten().tolist()
        raise ValueError(f"{what} in row(s) {rows[:8]} of {bad.numel()}")

"""Plain and speculative decoding of the pair for a batch of prompts, in plain PyTorch.

All prompts of a batch have one length. A chooser maps logits and absolute positions to tokens; as
long as it is a function of these alone, plain and speculative decoding give the same tokens. Trees,
sampling and acceptance are the reference ops of `overstory.kernels.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from overstory.kernels.reference import (
    Accepted,
    Tree,
    ancestor_matrix,
    candidates_topk,
    merge_candidates,
    sample_nodes,
    tree_accept,
    tree_build,
)

from .drafter import DrafterModel, masked_attention
from .target import TargetCache, TargetModel

WIDTH = 16
"""Most probable tokens of each depth that may enter a tree."""

Chooser = Callable[[Tensor, Tensor], Tensor]
"""Tokens [batch, rows] after rows with logits [batch, rows, vocab] at absolute positions
[batch, rows]."""

Proposer = Callable[[Tensor, Tensor], Tree]
"""Trees for roots [batch] and drafted logits [batch, depth, vocab]."""


def choose_greedily(logits: Tensor, positions: Tensor) -> Tensor:
    """The most probable tokens; a `Chooser`."""
    del positions
    return logits.argmax(-1)


def sampler(
    seeds: Tensor, temperature: float, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> Chooser:
    """A `Chooser` that samples with noise from (seed, position); `seeds` [batch] int64."""

    def choose(logits: Tensor, positions: Tensor) -> Tensor:
        batch, rows, vocab = logits.shape
        full = torch.ones(batch * rows, device=logits.device)
        tokens = sample_nodes(
            logits.reshape(-1, vocab),
            full * temperature,
            torch.full_like(full, top_k, dtype=torch.int64),
            full * top_p,
            full * min_p,
            seeds.to(logits.device).repeat_interleave(rows),
            positions.reshape(-1),
        )
        return tokens.view(batch, rows)

    return choose


def tree_proposer(nodes: int, spine_first: bool = False) -> Proposer:
    """Trees of `nodes` drafted tokens; spine first with as many nodes as depths is the chain."""

    def propose(roots: Tensor, logits: Tensor) -> Tree:
        batch, depth, vocab = logits.shape
        shard = candidates_topk(logits.reshape(-1, vocab), WIDTH)
        log_probs, tokens = merge_candidates([shard], WIDTH)
        shape = (batch, depth, WIDTH)
        return tree_build(
            roots, log_probs.view(shape), tokens.view(shape), nodes, spine_first=spine_first
        )

    return propose


@dataclass
class Decoded:
    """Tokens of a batch and how they came about."""

    tokens: Tensor
    """New tokens [batch, new], int64."""
    accepted: list[list[int]] = field(default_factory=list)
    """Per prompt and round: tokens that the round's target forward gave (1 + accepted drafts);
    the last round counts whole, also where it runs past `new`."""
    branched: list[int] = field(default_factory=list)
    """Per prompt: rounds whose accepted path left the drafter's most probable tokens."""


@dataclass
class _State:
    """Committed text and caches of a batch."""

    ids: Tensor
    """Text [batch, room], int64; positions past `lengths` hold nothing of meaning."""
    lengths: Tensor
    """Committed tokens per prompt [batch]; the last one has not been run through the target."""
    cache: TargetCache
    """Slots 0 ... room - 1 are positions, later ones are scratch for a round's rows."""
    context: list[tuple[Tensor, Tensor]]
    """The drafter's keys and values by position, per layer [batch, heads, room, head_dim]."""

    @property
    def room(self) -> int:
        return self.ids.shape[1]

    @property
    def last(self) -> Tensor:
        """Position of the last committed token [batch, 1]."""
        return self.lengths[:, None] - 1

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Commit the first `counts` [batch] of `tokens` [batch, k]."""
        for offset in range(tokens.shape[1]):
            where = (self.lengths + offset).clamp(max=self.room - 1)[:, None]
            kept = (offset < counts)[:, None]
            old = self.ids.gather(1, where)
            self.ids.scatter_(1, where, torch.where(kept, tokens[:, offset, None], old))
        self.lengths += counts


class PairDecoder:
    """Decodes with a target and, for speculation, its drafter."""

    def __init__(self, target: TargetModel, drafter: DrafterModel) -> None:
        self.target, self.drafter = target, drafter
        self.layers = drafter.config.target_layer_ids
        self.block = drafter.config.block_size

    @torch.no_grad()
    def plain(self, prompts: Tensor, new: int, choose: Chooser) -> Decoded:
        """One target forward per token; `prompts` [batch, length] int64."""
        state = self._prefill(prompts, new, 0, choose)
        slots = torch.arange(state.room, device=prompts.device)
        one = torch.ones_like(state.lengths)
        for _ in range(new - 1):
            at = state.last
            seen = slots <= at[..., None]
            logits, _ = self.target.extend(state.ids.gather(1, at), at, state.cache, at, seen)
            state.append(choose(logits, at), one)
        return Decoded(state.ids[:, prompts.shape[1] :][:, :new].clone())

    @torch.no_grad()
    def speculate(self, prompts: Tensor, new: int, choose: Chooser, propose: Proposer) -> Decoded:
        """One target forward per round; with the same chooser, the tokens are those of `plain`."""
        batch, length = prompts.shape
        state = self._prefill(prompts, new, 64, choose)
        accepted: list[list[int]] = [[] for _ in range(batch)]
        branched = [0] * batch
        while bool((active := state.lengths < length + new).any()):
            tree = propose(state.ids.gather(1, state.last)[:, 0], self._draft(state))
            walk = self._verify(state, tree, choose)
            ranks = tree.ranks.gather(1, walk.rows.clamp(min=0))
            off = ((ranks > 0) & (walk.rows >= 0)).any(1).tolist()
            gains = torch.where(active, walk.lengths + 1, 0)
            state.append(walk.tokens.clamp(min=0), gains)
            for row, gain in enumerate(gains.tolist()):
                if gain:
                    accepted[row].append(gain)
                    branched[row] += off[row]
        return Decoded(state.ids[:, length : length + new].clone(), accepted, branched)

    def _prefill(self, prompts: Tensor, new: int, scratch: int, choose: Chooser) -> _State:
        """Run the prompts and commit the first new token."""
        batch, length = prompts.shape
        device = prompts.device
        room = length + new + self.block
        cache = TargetCache.empty(self.target, batch, room + scratch)
        at = torch.arange(length, device=device).expand(batch, -1)
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        logits, features = self.target.extend(
            prompts, at, cache, at, seen.expand(batch, -1, -1), self.layers
        )
        assert features is not None
        context = [
            tuple(x.new_zeros(*x.shape[:2], room, x.shape[3]) for x in pair)
            for pair in self.drafter.context(features[:, :1], at[:, :1])
        ]
        ids = torch.zeros(batch, room, dtype=torch.int64, device=device)
        ids[:, :length] = prompts
        lengths = torch.full((batch,), length, dtype=torch.int64, device=device)
        state = _State(ids, lengths, cache, context)
        self._add_context(state, features, at)
        state.append(choose(logits[:, -1:], at[:, -1:]), torch.ones_like(lengths))
        return state

    def _add_context(self, state: _State, features: Tensor, at: Tensor) -> None:
        """Keep the drafter's keys and values of committed positions `at` [batch, rows]."""
        rows = torch.arange(at.shape[0], device=at.device)[:, None]
        new = self.drafter.context(features, at)
        for kept, fresh in zip(state.context, new, strict=True):
            for where, what in zip(kept, fresh, strict=True):
                where.transpose(1, 2)[rows, at] = what.transpose(1, 2)

    def _draft(self, state: _State) -> Tensor:
        """Logits [batch, block - 1, vocab] of the tokens after the last committed one."""
        batch, device = len(state.ids), state.ids.device
        tokens = torch.full((batch, self.block), self.drafter.config.mask_token_id, device=device)
        tokens[:, :1] = state.ids.gather(1, state.last)
        at = state.last + torch.arange(self.block, device=device)
        before = torch.arange(state.room, device=device) < state.last
        own = torch.ones(batch, self.block, dtype=torch.bool, device=device)
        mask = torch.cat([before, own], 1)[:, None, None].expand(-1, -1, self.block, -1)
        embeddings = self.target.embed_tokens(tokens)
        states = self.drafter(embeddings, at, state.context, masked_attention(mask))
        return self.target.lm_head(states[:, 1:])

    def _verify(self, state: _State, tree: Tree, choose: Chooser) -> Accepted:
        """Run a tree through the target, walk it, and move the accepted rows into place."""
        batch, device = len(state.ids), state.ids.device
        n, room = tree.rows, state.room
        before = torch.arange(room, device=device) < state.last
        mask = torch.cat([before[:, None].expand(-1, n, -1), ancestor_matrix(tree)], 2)
        at = state.last + tree.depths
        scratch = torch.arange(room, room + n, device=device).expand(batch, -1)
        logits, features = self.target.extend(
            tree.tokens, at, state.cache, scratch, mask, self.layers
        )
        assert features is not None
        walk = tree_accept(tree, choose(logits, at))
        self._commit(state, walk, features)
        return walk

    def _commit(self, state: _State, walk: Accepted, features: Tensor) -> None:
        """Move keys, values and features of the accepted rows to their positions.

        Rows past the end of a path repeat its last row: they write what stands there anyway.
        """
        offsets = torch.arange(walk.rows.shape[1], device=walk.rows.device)
        offsets = torch.minimum(offsets, walk.lengths[:, None])
        path = walk.rows.gather(1, offsets)
        at = (state.last + offsets).clamp(max=state.room - 1)
        rows = torch.arange(len(path), device=path.device)[:, None]
        for cached in (*state.cache.keys, *state.cache.values):
            cached[rows, at] = cached[rows, state.room + path]
        self._add_context(state, features[rows, path], at)

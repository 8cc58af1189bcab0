"""The oracle: the pair decoded in plain PyTorch on a CPU, without SGLang and without Ray.

Tests of SGLang's output compare with it. Everything is float32; sampling noise is a function of
the seed and the absolute position, as in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import load_drafter, load_target
from .config import EOS
from .decoding import Chooser, PairDecoder, choose_greedily, sampler, tree_proposer
from .paths import resolve_model


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, with SGLang's meanings; the default is greedy."""

    temperature: float = 0.0
    seed: int = 0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    def chooser(self) -> Chooser:
        """The chooser of tokens for a batch of one."""
        if self.temperature == 0.0:
            return choose_greedily
        seeds = torch.tensor([self.seed])
        return sampler(seeds, self.temperature, self.top_k, self.top_p, self.min_p)


GREEDY = Sampling()


@dataclass(frozen=True)
class Continuation:
    """New tokens of one prompt and the target forwards they took."""

    tokens: list[int]
    """At most as many as asked for; ends with the end-of-text token if that came."""
    gains: list[int]
    """Tokens that each verify forward gave (1 + accepted drafts). Empty for plain decoding. The
    first token comes from the prompt's own forward; the last round may run past the end."""

    @property
    def rounds(self) -> int:
        """Verify forwards."""
        return len(self.gains)


class Oracle:
    """A target and its drafter, decoded one prompt at a time."""

    def __init__(self, decoder: PairDecoder) -> None:
        self.decoder = decoder

    @classmethod
    def load(
        cls, target: str = "overstory-tiny", drafter: str = "overstory-tiny-drafter"
    ) -> Oracle:
        """Load by built-in name or folder."""
        return cls(
            PairDecoder(
                load_target(Path(resolve_model(target))), load_drafter(Path(resolve_model(drafter)))
            )
        )

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Target logits after every token of `ids`, float32 [tokens, vocab]."""
        target = self.decoder.target
        return target.lm_head(target(torch.tensor([ids])).hidden)[0]

    def greedy(self, prompt_ids: list[int], new: int, ignore_eos: bool = False) -> list[int]:
        """Up to `new` greedy tokens by plain decoding."""
        return self.plain(prompt_ids, new, ignore_eos=ignore_eos).tokens

    def plain(
        self, prompt_ids: list[int], new: int, sampling: Sampling = GREEDY, ignore_eos: bool = False
    ) -> Continuation:
        """Decode one token per target forward."""
        _check(prompt_ids, new)
        decoded = self.decoder.plain(torch.tensor([prompt_ids]), new, sampling.chooser())
        return cut_at_end(decoded.tokens[0].tolist(), [], ignore_eos)

    def chain(
        self, prompt_ids: list[int], new: int, sampling: Sampling = GREEDY, ignore_eos: bool = False
    ) -> Continuation:
        """Decode with the drafter's most probable chain."""
        return self.tree(prompt_ids, new, self.decoder.block - 1, True, sampling, ignore_eos)

    def tree(
        self,
        prompt_ids: list[int],
        new: int,
        nodes: int,
        spine_first: bool = False,
        sampling: Sampling = GREEDY,
        ignore_eos: bool = False,
    ) -> Continuation:
        """Decode with trees of `nodes` drafted tokens (1 to 63)."""
        _check(prompt_ids, new)
        decoded = self.decoder.speculate(
            torch.tensor([prompt_ids]), new, sampling.chooser(), tree_proposer(nodes, spine_first)
        )
        return cut_at_end(decoded.tokens[0].tolist(), decoded.accepted[0], ignore_eos)


def _check(prompt_ids: list[int], new: int) -> None:
    if not prompt_ids or new < 1:
        raise ValueError(
            f"got {len(prompt_ids)} prompt tokens and {new} new ones; both must be at least 1"
        )


def cut_at_end(tokens: list[int], gains: list[int], ignore_eos: bool) -> Continuation:
    """The continuation up to the end-of-text token, without the rounds after that one."""
    if ignore_eos or EOS not in tokens:
        return Continuation(tokens, gains)
    length = tokens.index(EOS) + 1
    rounds, have = 0, 1
    while have < length:
        have += gains[rounds] if gains else 1
        rounds += 1
    return Continuation(tokens[:length], gains[:rounds])

"""How one sequence is sampled, in the gateway's terms, and the seeds that make it repeatable.

Pure: no Ray, no SGLang. The seed is drawn here and nowhere else, because the gateway keeps it with
the request's committed tokens: with both, any replica can go on with the sequence and produce the
same text.
"""

import hashlib
import secrets
from dataclasses import dataclass, replace

from overstory.workers.ddtree import EARLIER_OUTPUT
from overstory.workers.policy import OPT_OUT

SEED_LIMIT = 2**31
"""Seeds are in [0, 2**31): SGLang carries them in tensors of 32-bit integers."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of one sequence.

    Attributes: seed: in [0, `SEED_LIMIT`); the sampler's noise is a function of it and of the
        absolute position. max_new_tokens: at least 1. temperature: 0 takes the most probable
        token. top_k: -1 for no limit. stop_token_ids: end the sequence besides the model's own end
        tokens. ignore_eos: go on past the model's end tokens (for load tests). logit_bias: (token
        id, bias) to add to the logits. frequency_penalty, presence_penalty, repetition_penalty:
        against tokens of the output, 0, 0 and 1 for none. min_new_tokens: no end token before that
        many. constraint: ("json_schema", "regex", "ebnf" or "structural_tag", its text), which the
        output must fit.
        earlier_output: how many of the prompt's last tokens are output of this sequence.
        speculate: false has nothing drafted for it; the text is the same.
    """

    seed: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    constraint: tuple[str, str] | None = None
    earlier_output: int = 0
    speculate: bool = True

    def engine_params(self) -> dict[str, object]:
        """The fields under the names of SGLang's `SamplingParams`
        (`sglang/srt/sampling/sampling_params.py`)."""
        params: dict[str, object] = {
            "sampling_seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "ignore_eos": self.ignore_eos,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_new_tokens,
        }
        if self.stop_token_ids:
            params["stop_token_ids"] = list(self.stop_token_ids)
        if self.logit_bias:
            params["logit_bias"] = {str(token): bias for token, bias in self.logit_bias}
        if self.constraint is not None:
            kind, text = self.constraint
            params[kind] = text
        custom: dict[str, object] = {}
        if self.earlier_output:
            custom[EARLIER_OUTPUT] = self.earlier_output
        if not self.speculate:
            custom[OPT_OUT] = False
        if custom:
            params["custom_params"] = custom
        return params

    def after(self, committed: int) -> "Sampling":
        """What is left to sample once `committed` tokens stand."""
        return replace(
            self,
            max_new_tokens=self.max_new_tokens - committed,
            min_new_tokens=max(0, self.min_new_tokens - committed),
            earlier_output=self.earlier_output + committed,
        )


def draw_seed() -> int:
    """A random seed for a request that names none."""
    return secrets.randbelow(SEED_LIMIT)


def fold_seed(seed: int) -> int:
    """Any integer as a seed in range: those in range stay as they are, others are hashed."""
    return seed if 0 <= seed < SEED_LIMIT else _hashed(str(seed))


def choice_seeds(seed: int, count: int) -> list[int]:
    """Distinct seeds for the `count` choices of one prompt.

    The first is `seed` itself, so that n = 1 gives the first choice of n > 1; the others depend on
    `seed` alone.
    """
    seeds = [seed]
    attempt = 0
    while len(seeds) < count:
        attempt += 1
        candidate = _hashed(f"{seed}/{attempt}")
        if candidate not in seeds:
            seeds.append(candidate)
    return seeds


def _hashed(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "big") % SEED_LIMIT

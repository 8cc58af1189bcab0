"""Target logits to one token per row, with noise that depends on seed and position only.

Filters (temperature, softmax, top-k, top-p, min-p) have the semantics of SGLang's
`top_k_top_p_min_p_sampling_from_probs_torch` (srt/layers/sampler.py): every filter looks at the
same float32 probabilities of the whole vocabulary, nothing is renormalised between them. With
the tokens in order of descending probability,

- top-k keeps the first k;
- top-p keeps those before which the sum of probabilities (cumulative minus own, in float32) is
  at most top_p: the token that crosses the bound is kept, the first always;
- min-p keeps those of at least min_p times the highest probability.

The support is what all three keep: a prefix of that order. Where SGLang leaves open which of
several equal probabilities comes first, here the lower token id does. SGLang applies top_p = 1
as a filter (float32 sums may then drop tokens of the far tail) when another request of the batch
needs top-p; here top_p >= 1, min_p <= 0, top_k < 1 and top_k >= V filter nothing, in any batch.
"""

from __future__ import annotations

import numpy as np
import torch

GREEDY_BELOW = 1e-6
"""Temperatures under this mean greedy (SGLang: `_SAMPLING_EPS` of its SamplingParams)."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[rows] float64 in [0, 1), a pure function of (seed, position) element by element.

    The stream of a seed is splitmix64 (Steele, Lea, Flood 2014) started at the mixed seed, and
    a position selects its element: with mix the finaliser of splitmix64 and arithmetic modulo
    2^64, u = (mix(mix(seed + G) + (position + 1) * G) >> 11) * 2^-53, G = 0x9E3779B97F4A7C15.

    Args:
        seeds: [rows] int64, any value.
        positions: [rows] int64, absolute positions.
    """
    start = _mix(seeds.to(torch.int64) + _GOLDEN)
    bits = _mix(start + (positions.to(torch.int64) + 1) * _GOLDEN)
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def sample_nodes(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The target's token after each row: one draw from its filtered distribution.

    Rows of temperature < 1e-6 or top_k = 1 take the highest logit, the lowest id among equals.
    The others invert the cumulative distribution in token-id order (float64) at the row's one
    uniform. A row's token depends on its own arguments alone: not on other rows, their order, or
    the tree the row stands in.

    Args:
        logits: [rows, V], any float type; -inf forbids a token.
        temperature, top_p, min_p: [rows] float; top_k: [rows] int (see the module for the
            values that filter nothing).
        seeds: [rows] int64, the seed of the row's request.
        positions: [rows] int64, absolute position of the row whose logits these are (the last
            prompt position for the first token after prefill, seq_len + depth in a tree), the
            same convention everywhere, or the same seed gives other text.

    Returns:
        [rows] int64 token ids.

    Raises:
        ValueError: a row's highest logit is NaN or infinite, or its parameters are NaN.
    """
    tokens = _argmax(logits)
    sampled = ~_is_greedy(temperature, top_k)
    if not bool(sampled.any()):
        return tokens
    every = bool(sampled.all())
    arguments = (logits, temperature, top_k, top_p, min_p, seeds, positions)
    drawn = _draw(*(arguments if every else (argument[sampled] for argument in arguments)))
    if every:
        return drawn
    tokens[sampled] = drawn
    return tokens


def filtered_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """[rows, V] float64, the distribution that `sample_nodes` draws from; see there."""
    tokens = _argmax(logits)
    greedy = _is_greedy(temperature, top_k)
    weights = _weights(logits, temperature.masked_fill(greedy, 1.0), top_k, top_p, min_p).double()
    weights[greedy] = torch.nn.functional.one_hot(tokens[greedy], logits.shape[1]).double()
    return weights / weights.sum(dim=1, keepdim=True)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """torch.argmax returns the first of equal maxima and propagates NaN."""
    tokens = logits.argmax(dim=1)
    best = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    finite = torch.isfinite(best)
    if not bool(finite.all()):
        rows = (~finite).nonzero().flatten().tolist()
        raise ValueError(
            f"target logits of row(s) {rows[:8]} of {finite.numel()} cannot be sampled: "
            "they hold NaN or +inf, or forbid every token"
        )
    return tokens


def _is_greedy(temperature: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    return (temperature < GREEDY_BELOW) | (top_k == 1)


def _draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    weights = _weights(logits, temperature, top_k, top_p, min_p)
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if not bool((total > 0).all()):
        raise ValueError("sampling parameters of a row are NaN")
    # u <= 1 - 2^-53, so u * total < total also when rounded: the first sum above it exists, and
    # sums only grow at tokens of positive weight, so no filtered token can be the one.
    threshold = uniforms(seeds, positions).unsqueeze(1) * total
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def _weights(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """[rows, V] float32 probabilities, 0 outside of the support, not renormalised."""
    probs = torch.softmax(logits.float() / temperature.float().unsqueeze(1), dim=1)
    vocabulary = probs.shape[1]
    top_k = torch.where((top_k < 1) | (top_k > vocabulary), vocabulary, top_k)
    bound = probs.amax(dim=1) * min_p.float().clamp(min=0.0)
    sorts = (top_k < vocabulary) | (top_p < 1)
    if bool(sorts.all()):
        probs = _keep_prefix(probs, top_k, top_p)
    elif bool(sorts.any()):
        probs[sorts] = _keep_prefix(probs[sorts], top_k[sorts], top_p[sorts])
    if bool((min_p > 0).any()):
        probs *= probs >= bound.unsqueeze(1)
    return probs


def _keep_prefix(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The probabilities with 0 for what top-k and top-p drop."""
    descending = _sorted_descending(probs)
    count = top_k
    if bool((top_p < 1).any()):
        crossed = descending.cumsum(dim=1) - descending > top_p.float().unsqueeze(1)
        crossed &= (top_p < 1).unsqueeze(1)
        first = crossed.view(torch.uint8).argmax(dim=1)
        until = torch.where(crossed.any(dim=1), first.clamp(min=1), probs.shape[1])
        count = torch.minimum(count, until)
    count = count.unsqueeze(1)
    return probs * _best(probs, descending.gather(1, count - 1), count)


def _sorted_descending(probs: torch.Tensor) -> torch.Tensor:
    """Values only: numpy's vectorised sort takes a fifth of the time of torch.sort on a CPU."""
    ascending = np.sort(probs.cpu().numpy(), axis=1)
    return torch.from_numpy(ascending).flip(1).to(probs.device)


def _best(probs: torch.Tensor, lowest: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Mask of the `count` highest of each row, of which the last equals `lowest`."""
    keep = probs >= lowest
    if bool((keep.sum(dim=1, keepdim=True) > count).any()):
        above = probs > lowest
        tied = keep & ~above
        places = count - above.sum(dim=1, keepdim=True)
        keep = above | (tied & (tied.cumsum(dim=1) <= places))
    return keep


def _mix(z: torch.Tensor) -> torch.Tensor:
    """Finaliser of splitmix64; int64 products wrap modulo 2^64."""
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right: torch has only the arithmetic one for int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

"""Texts written by the target itself, with its hidden states: what the drafter learns from.

A drafter has to predict the target's own continuations, so most of its training data is sampled
from the target: half greedily, half at the temperatures users ask for. Hidden states are computed
once and kept, since they are what drafter training would spend most of its time on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .target import TargetCache, TargetModel
from .train_target import crops

REPEAT = 12
"""A position whose last so many tokens stood earlier in its text is part of a loop."""
LOOP_WEIGHT = 0.25
"""How often loops are trained on, relative to other text: they are long and all alike."""


@dataclass
class Rollouts:
    """Texts of one length and everything the drafter needs to train on them."""

    ids: Tensor
    """Text [texts, length], int32."""
    prompt: Tensor
    """Tokens of each text that are prompt [texts], int64."""
    temperature: Tensor
    """At which the rest was sampled [texts], float32; 0 is greedy."""
    features: Tensor
    """Target features [texts, length, layers * hidden], bfloat16."""
    hidden: Tensor
    """Final target states [texts, length, hidden], bfloat16."""
    weights: Tensor
    """How often a block should start at each position [texts, length], float32."""

    def __len__(self) -> int:
        return len(self.ids)


@torch.no_grad()
def continue_texts(model: TargetModel, prompts: Tensor, length: int, temperature: Tensor) -> Tensor:
    """Continue `prompts` [texts, tokens] to `length` tokens; int32 [texts, length].

    `temperature` [texts] is that of each text. Keys and values are kept in bfloat16.
    """
    texts, start = prompts.shape
    device = prompts.device
    cache = TargetCache.empty(model, texts, length, torch.bfloat16)
    out = torch.zeros(texts, length, dtype=torch.int32, device=device)
    out[:, :start] = prompts
    noise = temperature[:, None]

    def pick(logits: Tensor) -> Tensor:
        logits = logits.float()
        gumbel = -torch.empty_like(logits).exponential_().log()
        return (logits + noise * gumbel).argmax(-1).int()

    def run(first: int, last: int) -> Tensor:
        at = torch.arange(first, last, device=device).expand(texts, -1)
        span = min(length, -(-last // 64) * 64)
        seen = torch.arange(span, device=device) <= at[:1, :, None]
        with torch.autocast(device.type, torch.bfloat16):
            return model.extend(out[:, first:last], at, cache, at, seen)[0][:, -1]

    logits = run(0, start)
    for position in range(start, length):
        out[:, position] = pick(logits)
        if position < length - 1:
            logits = run(position, position + 1)
    return out


@torch.no_grad()
def states(model: TargetModel, ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Features and final states of whole texts, bfloat16."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        out = model(ids, layers)
    return cast(Tensor, out.features).bfloat16(), out.hidden.bfloat16()


@torch.no_grad()
def looping(ids: Tensor) -> Tensor:
    """True where the last `REPEAT` tokens stood earlier in the text [texts, length], bool."""
    powers = torch.tensor([4099**i % (1 << 61) for i in range(REPEAT)], device=ids.device)
    grams = (ids.long().unfold(1, REPEAT, 1) * powers).sum(-1)
    rows = []
    for some in grams.split(64):
        same = some[:, :, None] == some[:, None, :]
        rows.append(same.tril(-1).any(-1))
    return torch.nn.functional.pad(torch.cat(rows), (REPEAT - 1, 0))


def collect(
    model: TargetModel,
    prompts: list[Tensor],
    length: int,
    temperature: float,
    layers: tuple[int, ...],
    block: int,
) -> Rollouts:
    """Continue every batch of prompts and keep what the drafter needs."""
    ids, prompt, features, hidden = [], [], [], []
    for batch in prompts:
        heat = torch.full((len(batch),), temperature, device=batch.device)
        ids.append(continue_texts(model, batch, length, heat))
        prompt.append(torch.full((len(batch),), batch.shape[1], device=batch.device))
    for some in torch.cat(ids).split(256):
        f, h = states(model, some, layers)
        features.append(f)
        hidden.append(h)
    texts, starts = torch.cat(ids), torch.cat(prompt)
    at = torch.arange(length, device=texts.device)
    weights = torch.where(looping(texts), LOOP_WEIGHT, 1.0)
    weights *= (at >= starts[:, None] - 1) & (at < length - block)
    heat = torch.full((len(texts),), temperature, device=texts.device)
    return Rollouts(texts, starts, heat, torch.cat(features), torch.cat(hidden), weights)


def draw_prompts(streams: list[tuple[Tensor, float]], texts: int, length: int) -> Tensor:
    """Random crops [texts, length] of several streams, by share."""
    pieces = [crops(stream, round(texts * share), length) for stream, share in streams]
    return torch.cat(pieces)

"""The shapes that are measured, with the goals that some of them have."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

KEY_WIDTH, VALUE_WIDTH = 576, 512
"""Columns of a cached row (512 latent + 64 rope), and how many of them are the value."""

FP8 = "fp8_e4m3"

CONTEXTS = (1024, 8192, 65536, 200_000)


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention: `bs` requests of `q` rows over `context` prefix slots each."""

    op: str
    """"verify_attention" or "decode_attention" (q = 1, no tail)."""
    bs: int
    q: int
    context: int
    heads: int = 8
    kv_dtype: str = "bf16"
    """"bf16" or "fp8_e4m3"."""
    goal_us: float | None = None
    """On one H200."""

    @property
    def tail(self) -> int:
        """Slots of the request's own rows, which the prefix does not hold."""
        return self.q if self.op == "verify_attention" else 0

    @property
    def kv_bytes(self) -> int:
        """Cache bytes that any implementation must read: each visible slot once."""
        width = {"bf16": 2, FP8: 1}[self.kv_dtype]
        return self.bs * (self.context + self.tail) * KEY_WIDTH * width

    @property
    def flops(self) -> int:
        """Of the two products; every row counts the whole tail, which trees mask in part."""
        keys = self.context + self.tail
        return 2 * self.bs * self.q * self.heads * keys * (KEY_WIDTH + VALUE_WIDTH)


def _verify(bs: int, q: int, context: int, goal: float | None = None) -> AttentionCase:
    return AttentionCase("verify_attention", bs, q, context, goal_us=goal)


def _decode(bs: int, context: int, goal: float | None = None) -> AttentionCase:
    return AttentionCase("decode_attention", bs, 1, context, goal_us=goal)


GOALS = (
    _verify(1, 9, 1024, 10),
    _verify(1, 9, 8192, 16),
    _verify(1, 9, 65536, 45),
    _verify(1, 9, 200_000, 110),
    _verify(1, 17, 65536, 75),
    _verify(1, 33, 65536, 130),
    _verify(1, 64, 65536, 240),
    _verify(1, 17, 200_000, 190),
    _verify(1, 33, 200_000, 360),
    _verify(1, 64, 200_000, 650),
    _verify(4, 9, 8192, 30),
    _verify(4, 9, 65536, 145),
    _verify(16, 9, 8192, 90),
    _decode(1, 8192, 12),
    _decode(32, 8192, 95),
)

_MORE = (
    *(_verify(bs, q, n) for bs in (1, 4, 16) for q in (2, 9, 17, 33, 64) for n in CONTEXTS),
    *(_decode(bs, n) for bs in (1, 4, 16, 32) for n in CONTEXTS),
    *(AttentionCase("verify_attention", 1, 9, 65536, heads=heads) for heads in (2, 4, 16)),
)
OVER_FP8 = tuple(
    dataclasses.replace(case, kv_dtype=FP8, goal_us=None)
    for case in GOALS
    if (case.op, case.bs, case.q) != ("verify_attention", 1, 33)
)
"""Over a cache in e4m3, which has no goals in us of its own: half the bytes, the same products."""

MAX_SLOTS = 3_400_000
"""Slots that one case may name in all its rotating sets: 3.9 GB of bf16 cache."""


def every_case() -> tuple[AttentionCase, ...]:
    """The cases with goals first, those over fp8, then the others that fit into `MAX_SLOTS` four
    times."""
    seen = {(c.op, c.bs, c.q, c.context, c.heads) for c in GOALS}
    fits = [c for c in _MORE if 4 * c.bs * (c.context + c.tail) <= MAX_SLOTS]
    more = (c for c in fits if (c.op, c.bs, c.q, c.context, c.heads) not in seen)
    return (*GOALS, *OVER_FP8, *more)

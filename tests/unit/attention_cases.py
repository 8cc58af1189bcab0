"""Inputs of the attention kernels, with all that may go wrong around them, and the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from overstory.kernels.reference import decode_attention, quantize_kv, verify_attention

WIDTH, VALUES = 576, 512
Tail = Callable[[int, torch.Generator], torch.Tensor]
"""Mask [n, n] bool of a request of n rows."""


def chain(n: int, _generator: torch.Generator) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def star(n: int, _generator: torch.Generator) -> torch.Tensor:
    tail = torch.eye(n, dtype=torch.bool)
    tail[:, :1] = True
    return tail


def diagonal(n: int, _generator: torch.Generator) -> torch.Tensor:
    return torch.eye(n, dtype=torch.bool)


def random_tree(n: int, generator: torch.Generator) -> torch.Tensor:
    tail = torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        parent = int(torch.randint(0, i, (), generator=generator))
        tail[i] |= tail[parent]
    return tail


def random_bits(n: int, generator: torch.Generator) -> torch.Tensor:
    """No tree: rows that see later rows, rows that see nothing."""
    tail = torch.rand(n, n, generator=generator) < 0.4
    tail[n // 2 : n // 2 + 1] = False
    return tail


def nothing(n: int, _generator: torch.Generator) -> torch.Tensor:
    return torch.zeros(n, n, dtype=torch.bool)


def everything(n: int, _generator: torch.Generator) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool)


@dataclass
class Case:
    """Requests of (prefix, rows) in one pool, slots shuffled; slots that nobody owns hold NaN.

    q [tokens, heads, 576] and kv [slots, 576] bf16 on `device`; the last `unowned` tokens belong to
    no request. `tails`: the mask of each request. `page_size` over 1: a request has whole pages,
    its rows follow its prefix in them, and slots are named one by one all the same. `kv_scale`: the
    cache is e4m3 with that scale.
    """

    requests: Sequence[tuple[int, int]]
    heads: int = 8
    tail: Tail = random_tree
    seed: int = 0
    unowned: int = 0
    scale: float = 0.06
    device: str = "cpu"
    index_dtype: torch.dtype = torch.int64
    page_size: int = 1
    kv_scale: float | None = None
    tails: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        prefixes, counts = zip(*self.requests, strict=True)
        self.tokens, total = sum(counts) + self.unowned, sum(prefixes)
        slots = self._draw_slots(generator)
        device = self.device
        draw = torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw, device=device).bfloat16()

        self.kv = normal(len(slots), WIDTH)
        self.q = normal(self.tokens, self.heads, WIDTH)
        self.qo_indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int().to(device)
        self.kv_indptr = torch.tensor([0, *prefixes], dtype=torch.int32).cumsum(0).int().to(device)
        self.kv_indices = slots[:total].to(device, self.index_dtype)
        self.out_cache_loc = slots[total : total + self.tokens].to(device, self.index_dtype)
        self.kv[slots[total + sum(counts) :].to(device)] = torch.nan
        if self.kv_scale is not None:
            self.kv = quantize_kv(self.kv.float(), self.kv_scale)
        self.tails = [self.tail(n, generator).to(device) for n in counts]

    def _draw_slots(self, generator: torch.Generator) -> torch.Tensor:
        """All slots of the pool: of the prefixes, of the rows, of nobody."""
        if self.page_size == 1:
            keys = sum(prefix + n for prefix, n in self.requests) + self.unowned
            return torch.randperm(keys + 5, generator=generator)
        size = self.page_size
        counts = [-(-(prefix + n) // size) for prefix, n in self.requests]
        counts.append(-(-self.unowned // size) + 1)  # of nobody
        pages = torch.randperm(sum(counts), generator=generator).split(counts)
        slots = [(own[:, None] * size + torch.arange(size)).flatten() for own in pages]
        parts = [
            own.tensor_split([prefix, prefix + n])
            for own, (prefix, n) in zip(slots, self.requests, strict=False)
        ]
        prefixes, rows, rest = zip(*parts, strict=True)
        return torch.cat([*prefixes, *rows, slots[-1], *rest])

    @property
    def owned(self) -> int:
        return self.tokens - self.unowned

    @property
    def max_q(self) -> int:
        return max(1, *(n for _, n in self.requests)) if self.requests else 1

    def mask_bytes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """FULL_MASK layout, uint8, garbage in the columns of the prefix; and its indptr."""
        sizes = [n * (prefix + n) for prefix, n in self.requests]
        indptr = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int64)
        draw = torch.Generator(self.device).manual_seed(self.seed + 1)
        flat = torch.randint(
            0, 2, (int(indptr[-1]),), generator=draw, device=self.device, dtype=torch.uint8
        )
        for (prefix, n), begin, size, tail in zip(
            self.requests, indptr.tolist(), sizes, self.tails, strict=False
        ):
            flat[begin : begin + size].view(n, prefix + n)[:, prefix:] = tail
        return flat, indptr.to(self.device)

    def mask_words(self) -> torch.Tensor:
        """[tokens] int64: bit j of a row is set if it sees row j of its request."""
        words = torch.zeros(self.tokens, dtype=torch.int64)
        for first, tail in zip(self.qo_indptr.tolist(), self.tails, strict=False):
            for i, row in enumerate(tail.tolist()):
                word = sum(1 << j for j, seen in enumerate(row) if seen)
                words[first + i] = word - (1 << 64) if word >> 63 else word
        return words.to(self.device)

    def tail_keys(self) -> torch.Tensor:
        """[tokens, 576]: the keys at out_cache_loc."""
        return self.kv[self.out_cache_loc.long()]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference in float64, and its log-sum-exp; of the owned rows."""
        n = self.owned
        q = self.q[:n].double()
        lse = torch.empty(q.shape[:2], dtype=torch.float64, device=self.device)
        flat, indptr = self.mask_bytes()
        out = verify_attention(
            q,
            self.kv,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices.long(),
            self.out_cache_loc.long(),
            flat.bool(),
            indptr,
            scale=self.scale,
            v_head_dim=VALUES,
            lse=lse,
            kv_scale=self.kv_scale or 1.0,
        )
        return out, lse


@dataclass
class DecodeCase:
    """Requests of `lengths` slots, one row each; slots may be named twice. `kv_scale`: as above."""

    lengths: Sequence[int]
    heads: int = 8
    seed: int = 0
    scale: float = 0.06
    device: str = "cpu"
    index_dtype: torch.dtype = torch.int64
    kv_scale: float | None = None

    def __post_init__(self) -> None:
        draw = torch.Generator(self.device).manual_seed(self.seed)
        device, total = self.device, sum(self.lengths)
        slots = max(2, total // 2)
        self.kv = torch.randn(slots, WIDTH, generator=draw, device=device).bfloat16()
        shape = (len(self.lengths), self.heads, WIDTH)
        self.q = torch.randn(shape, generator=draw, device=device).bfloat16()
        self.kv[0] = torch.nan  # slot 0 is where padding goes
        if self.kv_scale is not None:
            self.kv = quantize_kv(self.kv.float(), self.kv_scale)
        self.kv_indices = torch.randint(1, slots, (total,), generator=draw, device=device).to(
            self.index_dtype
        )
        bounds = [0, *itertools.accumulate(self.lengths)]
        self.kv_indptr = torch.tensor(bounds, dtype=torch.int32, device=device)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(self.q.shape[:2], dtype=torch.float64, device=self.device)
        out = decode_attention(
            self.q.double(),
            self.kv,
            self.kv_indptr,
            self.kv_indices.long(),
            scale=self.scale,
            v_head_dim=VALUES,
            lse=lse,
            kv_scale=self.kv_scale or 1.0,
        )
        return out, lse

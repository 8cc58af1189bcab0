"""SGLang's page kernels in torch, against a page table kept by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from overstory.workers.seam.portable.page_ops import alloc_decode, alloc_extend

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5)


def by_hand(lengths: list[tuple[int, int]], page_size: int) -> tuple[list[int], list[int], int]:
    """Last slots before, slots of the new tokens, pages taken: request b's first pages are
    1000 b, 1000 b + 7, ...; free pages are 1, 2, ..."""
    last, new, taken = [], [], 0
    for b, (prefix, more) in enumerate(lengths, start=1):
        pages = [1000 * b + 7 * i for i in range(-(-prefix // page_size))]
        slots = [pages[at // page_size] * page_size + at % page_size for at in range(prefix)]
        last.append(slots[-1] if slots else -1)
        for at in range(prefix, prefix + more):
            if at // page_size == len(pages):
                taken += 1
                pages.append(taken)
            new.append(pages[at // page_size] * page_size + at % page_size)
    return last, new, taken


def tensors(*values: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(one, dtype=torch.int32) for one in values]


@given(lengths=LENGTHS, page_size=st.sampled_from([2, 4, 16]), spare=st.integers(0, 3))
def test_tokens_go_to_the_rest_of_a_page_then_to_new_ones(
    lengths: list[tuple[int, int]], page_size: int, spare: int
) -> None:
    last, new, taken = by_hand(lengths, page_size)
    prefix, total, before = tensors([p for p, _ in lengths], [p + m for p, m in lengths], last)
    out = torch.empty(len(new), dtype=torch.int64)
    free = torch.arange(1, 1 + taken + spare)
    alloc_extend(prefix, total, before, free, out, 8, page_size)
    assert out.tolist() == new


@given(prefixes=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_one_token_each(prefixes: list[int]) -> None:
    last, new, taken = by_hand([(prefix, 1) for prefix in prefixes], 4)
    lengths, before = tensors([prefix + 1 for prefix in prefixes], last)
    out = torch.empty(len(new), dtype=torch.int64)
    alloc_decode(lengths, before, torch.arange(1, 1 + taken), out, 8, 4)
    assert out.tolist() == new


def test_too_few_free_pages_are_the_allocators_to_find_out() -> None:
    prefix, total, before = tensors([3], [20], [6])
    out = torch.zeros(17, dtype=torch.int64)
    alloc_extend(prefix, total, before, torch.empty(0, dtype=torch.int64), out, 1, 4)
    assert out[0] == 7

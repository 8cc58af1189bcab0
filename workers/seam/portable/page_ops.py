"""SGLang's Triton kernels of the paged allocator in torch, by their names and argument orders.

The allocator stays SGLang's: it launches these and does its own accounting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MODULE = "sglang.srt.mem_cache.allocator.paged"


def slots_of_new_tokens(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """Slots of the tokens ``prefix_lens[b] .. seq_lens[b] - 1``, request after request.

    A request first fills the page that its last token lies in, then takes pages from the front of
    ``free_pages``. Where there are too few of those the result is meaningless, as SGLang's kernels'
    is: the allocator finds out afterwards and hands nothing out.

    Args:
        prefix_lens, seq_lens: [bs] integers, tokens that have slots and tokens that shall have.
        last_loc: [bs] slot of the last token before; not read where the prefix ends with a page.
        free_pages: [pages] int64.
        page_size: slots of a page.

    Returns:
        [sum(seq_lens - prefix_lens)] int64.
    """
    prefix, length = prefix_lens.long(), seq_lens.long()
    counts = length - prefix
    request = torch.repeat_interleave(torch.arange(len(counts)), counts)
    offset = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[request]
    position = prefix[request] + offset
    begun = -(-prefix // page_size)
    new_pages = -(-length // page_size) - begun
    number = (new_pages.cumsum(0) - new_pages - begun)[request] + position // page_size
    own_page = position // page_size < begun[request]
    held = free_pages if len(free_pages) else free_pages.new_zeros(1)
    fresh = held[number.clamp(0, len(held) - 1)] * page_size + position % page_size
    return torch.where(own_page, last_loc.long()[request] + 1 + offset, fresh)


def alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    _bs_upper: int,
    page_size: int,
) -> None:
    """``alloc_extend_kernel``: fills ``out_indices`` by `slots_of_new_tokens`."""
    out_indices.copy_(slots_of_new_tokens(prefix_lens, seq_lens, last_loc, free_pages, page_size))


def alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    _bs_upper: int,
    page_size: int,
) -> None:
    """``alloc_decode_kernel``: one new token per request."""
    new = slots_of_new_tokens(seq_lens - 1, seq_lens, last_loc, free_pages, page_size)
    out_indices.copy_(new)


class Launched:
    """Stands where SGLang has a Triton kernel: ``kernel[grid](...)`` calls a function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


_KERNELS = {
    "alloc_extend_kernel": Launched(alloc_extend),
    "alloc_decode_kernel": Launched(alloc_decode),
}


def install() -> None:
    """Puts them in the place of the kernels."""
    import importlib

    module = importlib.import_module(_MODULE)
    for name, kernel in _KERNELS.items():
        setattr(module, name, kernel)


def installed() -> bool:
    """Whether they stand there."""
    import importlib

    module = importlib.import_module(_MODULE)
    return all(getattr(module, name) is kernel for name, kernel in _KERNELS.items())

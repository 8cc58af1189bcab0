"""Portable torch implementations of ops of `sgl_kernel`, by its names and argument orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes consecutive runs of `out_cache_loc` into rows of the request table, in place.

    Args:
        req_pool_indices: [batch] row of each request.
        req_to_token: [requests, pool_len] int32 table of KV slots, written.
        start_offset: [batch] first column written per request.
        end_offset: [batch] column after the last one.
        out_cache_loc: [sum(end - start)] KV slots, request after request.
        pool_len: columns of the table; unused here.
    """
    slots = out_cache_loc.to(req_to_token.dtype)
    taken = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        if end > start:
            req_to_token[row, start:end] = slots[taken : taken + end - start]
            taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Reads columns [start, end) of each request's row into `out_cache_loc`, in place.

    Args as `assign_req_to_token_pool_cpu`, with `out_cache_loc` the one written.
    """
    filled = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        if end > start:
            out_cache_loc[filled : filled + end - start] = req_to_token[row, start:end]
            filled += end - start


OPS: Mapping[str, Callable[..., Any]] = {
    "assign_req_to_token_pool_cpu": assign_req_to_token_pool_cpu,
    "assign_extend_cache_locs_cpu": assign_extend_cache_locs_cpu,
}

"""Arguments of the attention ops: what fits at all, and what the kernels are made for."""

from __future__ import annotations

import torch

from overstory.kernels.reference.kv_fp8 import is_fp8

from .checks import INTS, check_range, check_tensor
from .schedule import MOST

WIDTH, VALUES = 576, 512
"""Columns of a key that the kernels are made for, and of a value."""
HEADS = (2, 4, 8, 16)
_ROW_BYTES = 16
"""Rows of the cache and of queries begin at multiples of this."""
_MOST_BYTES_APART = 1 << 32
"""Rows are less than this apart: the kernels multiply slots by 32 bits."""


def check_verify(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_ends: torch.Tensor | None,
    kv_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    mask_words: torch.Tensor | None,
    tail: torch.Tensor | None,
    scale: float,
    kv_scale: float,
    v_head_dim: int,
    causal: bool,
    max_q: int,
    blocks: int,
    min_chunk: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """Raises ValueError where the arguments of `verify_attention` do not fit."""
    device, tokens = q.device, q.shape[0]
    bs = qo_indptr.numel() - 1
    if bs < 0:
        raise ValueError("qo_indptr is empty; want [bs + 1]")
    check_range("max_q", max_q, 1, 64)
    check_tensor("qo_indptr", qo_indptr, [bs + 1], INTS, device)
    if kv_ends is None:
        check_tensor("kv_indptr", kv_indptr, [bs + 1], INTS, device)
    else:
        check_tensor("kv_indptr (with kv_ends)", kv_indptr, [bs], INTS, device)
        check_tensor("kv_ends", kv_ends, [bs], (kv_indptr.dtype,), device)
    check_tensor("out_cache_loc", out_cache_loc, [tokens], INTS, device)
    if (custom_mask is None) != (mask_indptr is None):
        raise ValueError("custom_mask and mask_indptr go together")
    if custom_mask is not None and mask_words is not None:
        raise ValueError("custom_mask and mask_words are one mask twice; give one of them")
    if custom_mask is not None and mask_indptr is not None:
        check_tensor("custom_mask", custom_mask, [None], (torch.bool, torch.uint8), device)
        check_tensor("mask_indptr", mask_indptr, [None], (torch.int64,), device)
        if mask_indptr.numel() < bs:
            raise ValueError(f"mask_indptr has {mask_indptr.numel()} elements for {bs} requests")
    if mask_words is not None:
        check_tensor("mask_words", mask_words, [tokens], (torch.int64,), device)
    if tail is not None:
        _check_rows("tail", tail, q)
        if tail.dtype != kv.dtype:
            raise ValueError(f"tail is {tail.dtype}, kv {kv.dtype}; want one type")
        if tail.shape[0] != tokens:
            raise ValueError(f"tail has {tail.shape[0]} rows; q has {tokens}")
    numbers = (blocks, min_chunk)
    _check_scale(kv, kv_scale)
    _check_common(q, kv, kv_indices, scale, v_head_dim, numbers, out, lse, workspace)


def check_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    scale: float,
    kv_scale: float,
    v_head_dim: int,
    blocks: int,
    min_chunk: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """Raises ValueError where the arguments of `decode_attention` do not fit."""
    check_tensor("kv_indptr", kv_indptr, [q.shape[0] + 1], INTS, q.device)
    numbers = (blocks, min_chunk)
    _check_scale(kv, kv_scale)
    _check_common(q, kv, kv_indices, scale, v_head_dim, numbers, out, lse, workspace)


def check_numbers(heads: int, max_q: int) -> None:
    """Raises ValueError where the kernels are made for no such rows."""
    _check_heads(heads)
    check_range("max_q", max_q, 1, 64)


def _check_heads(heads: int) -> None:
    if heads not in HEADS:
        raise ValueError(f"{heads} heads; the kernels take {HEADS} per rank")


def check_kernel_limits(
    q: torch.Tensor, keys: dict[str, torch.Tensor | None], scale: float, v_head_dim: int
) -> None:
    """What the kernels are made for; the reference takes more.

    Raises:
        ValueError: these tensors are outside of it.
    """
    if q.dtype != torch.bfloat16:
        raise ValueError(f"q is {q.dtype}; the kernels take torch.bfloat16")
    if (q.shape[2], v_head_dim) != (WIDTH, VALUES):
        raise ValueError(
            f"keys of {q.shape[2]} columns with values of {v_head_dim}; "
            f"the kernels are made for {WIDTH} and {VALUES}"
        )
    _check_heads(q.shape[1])
    if not scale > 0:
        raise ValueError(f"scale is {scale}; the kernels want it above 0")
    strides = [q.stride(d) * q.element_size() for d in (0, 1) if q.shape[d] > 1]
    if q.data_ptr() % _ROW_BYTES or any(apart % _ROW_BYTES for apart in strides):
        raise ValueError(
            f"rows of q are {strides} bytes apart and begin at {q.data_ptr():#x}; the kernels want "
            f"multiples of {_ROW_BYTES}: q.contiguous() has them"
        )
    for name, rows in keys.items():
        if rows is None:
            continue
        apart = rows.stride(0) * rows.element_size()
        if apart % _ROW_BYTES or apart >= _MOST_BYTES_APART:
            raise ValueError(
                f"rows of {name} are {apart} bytes apart; the kernels want a multiple of "
                f"{_ROW_BYTES} below {_MOST_BYTES_APART}"
            )


def _check_common(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_indices: torch.Tensor,
    scale: float,
    v_head_dim: int,
    schedule: tuple[int, int],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    if q.dim() != 3:
        raise ValueError(f"q has shape {list(q.shape)}; want [tokens, heads, D]")
    if q.stride(2) != 1:
        raise ValueError(f"columns of q are {q.stride(2)} elements apart; want 1")
    tokens, heads, width = q.shape
    check_range("v_head_dim", v_head_dim, 1, width)
    for name, value in zip(("blocks", "min_chunk"), schedule, strict=True):
        check_range(name, value, 0, MOST)
    _check_rows("kv", kv, q)
    check_tensor("kv_indices", kv_indices, [None], INTS, q.device)
    check_tensor("out", out, [tokens, heads, v_head_dim], (q.dtype,), q.device)
    if lse is not None:
        of_lse = torch.promote_types(q.dtype, torch.float32)
        check_tensor("lse", lse, [tokens, heads], (of_lse,), q.device)
    if workspace is not None:
        check_tensor("workspace", workspace, [None], (torch.uint8,), q.device)


def _check_scale(kv: torch.Tensor, kv_scale: float) -> None:
    """As the reference: a positive number for e4m3, 1 for any other cache."""
    if not 0.0 < kv_scale < float("inf"):
        raise ValueError(f"kv_scale is {kv_scale}; want a positive number")
    if kv_scale != 1.0 and not is_fp8(kv):
        raise ValueError(f"kv_scale is {kv_scale}, but kv is {kv.dtype}; want 1")


def _check_rows(name: str, rows: torch.Tensor, q: torch.Tensor) -> None:
    """Keys: [n, D] or [n, 1, D], rows any multiple of 16 bytes apart."""
    width = q.shape[2]
    if rows.shape not in ((rows.shape[0], width), (rows.shape[0], 1, width)):
        raise ValueError(f"{name} has shape {list(rows.shape)}; want [*, 1, {width}]")
    if (rows.dtype != q.dtype and not is_fp8(rows)) or rows.device != q.device:
        raise ValueError(
            f"{name} is {rows.dtype} on {rows.device}; q {q.dtype} on {q.device}; want the type of "
            "q, or e4m3 (torch.float8_e4m3fn, or its bytes)"
        )
    if rows.stride(-1) != 1:
        raise ValueError(f"columns of {name} are {rows.stride(-1)} elements apart; want 1")

"""The cache in fp8 (e4m3): what a stored row is, and back.

The contract is that of SGLang's `--kv-cache-dtype fp8_e4m3` with an MLA pool (`MLATokenToKVPool`;
the scale: `RadixAttention.k_scale`, divided out before the row is stored): one scale per layer for
latent and rope alike, a row is `(row / scale)` rounded to the nearest even e4m3 number, 576 bytes
with neither scales nor padding beside them. Values are the row's first columns, so the one scale
holds for keys and values. The pool hands its bytes out as uint8 or as float8_e4m3fn; both are
understood here.
"""

from __future__ import annotations

import torch

FP8_MAX = 448.0
"""The largest finite e4m3 number."""


def quantize_kv(rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows as the cache stores them.

    Args:
        rows: any shape, any float type.
        scale: what the numbers are divided by, in the type of `rows`. `scale_for` gives one.

    Returns:
        float8_e4m3fn of the same shape. What rounds beyond 448 is NaN, as in SGLang's pool (e4m3
        has no infinity, and torch does not saturate): a scale that is too small poisons rows, it
        does not clip them.

    Raises:
        ValueError: the scale is not a positive number.
    """
    _check_scale(scale)
    return (rows / scale).to(torch.float8_e4m3fn)


def dequantize_kv(
    stored: torch.Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What stored rows stand for; exact but for the product with the scale.

    Args:
        stored: float8_e4m3fn, or uint8 of the same bytes.
        scale: of `quantize_kv`.
        dtype: of the result.

    Raises:
        ValueError: another type, or the scale is not a positive number.
    """
    _check_scale(scale)
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e4m3fn)
    if stored.dtype != torch.float8_e4m3fn:
        raise ValueError(f"stored rows are {stored.dtype}; want torch.float8_e4m3fn or torch.uint8")
    return stored.to(dtype) * scale


def scale_for(highest: float) -> float:
    """The smallest scale with which numbers up to `highest` in size stay finite.

    Raises:
        ValueError: `highest` is not a positive number.
    """
    _check_scale(highest)
    return highest / FP8_MAX


def is_fp8(cache: torch.Tensor) -> bool:
    """Whether a cache is one of this module: no other cache holds bytes."""
    return cache.dtype in (torch.float8_e4m3fn, torch.uint8)


def _check_scale(scale: float) -> None:
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}; want a positive number")

"""Checks of arguments that read no value of a tensor, and so wait for no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

INTS = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """A contiguous tensor of this shape (None: any size), one of these types, on this device.

    Raises:
        ValueError: it is not; the message says what it is and what is wanted.
    """
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ["*" if size is None else size for size in shape]
        raise ValueError(f"{name} has shape {list(tensor.shape)}; want {wanted}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}; want {names}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; the others are on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous (strides {tensor.stride()})")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """An integer within low..high.

    Raises:
        ValueError: it is outside.
    """
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; want {low}..{high}")

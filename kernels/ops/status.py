"""What the kernels cannot raise: a word on the device that they set, read when somebody asks."""

from __future__ import annotations

import functools

import torch

from overstory.kernels.errors import KernelError


class BadInputError(KernelError):
    """A kernel met values that its op's contract excludes."""


def status_of(device: torch.device, given: torch.Tensor | None) -> torch.Tensor:
    """`given`, else the word that all ops of the device share. [1] int32, 0 while all is well."""
    return _shared(device) if given is None else given


def raise_bad_input(device: torch.device, status: torch.Tensor | None = None) -> None:
    """Wait for the device and raise what a kernel has noted since the last call; clears it.

    Raises:
        BadInputError: a kernel was given values that its op's contract excludes.
    """
    word = status_of(device, status)
    value = int(word.item())
    if value:
        word.zero_()
        raise BadInputError(
            f"a kernel on {device} met values that its op excludes (status {value}): NaN or +inf "
            "in logits, log-probabilities not in descending order, or a slot outside of the "
            "buffers; OVERSTORY_KERNELS=reference names the first one"
        )


@functools.cache
def _shared(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)

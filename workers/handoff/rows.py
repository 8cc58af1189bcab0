"""KV rows as pieces: of some slots, the rows of all layers of target and drafter."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from overstory.kernels import ops, reference
from overstory.workers.handoff.pieces import Piece

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class RowTable:
    """All KV tensors of a rank, as rows of the widest words that fit.

    Gathering by slot number hardly notices whether slots lie in runs (docs/defragmentation.md), so
    nothing is moved together first.

    Args:
        buffers: KV tensors [slots, ...], all of the same number of slots.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        flat = [_flat(buffer) for buffer in buffers]
        word = next(w for w in _WORDS if all(rows.shape[1] % w.itemsize == 0 for rows in flat))
        rows = [one.view(word) for one in flat]
        # A group's part of a staging is aligned if the parts before it are.
        by_kernel = all(one.data_ptr() % 16 == 0 for one in rows)
        by_kernel &= all(one.shape[1] * one.element_size() % 16 == 0 for one in rows)
        self._groups = [
            _Group(list(alike), by_kernel)
            for _, alike in itertools.groupby(rows, key=lambda r: r.shape[1])
        ]
        self.row_bytes = sum(group.row_bytes * len(group.rows) for group in self._groups)

    def described(self) -> list[int]:
        """Bytes of a row in each tensor: alike on both sides, or rows mean different things."""
        return [group.row_bytes for group in self._groups for _ in group.rows]

    def gather(self, slots: torch.Tensor, piece_bytes: int) -> Iterator[Piece]:
        """Pieces that fill a staging with the rows of `slots` int64 [n]."""
        for part in slots.split(self._most_rows(piece_bytes)):
            yield Piece(len(part) * self.row_bytes, self._mover(part, taking_out=False))

    def scatter(self, slots: torch.Tensor, piece_bytes: int) -> Iterator[Piece]:
        """Pieces that write a staging to the rows of `slots` int64 [n]."""
        for part in slots.split(self._most_rows(piece_bytes)):
            yield Piece(len(part) * self.row_bytes, self._mover(part, taking_out=True))

    def _most_rows(self, piece_bytes: int) -> int:
        if self.row_bytes > piece_bytes:
            raise ValueError(f"a row has {self.row_bytes} bytes, a piece {piece_bytes}")
        return piece_bytes // self.row_bytes

    def _mover(self, slots: torch.Tensor, taking_out: bool) -> _Mover:
        return _Mover(self._groups, slots, taking_out)


class _Group:
    """Tensors of one row size that follow each other, and what moves their rows.

    Args:
        rows: [slots, words] each.
        by_kernel: all tensors by one launch; layer by layer the host would be the limit.
    """

    def __init__(self, rows: list[torch.Tensor], by_kernel: bool) -> None:
        self.rows = rows
        self.row_bytes = rows[0].shape[1] * rows[0].element_size()
        self._move: Callable[..., None] = functools.partial(reference.kv_rows, rows)
        if by_kernel:
            self._move = functools.partial(ops.kv_rows, ops.LayerTable(rows))

    def move(self, slots: torch.Tensor, stretch: torch.Tensor, taking_out: bool) -> None:
        """Rows of all tensors to the stretch uint8, tensor after tensor, or from there."""
        first = self.rows[0]
        dense = stretch.view(first.dtype).view(len(self.rows), len(slots), first.shape[1])
        if dense.device == first.device:
            self._move(slots, dense, scatter=taking_out)
        elif taking_out:
            self._move(slots, dense.to(first.device), scatter=True)
        else:
            packed = torch.empty_like(dense, device=first.device)
            self._move(slots, packed, scatter=False)
            dense.copy_(packed)


class _Mover:
    """Tensor after tensor of some rows, to or from a staging on any device."""

    def __init__(self, groups: list[_Group], slots: torch.Tensor, taking_out: bool) -> None:
        self._groups, self._slots, self._taking_out = groups, slots, taking_out

    def __call__(self, staging: torch.Tensor) -> None:
        at = 0
        for group in self._groups:
            size = len(group.rows) * len(self._slots) * group.row_bytes
            group.move(self._slots, staging[at : at + size], self._taking_out)
            at += size


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 [slots, bytes]."""
    if not buffer.is_contiguous():
        raise ValueError(f"a KV tensor with strides {buffer.stride()} has no plain rows")
    return buffer.view(buffer.shape[0], -1).view(torch.uint8)

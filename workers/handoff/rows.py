"""KV rows as pieces: of some slots, the rows of all layers of target and drafter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

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
        self._rows = [rows.view(word) for rows in flat]
        self.row_bytes = sum(rows.shape[1] * rows.element_size() for rows in self._rows)

    def described(self) -> list[int]:
        """Bytes of a row in each tensor: alike on both sides, or rows mean different things."""
        return [rows.shape[1] * rows.element_size() for rows in self._rows]

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
        return _Mover(self._rows, slots, taking_out)


class _Mover:
    """Layer after layer of some rows, to or from a staging on any device."""

    def __init__(self, rows: list[torch.Tensor], slots: torch.Tensor, taking_out: bool) -> None:
        self._rows, self._slots, self._taking_out = rows, slots, taking_out

    def __call__(self, staging: torch.Tensor) -> None:
        for rows, part in zip(self._rows, self._parts(staging), strict=True):
            if self._taking_out:
                rows.index_copy_(0, self._slots, part.to(rows.device))
            elif part.device == rows.device:
                torch.index_select(rows, 0, self._slots, out=part)
            else:
                part.copy_(rows.index_select(0, self._slots))

    def _parts(self, staging: torch.Tensor) -> Iterator[torch.Tensor]:
        """The staging's stretch of each tensor. Tensors of one row size are cut at once: with many
        layers the host's time for it would be longer than a GPU's for the copy."""
        at, count = 0, len(self._slots)
        for words, tensors in itertools.groupby(self._rows, key=lambda rows: rows.shape[1]):
            alike = list(tensors)
            size = len(alike) * count * words * alike[0].element_size()
            stretch = staging[at : at + size].view(alike[0].dtype)
            yield from stretch.view(len(alike), count, words).unbind(0)
            at += size


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 [slots, bytes]."""
    if not buffer.is_contiguous():
        raise ValueError(f"a KV tensor with strides {buffer.stride()} has no plain rows")
    return buffer.view(buffer.shape[0], -1).view(torch.uint8)

"""A model's weights as pieces: all memory that its tensors lie in.

Weights are taken after loading, so in the shape that SGLang's quantizations and its models' own
preparations give them. What belongs to a model is whatever its modules hold: parameters, buffers,
and tensors kept as plain attributes (absorbed MLA projections are such). Two models are alike if
all these have the same names, shapes, strides and places in memory of the same sizes, and if the
modules' plain numbers are the same: some come from weights (KV scales), and are not sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overstory.workers.handoff.pieces import Piece

_SAMPLE = 1 << 16
_SAMPLES = 16
_ALIGN = 16

Spans = list[tuple[torch.Tensor, int, int]]


class WeightTable:
    """The memory of one model.

    Args:
        model: loaded, on one device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._memory: list[torch.Tensor] = []
        places: dict[int, int] = {}
        described: list[Any] = []
        for name, tensor in _tensors(model):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in places:
                places[address] = len(self._memory)
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self._memory.append(flat)
            described.append(
                (
                    name,
                    str(tensor.dtype),
                    list(tensor.shape),
                    list(tensor.stride()),
                    places[address],
                    tensor.storage_offset(),
                )
            )
        self.bytes = sum(len(memory) for memory in self._memory)
        sizes = [len(memory) for memory in self._memory]
        text = json.dumps([described, sizes, list(_numbers(model))]).encode()
        self.layout = hashlib.blake2b(text, digest_size=16).hexdigest()

    def gather(self, piece_bytes: int) -> Iterator[Piece]:
        """Pieces that fill a staging with the weights, all in order."""
        return self._pieces(piece_bytes, taking_out=False)

    def scatter(self, piece_bytes: int) -> Iterator[Piece]:
        """Pieces that write a staging over the weights."""
        return self._pieces(piece_bytes, taking_out=True)

    def _pieces(self, piece_bytes: int, taking_out: bool) -> Iterator[Piece]:
        spans: Spans = []
        filled = 0
        for memory in self._memory:
            start = 0
            while start < len(memory):
                if filled >= piece_bytes:
                    yield Piece(filled, _Mover(spans, taking_out))
                    spans, filled = [], 0
                count = min(len(memory) - start, piece_bytes - filled)
                spans.append((memory[start : start + count], filled, filled + count))
                filled = min(piece_bytes, -(-(filled + count) // _ALIGN) * _ALIGN)
                start += count
        if spans:
            yield Piece(filled, _Mover(spans, taking_out))


class _Mover:
    """Stretches of memory, to or from a staging on any device."""

    def __init__(self, spans: Spans, taking_out: bool) -> None:
        self._spans, self._taking_out = spans, taking_out

    def __call__(self, staging: torch.Tensor) -> None:
        for memory, start, end in self._spans:
            if self._taking_out:
                memory.copy_(staging[start:end])
            else:
                staging[start:end].copy_(memory)


def fingerprint(folder: Path) -> str:
    """What a checkpoint's files hold, by their names, sizes and samples of their bytes.

    A sample of a file is its begin, its end and some stretches between: enough to tell training
    runs apart, in milliseconds.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".safetensors", ".bin", ".json", ".pt") or not file.is_file():
            continue
        size = file.stat().st_size
        hashed.update(f"{file.name} {size} ".encode())
        step = max(_SAMPLE, (size - _SAMPLE) // (_SAMPLES - 1))
        with file.open("rb") as opened:
            for at in sorted({*range(0, size, step), max(0, size - _SAMPLE)}):
                opened.seek(at)
                hashed.update(opened.read(_SAMPLE))
    return hashed.hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All that has memory, by name; in the order of modules and of names in them."""
    for path, module in model.named_modules():
        held = {**module._parameters, **module._buffers, **module.__dict__}
        for name, value in sorted(held.items()):
            many = value if isinstance(value, (list, tuple)) else [value]
            for number, one in enumerate(many):
                if isinstance(one, torch.Tensor) and one.numel() and one.device.type != "meta":
                    yield f"{path}.{name}.{number}", one


def _numbers(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        for name, value in sorted(module.__dict__.items()):
            if isinstance(value, float):
                yield f"{path}.{name}", repr(value)

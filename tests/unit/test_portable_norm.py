"""The RMS norm op against its definition, and what it leaves to SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overstory.workers.seam.portable.norm import rms_norm


def _layer(**fields: Any) -> SimpleNamespace:
    plain = {
        "weight": torch.rand(16) + 0.5,
        "variance_epsilon": 1e-6,
        "hidden_size": 16,
        "variance_size_override": None,
    }
    return SimpleNamespace(**plain | fields)


def _refuse(*unused: Any) -> None:
    raise AssertionError("SGLang's own was called")


@pytest.mark.parametrize("rows", [1, 7])
def test_against_the_definition(rows: int) -> None:
    layer, x, residual = _layer(), torch.randn(rows, 16), torch.randn(rows, 16)

    def want(value: torch.Tensor) -> torch.Tensor:
        scale = (value.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (value.double() * scale * layer.weight.double()).float()

    torch.testing.assert_close(rms_norm(_refuse, layer, x), want(x))
    kept = x.clone()
    normalised, total = rms_norm(_refuse, layer, x, residual)
    torch.testing.assert_close(normalised, want(x + residual))
    assert torch.equal(total, kept + residual)
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    ("layer", "x", "extra"),
    [
        (_layer(), torch.randn(2, 16).bfloat16(), None),
        (_layer(weight=torch.ones(16).bfloat16()), torch.randn(2, 16), None),
        (_layer(variance_size_override=8), torch.randn(2, 16), None),
        (_layer(), torch.randn(2, 16), torch.ones(2, 16)),
        (_layer(), torch.randn(2, 8), None),
    ],
)
def test_other_layers_are_left_to_sglang(
    layer: SimpleNamespace, x: torch.Tensor, extra: torch.Tensor | None
) -> None:
    called = rms_norm(lambda *args: ("own", *args), layer, x, None, extra)
    assert called[0] == "own"
    assert called[1] is layer

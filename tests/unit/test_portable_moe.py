"""The mixture-of-experts op against a plain loop over rows and experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from overstory.workers.seam.portable.moe import moe_forward, routed_experts


def _by_rows(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    width = w2.shape[-1]
    for row in range(x.shape[0]):
        for weight, expert in zip(weights[row], ids[row], strict=True):
            both = w13[expert].double() @ x[row].double()
            hidden = torch.nn.functional.silu(both[:width]) * both[width:]
            out[row] += weight.double() * (w2[expert].double() @ hidden)
    return out


@pytest.mark.parametrize("rows", [1, 2, 8, 33])
@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_against_a_loop(rows: int, chosen: int) -> None:
    torch.manual_seed(rows * 10 + chosen)
    x = torch.randn(rows, 16)
    w13, w2 = torch.randn(6, 24, 16), torch.randn(6, 16, 12)
    weights = torch.rand(rows, chosen)
    ids = torch.stack([torch.randperm(6)[:chosen] for _ in range(rows)]).int()
    got = routed_experts(x, w13, w2, weights, ids)
    assert got.dtype == x.dtype
    torch.testing.assert_close(
        got.double(), _by_rows(x, w13, w2, weights, ids), atol=1e-4, rtol=1e-4
    )


def test_a_row_alone_gets_what_it_gets_in_a_batch() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 16)
    w13, w2 = torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    weights, ids = torch.rand(9, 2), torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    batch = routed_experts(x, w13, w2, weights, ids)
    for row in range(9):
        part = slice(row, row + 1)
        alone = routed_experts(x[part], w13, w2, weights[part], ids[part])
        torch.testing.assert_close(batch[part], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"activation": "gelu"},
        {"gemm1_alpha": 1.7},
        {"apply_router_weight_on_input": True},
    ],
)
def test_other_forms_are_refused(config: dict[str, object]) -> None:
    plain = {"activation": "silu", "gemm1_alpha": None, "apply_router_weight_on_input": False}
    with pytest.raises(NotImplementedError, match="plain CPU"):
        moe_forward(
            torch.nn.Module(),
            torch.ones(1, 4),
            (None, None, None),
            SimpleNamespace(**plain | config),
        )

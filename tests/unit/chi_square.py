"""Pearson's test of counts against probabilities some of which are 0 or tiny."""

import pytest
import torch


def chance_of(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """p of the counts, all of them expected often. scipy's takes a second to import."""
    counts, expected = counts.double(), expected.double()
    assert float(expected.sum() / counts.sum()) == pytest.approx(1, rel=1e-6), "not all expected"
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2)
    )


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """p of the counts under the probabilities; impossible outcomes must not have occurred.

    Outcomes expected fewer than five times are pooled.
    """
    assert int(counts[probs == 0].sum()) == 0, "an impossible outcome occurred"
    expected = probs * counts.sum()
    often = expected >= 5
    observed = [*counts[often].tolist(), int(counts[~often].sum())]
    wanted = [*expected[often].tolist(), float(expected[~often].sum())]
    if wanted[-1] == 0.0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 3, "too few outcomes to say anything"
    return chance_of(torch.tensor(observed), torch.tensor(wanted, dtype=torch.float64))

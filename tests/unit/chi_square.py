"""Pearson's test of counts against probabilities some of which are 0 or tiny."""

import torch
from scipy import stats


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
    return float(stats.chisquare(observed, wanted).pvalue)

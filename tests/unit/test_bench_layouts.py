"""Slots of the attention benchmark: distinct, and in runs of the length asked for."""

import pytest
import torch

from overstory.kernels.bench.inputs import slots_in_runs
from overstory.orchestrator.defrag_plan import runs_of


@pytest.mark.parametrize("run", [1, 8, 64, 1000])
def test_slots_come_in_runs(run: int) -> None:
    slots = slots_in_runs(1000, run, torch.Generator().manual_seed(1))
    assert len(slots) == 1000 // run * run
    assert len(slots.unique()) == len(slots)
    assert all(runs_of(part.numpy()) == 1 for part in slots.split(run))
    assert 0.8 * len(slots) / run <= runs_of(slots.numpy()) <= len(slots) / run


def test_without_runs_it_is_the_permutation_that_it_was() -> None:
    slots = slots_in_runs(50, 1, torch.Generator().manual_seed(1))
    assert slots.tolist() == torch.randperm(50, generator=torch.Generator().manual_seed(1)).tolist()

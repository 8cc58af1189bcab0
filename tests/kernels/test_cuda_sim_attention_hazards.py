"""Kinds of bugs that attention kernels had elsewhere, in the simulator; tests/gpu has the same."""

import shutil
from typing import Any

import attention_hazards as hazards
import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the simulator")
full = pytest.mark.full


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSTORY_KERNELS", "simulator")


@pytest.mark.parametrize("page_size", [16, pytest.param(64, marks=full)])
def test_pages(page_size: int) -> None:
    hazards.check_pages("cpu", page_size)


def test_scores_far_below_zero() -> None:
    hazards.check_scores_far_below_zero("cpu")


def test_parts_of_which_none_is_seen() -> None:
    hazards.check_parts_of_which_none_is_seen("cpu")


def test_what_lies_behind_the_end() -> None:
    hazards.check_what_lies_behind_the_end("cpu")


def test_padded_requests() -> None:
    hazards.check_padded_requests("cpu")


def test_halves_merge_by_their_log_sums() -> None:
    hazards.check_halves_merge_by_their_log_sums("cpu")


def test_rows_of_a_chain_are_decodes() -> None:
    hazards.check_rows_of_a_chain_are_decodes("cpu")


def test_inputs_stay() -> None:
    hazards.check_inputs_stay("cpu")


def test_calls_share_a_workspace() -> None:
    hazards.check_calls_share_a_workspace("cpu", 40, 2)


@pytest.mark.parametrize(
    ("requests", "heads", "options"),
    [
        ([(37, 150)], 8, {}),
        ([(16, 130), (0, 70), (3, 1)], 4, {"unowned": 5}),
        ([(100, 65)], 2, {"kv_scale": 0.4}),
        pytest.param([(5, 200), (64, 64)], 16, {"page_size": 16}, marks=full),
    ],
)
@pytest.mark.parametrize("schedule", [None, hazards.FINE])
def test_blocks_of_rows(requests: Any, heads: int, options: Any, schedule: Any) -> None:
    hazards.check_blocks_of_rows("cpu", requests, heads=heads, schedule=schedule, **options)


def test_more_blocks_than_lanes() -> None:
    """More requests than a warp looks at a time, one list of slots for all."""
    hazards.check_blocks_of_rows("cpu", [(9, 70)], size=1, heads=2, schedule=hazards.FINE)


def test_repeated_slots() -> None:
    hazards.check_repeated_slots("cpu")

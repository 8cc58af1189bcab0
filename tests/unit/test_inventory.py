"""What this machine offers."""

import pytest

from overstory.orchestrator.inventory import visible_gpus

GPUS = [("0", "GPU-aa11-1", 80.0), ("1", "GPU-bb22-2", 90.0), ("2", "GPU-bb33-3", 70.0)]


@pytest.mark.parametrize(
    ("visible", "memory"),
    [
        (None, [80.0, 90.0, 70.0]),
        ("1", [90.0]),
        ("2,0", [70.0, 80.0]),
        ("GPU-bb3,GPU-aa11-1", [70.0, 80.0]),
        ("", []),
        ("-1", []),
        ("1,7,0", [90.0]),
        ("GPU-bb", []),
    ],
)
def test_only_gpus_that_cuda_shows_are_counted(visible: str | None, memory: list[float]) -> None:
    assert visible_gpus(GPUS, visible) == memory


def test_a_machine_without_gpus_has_none() -> None:
    assert visible_gpus([], None) == visible_gpus([], "0") == []

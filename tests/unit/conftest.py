import gc
import os
import sys
from typing import NoReturn

import pytest
from hypothesis import settings

# As in a rank on a CPU: OpenMP threads that spin against each other only cost time on small
# tensors.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# The same examples in each run, so that a failure is the change's; `tests/run.sh full` draws anew.
# No deadline for one example: a busy machine takes any time.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("anew", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_finish() -> None:
    """What all modules have imported stays to the end: full collections need not look at it."""
    gc.collect()
    gc.freeze()


def _no_ray(*_arguments: object, **_named: object) -> NoReturn:
    raise AssertionError("a unit test may not start or join a Ray; that is for tests/cluster")


@pytest.fixture(autouse=True)
def ray_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `ray.init` raise, where a test's imports have brought Ray in."""
    if "ray" in sys.modules:
        monkeypatch.setattr("ray.init", _no_ray)

"""Tests that need a GPU and nothing else but torch and pytest: no SGLang, no Ray, no install."""

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# `chi_square` is shared with the unit tests.
sys.path.append(str(ROOT / "tests" / "unit"))


def _show_package() -> None:
    """The import package where it is not installed, as a folder of links (as tests/mypy.sh)."""
    links = Path(tempfile.mkdtemp(prefix="overstory-links-"))
    (links / "overstory").mkdir()
    for package in ("kernels", "workers"):
        (links / "overstory" / package).symlink_to(ROOT / package)
    sys.path.insert(0, str(links))


if importlib.util.find_spec("overstory") is None:
    _show_package()


def _why_not() -> str | None:
    """Why no test of this folder can run here."""
    from overstory.kernels.compilers import find_nvcc
    from overstory.kernels.cuda_library import arch_of
    from overstory.kernels.errors import NoCompilerError, NoDeviceError

    try:
        arch_of()
        find_nvcc()
    except (NoDeviceError, NoCompilerError) as error:
        return str(error)
    return None


_BEGUN = time.monotonic()
_SECONDS = float(os.environ.get("OVERSTORY_TEST_SECONDS", "inf"))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Within a given time: end with a report of what ran, instead of being killed without."""
    if time.monotonic() - _BEGUN > _SECONDS:
        item.session.shouldstop = f"{_SECONDS:.0f} s are over; the tests after this one did not run"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = _why_not() if here else None
    for item in here:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No op falls back to the reference here."""
    monkeypatch.setenv("OVERSTORY_KERNELS", "cuda")


@pytest.fixture(autouse=True)
def errors_show_where_they_arise(our_kernels: None) -> object:
    """A faulting kernel is reported by the test that launched it."""
    yield
    torch.cuda.synchronize()

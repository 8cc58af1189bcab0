"""One small Ray for all cluster tests, started here and proved gone at the end."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import ray
from leftovers import processes_naming, wait_until

RAY_CPUS = 8
"""Logical: tests reserve small shares, so that they fit on any machine."""


@pytest.fixture(scope="session", autouse=True)
def ray_here() -> Iterator[str]:
    """A local Ray of these tests alone: own ports, own temp folder, no dashboard. Its address."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
    # A short path: Unix socket names below it are limited to 107 characters.
    folder = tempfile.mkdtemp(prefix="ovr-", dir="/tmp")
    _init_ray(folder)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    wait_until(lambda: not processes_naming(folder), 90, f"processes of the Ray in {folder} to end")
    shutil.rmtree(folder, ignore_errors=True)


def _init_ray(folder: str, attempts: int = 3) -> None:
    """A raylet gives up where its agent is not up within 15 s, as happens on a loaded machine."""
    for attempt in range(1, attempts + 1):
        try:
            ray.init(
                address="local",
                namespace="overstory",
                num_cpus=RAY_CPUS,
                include_dashboard=False,
                object_store_memory=100_000_000,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=folder,
            )
            return
        except Exception:
            if attempt == attempts:
                raise
            ray.shutdown()

"""The process groups of a rank share one gloo device, and stay what torch expects."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from overstory.workers.seam.portable import gloo


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(c10d, "ProcessGroupGloo", c10d.ProcessGroupGloo)  # put back at the end
    monkeypatch.setattr(gloo.SharedDeviceGloo, "_first", None)
    gloo.share_gloo_device()
    assert gloo.gloo_device_shared()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _backend(group: Any) -> Any:
    return (
        c10d._get_default_group()._get_backend(torch.device("cpu"))
        if group is None
        else (group._get_backend(torch.device("cpu")))
    )


@pytest.mark.usefixtures("world")
def test_groups_share_a_device_and_reduce() -> None:
    groups = [None] + [dist.new_group([0], backend="gloo") for _ in range(3)]
    backends = [_backend(group) for group in groups]
    devices = [backend.options._devices for backend in backends]
    assert all(isinstance(backend, dist.ProcessGroupGloo) for backend in backends)
    assert all(isinstance(backend, c10d.ProcessGroupGloo) for backend in backends)
    assert all(len(each) == 1 and each[0] is devices[0][0] for each in devices)
    for group in groups:
        value = torch.ones(3)
        dist.all_reduce(value, group=group)
        assert value.tolist() == [1.0, 1.0, 1.0]
    dist.monitored_barrier(groups[1])


@pytest.mark.usefixtures("world")
def test_each_group_keeps_its_timeout() -> None:
    group = dist.new_group([0], backend="gloo", timeout=datetime.timedelta(seconds=7))
    assert _backend(group).options._timeout == datetime.timedelta(seconds=7)

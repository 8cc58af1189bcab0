"""One gloo device for all process groups of a rank.

torch makes a gloo device for each group, and the thread of each wakes up 100 times a second. SGLang
makes 13 groups at TP 2, so an idle rank would spend over 1% of a core on them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroupGloo


class _SameInstances(type):
    """Makes the stand-in answer isinstance and attribute look-ups as the original does."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroupGloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(ProcessGroupGloo, name)


class SharedDeviceGloo(metaclass=_SameInstances):
    """Stands in for the class in torch's own module: a call gives a real `ProcessGroupGloo`.

    The first group of the process chooses the device, as torch does (`GLOO_SOCKET_IFNAME` or the
    address of the host's name); later groups take the same.
    """

    _first: Any = None

    def __new__(cls, store: Any, rank: int, size: int, timeout: Any) -> Any:
        """A group of `size` ranks over `store`; `timeout` as a timedelta."""
        if cls._first is None:
            group = ProcessGroupGloo(store, rank, size, timeout)
            cls._first = group.options
            return group
        options = ProcessGroupGloo._Options()
        options._devices = cls._first._devices
        options._threads = cls._first._threads
        options._timeout = timeout
        return ProcessGroupGloo(store, rank, size, options)


def share_gloo_device() -> None:
    """From now on, groups of this process share a device."""
    c10d.ProcessGroupGloo = SharedDeviceGloo


def gloo_device_shared() -> bool:
    """Whether `share_gloo_device` stands."""
    return c10d.ProcessGroupGloo is SharedDeviceGloo

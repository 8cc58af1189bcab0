"""What a test may have left behind: actors, placement groups, processes, ports."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import ray


def wait_until(
    true: Callable[[], object],
    timeout_s: float = 20.0,
    what: str = "what was expected",
    every_s: float = 0.02,
) -> float:
    """Polls; seconds it took. Fails with `what` at the deadline."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < timeout_s, f"waited {timeout_s:g} s in vain for {what}"
        time.sleep(every_s)
    return time.monotonic() - begun


def processes_naming(text: str) -> list[int]:
    """Pids of other processes whose command line holds `text`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def actors_of(deployment: str) -> list[str]:
    """Named actors of a deployment that Ray still knows."""
    prefix = f"overstory/{deployment}/"
    named = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in named if entry["name"].startswith(prefix)]


def placement_groups() -> list[str]:
    """Ids of placement groups that are not removed."""
    table = ray.util.placement_group_table()
    return [key for key, group in table.items() if group["state"] != "REMOVED"]


def port_is_free(port: int) -> bool:
    """Whether nothing listens on the port of any interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True

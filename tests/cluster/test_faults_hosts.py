"""Faults of whole hosts and their links: two replicas, one on each host of a lab.

Every test has a lab and a Ray of its own, since each leaves its hosts broken.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fixtures_hosts import ray_here, start_cluster, start_worker  # noqa: F401
from hosts_lab import Host, Lab, hosts_lab, why_no_lab
from leftovers import wait_until

DEPLOYMENT = Path(__file__).parents[2] / "clusters" / "local" / "deployment.yaml"
CLIENT = Path(__file__).with_name("host_client.py")
URL = "http://127.0.0.1:8000"
CPUS = {"h1": 2, "h2": 2}
UP_S = 500.0
TOKENS, STREAMS = 700, 4
NOTICE = {  # Ray's own take over a minute; what counts is that they bound the notice.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
NOTICE_S = 60.0
CUT_OFF_S = 180.0
"""Ray gives a node a minute to find its head again before it ends what runs there."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@contextmanager
def two_replicas() -> Iterator[tuple[Lab, Host, Host]]:
    """The lab, the head's host and the other one, with a replica of one rank on each."""
    if reason := why_no_lab():
        pytest.skip(reason)
    with hosts_lab(*CPUS) as lab:
        start_cluster(lab, CPUS, NOTICE)
        head, other = lab.hosts["h1"], lab.hosts["h2"]
        sets = (
            "replicas=2", "engine.tp_size=1", "resources.cpus_per_rank=1.5",
            "control.unresponsive_s=20",
        )  # fmt: skip
        flags = [part for one in sets for part in ("--set", one)]
        up = head.run(
            "overstory", "deploy", str(DEPLOYMENT), *flags, "--timeout", "400", timeout_s=UP_S
        )
        assert up.returncode == 0, up.stderr
        wait_until(lambda: ranks(lab) == {"h1": 1, "h2": 1}, 300, "a replica on each host")
        yield lab, head, other


def ranks(lab: Lab) -> dict[str, int]:
    return {name: len(host.processes("ray::RankHost")) for name, host in lab.hosts.items()}


class Streams:
    """Streams under way on a host."""

    def __init__(self, host: Host, model: str = "overstory-tiny") -> None:
        begun = "/root/begun"
        self._process = host.popen(
            *("python", str(CLIENT), URL, model, str(STREAMS), str(TOKENS), begun),
            stdout=subprocess.PIPE,
        )
        file = Path(f"/proc/{host.pid}/root{begun}")

        def all_begun() -> bool:
            assert self._process.poll() is None, "the streams ended before the fault"
            return file.exists() and len(file.read_text()) == STREAMS

        wait_until(all_begun, 200, "all streams to begin")

    def results(self) -> list[dict[str, Any]]:
        """When all have ended."""
        with self._process:
            out, _ = self._process.communicate(timeout=300)
        return json.loads(out.splitlines()[-1])


def undisturbed(host: Host) -> str:
    """The text that every stream should bring."""
    (text,) = {row["text"] for row in Streams(host).results()}
    return text


def assert_whole(results: list[dict[str, Any]], expected: str) -> float:
    """All streams ended well with the expected text; the longest pause of any."""
    assert [row["error"] for row in results] == [None] * STREAMS
    assert {row["finish"] for row in results} == {"length"}
    assert {row["text"] for row in results} == {expected}
    return max(row["gap_s"] for row in results)


def status(host: Host) -> dict[str, Any]:
    done = host.run("overstory", "status", "--json")
    return json.loads(done.stdout) if done.returncode == 0 else {}


def states(host: Host) -> list[str]:
    controller = status(host).get("controller") or {"health": []}
    return sorted(row["state"] for row in controller["health"])


def test_a_cut_link_and_then_the_loss_of_the_head() -> None:
    with two_replicas() as (lab, head, other):
        expected = undisturbed(head)
        streams = Streams(head)
        lab.set_port(other, up=False)
        gap_s = assert_whole(streams.results(), expected)
        assert gap_s < NOTICE_S
        wait_until(lambda: "RESTARTING" in states(head), 2 * NOTICE_S, "the loss to be told")
        picture = status(head)
        assert picture["ready"]
        assert any("gone without a word" in r["reason"] for r in picture["controller"]["health"])
        # The host that was cut off finds out by itself, and ends all that ran there.
        ended_s = wait_until(lambda: ranks(lab)["h2"] == 0, CUT_OFF_S, "the cut-off rank to end")
        print(f"streams paused {gap_s:.0f} s; the cut-off rank ended {ended_s:.0f} s later")
        lab.set_port(other, up=True)
        assert head.run("overstory", "generate", "x =", "--max-tokens", "4").returncode == 0

        # What is left of the cluster goes with its head, and nothing of it stays on other hosts.
        wait_until(lambda: not other.processes("raylet"), NOTICE_S, "the old raylet to end")
        start_worker(head, other, CPUS["h2"], NOTICE)
        wait_until(lambda: ranks(lab) == {"h1": 1, "h2": 1}, 300, "the replica to come back")
        subprocess.run(["kill", "-9", str(head.pid)], check=True)
        for what in ("ray::", "raylet"):
            # No connection is reset where a machine is gone: the same minute as after a cut link.
            took_s = wait_until(
                lambda w=what: not other.processes(w), CUT_OFF_S, f"{what} on h2 to end"
            )
            print(f"{what} on the other host ended {took_s:.0f} s after the loss of the head")
        left = other.check("ls", "/dev/shm").split()
        assert not [name for name in left if "overstory" in name or "sgl" in name]


def test_the_loss_of_a_host_and_a_full_shm() -> None:
    with two_replicas() as (_, head, other):
        expected = undisturbed(head)
        # Serving does not need /dev/shm once all is up.
        head.run("sh", "-c", "head -c 4G /dev/zero > /dev/shm/full")
        assert int(head.check("sh", "-c", "df --output=avail /dev/shm | tail -1")) < 1024
        assert_whole(Streams(head).results(), expected)
        head.check("rm", "/dev/shm/full")

        streams = Streams(head)
        subprocess.run(["kill", "-9", str(other.pid)], check=True)
        gap_s = assert_whole(streams.results(), expected)
        assert gap_s < NOTICE_S
        wait_until(lambda: "RESTARTING" in states(head), NOTICE_S, "the loss to be told")
        assert status(head)["ready"]
        down = head.run("overstory", "down", timeout_s=120)
        assert down.returncode == 0, down.stderr
        wait_until(lambda: not head.processes("ray::RankHost"), 20, "ranks to end")
        assert head.check("ls", "/dev/shm").split() == []
        assert "overstory" not in head.check("ls", "/tmp")

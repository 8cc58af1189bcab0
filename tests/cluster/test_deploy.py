"""The life of a deployment by the command line: up, used, scaled, down, and what fails on the way.

The commands run as a user runs them, each in a process of its own; the first one starts a Ray.
"""

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from leftovers import port_is_free, processes_naming, wait_until

from overstory.orchestrator.local_ray import (
    auth_environment,
    free_port,
    is_running,
    start_local_ray,
    stop_local_ray,
)
from overstory.orchestrator.metric_table import METRICS
from overstory.orchestrator.state import LocalRayRecord, read_state
from overstory.workers.tiny.paths import resolve_model

LOCAL = Path(__file__).parents[2] / "clusters" / "local" / "deployment.yaml"
UP_S, DOWN_S = 400, 120


AUTOMATIC = ("draft_candidate_share", "drafter_switched_off", "drafter_in_use")
"""Metrics of the automatic tree policy, which this deployment does not have."""


class Shell:
    """Runs `overstory` with a state file and environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state.json"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.environment["OVERSTORY_STATE"] = str(self.state)
        self.script = Path(sys.executable).with_name("overstory")

    def __call__(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.script, *arguments],
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=timeout_s,
        )

    def deploy(self, *changes: str) -> subprocess.CompletedProcess[str]:
        sets = [part for change in changes for part in ("--set", change)]
        wait = ("--timeout", str(UP_S - 60))
        return self("deploy", str(LOCAL), *sets, *wait, timeout_s=UP_S)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell; whatever it deployed is taken down at the end."""
    shell = Shell(tmp_path)
    yield shell
    for name in read_state(shell.state).deployments:
        shell("down", "--name", name, timeout_s=DOWN_S)
    left = read_state(shell.state).local_ray
    if left is not None:
        stop_local_ray(left)


def watched(shell: Shell, until: str) -> str:
    """What `status --watch` draws on a terminal until it shows a word; ended as by Ctrl-C."""
    terminal, other_end = pty.openpty()
    command = [shell.script, "status", "--watch", "--every", "0.2"]
    size = {"COLUMNS": "120", "LINES": "60", "TERM": "xterm"}
    watching = subprocess.Popen(
        command, stdin=other_end, stdout=other_end, stderr=other_end, env=shell.environment | size
    )
    os.close(other_end)
    drawn = b""
    deadline = time.monotonic() + 60
    while until.encode() not in drawn and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            drawn += os.read(terminal, 65536)
    watching.send_signal(signal.SIGINT)
    # What it still draws must be taken off, or it cannot end.
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            drawn += os.read(terminal, 65536)
    assert watching.wait(timeout=30) == 0
    os.close(terminal)
    return drawn.decode(errors="replace")


def assert_nothing_left(own: LocalRayRecord, port: int) -> None:
    assert not is_running(own)
    assert processes_naming(own.folder) == []
    assert not Path(own.folder).exists()
    assert port_is_free(port)


def exported_names(own: LocalRayRecord) -> set[str]:
    """Metrics that Ray's agent of the one node exports now."""
    command = Path(f"/proc/{own.pid}/cmdline").read_text().split("\0")
    port = next(part.split("=")[1] for part in command if part.startswith("--metrics-export-port="))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}


def assert_all_exported(own: LocalRayRecord) -> None:
    """Prometheus would see every metric of the table, and so every panel has data."""
    wanted = {
        metric.ray_name + ("_bucket" if metric.kind == "histogram" else "")
        for metric in METRICS.values()
        if metric.name not in AUTOMATIC
    }
    missing = set(wanted)

    def all_there() -> bool:
        missing.intersection_update(wanted - exported_names(own))
        return not missing

    try:
        wait_until(all_there, 60, "all metrics are exported")
    except AssertionError:
        raise AssertionError(f"not exported: {sorted(missing)}") from None


def assert_as_important_as_others(own: LocalRayRecord) -> None:
    """Ray's default puts workers behind whatever else runs."""
    ours = psutil.Process(own.pid).children(recursive=True)
    titles = {" ".join(one.cmdline()).strip(): one.nice() for one in ours}
    assert titles["ray::RankHost"] == titles["ray::ServeReplica:tiny:Gateway"] == 0


def test_up_used_and_down(shell: Shell) -> None:
    port = free_port()
    up = shell.deploy(f"gateway.port={port}")
    assert up.returncode == 0, up.stderr
    assert f"tiny is ready at http://127.0.0.1:{port}" in up.stdout
    for phase in ("nodes", "placement", "weights", "first token"):
        assert f"] {phase}" in up.stderr
    assert "no Ray is running: starting a local one" in up.stderr
    own = read_state(shell.state).local_ray
    assert own is not None
    assert is_running(own)
    assert_as_important_as_others(own)

    text = shell("generate", "def add(a, b):", "--max-tokens", "16")
    assert text.returncode == 0, text.stderr
    assert "[16 tokens in " in text.stderr
    again = shell("generate", "def add(a, b):", "--max-tokens", "16")
    assert again.stdout == text.stdout
    refused = shell("generate", "x", "--model", "other")
    assert refused.returncode == 1
    assert "other" in refused.stderr

    picture = json.loads(shell("status", "--json").stdout)
    assert picture["ready"]
    (replica,) = picture["controller"]["replicas"]
    assert replica["phase"] == "leased"
    assert [rank["policy"] for rank in replica["ranks"]] == ["tree-31", "tree-31"]
    assert "replica" in shell("status").stdout

    rows = shell.state.with_name("rows.json")
    sizes = ("--prompts", "2", "--max-new-tokens", "12", "--rounds", "1")
    cells = ("--concurrency", "1,2", "--temperature", "0")
    measured = shell("bench", "--json", str(rows), *sizes, *cells, timeout_s=240)
    assert measured.returncode == 0, measured.stderr
    result = json.loads(rows.read_text())
    assert [(r["mode"], r["concurrency"]) for r in result["rows"]] == [
        (mode, c) for c in (1, 2) for mode in ("plain", "chain", "tree-15", "tree-31")
    ]
    by_mode = {row["mode"]: row for row in result["rows"] if row["concurrency"] == 1}
    assert by_mode["plain"]["tokens_per_forward"] == 1.0
    assert all(row["tokens"] == 24 for row in result["rows"])
    assert len(by_mode["chain"]["accepted_by_depth"]) == 7

    defragged = shell("defrag", "--json")
    assert defragged.returncode == 0, defragged.stderr
    (done,) = json.loads(defragged.stdout).values()
    assert done["after"]["contiguous_share"] >= done["before"]["contiguous_share"]
    unknown = shell("defrag", "--dry-run", "--replica", "nobody")
    assert unknown.returncode == 1
    assert "error: controller: replica nobody cannot be defragmented" in unknown.stderr
    after = json.loads(shell("status", "--json").stdout)
    assert after["controller"]["policy"] == "tree-31"  # As before the benchmark.
    (replica,) = after["controller"]["replicas"]
    assert replica["fragmentation"]["free"] == done["after"]["free"]

    assert_all_exported(own)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b"overstory_requests_total" in answer.read()

    looked = shell("doctor", str(LOCAL), "--json")
    diagnosis = json.loads(looked.stdout)
    assert looked.returncode == 0, diagnosis["findings"]
    assert [len(node["models"]) for node in diagnosis["nodes"]] == [2]
    reported = shell("report", "--bench", str(rows))
    assert reported.returncode == 0, reported.stderr
    for part in ("# Status report of tiny", "% of a step is", "benchmark tree-31, 1 at a time"):
        assert part in reported.stdout
    screen = watched(shell, until="free")
    assert "depth 1" in screen
    assert "Traceback" not in screen

    same = shell.deploy(f"gateway.port={port}")
    assert same.returncode == 0
    assert "tiny is up already" in same.stderr
    other = shell.deploy(f"gateway.port={port}", "tree.budget=15")
    assert other.returncode == 1
    assert "is up with other settings" in other.stderr

    down = shell("down", timeout_s=DOWN_S)
    assert down.returncode == 0, down.stderr
    assert_nothing_left(own, port)
    assert read_state(shell.state).deployments == {}


def test_a_rank_that_cannot_load_is_named_and_nothing_is_left(shell: Shell, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(resolve_model("overstory-tiny"), broken)
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:1000])
    port = free_port()
    changes = (f"model={broken}", "served_model_name=overstory-tiny", "engine.tp_size=1")
    up = shell.deploy(*changes, f"gateway.port={port}")
    assert up.returncode == 1
    assert "Traceback (most recent call last)" not in up.stderr.split("last log lines")[0]
    assert "rank 0 died (exit code" in up.stderr
    assert "last log lines" in up.stderr
    assert "SafetensorError" in up.stderr
    state = read_state(shell.state)
    assert (state.local_ray, state.deployments) == (None, {})
    folder = next(
        line.rpartition("files in ")[2] for line in up.stderr.splitlines() if "files in" in line
    )
    assert processes_naming(folder) == []
    assert not Path(folder).exists()
    assert port_is_free(port)


@pytest.mark.parametrize("setting", ["port", "token_port"])
def test_a_taken_port_is_told_before_ranks_start(shell: Shell, setting: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        up = shell.deploy(f"gateway.{setting}={port}")
    assert up.returncode == 1
    assert f"gateway.{setting}: " in up.stderr
    assert f":{port} cannot be used (Address already in use)" in up.stderr
    assert "] placement" not in up.stderr
    assert read_state(shell.state).local_ray is None


def test_of_two_deploys_at_once_one_goes_on(shell: Shell) -> None:
    """No Ray runs: they agree on one, and the second neither takes the first one's place nor takes
    anything away."""
    port = free_port()
    settings = ("--set", f"gateway.port={port}", "--set", "engine.tp_size=1")
    files = [shell.state.with_name(f"deploy-{number}") for number in range(2)]
    both = [
        subprocess.Popen(
            [shell.script, "deploy", str(LOCAL), *settings],
            stderr=file.open("w"),
            stdout=subprocess.DEVNULL,
            env=shell.environment,
        )
        for file in files
    ]
    ends = [one.wait(UP_S) for one in both]
    texts = [file.read_text() for file in files]
    done, other = sorted(range(2), key=lambda number: "generated; " not in texts[number])
    assert ends[done] == 0, "\n".join(texts)
    assert "generated; " not in texts[other]
    assert (ends[other], "tiny is up already" in texts[other]) in ((1, False), (0, True)), texts
    if ends[other]:  # Else it came so late that nothing was left to do.
        assert "tiny is being changed already by another command" in texts[other] or (
            "a deployment 'tiny' is up but not ready" in texts[other]
        ), texts
    assert shell("generate", "x =", "--max-tokens", "4").returncode == 0
    started = [line.rpartition("files in ")[2] for line in "".join(texts).splitlines()]
    folders = {folder for folder in started if folder.startswith("/")}
    own = read_state(shell.state).local_ray
    assert own is not None
    assert folders == {own.folder}
    down = shell("down", timeout_s=DOWN_S)
    assert down.returncode == 0, down.stderr
    assert_nothing_left(own, port)


def test_our_ray_starts_and_stops_and_leaves_nothing() -> None:
    own = start_local_ray(1, 0)
    try:
        assert is_running(own)
        assert processes_naming(own.folder) != []
        assert Path(own.folder).stat().st_mode & 0o077 == 0  # It holds the token.
    finally:
        stop_local_ray(own)
    assert_nothing_left(own, int(own.address.rpartition(":")[2]))
    stop_local_ray(own)  # Nothing to do is no error.


@pytest.fixture
def foreign_ray() -> Iterator[LocalRayRecord]:
    """A Ray that no command of ours started."""
    ray = start_local_ray(2, 0)
    yield ray
    stop_local_ray(ray)


@pytest.mark.full
def test_a_ray_that_is_not_ours_is_used_and_left_alone(
    shell: Shell, foreign_ray: LocalRayRecord
) -> None:
    shell.environment |= {"RAY_ADDRESS": foreign_ray.address}
    shell.environment |= auth_environment(foreign_ray.folder)
    port = free_port()
    up = shell.deploy(f"gateway.port={port}", "engine.tp_size=1")
    assert up.returncode == 0, up.stderr
    assert f"using Ray at {foreign_ray.address} (RAY_ADDRESS)" in up.stderr
    assert read_state(shell.state).local_ray is None
    (rank,) = rank_pids(shell)
    down = shell("down", timeout_s=DOWN_S)
    assert down.returncode == 0, down.stderr
    assert is_running(foreign_ray)
    assert port_is_free(port)
    assert not Path(f"/proc/{rank}").exists()


@pytest.mark.full
def test_replicas_come_and_go(shell: Shell) -> None:
    up = shell.deploy(
        f"gateway.port={free_port()}", "engine.tp_size=1", "resources.cpus_per_rank=0.9"
    )
    assert up.returncode == 0, up.stderr
    first = rank_pids(shell)
    more = shell("scale", "2", timeout_s=UP_S)
    assert more.returncode == 0, more.stderr
    both = rank_pids(shell)
    assert first < both  # The first one was not touched.
    assert len(both) == 2
    too_many = shell("scale", "3")
    assert too_many.returncode == 1
    assert "CPUs" in too_many.stderr
    fewer = shell("scale", "1", timeout_s=UP_S)
    assert fewer.returncode == 0, fewer.stderr
    assert len(rank_pids(shell)) == 1
    assert shell("generate", "x =", "--max-tokens", "4").returncode == 0


def rank_pids(shell: Shell) -> set[int]:
    """Pids of all ranks under lease, by the status command, once it sees as many as Serve runs."""
    picture = json.loads(shell("status", "--json").stdout)
    leased = [r for r in picture["controller"]["replicas"] if r["phase"] == "leased"]
    return {rank["pid"] for replica in leased for rank in replica["ranks"]}

"""A Ray of our own on this machine, where there is none: own ports, own temp folder.

`ray start --block` holds it, so that one signal to one process ends all of it. `ray stop` would end
every Ray on the machine and is never used.
"""

import contextlib
import dataclasses
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.local_process import LocalProcess
from overstory.orchestrator.state import LocalRayRecord
from overstory.workers.process_ids import process_start_ticks

NICENESS = "RAY_worker_niceness"
"""Environment variable of Ray's raylet: nice value of its workers."""

START_TIMEOUT_S = 180.0
START_ATTEMPTS = 2
STOP_TIMEOUT_S = 30.0
OBJECT_STORE_BYTES = 200_000_000
_POLL_S = 0.05
_LOWEST_PORT = 10_000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


# Settings of the user for another Ray.
_NOT_OURS = ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
_TOKEN_FILE = "auth_token"
# Below our folder, which only this user may enter: Ray opens its own temp folder to everybody.
_TEMP = "r"


class LocalRayError(UserFault, RuntimeError):
    """Our local Ray did not start or did not stop."""


def free_ports(count: int) -> list[int]:
    """Different TCP ports that are free now, below those that the system gives to others."""
    found: list[int] = []
    candidates = random.Random().sample(range(_LOWEST_PORT, _ephemeral_ports()), k=1000)
    with contextlib.ExitStack() as held:
        for port in candidates:
            if len(found) == count:
                break
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(port)
    if len(found) < count:
        raise LocalRayError(f"found {len(found)} of {count} free TCP ports above {_LOWEST_PORT}")
    return found


def _ephemeral_ports() -> int:
    """The lowest port that the system gives to whoever asks for any."""
    try:
        lowest = int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        lowest = 0
    return lowest if lowest > _LOWEST_PORT + 2000 else 32768


def free_port() -> int:
    """A TCP port that is free now."""
    return free_ports(1)[0]


class LocalRayEnded(LocalRayError):
    """It ended by itself while starting."""


def auth_environment(folder: str) -> dict[str, str]:
    """Environment variables with which Ray processes and drivers use the token of the Ray there."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{folder}/{_TOKEN_FILE}"}


def _start_command(folder: Path, cpus: int, gpus: int) -> list[str]:
    # Ports that Ray takes at fixed numbers would clash with another Ray; for agents' ports that it
    # draws, a raylet waits until the agents are up, and gives up after 15 s on a loaded machine.
    drawn = (
        *("port", "ray-client-server-port", "dashboard-agent-listen-port"),
        *("dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port"),
    )
    return [
        *(sys.executable, "-m", "overstory.orchestrator.ray_head", "start", "--head", "--block"),
        *("--node-ip-address=127.0.0.1", f"--temp-dir={folder / _TEMP}"),
        *(f"--{name}={port}" for name, port in zip(drawn, free_ports(len(drawn)), strict=True)),
        *("--min-worker-port=0", "--max-worker-port=0"),
        *("--include-dashboard=false", "--no-monitor", "--disable-usage-stats"),
        *(f"--num-cpus={cpus}", f"--num-gpus={gpus}"),
        f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]


def start_local_ray(cpus: int, gpus: int) -> LocalRayRecord:
    """Starts it and waits until it has an address.

    Raises:
        LocalRayError: it ended or gave no address in time; the message has its last words.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            return _start(cpus, gpus)
        except LocalRayEnded:
            # A port drawn for it may have been taken meanwhile.
            if attempt == START_ATTEMPTS:
                raise
    raise AssertionError("START_ATTEMPTS is at least 1")


def _start(cpus: int, gpus: int) -> LocalRayRecord:
    # Not the user's TMPDIR: Unix socket paths below it may not exceed 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="overstory-ray-", dir="/tmp"))
    log = folder / "start.log"
    process = _spawn(folder, log, cpus, gpus)
    record = LocalRayRecord(
        address="",
        folder=str(folder),
        host=socket.gethostname(),
        pid=process.pid,
        started=process_start_ticks(process.pid),
    )
    try:
        address = _await_address(process, folder)
    except BaseException as error:
        words = " | ".join(log.read_text().splitlines()[-5:])
        stop_local_ray(record)
        if isinstance(error, LocalRayError):
            raise type(error)(f"{error}: {words}") from None
        raise
    return dataclasses.replace(record, address=address)


def _spawn(folder: Path, log: Path, cpus: int, gpus: int) -> subprocess.Popen[bytes]:
    (folder / _TOKEN_FILE).write_text(secrets.token_hex(32))
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_OURS}
    environment.setdefault("RAY_raylet_start_wait_time_s", "60")
    # Deployments are removed before it ends: nothing is left to drain, and Ray would wait 30 s.
    environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    environment |= auth_environment(str(folder))
    with log.open("w") as stream:
        return subprocess.Popen(
            _start_command(folder, cpus, gpus),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _await_address(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Ray writes the address when the node is up."""
    deadline = time.monotonic() + START_TIMEOUT_S
    file = folder / _TEMP / "ray_current_cluster"
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if address := file.read_text().strip():
                return address
        if process.poll() is not None:
            raise LocalRayEnded(f"the local Ray ended at once (exit code {process.returncode})")
        time.sleep(_POLL_S)
    raise LocalRayError(f"the local Ray was not up within {START_TIMEOUT_S:.0f} s")


def local_ray_process(record: LocalRayRecord) -> LocalProcess:
    """The process that holds it."""
    return LocalProcess(record.host, record.pid, record.started)


def is_running(record: LocalRayRecord) -> bool:
    """Whether the process that holds it lives on this machine."""
    return local_ray_process(record).alive()


def stop_local_ray(record: LocalRayRecord) -> None:
    """Ends it with everything it started, and removes its folder. Fine if it is gone already.

    Raises:
        LocalRayError: some of its processes could not be ended.
    """
    holder = local_ray_process(record)
    if holder.alive():
        os.kill(record.pid, signal.SIGTERM)
        if not holder.wait_gone(STOP_TIMEOUT_S):
            holder.kill()
    left = _processes_of(record.folder)
    for process in left:
        process.kill()
    stuck = [p.pid for p in left if not p.wait_gone(5.0)]
    if stuck:
        raise LocalRayError(f"processes of the local Ray in {record.folder} would not end: {stuck}")
    shutil.rmtree(record.folder, ignore_errors=True)


def _processes_of(folder: str) -> list[LocalProcess]:
    """Processes of this machine that run for the Ray in `folder`: it is in their command lines or
    environment (Ray workers carry its socket paths)."""
    needle = folder.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if needle in (entry / "cmdline").read_bytes():
                pid = int(entry.name)
                found.append(LocalProcess(socket.gethostname(), pid, process_start_ticks(pid)))
    return found

"""SGLang's own HTTP server and a deployment of the same engine, side by side. Not collected: it
holds no test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import psutil
from leftovers import wait_until

from overstory.orchestrator.deploy import deploy, take_down
from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.progress import Progress
from overstory.orchestrator.replica_setup import policy_environment
from overstory.orchestrator.spec import DeploymentSpec
from overstory.orchestrator.state import DeploymentRecord, read_state

SERVER = Path(__file__).with_name("sglang_server.py")
START_S = 600.0


@contextmanager
def both(
    spec: DeploymentSpec, port: int, together: bool = False
) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """The deployment's first process and SGLang's, which listens at `port`; both ready. They start
    one after the other, or `together`: sooner up, where memory and cores are plenty."""
    with tempfile.TemporaryFile("w+") as words, sglang_server(spec, port, words) as theirs:
        if not together:
            _await_up(theirs, port, words)
        with deployment(spec) as ours:
            _await_up(theirs, port, words)
            yield ours, psutil.Process(theirs.pid)


@contextmanager
def sglang_server(
    spec: DeploymentSpec, port: int, words: IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """SGLang's server, starting; it writes to `words`."""
    fields = resolve_engine(spec).server_args
    command = [sys.executable, str(SERVER), spec.resources.device, str(spec.resources.threads)]
    process = subprocess.Popen(
        [*command, str(port), json.dumps(fields)],
        env=os.environ | spec.environment | policy_environment(spec),
        stdout=words,
        stderr=words,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_up(process: subprocess.Popen[bytes], port: int, words: IO[str]) -> None:
    wait_until(lambda: process.poll() is not None or _is_up(port), START_S, "SGLang's server")
    if process.poll() is not None:
        words.seek(0)
        raise RuntimeError(f"SGLang's server ended: {words.read()[-3000:]}")


def _is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def deployment(spec: DeploymentSpec) -> Iterator[psutil.Process]:
    """The deployment, up on a Ray of its own, whose first process is given."""
    record: DeploymentRecord | None = None
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OVERSTORY_STATE"] = str(Path(folder) / "state.json")
        try:
            record = deploy(spec, Progress(sys.stderr), START_S)
            own = read_state().local_ray
            if own is None:
                raise RuntimeError("another Ray runs here; this measures one of its own")
            yield psutil.Process(own.pid)
        finally:
            if record is not None:
                take_down(record.name)

import inspect
import os
from pathlib import Path

import pytest
from ray._private import services

from overstory.orchestrator import ray_head
from overstory.orchestrator.local_ray import NICENESS
from overstory.orchestrator.ray_head import with_agent_port

ARGUMENTS = ["ray", "start", "--dashboard-agent-listen-port=1234", "--port=5"]


def test_only_the_raylet_gets_the_port() -> None:
    assert with_agent_port(["raylet", "-x"], "raylet", ARGUMENTS) == [
        "raylet",
        "-x",
        "--dashboard_agent_listen_port=1234",
    ]
    assert with_agent_port(["gcs"], "gcs_server", ARGUMENTS) == ["gcs"]
    assert with_agent_port(["raylet"], "raylet", ["ray", "start"]) == ["raylet"]


def test_ray_still_starts_its_processes_through_the_function_that_is_wrapped() -> None:
    first, second, *_ = inspect.signature(services.start_ray_process).parameters
    assert (first, second) == ("command", "process_type")
    assert "start_ray_process(" in inspect.getsource(services.start_raylet)


def test_workers_are_as_important_as_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user says otherwise."""
    told = []
    monkeypatch.setattr(services, "start_ray_process", services.start_ray_process)
    monkeypatch.setattr(ray_head.scripts, "main", lambda: told.append(os.environ[NICENESS]))
    monkeypatch.delenv(NICENESS, raising=False)
    ray_head.main()
    monkeypatch.setenv(NICENESS, "7")
    ray_head.main()
    assert told == ["0", "7"]
    assert NICENESS.removeprefix("RAY_").encode() in raylet().read_bytes(), "Ray has another name"


def raylet() -> Path:
    return Path(services.RAYLET_EXECUTABLE)

import inspect

from ray._private import services

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

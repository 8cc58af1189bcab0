"""`overstory status`: what a deployment does right now, as text, JSON or a live view."""

import json
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from rich.console import Console
from rich.live import Live

from overstory.orchestrator import client, serving
from overstory.orchestrator.control import connected, controller_status
from overstory.orchestrator.interrupts import Looks
from overstory.orchestrator.state import DeploymentRecord
from overstory.orchestrator.status_live import fitted_view
from overstory.orchestrator.status_text import render

_GATEWAY_TIMEOUT_S = 5.0


def _gateway_snapshot(name: str) -> dict[str, Any] | None:
    """`Gateway.snapshot`, None where the gateway does not answer."""
    try:
        handle = serve.get_deployment_handle("Gateway", name)
        return dict(handle.snapshot.remote().result(timeout_s=_GATEWAY_TIMEOUT_S))
    except (RayError, RayServeException, TimeoutError):
        return None


def gather(record: DeploymentRecord) -> dict[str, Any]:
    """The picture of a deployment, JSON-able. Needs a connected Ray.

    `name`, `endpoint`, `model`, `ready`, `reason`, `serve` (status, message, replica states by
    Serve deployment; None if Serve does not know it), `gateway` (`Gateway.snapshot`; None if it
    does not answer), `controller` (`ControllerState.status`; None if none answers).
    """
    is_ready, reason = client.ready(record.endpoint)
    app = serving.app_status(record.name)
    return {
        "name": record.name,
        "endpoint": record.endpoint,
        "model": record.spec["served_model_name"],
        "ready": is_ready,
        "reason": reason,
        "serve": None
        if app is None
        else {
            "status": app.status,
            "message": app.message,
            "replicas": {name: dict(states) for name, states in app.replicas.items()},
        },
        "gateway": None if app is None else _gateway_snapshot(record.name),
        "controller": controller_status(record.name),
    }


def show_status(name: str | None, as_json: bool, every_s: float | None) -> None:
    """Prints the status once, or every `every_s` seconds until Ctrl-C.

    On a terminal that can be drawn on, the repeated one is a live view; elsewhere text or JSON,
    one after the other.
    """
    with connected(name) as record:
        serving.quiet_serve_logs()
        console = Console()
        drawn_on = console.is_terminal and not console.is_dumb_terminal
        if every_s is not None and not as_json and drawn_on:
            _watch(record, every_s, console)
            return
        _print(record, as_json)
        if every_s is None:
            return
        with Looks() as looks:
            while looks.wait(every_s):
                _print(record, as_json)


def _print(record: DeploymentRecord, as_json: bool) -> None:
    picture = gather(record)
    print(json.dumps(picture, indent=1) if as_json else render(picture), flush=True)


def _watch(record: DeploymentRecord, every_s: float, console: Console) -> None:
    """The live view until Ctrl-C."""
    with Looks() as looks:
        first = fitted_view(gather(record), console)
        with Live(first, console=console, screen=True, auto_refresh=False) as live:
            while looks.wait(every_s):
                live.update(fitted_view(gather(record), console), refresh=True)

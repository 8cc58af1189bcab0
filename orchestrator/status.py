"""`overstory status`: what a deployment does right now, as text or JSON."""

import json
import sys
import time
from typing import Any

from overstory.orchestrator import client, serving
from overstory.orchestrator.control import connected, controller_status
from overstory.orchestrator.state import DeploymentRecord
from overstory.orchestrator.status_text import render


def gather(record: DeploymentRecord) -> dict[str, Any]:
    """The picture of a deployment, JSON-able. Needs a connected Ray.

    `name`, `endpoint`, `model`, `ready`, `reason`, `serve` (status, message, replica states by
    Serve deployment; None if Serve does not know it), `controller` (`ControllerState.status`; None
    if none answers).
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
        "controller": controller_status(record.name),
    }


def show_status(name: str | None, as_json: bool, every_s: float | None) -> None:
    """Prints the status once, or every `every_s` seconds until Ctrl-C."""
    with connected(name) as record:
        serving.quiet_serve_logs()
        while True:
            picture = gather(record)
            text = json.dumps(picture, indent=1) if as_json else render(picture)
            clear = "\x1b[2J\x1b[H" if every_s and sys.stdout.isatty() else ""
            print(clear + text, flush=True)
            if every_s is None:
                return
            try:
                time.sleep(every_s)
            except KeyboardInterrupt:
                return

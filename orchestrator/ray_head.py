"""`ray start` with one more argument for the raylet, and workers as important as other processes;
run as `-m overstory.orchestrator.ray_head`.

Ray 2.60 tells the dashboard agent its port but not the raylet, which then waits for the agent to
write it to a file and gives up after 15 s: on a loaded machine the agent is still importing then,
and the whole node fails to start. The raylet has a flag for it (`raylet/main.cc`).

And it starts workers at nice 15: whatever else runs on the machine, Ray's own daemons included,
goes before ranks and the gateway, with 28 times their share of a core.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from ray._private import services
from ray.scripts import scripts

from overstory.orchestrator.local_ray import NICENESS

PORT_OPTION = "--dashboard-agent-listen-port="
RAYLET_FLAG = "--dashboard_agent_listen_port="


def with_agent_port(
    command: Sequence[str], process_type: str, arguments: Sequence[str]
) -> list[str]:
    """A command of Ray's, with the agent's port if it starts a raylet and `arguments` name one."""
    ports = [each for each in arguments if each.startswith(PORT_OPTION)]
    if process_type != "raylet" or not ports:
        return list(command)
    return [*command, RAYLET_FLAG + ports[-1].removeprefix(PORT_OPTION)]


def main() -> None:
    """Ray's own command line, from there on."""
    os.environ.setdefault(NICENESS, "0")
    original = services.start_ray_process

    def start(command: Sequence[str], process_type: str, *rest: Any, **named: Any) -> Any:
        return original(
            with_agent_port(command, process_type, sys.argv), process_type, *rest, **named
        )

    services.start_ray_process = start
    scripts.main()


if __name__ == "__main__":
    main()

"""What this user has deployed from this machine, for later commands to find. A small JSON file."""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overstory.orchestrator.errors import UserFault


class StateError(UserFault):
    """No such deployment, or a state file that cannot be read."""


@dataclass(frozen=True)
class LocalRayRecord:
    """A local Ray that Overstory started: the process that holds it, its folder and its address."""

    address: str
    folder: str
    host: str
    pid: int
    started: int
    """Start of the process in clock ticks since boot: with the pid it names it beyond doubt."""


@dataclass(frozen=True)
class DeploymentRecord:
    """One deployment as it was asked for. `spec` is `DeploymentSpec.model_dump()`."""

    name: str
    endpoint: str
    ray_address: str
    spec: dict[str, Any]
    nodes_per_replica: int = 1
    serve_started: bool = False
    """Whether Serve was started for it, so that it may be shut down with the last deployment."""

    restart: dict[str, Any] | None = None
    """A rolling restart that has begun and was not seen to end (`restart.Begun`)."""


@dataclass
class State:
    """All of it."""

    local_ray: LocalRayRecord | None = None
    deployments: dict[str, DeploymentRecord] = field(default_factory=dict)

    def pick(self, name: str | None) -> DeploymentRecord:
        """The deployment called `name`, or the only one.

        Raises:
            StateError: there is none, or more than one and no name.
        """
        if name is not None and name in self.deployments:
            return self.deployments[name]
        known = ", ".join(self.deployments) or "none"
        if name is not None:
            raise StateError(
                f"--name: got {name!r}, wanted a deployment that {state_path()} notes: {known}"
            )
        if len(self.deployments) != 1:
            if self.deployments:
                raise StateError(f"there are several deployments ({known}); name one with --name")
            raise StateError(
                "no deployment was made on this machine by this user (none is noted in "
                f"{state_path()}); run `overstory deploy FILE`, or the command where that was run"
            )
        return next(iter(self.deployments.values()))


def state_path() -> Path:
    """`$OVERSTORY_STATE`, else `overstory/state.json` in the user's state folder (XDG)."""
    chosen = os.environ.get("OVERSTORY_STATE")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_STATE_HOME")
    folder = Path(home) if home else Path.home() / ".local" / "state"
    return folder / "overstory" / "state.json"


def read_state(path: Path | None = None) -> State:
    """The state; an empty one where there is no file.

    Raises:
        StateError: the file is not ours or damaged.
    """
    path = path or state_path()
    try:
        raw = json.loads(path.read_text())
        local = raw["local_ray"]
        return State(
            LocalRayRecord(**local) if local else None,
            {name: DeploymentRecord(**row) for name, row in raw["deployments"].items()},
        )
    except FileNotFoundError:
        return State()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{path} is damaged ({error}); remove it") from error
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> StateError:
    return StateError(
        f"{path}, where deployments are noted, cannot be used ({error.strerror}); set "
        "OVERSTORY_STATE to a file of yours, the same for all commands"
    )


def amend_record(name: str, **changes: Any) -> None:
    """Notes other values of a deployment's record; raises as `changing_state`."""
    with changing_state() as state:
        state.deployments[name] = dataclasses.replace(state.deployments[name], **changes)


@contextlib.contextmanager
def changing_state(path: Path | None = None) -> Iterator[State]:
    """The state to change; written when the block ends without an exception. One writer at once.

    Raises:
        StateError: the file is not ours, damaged, or its folder may not be written.
    """
    path = path or state_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / (path.name + ".lock")).open("w")
    except OSError as error:
        raise _unusable(path, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = read_state(path)
        yield state
        text = json.dumps(dataclasses.asdict(state), indent=1)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(text + "\n")
        fresh.replace(path)

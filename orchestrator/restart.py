"""`overstory restart`: every replica replaced, one after another, while the others serve.

Serve's own rolling update does the work; here is decided what it is told: whether a successor
starts beside its predecessor (where a replica's resources are free) or in its place, and a version
of its own for each restart, for an application that is handed over unchanged restarts nothing.
Serve counts a replica as running once it has generated, and takes the old one out only then
(beside) or before (in place). The gateway sees a replica leave and moves its sequences
(`replica_board`).

A restart belongs to Serve: one whose command was interrupted goes on, `--follow` watches it.
"""

import contextlib
import dataclasses
import time
import uuid
from dataclasses import dataclass
from typing import Any

from overstory.orchestrator import cluster, serving
from overstory.orchestrator.change_turn import turn_to_change
from overstory.orchestrator.control import ControlError, ask_controller, connected
from overstory.orchestrator.plan import PlanError, check_models, make_plan
from overstory.orchestrator.progress import Progress, describe_ranks, failure_text
from overstory.orchestrator.replica_setup import bundles
from overstory.orchestrator.restart_rules import (
    Replaced,
    RestartError,
    RestartProgress,
    change_under_way,
    changed_settings,
    refuse_changes,
)
from overstory.orchestrator.spec import DeploymentSpec, parse_spec
from overstory.orchestrator.state import DeploymentRecord, amend_record, changing_state, read_state

_POLL_S = 0.5
_CAUSE_S = 5.0
_PLENTY = 1e6
_ROOM_S = 30.0
"""How long a successor may wait for room that was free when the restart began."""


@dataclass(frozen=True)
class Begun:
    """A restart as it is remembered: `old` replicas are to go, `spec` is what their successors
    get."""

    version: str
    old: list[str]
    spec: dict[str, Any]
    nodes_per_replica: int
    surge: bool
    attempt: int = 0
    """How often Serve has been asked to go on with it after it had stopped."""
    stopped: bool = False
    """Whether Serve has stopped it at a replica that failed; those that are new stay so."""


def restart(
    name: str | None, wanted: DeploymentSpec | None, progress: Progress, timeout_s: float
) -> list[Replaced]:
    """Replaces every replica and waits until that is done.

    Args:
        name: which deployment; the only one if not given.
        wanted: its new settings; None keeps the old.
        progress: told what happens.
        timeout_s: longest that nothing may happen: for one replica to come up.

    Raises:
        RestartError: refused (the state is untouched), or stopped at a replica that failed.
        PlanError: the model or drafter cannot be used.
    """
    with connected(name) as known, turn_to_change(known.name):
        serving.quiet_serve_logs()
        record = with_finished_restart(read_state().pick(known.name))
        spec = parse_spec(record.spec)
        wanted = wanted or spec
        if wanted.name != record.name:
            raise RestartError(
                f"name: the file is of deployment {wanted.name!r}, not of {record.name!r}"
            )
        refuse_changes(spec, wanted)
        check_models(wanted)
        refuse_if_changing(record.name)
        begun = _go_on(record, _plan(record, spec, wanted))
        amend_record(record.name, restart=dataclasses.asdict(begun))
        for line in changed_settings(spec, wanted):
            progress.tell("placement", line)
        progress.tell("placement", _manner(begun.surge))
        with contextlib.suppress(ControlError):  # Without a controller nothing was given up.
            ask_controller(record.name, "asked_for", wanted.replicas)
        try:
            _roll(begun, begun.surge)
        except Exception:  # Not begun: later crashes must not look like its end.
            amend_record(record.name, restart=record.restart)
            raise
        return _follow(record.name, begun, progress, timeout_s)


def follow(name: str | None, progress: Progress, timeout_s: float) -> list[Replaced]:
    """Watches a restart whose command was interrupted, to its end.

    Raises:
        RestartError: none was left; else as `restart`.
    """
    with connected(name) as record:
        serving.quiet_serve_logs()
        if record.restart is None or Begun(**record.restart).stopped:
            raise RestartError(f"no restart of {record.name} is under way")
        return _follow(record.name, Begun(**record.restart), progress, timeout_s)


def with_finished_restart(record: DeploymentRecord) -> DeploymentRecord:
    """The record, after a restart that nobody saw to its end."""
    if record.restart is None:
        return record
    begun, app = Begun(**record.restart), serving.app_status(record.name)
    if app is None or app.status != "RUNNING":
        return record
    if set(begun.old) & set(serving.replica_states(record.name)):
        return record
    _note(record.name, begun, _finished(begun))
    return read_state().pick(record.name)


def refuse_if_changing(name: str) -> None:
    """Refuses where Serve is still at work on the deployment.

    Raises:
        RestartError: a restart, a change of the number of replicas or a start is under way, or
            there is nothing to change.
    """
    app = serving.app_status(name)
    if app is None:
        raise RestartError(f"{name} is not running; `overstory deploy` it")
    states = dict(app.replicas.get("Replica", {}))
    what = change_under_way(app.status, app.deployments.get("Replica", ""), states)
    if what:
        raise RestartError(
            f"{name} is being changed already (replicas: {states or 'none'}): {what}. Wait for it; "
            "`overstory restart --follow` watches a restart that was begun from here"
        )


def _manner(surge: bool) -> str:
    if surge:
        return "a replica's resources are free: each successor starts beside its predecessor"
    return "no room for one more replica: each is drained first, its successor takes its place"


def _plan(record: DeploymentRecord, spec: DeploymentSpec, wanted: DeploymentSpec) -> Begun:
    """Beside or in place: by what is free now."""
    nodes = cluster.ray_inventory()
    surge, nodes_per_replica = True, record.nodes_per_replica
    one = wanted.model_copy(update={"replicas": 1})
    try:
        plan = make_plan(one, nodes)
        nodes_per_replica = plan.nodes_per_replica
    except PlanError as error:
        surge = False
        # What is wrong on empty nodes too is no lack of room: nothing is drained for that.
        make_plan(one, [dataclasses.replace(n, cpus=_PLENTY, gpus=_PLENTY) for n in nodes])
        _refuse_to_grow(spec, wanted, record.nodes_per_replica, error)
    return Begun(
        version=uuid.uuid4().hex[:12],
        old=sorted(serving.replica_states(record.name)),
        spec=wanted.model_dump(),
        nodes_per_replica=nodes_per_replica,
        surge=surge,
    )


def _go_on(record: DeploymentRecord, planned: Begun) -> Begun:
    """What is planned; where it is what a stopped restart was about, that one goes on: replicas
    that it has made new stay."""
    if record.restart is None:
        return planned
    before = Begun(**record.restart)
    same = before.spec == planned.spec and before.nodes_per_replica == planned.nodes_per_replica
    if not before.stopped or not same:
        return planned
    left = [name for name in planned.old if name in before.old]
    attempt = before.attempt + 1
    return dataclasses.replace(planned, version=before.version, old=left, attempt=attempt)


def _roll(begun: Begun, surge: bool) -> None:
    spec = parse_spec(begun.spec)
    serving.roll(spec, begun.nodes_per_replica, begun.version, surge, begun.attempt)


def _refuse_to_grow(
    spec: DeploymentSpec, wanted: DeploymentSpec, nodes_per_replica: int, error: PlanError
) -> None:
    """In place, a successor gets what its predecessor frees: more would be waited for for ever."""
    freed, needed = bundles(spec, nodes_per_replica), bundles(wanted, nodes_per_replica)
    for was, now in zip(freed, needed, strict=True):
        for resource, amount in now.items():
            if amount > was.get(resource, 0.0):
                raise RestartError(
                    f"resources: a new replica needs {amount:g} {resource} where an old one frees "
                    f"{was.get(resource, 0.0):g}, and there is no room beside it: {error}"
                ) from error


def _follow(name: str, begun: Begun, progress: Progress, timeout_s: float) -> list[Replaced]:
    wanted = parse_spec(begun.spec)
    seen = RestartProgress(frozenset(begun.old), wanted.replicas, time.monotonic())
    surge = begun.surge
    try:
        while True:
            _look(name, seen, begun, progress)
            if seen.done:
                break
            still_s = seen.still_s(time.monotonic())
            waited = surge and still_s > _ROOM_S
            if waited and serving.waits_for_room(name) and _note(name, begun, {}):
                surge = False
                progress.tell("placement", "the room is gone; " + _manner(surge))
                _roll(begun, surge)
            if still_s > timeout_s:
                raise RestartError(
                    f"nothing happened for {timeout_s:.0f} s: {seen.describe()}. Serve goes on; "
                    "`overstory restart --follow` watches it"
                )
            time.sleep(_POLL_S)
    except (KeyboardInterrupt, SystemExit) as interrupt:  # Ray turns SIGTERM into SystemExit.
        raise RestartError(
            f"interrupted: {seen.describe()}. Serve goes on; `overstory restart --follow` "
            "watches it"
        ) from interrupt
    _note(name, begun, _finished(begun))
    progress.tell("first token", f"all {wanted.replicas} replicas are new")
    return seen.replaced


def _look(name: str, seen: RestartProgress, begun: Begun, progress: Progress) -> None:
    """Takes in how things are.

    Raises:
        RestartError: Serve has stopped at a replica that failed.
    """
    known, first = len(seen.replaced), seen.kept is None
    seen.look(serving.replica_states(name), time.monotonic())
    if first and seen.kept:
        progress.tell("placement", f"new already, and kept: {', '.join(sorted(seen.kept))}")
    for one in seen.replaced[known:]:
        progress.tell("first token", f"replica {one.name} took over after {one.seconds:.1f} s")
    app = serving.app_status(name)
    if app is None:
        raise RestartError(f"{name} was taken down meanwhile")
    if app.status == "DEPLOY_FAILED":
        stopped = dataclasses.replace(begun, stopped=True)
        _note(name, begun, {"restart": dataclasses.asdict(stopped)})
        left = dict(app.replicas.get("Replica", {}))
        raise RestartError(
            f"stopped at a replica that failed ({seen.describe()}; serving on: {left or 'none'}). "
            "Those that are old keep the old settings. The same `overstory restart` again goes on "
            "where it stopped; one with a better file, or without a file for the old settings, "
            "replaces all. Serve starts no replica before that, not even in place of one that is "
            "lost meanwhile.\n" + _why(name)
        )
    if not seen.done:
        replicas = begun.spec["replicas"]
        phase, _ = describe_ranks(serving.ask_ranks(name, "phase", 2.0), replicas)
        progress.tell(phase, seen.describe())


def _why(name: str) -> str:
    """The cause as Serve tells it: a moment after it tells of the failure."""
    deadline = time.monotonic() + _CAUSE_S
    while True:
        app = serving.app_status(name)
        message = failure_text(app.message if app else "")
        if " died (exit code" in message or time.monotonic() > deadline:
            return message
        time.sleep(_POLL_S)


def _finished(begun: Begun) -> dict[str, Any]:
    return {"spec": begun.spec, "nodes_per_replica": begun.nodes_per_replica, "restart": None}


def _note(name: str, begun: Begun, changes: dict[str, Any]) -> bool:
    """Notes what has become of a restart, unless it is over or another one has begun. Those that
    watch have no turn: another may have seen the end first, and what came then must stand.

    Returns:
        whether it was under way.
    """
    with changing_state() as state:
        record = state.deployments.get(name)
        if record is None or record.restart is None:
            return False
        noted = Begun(**record.restart)
        if (noted.version, noted.attempt) != (begun.version, begun.attempt):
            return False
        state.deployments[name] = dataclasses.replace(record, **changes)
        return True

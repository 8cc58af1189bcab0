"""`overstory scale`: another number of replicas; those that stay are not touched.

What runs on a replica that Serve takes away goes on on another: the gateway moves it
(`replica_board`).
"""

import contextlib
import time

from overstory.orchestrator import cluster, serving
from overstory.orchestrator.change_turn import turn_to_change
from overstory.orchestrator.control import ControlError, ask_controller, connected
from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.placement import NoRoom
from overstory.orchestrator.plan import make_plan
from overstory.orchestrator.progress import Progress, describe_ranks
from overstory.orchestrator.restart import refuse_if_changing, with_finished_restart
from overstory.orchestrator.spec import parse_spec
from overstory.orchestrator.state import amend_record, read_state

_POLL_S = 0.5


class ScaleError(UserFault):
    """The number of replicas could not be changed; what ran goes on."""


def scale(name: str | None, replicas: int, progress: Progress, timeout_s: float) -> None:
    """Sets the number of replicas and waits until so many run.

    Raises:
        ScaleError: not a number of replicas, no room for the new ones, not reached in time, or
            interrupted: Serve goes on.
        RestartError: the deployment is being changed already.
    """
    if replicas < 1:
        raise ScaleError(f"replicas: got {replicas}, wanted at least 1; `overstory down` ends all")
    with connected(name) as known, turn_to_change(known.name):
        serving.quiet_serve_logs()
        record = with_finished_restart(read_state().pick(known.name))
        refuse_if_changing(record.name)
        spec = parse_spec(record.spec)
        more = replicas - spec.replicas
        if more > 0:
            _refuse_after_a_stop(record.name)
            wanted = spec.model_copy(update={"replicas": more})
            try:
                make_plan(wanted, cluster.ray_inventory())
            except NoRoom as error:
                raise ScaleError(
                    f"replicas: got {replicas}, {more} more than now; for those: {error}"
                ) from error
        progress.tell("placement", f"{spec.replicas} -> {replicas} replicas")
        with contextlib.suppress(ControlError):  # Without a controller nothing was given up.
            ask_controller(record.name, "asked_for", replicas)
        # Before Serve is told: a restart of a number that nobody has noted would undo it.
        amend_record(record.name, spec=spec.model_copy(update={"replicas": replicas}).model_dump())
        try:
            serving.set_replicas(record.name, replicas)
        except Exception:
            amend_record(record.name, spec=spec.model_dump())
            raise
        try:
            _await_replicas(record.name, replicas, spec.tp_size, progress, timeout_s)
        except (KeyboardInterrupt, SystemExit) as interrupt:  # Ray turns SIGTERM into SystemExit.
            raise ScaleError(
                f"interrupted: Serve goes on to {replicas} replicas; `overstory status` shows them"
            ) from interrupt


def _refuse_after_a_stop(name: str) -> None:
    app = serving.app_status(name)
    if app is not None and app.restart_stopped:
        raise ScaleError(
            f"a restart of {name} has stopped at a replica that failed, and Serve starts no "
            "replica before another one: `overstory restart` (the old settings, or a better file), "
            "then scale"
        )


def _await_replicas(
    name: str, replicas: int, tp_size: int, progress: Progress, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        app = serving.app_status(name)
        if app is None:
            raise ScaleError(f"{name} was taken down meanwhile")
        states = dict(app.replicas.get("Replica", {}))
        if states == {"RUNNING": replicas}:
            progress.tell("first token", f"{replicas} replicas run")
            return
        progress.tell(*describe_ranks(serving.ask_ranks(name, "phase", 2.0), replicas * tp_size))
        if time.monotonic() > deadline:
            raise ScaleError(
                f"not {replicas} running replicas within {timeout_s:.0f} s: {states or 'none'}; "
                f"{app.message}\nServe goes on; "
                "`overstory status` shows them"
            )
        time.sleep(_POLL_S)

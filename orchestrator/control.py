"""Talking to a deployment's controller from the command line. Needs a connected Ray."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from overstory.orchestrator import cluster
from overstory.orchestrator.controller_actor import find_controller
from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.state import DeploymentRecord, read_state

CALL_TIMEOUT_S = 30.0
POLICY_TIMEOUT_S = 60.0
_POLL_S = 0.1


class ControlError(UserFault):
    """The controller is not there, does not answer, or refuses."""


@contextmanager
def connected(name: str | None) -> Iterator[DeploymentRecord]:
    """The deployment `name` (or the only one), with this process connected to its Ray.

    Raises:
        StateError: there is no such deployment.
        ClusterError: its Ray cannot be joined.
    """
    state = read_state()
    record = state.pick(name)
    if not cluster.reachable(record.ray_address):
        raise cluster.ClusterError(
            f"the Ray of deployment {record.name} at {record.ray_address} is gone; "
            f"`overstory down --name {record.name}` forgets it"
        )
    cluster.connect(record.ray_address, state.local_ray)
    try:
        yield record
    finally:
        cluster.disconnect()


def ask_controller(
    deployment: str, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S
) -> Any:
    """Calls a method of the controller and waits for the answer.

    Raises:
        ControlError: no controller, no answer in time, or its own refusal.
    """
    actor = find_controller(deployment)
    if actor is None:
        raise ControlError(f"deployment {deployment} has no controller; deploy it anew")
    try:
        return ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise ControlError(f"controller: {error.cause}") from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise ControlError(f"the controller of {deployment} does not answer: {error}") from error


def controller_status(deployment: str) -> dict[str, Any] | None:
    """`ControllerState.status`, or None where there is no controller that answers."""
    try:
        return ask_controller(deployment, "status")
    except ControlError:
        return None


def steered_ranks(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Rank rows of all replicas under lease."""
    leased = [row for row in status["replicas"] if row["phase"] == "leased"]
    return [rank for row in leased for rank in row["ranks"]]


def switch_policy(deployment: str, policy: str, timeout_s: float = POLICY_TIMEOUT_S) -> None:
    """Sets the tree policy and waits until every rank runs under it.

    Raises:
        ControlError: refused, or not in force in time.
    """
    note = ask_controller(deployment, "set_policy", policy)["note"]
    deadline = time.monotonic() + timeout_s
    while True:
        ranks = steered_ranks(ask_controller(deployment, "status"))
        if ranks and all(rank["policy"] == policy for rank in ranks):
            return
        if time.monotonic() > deadline:
            under = sorted({str(rank["policy"]) for rank in ranks}) or ["no rank under lease"]
            raise ControlError(
                f"policy {policy} not in force after {timeout_s:.0f} s: {', '.join(under)}"
                + (f" ({note})" if note else "")
            )
        time.sleep(_POLL_S)

"""The controller as a Ray actor: detached, named, restarted by Ray, on no CPU share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from typing import Any

import ray

from overstory.orchestrator.controller import Controller
from overstory.orchestrator.controller_metrics import keep_exporting
from overstory.orchestrator.defrag import DefragOrder
from overstory.orchestrator.fleet import Fleet
from overstory.orchestrator.fleet_watch import FleetWatch
from overstory.orchestrator.handoff import Text
from overstory.orchestrator.lease import Command
from overstory.orchestrator.rank_directory import RankDirectory
from overstory.orchestrator.rank_group import NAMESPACE
from overstory.orchestrator.replica_health import HealthLimits, State
from overstory.orchestrator.spec import ControlSpec
from overstory.workers.log_context import label_process


def controller_name(deployment: str) -> str:
    """Ray actor name of a deployment's controller, within `NAMESPACE`."""
    return f"overstory/{deployment}/controller"


class _ControllerActor:
    """Async actor: Ray runs all its methods on one event loop."""

    # Ray awaits it: the controller's tasks need the actor's running loop.
    async def __init__(  # type: ignore[misc]
        self, deployment: str, control: ControlSpec
    ) -> None:
        self._deployment = deployment
        label_process(repr(self))
        self._controller = Controller(
            deployment,
            control,
            RankDirectory(deployment),
            in_charge=functools.partial(_in_charge, deployment),
            draining=self._draining,
            on_report=lambda name: self._replicas.fleet.heard(name),
        )
        self._replicas = FleetWatch(
            Fleet(time.monotonic),
            _actor_names,
            functools.partial(_serve_view, deployment),
            functools.partial(_drop_replica, deployment),
        )
        self._controller.start()
        loop = asyncio.get_running_loop()
        self._looking = loop.create_task(self._replicas.run())
        self._exporting = loop.create_task(keep_exporting(deployment, self._picture))

    def __repr__(self) -> str:
        """Ray puts it before the process's lines and into its dashboard."""
        return f"controller of {self._deployment}"

    async def register(self, replica: str, ranks: int) -> None:
        """See `Controller.register`."""
        self._controller.register(replica, ranks)

    async def set_policy(self, policy: str) -> dict[str, str]:
        """See `Controller.set_policy`."""
        return await self._controller.set_policy(policy)

    async def run_command(self, command: Command, replica: str | None = None) -> Any:
        """See `Controller.run_command`."""
        return await self._controller.run_command(command, replica)

    async def defrag(self, order: DefragOrder, replica: str | None = None) -> dict[str, Any]:
        """See `Controller.defrag`."""
        return await self._controller.defrag(order, replica)

    async def hand_off(self, giver: str, taker: str, text: Text) -> int:
        """See `Controller.hand_off`."""
        return await self._controller.hand_off(giver, taker, text)

    async def meet_ahead(self, giver: str, takers: list[str]) -> None:
        """See `Controller.meet_ahead`."""
        await self._controller.meet_ahead(giver, takers)

    async def part(self, replica: str) -> None:
        """See `Controller.part`."""
        await self._controller.part(replica)

    async def donor(self) -> str:
        """See `Controller.donor`."""
        return self._controller.donor()

    async def replica_event(
        self, event: str, replica: str, actor: str, limits: HealthLimits, detail: Any
    ) -> None:
        """See `FleetWatch.event`."""
        self._replicas.event(event, replica, actor, limits, detail)

    async def asked_for(self, replicas: int) -> None:
        """See `FleetWatch.asked_for`."""
        self._replicas.asked_for(replicas)

    async def hopeless(self) -> str:
        """See `Fleet.hopeless`."""
        return self._replicas.fleet.hopeless()

    async def status(self) -> dict[str, Any]:
        """See `Controller.status`, and `health`: `Fleet.status`, `faults`: `Fleet.faults`."""
        return {**await self._controller.status(), **self._fleet_picture()}

    def _picture(self) -> dict[str, Any]:
        """As `status`, from the last reports."""
        return {**self._controller.last_status(), **self._fleet_picture()}

    def _fleet_picture(self) -> dict[str, Any]:
        fleet = self._replicas.fleet
        return {"health": fleet.status(), "faults": fleet.faults()}

    def _draining(self, replica: str) -> bool:
        return self._replicas.fleet.state_of(replica) is State.DRAINING

    async def pid(self) -> int:
        """Its process, for status and tests."""
        return os.getpid()

    async def close(self) -> None:
        """See `Controller.close`."""
        self._looking.cancel()
        self._exporting.cancel()
        await self._controller.close()


async def _actor_names() -> list[str]:
    listed = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
    return [row["name"] for row in listed]


async def _serve_view(deployment: str) -> tuple[list[str], int | None]:
    """Replicas that Serve is taking out, and how many it wants; none and None where Serve does not
    run or know the deployment."""
    try:
        controller = await asyncio.to_thread(ray.get_actor, "SERVE_CONTROLLER_ACTOR", "serve")
    except ValueError:
        return [], None
    details = await controller.get_serve_instance_details.remote()
    app = details["applications"].get(deployment, {"deployments": {}})
    replicas = app["deployments"].get("Replica")
    if replicas is None:
        return [], None
    leaving = [row["replica_id"] for row in replicas["replicas"] if row["state"] == "STOPPING"]
    return leaving, replicas["target_num_replicas"]


async def _drop_replica(deployment: str) -> None:
    from overstory.orchestrator import serving  # Imports this module, and Serve.

    await asyncio.to_thread(serving.drop_replica, deployment)


async def _in_charge(deployment: str) -> bool:
    """Whether the controller's name leads to the actor that asks."""
    named = await asyncio.to_thread(find_controller, deployment)
    own = ray.get_runtime_context().get_actor_id()
    return named is not None and named._actor_id.hex() == own


def ensure_controller(deployment: str, control: ControlSpec) -> Any:
    """The deployment's controller, started if it does not run. Returns its actor handle.

    A running one keeps its own settings.
    """
    actor = ray.remote(_ControllerActor).options(
        name=controller_name(deployment),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        # On the head: the loss of another host must not take along what knows of that loss. Ray's
        # own resource, of which the head node alone has 1.
        resources={"node:__internal_head__": 0.001},
        max_restarts=-1,
        max_task_retries=0,
        get_if_exists=True,
    )
    return actor.remote(deployment, control)


def find_controller(deployment: str) -> Any | None:
    """Actor handle of the deployment's controller, or None."""
    try:
        return ray.get_actor(controller_name(deployment), namespace=NAMESPACE)
    except ValueError:
        return None


def hopeless(deployment: str, timeout_s: float = 5.0) -> str:
    """`Fleet.hopeless`; empty too where no controller answers."""
    controller = find_controller(deployment)
    if controller is None:
        return ""
    try:
        reason: str = ray.get(controller.hopeless.remote(), timeout=timeout_s)
    except (ray.exceptions.RayError, TimeoutError):
        return ""
    return reason


def end_controller(deployment: str, timeout_s: float = 10.0) -> bool:
    """Ends the controller; replicas still up run freely. False if there was none."""
    actor = find_controller(deployment)
    if actor is None:
        return False
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # It is to end anyway.
        ray.get(actor.close.remote(), timeout=timeout_s)
    ray.kill(actor, no_restart=True)
    return True

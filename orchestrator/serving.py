"""What deploy, status and down do to Ray Serve and to our named actors. Needs a connected Ray."""

import contextlib
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve._private.common import DeploymentID
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from overstory.orchestrator.app import build_app
from overstory.orchestrator.controller_actor import end_controller, ensure_controller
from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.front_files import sweep_dead
from overstory.orchestrator.provision import write_dashboards_here
from overstory.orchestrator.rank_group import CONTROL, NAMESPACE, call
from overstory.orchestrator.spec import DeploymentSpec

CALL_TIMEOUT_S = 10.0
GONE_TIMEOUT_S = 60.0
_POLL_S = 0.2
_STOPPED = "The update is stopped"  # Serve tells it in words only


class StillThere(UserFault):
    """Something of a deployment would not go."""


@dataclass(frozen=True)
class AppStatus:
    """How Serve sees the application. `replicas` counts states by deployment, `deployments` has
    each one's own status."""

    status: str
    message: str
    replicas: Mapping[str, Mapping[str, int]]
    deployments: Mapping[str, str]

    @property
    def failed(self) -> bool:
        """Whether Serve has given up, or lost what it had."""
        return self.status in ("DEPLOY_FAILED", "UNHEALTHY")

    @property
    def restart_stopped(self) -> bool:
        """Whether Serve has stopped a rolling update at replicas that failed: it starts none until
        it is given another version."""
        return self.status == "DEPLOY_FAILED" and _STOPPED in self.message


def quiet_serve_logs() -> None:
    """Serve tells a driver about every step; we tell the user ourselves."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def serve_running() -> bool:
    """Whether Serve runs on this Ray."""
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def app_names() -> list[str]:
    """Applications of the running Serve; empty if it does not run."""
    return list(serve.status().applications) if serve_running() else []


def _head() -> dict[str, Any]:
    nodes = (n for n in ray.nodes() if n["Alive"] and "node:__internal_head__" in n["Resources"])
    return next(nodes)


def _is_here(node: Mapping[str, Any]) -> bool:
    return bool(node["NodeID"] == ray.get_runtime_context().get_node_id())


def head_elsewhere() -> str | None:
    """Address of the head node, where the endpoint listens; None if this is the head node."""
    return None if _is_here(_head()) else head_address()


def head_address() -> str:
    """Address of the head node, as other nodes reach it."""
    return str(_head()["NodeManagerAddress"])


def port_free_on_head(host: str, port: int) -> str | None:
    """Why the gateway cannot listen there on the head node; None if it can."""
    head = _head()
    if _is_here(head):
        return why_not_bindable(host, port)  # It is this machine: no worker need be started for it.
    strategy = NodeAffinitySchedulingStrategy(head["NodeID"], soft=False)
    probe = ray.remote(why_not_bindable).options(num_cpus=0, scheduling_strategy=strategy)
    return ray.get(probe.remote(host, port), timeout=60)


def why_not_bindable(host: str, port: int) -> str | None:
    """Why this machine cannot listen at `host:port`; None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a port whose old connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def provide_dashboards() -> list[str]:
    """Puts our Grafana dashboards beside Ray's on the head node; their paths there."""
    head = _head()
    if _is_here(head):
        return write_dashboards_here()
    place = NodeAffinitySchedulingStrategy(head["NodeID"], soft=False)
    task = ray.remote(write_dashboards_here).options(num_cpus=0, scheduling_strategy=place)
    return ray.get(task.remote(), timeout=60)


def start_app(spec: DeploymentSpec, nodes_per_replica: int) -> None:
    """Hands the application to Serve and returns; Serve brings it up meanwhile."""
    serve.start(proxy_location="Disabled")  # the gateway listens itself
    _hand_over(spec, build_app(spec, nodes_per_replica))


def roll(
    spec: DeploymentSpec, nodes_per_replica: int, version: str, surge: bool, attempt: int
) -> None:
    """Has Serve replace, one after another, the replicas of another version; returns at once."""
    _hand_over(spec, build_app(spec, nodes_per_replica, version, surge, attempt))


def _hand_over(spec: DeploymentSpec, app: Application) -> None:
    serve.run_many(
        [
            serve.RunTarget(
                app,
                name=spec.name,
                route_prefix=None,  # nothing for proxies of a Serve that others have started
                external_scaler_enabled=True,  # for `set_replicas`
            )
        ],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def set_replicas(name: str, replicas: int) -> None:
    """Sets the number of replicas of a running application; those that stay keep running.

    `serve.run` with another number would start every replica anew.
    """
    client = serve.context._get_global_client()
    target = DeploymentID(name="Replica", app_name=name)
    ray.get(client._controller.update_deployment_replicas.remote(target, replicas), timeout=60)


def _replica_details(name: str) -> dict[str, Any]:
    """Serve's own details of an application's replicas."""
    details = ray.get(
        serve.context._get_global_client()._controller.get_serve_instance_details.remote(),
        timeout=60,
    )
    found: dict[str, Any] = details["applications"][name]["deployments"]["Replica"]
    return found


def replica_states(name: str) -> dict[str, str]:
    """State of each replica that Serve has not forgotten, by the replica's own name."""
    return {
        row["replica_id"]: str(getattr(row["state"], "value", row["state"]))
        for row in _replica_details(name)["replicas"]
    }


def waits_for_room(name: str) -> bool:
    """Whether a placement group of the application's replicas finds no place at the moment."""
    return any(row["state"] == "PENDING" for row in _groups(name))


def drop_replica(name: str) -> None:
    """Has Serve want one replica fewer than it does; nothing to do where it wants none."""
    wanted = _replica_details(name)["target_num_replicas"]
    if wanted > 0:
        set_replicas(name, wanted - 1)


def start_controller(spec: DeploymentSpec) -> None:
    """The deployment's controller, which finds the replicas by their ranks' names."""
    ensure_controller(spec.name, spec.control)


def app_status(name: str) -> AppStatus | None:
    """None if Serve does not know the application (or does not run)."""
    if not serve_running():
        return None
    app = serve.status().applications.get(name)
    if app is None:
        return None
    messages = [app.message, *(d.message for d in app.deployments.values())]
    replicas = {
        deployment: {str(getattr(k, "value", k)): v for k, v in overview.replica_states.items()}
        for deployment, overview in app.deployments.items()
    }
    statuses = {name: overview.status.value for name, overview in app.deployments.items()}
    return AppStatus(app.status.value, "\n".join(m for m in messages if m), replicas, statuses)


def actor_names(deployment: str) -> list[str]:
    """Named actors of a deployment: its ranks and its controller."""
    prefix = f"overstory/{deployment}/"
    listed = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        row["name"]
        for row in listed
        if row["namespace"] == NAMESPACE and row["name"].startswith(prefix)
    )


def ask_ranks(deployment: str, method: str, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
    """Answers of a control method of all ranks, by actor name; the silent are left out."""
    refs = {}
    for name in actor_names(deployment):
        if "/rank-" in name:
            with contextlib.suppress(ValueError):  # Gone since it was listed.
                actor = ray.get_actor(name, namespace=NAMESPACE)
                refs[call(actor, CONTROL, method)] = name
    if not refs:
        return {}
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    answers = {}
    for ref in done:
        with contextlib.suppress(RayError):
            answers[refs[ref]] = ray.get(ref)
    return answers


def remove_app(name: str) -> None:
    """Deletes the application, then whatever of its named actors outlived it.

    Raises:
        StillThere: some of it is still there after `GONE_TIMEOUT_S`.
    """
    end_controller(name)
    if name in app_names():
        serve.delete(name)
    for actor_name in actor_names(name):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(actor_name, namespace=NAMESPACE), no_restart=True)
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while left := actor_names(name) or _placement_groups(name):
        if time.monotonic() > deadline:
            raise StillThere(f"still there {GONE_TIMEOUT_S:.0f} s after removal: {left}")
        time.sleep(_POLL_S)
    _sweep_nodes()


def _sweep_nodes() -> None:
    """Takes away what killed front halves have left, on every node."""
    sweep = ray.remote(sweep_dead)
    places = [
        NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for node in ray.nodes()
        if node["Alive"]
    ]
    swept = [sweep.options(num_cpus=0, scheduling_strategy=place).remote() for place in places]
    ray.wait(swept, num_returns=len(swept), timeout=CALL_TIMEOUT_S)  # Files, not worth a failure.


def _placement_groups(name: str) -> list[str]:
    """Placement groups of the application's replicas that Ray still holds (Serve names them)."""
    return [row["placement_group_id"] for row in _groups(name) if row["state"] != "REMOVED"]


def _groups(name: str) -> list[Mapping[str, Any]]:
    table = ray.util.placement_group_table()
    return [row for row in table.values() if f"{name}#Replica#" in str(row["name"])]


def remove_serve() -> None:
    """Shuts Serve down on this Ray: proxies and its controller."""
    if serve_running():
        serve.shutdown()

"""Deploying and taking down: the acts behind `overstory deploy` and `overstory down`.

```
nodes        which Ray (or a local one of our own), what its nodes offer
placement    plan, port and name checked; application handed to Serve
weights      ranks import SGLang and load            | a failure here: cause of death of the rank,
warm-up      schedulers up, gateway proves itself    | then everything is taken away again
first token  /ready says that it has generated
```
"""

import contextlib
import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from overstory.orchestrator import client, cluster, local_ray
from overstory.orchestrator.cluster import Cluster
from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.inventory import NodeInventory, local_inventory
from overstory.orchestrator.plan import Plan, make_plan
from overstory.orchestrator.progress import Progress, describe_ranks, failure_text
from overstory.orchestrator.restart_rules import RestartError
from overstory.orchestrator.spec import DeploymentSpec, GatewaySpec
from overstory.orchestrator.state import (
    DeploymentRecord,
    LocalRayRecord,
    changing_state,
    read_state,
    state_path,
)
from overstory.orchestrator.wording import counted

_POLL_S = 0.5
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all, with the loopback address that is among them."""
_LOOPBACKS = ("127.0.0.1", "localhost", "::1")


class DeployError(UserFault, RuntimeError):
    """The deployment did not come up; the message is for the user."""


def endpoint_of(gateway: GatewaySpec, head: str | None) -> str:
    """URL at which this machine reaches the endpoint.

    Args:
        gateway: what it listens on.
        head: address of the head node, where it listens; None if this is the head node.

    Raises:
        DeployError: it listens on the loopback of another machine.
    """
    host = gateway.host
    if head is not None and host in _LOOPBACKS:
        raise DeployError(
            f"gateway.host: the endpoint listens on the head node {head}, and {host} is reached "
            f"from there alone; run this command there, or set gateway.host to {head} or to "
            "0.0.0.0 (other machines reach it then, and it asks for no key)"
        )
    if host in _ANYWHERE:
        host = head or _ANYWHERE[host]
    return f"{gateway.scheme}://{f'[{host}]' if ':' in host else host}:{gateway.port}"


def deploy(spec: DeploymentSpec, progress: Progress, timeout_s: float) -> DeploymentRecord:
    """Deploys `spec` and waits until it has generated.

    An identical deployment that is up is left as it is.

    Raises:
        PlanError: it cannot run on these nodes.
        DeployError: a fault on the way; everything started has been taken away again.
        RestartError: another command is deploying it.
    """
    used, started = _nodes(spec, progress)
    from overstory.orchestrator import serving  # Imports Ray.
    from overstory.orchestrator.change_turn import turn_to_change

    record = None
    try:
        cluster.connect(used.address, read_state().local_ray)
        serving.quiet_serve_logs()
        with turn_to_change(spec.name):  # Until Serve knows it: then others find it taken.
            known = _already_up(spec, used)
            if known is not None:
                progress.tell("first token", f"{spec.name} is up already at {known.endpoint}")
                return known
            plan = _check(spec, used, progress)
            record = _remember(spec, plan, used)
            serving.start_app(spec, plan.nodes_per_replica)
        serving.start_controller(spec)
        if dashboards := serving.provide_dashboards():
            folder = dashboards[0].rpartition("/")[0]
            progress.tell("placement", f"{len(dashboards)} Grafana dashboards in {folder}")
        _await_ready(record, spec, progress, timeout_s)
    except BaseException as error:
        if record is None:  # What is there by this name is another's.
            cluster.disconnect()
            if not isinstance(error, RestartError):  # The command that has the turn is on that Ray.
                _stop_own_ray(started)
            raise
        left = _clean_up(record.name)
        # Ray turns SIGTERM into SystemExit.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise DeployError(f"interrupted{left}") from error
        if isinstance(error, UserFault):
            raise DeployError(f"{error}{left}") from error
        raise
    finally:
        cluster.disconnect()
    return record


def _clean_up(name: str) -> str:
    """Takes a failed deployment away; a line about what would not go, else nothing."""
    try:
        take_down(name)
    except Exception as error:  # The first fault is the one to tell; this one goes with it.
        return f"\nnot everything could be taken away ({error}); run `overstory down`"
    return ""


def _nodes(spec: DeploymentSpec, progress: Progress) -> tuple[Cluster, LocalRayRecord | None]:
    """The Ray to use, and the record of ours if it was started just now."""
    state = read_state()
    found = cluster.find_cluster(state.local_ray)
    if found is not None:
        progress.tell("nodes", f"using {found.describe()}")
        return found, None
    here = local_inventory()
    make_plan(spec, [here])  # Faults are told before a Ray is started for nothing.
    progress.tell("nodes", "no Ray is running: starting a local one")
    with changing_state() as state:
        if (found := cluster.find_cluster(state.local_ray)) is None:
            state.local_ray = started = _start_own(here)
    if found is not None:
        progress.tell("nodes", f"another command was first: using {found.describe()}")
        return found, None
    own = Cluster(started.address, "own")
    progress.tell("nodes", f"using {own.describe()}, files in {started.folder}")
    return own, started


def _start_own(here: NodeInventory) -> LocalRayRecord:
    """Starts our Ray. It takes seconds to come up and seconds to be imported: both at once."""
    pool = ThreadPoolExecutor(1)
    starting = pool.submit(local_ray.start_local_ray, int(here.cpus), int(here.gpus))
    try:
        importlib.import_module("overstory.orchestrator.serving")
        return starting.result()
    except BaseException:  # Ctrl-C too: it comes up all the same, and nobody would know of it.
        with contextlib.suppress(local_ray.LocalRayError):
            local_ray.stop_local_ray(starting.result())
        raise


def _already_up(spec: DeploymentSpec, used: Cluster) -> DeploymentRecord | None:
    """The record of the same deployment if it is up.

    Raises:
        DeployError: its name or its route is taken by something else.
    """
    from overstory.orchestrator import serving

    names = serving.app_names()
    if spec.name in names:
        known = read_state().deployments.get(spec.name)
        same = known is not None and known.spec == spec.model_dump()
        if same and known is not None and client.ready(known.endpoint)[0]:
            return known
        what = "is up but not ready" if same else "is up with other settings"
        raise DeployError(
            f"name: a deployment {spec.name!r} {what} on {used.describe()}; "
            f"run `overstory down --name {spec.name}` first, or choose another name"
        )
    if names:
        raise DeployError(
            f"name: Serve on {used.describe()} runs {', '.join(names)} already and one endpoint "
            "serves one deployment; take that down or use another Ray"
        )
    return None


def _check(spec: DeploymentSpec, used: Cluster, progress: Progress) -> Plan:
    """The plan on these nodes, with the endpoint in reach and its port free."""
    from overstory.orchestrator import serving

    nodes = cluster.ray_inventory()
    if used.origin == "own":
        nodes = [local_inventory()]
    plan = make_plan(spec, nodes)
    for warning in plan.warnings:
        progress.tell("nodes", f"warning: {warning}")
    total = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    offered = f"{total[0]:g} CPUs and {total[1]:g} GPUs free"
    progress.tell("nodes", f"{counted(len(nodes), 'node')} with {offered}")
    endpoint_of(spec.gateway, serving.head_elsewhere())  # Faults are told before anything starts.
    _check_port(spec)
    where = ", ".join(sorted({share.node for r in plan.replicas for share in r.shares}))
    progress.tell("placement", f"{spec.replicas} x {spec.tp_size} ranks on {where}")
    return plan


def _check_port(spec: DeploymentSpec) -> None:
    from overstory.orchestrator import serving

    gateway = spec.gateway
    wanted = [("port", gateway.host, gateway.port)]
    if gateway.token_port:
        wanted.append(("token_port", serving.head_address(), gateway.token_port))
    for setting, host, port in wanted:
        reason = serving.port_free_on_head(host, port)
        if reason is not None:
            raise DeployError(
                f"gateway.{setting}: {host}:{port} cannot be used ({reason}); choose another with "
                f"`--set gateway.{setting}=...` or end what listens there"
            )


def _remember(spec: DeploymentSpec, plan: Plan, used: Cluster) -> DeploymentRecord:
    from overstory.orchestrator import serving

    record = DeploymentRecord(
        name=spec.name,
        endpoint=endpoint_of(spec.gateway, serving.head_elsewhere()),
        ray_address=used.address,
        spec=spec.model_dump(),
        nodes_per_replica=plan.nodes_per_replica,
        serve_started=not serving.serve_running(),
    )
    with changing_state() as state:
        state.deployments[spec.name] = record
    return record


def _await_ready(
    record: DeploymentRecord, spec: DeploymentSpec, progress: Progress, timeout_s: float
) -> None:
    """Until the endpoint has generated.

    Raises:
        DeployError: Serve gave up, or `timeout_s` passed.
    """
    from overstory.orchestrator import serving

    deadline = time.monotonic() + timeout_s
    expected = spec.replicas * spec.tp_size
    phase, what = "placement", "handed to Serve"
    while True:
        is_ready, reason = client.ready(record.endpoint)
        if is_ready:
            progress.tell("first token", f"generated; {record.endpoint} is ready")
            return
        status = serving.app_status(record.name)
        if status is not None and status.failed:
            raise DeployError(failure_text(status.message))
        phase, what = describe_ranks(serving.ask_ranks(record.name, "phase", 2.0), expected)
        progress.tell(phase, what)
        if time.monotonic() > deadline:
            raise DeployError(
                f"not ready within {timeout_s:.0f} s: {phase}, {what}; the endpoint says: {reason}"
            )
        time.sleep(_POLL_S)


def take_down(name: str | None, say: Callable[[str], None] = lambda _: None) -> None:
    """Removes a deployment with everything that was started for it.

    Args:
        name: which; the only one if not given, and no fault if there is none: then a Ray of our
            own that a killed `deploy` left is ended.
        say: told what has been removed.

    Raises:
        StateError: there is no such deployment.
        StillThere, LocalRayError: something would not go.
    """
    state = read_state()
    if name is None and not state.deployments:
        if state.local_ray is None:
            say(f"nothing to take away: no deployment is noted in {state_path()}")
            return
        _stop_own_ray(state.local_ray)
        say(f"local Ray in {state.local_ray.folder}: ended and removed")
        return
    record = state.pick(name)
    own = state.local_ray if state.local_ray and _is_ours(state.local_ray, record) else None
    others = [d for d in state.deployments.values() if d.name != record.name]
    if cluster.reachable(record.ray_address):
        from overstory.orchestrator import serving

        cluster.connect(record.ray_address, state.local_ray)
        try:
            serving.quiet_serve_logs()
            serving.remove_app(record.name)
            say(f"deployment {record.name}: application, ranks and placement groups removed")
            # Our own Ray ends as a whole below.
            if own is None and record.serve_started and not serving.app_names():
                serving.remove_serve()
        finally:
            cluster.disconnect()
    else:
        say(f"deployment {record.name}: the Ray at {record.ray_address} is gone")
    with changing_state() as state:
        state.deployments.pop(record.name, None)
    if own is not None and all(d.ray_address != own.address for d in others):
        _stop_own_ray(own)
        say(f"local Ray in {own.folder}: ended and removed")


def _is_ours(own: LocalRayRecord, record: DeploymentRecord) -> bool:
    return own.address == record.ray_address


def _stop_own_ray(own: LocalRayRecord | None) -> None:
    if own is None:
        return
    local_ray.stop_local_ray(own)
    with changing_state() as state:
        if state.local_ray == own:
            state.local_ray = None

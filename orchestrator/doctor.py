"""`overstory doctor`: looks at every node of the Ray in use, or at this machine where none runs.

A probe actor on each node (no CPU share, gone afterwards) collects `NodeFacts` and tries the links;
`doctor_checks` judges. What a deployment asks of the nodes comes from its plan on what they have.
"""

import dataclasses
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from overstory.orchestrator.doctor_checks import Facts, Finding, LinkFacts, Wanted, findings
from overstory.orchestrator.engine_args import sglang_version
from overstory.orchestrator.inventory import NodeInventory
from overstory.orchestrator.model_facts import PlanError
from overstory.orchestrator.node_facts import NodeFacts, clock, look_here
from overstory.orchestrator.plan import make_plan, node_memory_per_rank
from overstory.orchestrator.spec import DeploymentSpec
from overstory.orchestrator.wording import counted
from overstory.workers.tiny.paths import resolve_model

CALL_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 60.0
_ROUNDS = 5
_LOOKS_AT_CLOCK = 3
_STREAM_BYTES = 32 << 20
_POLL_S = 0.5


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was seen and what is wrong with it."""

    facts: Facts
    findings: tuple[Finding, ...]
    ray: str
    """Which Ray was looked at; empty where only this machine was."""

    @property
    def errors(self) -> int:
        """How many findings are errors."""
        return sum(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`. Bytes and seconds."""
        return {
            "ray": self.ray,
            "nodes": [dataclasses.asdict(node) for node in self.facts.nodes],
            "links": [dataclasses.asdict(link) for link in self.facts.links],
            "wanted": dataclasses.asdict(self.facts.wanted),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "errors": self.errors,
        }


# ------------------------------------------------------------------------------- on a node


class Listener:
    """Answers `reach` of other nodes until its process ends."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens, on all addresses."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Stops listening."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes its thread; closing alone does not
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(CONNECT_TIMEOUT_S)
                try:
                    self._answer(connection, str(peer[0]))
                except OSError:
                    continue  # The other side tells its user.

    @staticmethod
    def _answer(connection: socket.socket, peer: str) -> None:
        for _ in range(_ROUNDS):
            connection.sendall(connection.recv(1))
        connection.sendall(peer.encode().ljust(64))
        left = _STREAM_BYTES
        while left > 0:
            got = len(connection.recv(1 << 20))
            if not got:
                return
            left -= got
        connection.sendall(b"k")


def reach(source: str, target: str, address: str, port: int) -> LinkFacts:
    """Tries the way from this node to a `Listener`: round trip, address seen, rate of a stream."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(_ROUNDS):
                begun = time.perf_counter()
                link.sendall(b"p")
                link.recv(1)
                trips.append(time.perf_counter() - begun)
            seen = link.recv(64, socket.MSG_WAITALL).decode().strip()
            link.settimeout(STREAM_TIMEOUT_S)  # Python's covers all of `sendall`: slow is not cut
            begun = time.perf_counter()
            link.sendall(bytes(_STREAM_BYTES))
            link.recv(1)
            rate = _STREAM_BYTES / (time.perf_counter() - begun)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        return LinkFacts(source, target, address, None, reason=reason)
    return LinkFacts(source, target, address, min(trips), seen.removeprefix("::ffff:"), rate)


class Probe:
    """Actor on one node."""

    def __init__(self) -> None:
        self._listener = Listener()

    def look(
        self, address: str, head: bool, models: Sequence[tuple[str, str]], ports: Sequence[int]
    ) -> NodeFacts:
        """See `look_here`."""
        return look_here(address, head, models, ports)

    def clock(self) -> float:
        """See `node_facts.clock`."""
        return clock()

    def port(self) -> int:
        """Where its listener is."""
        return self._listener.port

    def reach(self, source: str, target: str, address: str, port: int) -> LinkFacts:
        """See `reach`."""
        return reach(source, target, address, port)


# ------------------------------------------------------------------------------- from outside


def _models_of(spec: DeploymentSpec | None) -> list[tuple[str, str]]:
    if spec is None:
        return []
    pairs = (("model", spec.model), ("drafter", spec.drafter))
    return [(key, resolve_model(path)) for key, path in pairs if path]


def _clock_offset(probe: Any) -> tuple[float, float]:
    """Offset of a node's clock against ours and its uncertainty, of the quickest of some looks."""
    import ray

    looks = []
    for _ in range(_LOOKS_AT_CLOCK):
        before = time.time()
        there = ray.get(probe.clock.remote(), timeout=CALL_TIMEOUT_S)
        after = time.time()
        looks.append(((after - before) / 2, there - (before + after) / 2))
    uncertain, offset = min(looks)
    return offset, uncertain


def collect(spec: DeploymentSpec | None) -> tuple[tuple[NodeFacts, ...], tuple[LinkFacts, ...]]:
    """Facts of all living nodes of the connected Ray, and of the ways between them."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda node: "node:__internal_head__" not in node["Resources"])
    probes = [
        ray.remote(Probe)
        .options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote()
        for node in nodes
    ]
    try:
        looks = []
        for node, probe in zip(nodes, probes, strict=True):
            head = "node:__internal_head__" in node["Resources"]
            ports = spec.gateway.ports if spec and head and not _serve_runs() else []
            address = str(node["NodeManagerAddress"])
            looks.append(probe.look.remote(address, head, _models_of(spec), ports))
        seen = [
            _answer(look, probe, node)
            for look, probe, node in zip(looks, probes, nodes, strict=True)
        ]
        pairs = zip(seen, probes, strict=True)
        return tuple(seen), _links([(facts, probe) for facts, probe in pairs if not facts.fault])
    finally:
        for probe in probes:
            ray.kill(probe)


def _answer(look: Any, probe: Any, node: dict[str, Any]) -> NodeFacts:
    """A node's facts with its clock, or why there are none."""
    import ray

    try:
        facts = ray.get(look, timeout=CALL_TIMEOUT_S)
        offset, uncertain = _clock_offset(probe)
    except (ray.exceptions.RayError, TimeoutError) as error:
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return NodeFacts(
            name=str(node["NodeManagerHostname"]),
            address=str(node["NodeManagerAddress"]),
            fault=f"cannot be looked at: {last}",
        )
    return dataclasses.replace(facts, clock_offset=offset, clock_uncertain=uncertain)


def _links(well: Sequence[tuple[NodeFacts, Any]]) -> tuple[LinkFacts, ...]:
    """One way after the other: streams at the same time would halve each other's rate."""
    import ray

    ports = ray.get([probe.port.remote() for _, probe in well], timeout=CALL_TIMEOUT_S)
    found = []
    for source, probe in well:
        for (target, _), port in zip(well, ports, strict=True):
            if source is not target:
                asked = probe.reach.remote(source.name, target.name, target.address, port)
                found.append(ray.get(asked, timeout=CALL_TIMEOUT_S))
    return tuple(found)


def _serve_runs() -> bool:
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def inventory(nodes: Sequence[NodeFacts]) -> list[NodeInventory]:
    """What a plan needs to know of nodes that were looked at."""
    return [
        NodeInventory(
            name=node.name,
            cpus=node.cpus,
            gpus=float(len(node.gpus)),
            memory=node.memory_free,
            gpu_memory=min((gpu.memory for gpu in node.gpus), default=0.0),
        )
        for node in nodes
    ]


def wanted(spec: DeploymentSpec | None, nodes: Sequence[NodeFacts]) -> tuple[Wanted, list[Finding]]:
    """What `spec` asks of the nodes, and why it cannot be had there at all."""
    if spec is None:
        return Wanted(sglang=sglang_version()), []
    device = spec.resources.device
    gpus = round(spec.resources.gpus * spec.tp_size * spec.replicas)
    try:
        plan = make_plan(spec, inventory(nodes), published=True)
    except PlanError as error:
        faults = [
            Finding("error", "plan", "", line, "see `overstory plan FILE`")
            for line in error.problems
        ]
        return Wanted(device, gpus, sglang=sglang_version()), faults
    ranks = max(len(share.ranks) for replica in plan.replicas for share in replica.shares)
    memory = ranks * node_memory_per_rank(spec, plan.memory)
    return Wanted(device, gpus, memory, plan.nodes_per_replica > 1, sglang_version()), []


def _await_nodes(expected: int, wait_s: float) -> None:
    """Until so many nodes have joined the connected Ray, or the time is up."""
    import ray

    deadline = time.monotonic() + wait_s
    while sum(node["Alive"] for node in ray.nodes()) < expected and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def missing_nodes(expected: int, seen: int) -> list[Finding]:
    """A finding where fewer nodes are there than expected."""
    if seen >= expected:
        return []
    found = f"{counted(seen, 'node')} in the cluster, {expected} expected"
    fix = (
        "look into /tmp/ray/session_latest/logs/monitor* on the head (`ray up` reaches the others "
        "from there); with provider local run RAY_UP_enable_autoscaler_v2=0 ray up"
    )
    return [Finding("error", "nodes", "", found, fix)]


def diagnose(
    spec: DeploymentSpec | None, expected: int | None = None, wait_s: float = 0.0
) -> Diagnosis:
    """Looks at the Ray that `overstory deploy` would use, or at this machine without one.

    Args:
        spec: nodes are checked for what it needs.
        expected: number of nodes that should have joined.
        wait_s: how long to wait for them.

    Raises:
        ClusterError: the Ray there is cannot be joined.
    """
    from overstory.orchestrator import cluster
    from overstory.orchestrator.state import read_state

    own = read_state().local_ray
    found = cluster.find_cluster(own)
    links: tuple[LinkFacts, ...] = ()
    if found is None:
        ports = spec.gateway.ports if spec else []
        nodes: tuple[NodeFacts, ...] = (look_here("127.0.0.1", True, _models_of(spec), ports),)
    else:
        cluster.connect(found.address, own)
        try:
            if expected is not None:
                _await_nodes(expected, wait_s)
            nodes, links = collect(spec)
        finally:
            cluster.disconnect()
    asked, faults = wanted(spec, nodes)
    faults = [*missing_nodes(expected or 0, len(nodes)), *faults]
    facts = Facts(nodes, links, asked)
    return Diagnosis(facts, (*faults, *findings(facts)), found.describe() if found else "")

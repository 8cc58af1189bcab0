"""What is wrong with nodes and between them: pure checks over collected facts.

Each finding says what was found, what is wanted, and what mends it. An error keeps a deployment
from running or from being right; a warning costs speed or will cost it later.
"""

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from overstory.orchestrator.node_facts import Interface, NodeFacts

GIB = 2.0**30
MIB = 2.0**20

BUILT_FOR = ((9, 0), (12, 0))
"""Compute capabilities that the kernels are built and tested for."""
LEAST_DRIVER = 580
"""Major driver version that CUDA 13 needs."""
LEAST_SHM, GOOD_SHM = 256 * MIB, 1 * GIB
LEAST_FILES, GOOD_FILES = 1024, 65536
SKEW_WARNING_S, SKEW_ERROR_S = 0.1, 1.0
SLOW_LINK_S = 2e-3
SLOW_LINK_RATE = 1e9
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "tunl", "kube")

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `node` is empty for what concerns several."""

    severity: Severity
    check: str
    node: str
    found: str
    fix: str


@dataclass(frozen=True)
class LinkFacts:
    """A connection from one node to another, tried with a plain TCP socket.

    Attributes:
        source, target: node names.
        address: that was connected to: Ray's of `target`.
        seconds: of a round trip; None where it could not be reached.
        seen_as: the address that `target` saw the connection come from.
        rate: bytes per second of one stream, 0 if not tried.
        reason: why it failed.
    """

    source: str
    target: str
    address: str
    seconds: float | None
    seen_as: str = ""
    rate: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Wanted:
    """What a deployment asks of the nodes.

    Attributes:
        device: `cpu` or `cuda`.
        gpus: whole GPUs of all replicas together.
        memory: bytes of each node's memory that the ranks on it take.
        over_nodes: whether one replica is cut over several nodes.
        sglang: version whose arguments the deployment was checked against.
    """

    device: str = "cpu"
    gpus: int = 0
    memory: float = 0.0
    over_nodes: bool = False
    sglang: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything that was looked at."""

    nodes: tuple[NodeFacts, ...]
    links: tuple[LinkFacts, ...] = ()
    wanted: Wanted = field(default_factory=Wanted)


def _odd_ones(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The value that most nodes have, and the nodes that have another."""
    (usual, _), *_ = Counter(values.values()).most_common(1)
    return usual, {node: value for node, value in values.items() if value != usual}


def check_python(facts: Facts) -> Iterator[Finding]:
    """Ray refuses nodes whose Python differs, to the patch level."""
    usual, odd = _odd_ones({node.name: node.python for node in facts.nodes})
    for node, value in odd.items():
        yield Finding(
            "error", "python", node, f"Python {value}, the others have {usual}",
            f"install Python {usual} there and make the environment anew",
        )  # fmt: skip


def check_packages(facts: Facts) -> Iterator[Finding]:
    """The same package versions everywhere, and all there."""
    for package in facts.nodes[0].packages:
        values = {node.name: node.packages.get(package, "") for node in facts.nodes}
        for node, value in values.items():
            if not value and package != "nccl":
                yield Finding(
                    "error", "packages", node, f"{package} is not installed",
                    "make the environment there with the project's constraints.txt",
                )  # fmt: skip
        usual, odd = _odd_ones(values)
        for node, value in odd.items():
            if value:
                yield Finding(
                    "error", "packages", node,
                    f"{package} {value}, the others have {usual or 'none'}",
                    f"install {package}=={usual} there (constraints.txt pins all of them)",
                )  # fmt: skip
    wanted = facts.wanted.sglang
    for each in facts.nodes:
        seen = each.packages.get("sglang", "")
        if wanted and seen and seen != wanted:
            yield Finding(
                "error", "packages", each.name, f"sglang {seen}, Overstory is made for {wanted}",
                f"install sglang=={wanted}",
            )  # fmt: skip


def check_driver(facts: Facts) -> Iterator[Finding]:
    """A driver new enough for CUDA 13, and one everywhere."""
    with_gpus = {node.name: node.driver for node in facts.nodes if node.gpus}
    for node, driver in with_gpus.items():
        major = driver.partition(".")[0]
        if major.isdigit() and int(major) < LEAST_DRIVER:
            yield Finding(
                "error", "driver", node, f"driver {driver}, CUDA 13 needs {LEAST_DRIVER} or newer",
                "install a newer NVIDIA driver and restart the node",
            )  # fmt: skip
    if len(set(with_gpus.values())) > 1:
        usual, odd = _odd_ones(with_gpus)
        for node, driver in odd.items():
            yield Finding(
                "warning", "driver", node, f"driver {driver}, the others have {usual}",
                f"install {usual} there, so that kernels and NCCL behave alike",
            )  # fmt: skip


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """As many as wanted, of one kind, that the kernels are built for."""
    if facts.wanted.device != "cuda":
        return
    count = sum(len(node.gpus) for node in facts.nodes)
    if count < facts.wanted.gpus:
        listed = ", ".join(f"{node.name} {len(node.gpus)}" for node in facts.nodes)
        yield Finding(
            "error", "gpus", "", f"{count} GPUs ({listed}), the deployment needs "
            f"{facts.wanted.gpus}",
            "add nodes, lower replicas or engine.tp_size, or see why nvidia-smi shows too few",
        )  # fmt: skip
    kinds = {f"{gpu.name}, {gpu.memory / GIB:.0f} GiB" for n in facts.nodes for gpu in n.gpus}
    if len(kinds) > 1:
        yield Finding(
            "warning", "gpus", "", f"GPUs of several kinds: {', '.join(sorted(kinds))}",
            "ranks wait for the slowest and the KV pool is as large as the smallest allows: use "
            "one kind for a deployment",
        )  # fmt: skip
    for node in facts.nodes:
        for capability in sorted({gpu.capability for gpu in node.gpus}):
            if capability not in BUILT_FOR:
                built = " and ".join(f"{a}.{b}" for a, b in BUILT_FOR)
                yield Finding(
                    "error", "gpus", node.name,
                    f"compute capability {capability[0]}.{capability[1]}, kernels are built for "
                    f"{built}",
                    "use other GPUs, or engine.attention_backend: triton and "
                    "OVERSTORY_KERNELS=reference (slow)",
                )  # fmt: skip
        if node.gpus and not node.builds_kernels:
            yield Finding(
                "warning", "kernels", node.name, "no nvcc: missing kernels cannot be built",
                "install the CUDA 13 compiler, or copy a kernel cache that was built elsewhere",
            )  # fmt: skip


def check_pcie(facts: Facts) -> Iterator[Finding]:
    """Links as wide as the cards, and GPUs that reach each other's memory."""
    for node in facts.nodes:
        narrow = [
            f"GPU {number} x{gpu.link_width} of x{gpu.link_width_max}"
            for number, gpu in enumerate(node.gpus)
            if 0 < gpu.link_width < gpu.link_width_max
        ]
        if narrow:
            yield Finding(
                "warning", "pcie", node.name, f"narrow links: {', '.join(narrow)}",
                "seat the cards in x16 slots, check risers and bifurcation in the BIOS",
            )  # fmt: skip
        apart = sorted(pair for pair, state in node.peer.items() if state not in ("OK", "X"))
        if apart:
            states = ", ".join(sorted({node.peer[pair] for pair in apart}))
            yield Finding(
                "warning", "pcie", node.name,
                f"{len(apart)} pairs of GPUs do not reach each other's memory ({states}; first: "
                f"{apart[0]})",
                "allow peer access: IOMMU off or in passthrough (iommu=pt), ACS off on the "
                "switches, resizable BAR on",
            )  # fmt: skip
        far = sorted(pair for pair, how in node.topology.items() if how == "SYS")
        if far and not apart and "NCCL_P2P_LEVEL" not in node.environment:
            yield Finding(
                "warning", "pcie", node.name,
                f"{len(far)} pairs of GPUs are on different CPU sockets; NCCL goes through host "
                "memory there",
                "set NCCL_P2P_LEVEL=SYS before `ray start`",
            )  # fmt: skip


def check_memory(facts: Facts) -> Iterator[Finding]:
    """Room for the ranks in the node's memory."""
    for node in facts.nodes:
        if facts.wanted.memory and node.memory_free < facts.wanted.memory:
            yield Finding(
                "error", "memory", node.name,
                f"{node.memory_free / GIB:.1f} GiB free, ranks there take about "
                f"{facts.wanted.memory / GIB:.1f} GiB",
                "end other work there, or lower engine.tp_size or replicas",
            )  # fmt: skip


def check_shm(facts: Facts) -> Iterator[Finding]:
    """/dev/shm, where Ray, NCCL and SGLang's queues live."""
    for node in facts.nodes:
        if node.shm_free >= (GOOD_SHM if node.gpus else LEAST_SHM):
            continue
        severity: Severity = "error" if node.gpus and node.shm_free < LEAST_SHM else "warning"
        yield Finding(
            severity, "shm", node.name,
            f"/dev/shm has {node.shm_free / MIB:.0f} of {node.shm / MIB:.0f} MiB free",
            "remove files that crashed processes left there; in a container start it with "
            "--shm-size=16g (an emptyDir with medium: Memory on Kubernetes)",
        )  # fmt: skip


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Limits on open files, and on locked memory where RDMA may be used."""
    for node in facts.nodes:
        if 0 <= node.open_files < GOOD_FILES:
            yield Finding(
                "error" if node.open_files < LEAST_FILES else "warning", "limits", node.name,
                f"{node.open_files} open files a process",
                f"run `ulimit -n {GOOD_FILES}` before `ray start`",
            )  # fmt: skip
        if facts.wanted.over_nodes and node.gpus and node.locked_memory >= 0:
            yield Finding(
                "warning", "limits", node.name,
                f"locked memory is limited to {node.locked_memory / MIB:.0f} MiB: RDMA cannot "
                "register buffers",
                "run `ulimit -l unlimited` before `ray start`",
            )  # fmt: skip


def check_clock(facts: Facts) -> Iterator[Finding]:
    """Clocks together: logs, leases' times and certificates go by them."""
    for node in facts.nodes:
        skew = abs(node.clock_offset) - node.clock_uncertain
        if skew > SKEW_WARNING_S:
            yield Finding(
                "error" if skew > SKEW_ERROR_S else "warning", "clock", node.name,
                f"clock is {node.clock_offset:+.2f} s off (known to {node.clock_uncertain:.2f} s)",
                "run chrony or systemd-timesyncd on every node",
            )  # fmt: skip


def _physical(interfaces: Sequence[Interface]) -> list[Interface]:
    return [i for i in interfaces if i.up and i.addresses and not i.name.startswith(_VIRTUAL)]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _named_interface(setting: str) -> str:
    """The interface that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names first."""
    return setting.lstrip("^=").split(",")[0].strip()


def check_interfaces(facts: Facts) -> Iterator[Finding]:
    """Ray's address of each node is one that the others reach, on the network that is meant."""
    several = len(facts.nodes) > 1
    for node in facts.nodes:
        if several and _is_loopback(node.address):
            yield Finding(
                "error", "interfaces", node.name,
                f"Ray knows it as {node.address}, which the other nodes cannot reach",
                "give it a name in /etc/hosts or start Ray with --node-ip-address=",
            )  # fmt: skip
            continue
        holders = [i.name for i in node.interfaces if node.address in i.addresses]
        if not holders:
            yield Finding(
                "error" if several else "warning", "interfaces", node.name,
                f"none of its interfaces has {node.address}, by which Ray knows it",
                "start Ray with --node-ip-address= an address of the node (NAT does not do)",
            )  # fmt: skip
        named = {
            name: _named_interface(value)
            for name, value in node.environment.items()
            if name.endswith("_SOCKET_IFNAME") and not value.startswith("^")
        }
        for variable, interface in named.items():
            yield from _check_named(node, variable, interface, holders)
        physical = [i.name for i in _physical(node.interfaces)]
        if several and len(physical) > 1 and not named and facts.wanted.over_nodes:
            yield Finding(
                "warning", "interfaces", node.name,
                f"several networks ({', '.join(physical)}); ranks meet on "
                f"{holders[0] if holders else '?'}, which has Ray's address {node.address}",
                "if another one is the fast one, start Ray with --node-ip-address= its address",
            )  # fmt: skip


def _check_named(
    node: NodeFacts, variable: str, interface: str, holders: Sequence[str]
) -> Iterator[Finding]:
    known = {i.name: i for i in node.interfaces}
    matching = [i for name, i in known.items() if name.startswith(interface)]
    if not matching:
        yield Finding(
            "error", "interfaces", node.name,
            f"{variable}={interface}, but the node has {', '.join(sorted(known)) or 'none'}",
            f"correct {variable} and restart Ray there",
        )  # fmt: skip
    elif not any(i.up and i.addresses for i in matching):
        yield Finding(
            "error", "interfaces", node.name, f"{variable}={interface}, which is down or has no "
            "address", f"bring {interface} up or name another in {variable}",
        )  # fmt: skip
    elif holders and not any(i.name in holders for i in matching):
        yield Finding(
            "warning", "interfaces", node.name,
            f"{variable}={interface}, but Ray's address {node.address} is on {holders[0]}",
            "start Ray with --node-ip-address= the address of that interface, or correct the "
            "variable: control and data should take the network that is meant",
        )  # fmt: skip


def check_links(facts: Facts) -> Iterator[Finding]:
    """Every node reaches every other at Ray's address of it."""
    addresses = {node.name: node.address for node in facts.nodes}
    for link in facts.links:
        way = f"{link.source} -> {link.target}"
        if link.seconds is None:
            yield Finding(
                "error", "links", link.source, f"{way} at {link.address}: {link.reason}",
                "open the firewall between the nodes for all ports, or correct the address by "
                "which Ray knows the target",
            )  # fmt: skip
            continue
        if link.seen_as and link.seen_as != addresses[link.source]:
            yield Finding(
                "warning", "links", link.source,
                f"{way} arrives from {link.seen_as}, Ray knows {link.source} as "
                f"{addresses[link.source]}",
                "the route takes another interface than Ray's: start Ray with --node-ip-address= "
                "that address, or mend the routes",
            )  # fmt: skip
        if link.seconds > SLOW_LINK_S:
            yield Finding(
                "warning", "links", link.source, f"{way} takes {1e3 * link.seconds:.1f} ms there "
                "and back", "use one switch or a nearer node: a step exchanges many times",
            )  # fmt: skip
        if facts.wanted.over_nodes and 0 < link.rate < SLOW_LINK_RATE:
            yield Finding(
                "warning", "links", link.source,
                f"{way} moves {link.rate / 1e9:.2f} GB/s in one stream",
                "ranks of one replica exchange over it: use a faster network (RDMA), or keep "
                "replicas on one node",
            )  # fmt: skip


def check_ports(facts: Facts) -> Iterator[Finding]:
    """The gateway's ports are free on the head."""
    for node in facts.nodes:
        for port, reason in sorted(node.taken_ports.items()):
            yield Finding(
                "error", "ports", node.name, f"port {port} cannot be bound: {reason}",
                "end what listens there (`ss -ltnp`), or set another gateway.port or token_port",
            )  # fmt: skip


def check_models(facts: Facts) -> Iterator[Finding]:
    """Every model on every node, with the same files."""
    seen: dict[str, dict[str, str]] = {}
    for node in facts.nodes:
        for model in node.models:
            if not model.present:
                yield Finding(
                    "error", "models", node.name,
                    f"{model.key}: no {model.path}/config.json",
                    "copy the model there, or mount the same file system at the same path",
                )  # fmt: skip
                continue
            if not model.weight_files:
                yield Finding(
                    "error", "models", node.name,
                    f"{model.key}: {model.path} has no *.safetensors files",
                    "finish the download there",
                )  # fmt: skip
            seen.setdefault(model.key, {})[node.name] = model.digest
    for key, digests in seen.items():
        _, odd = _odd_ones(digests)
        for name in odd:
            yield Finding(
                "error", "models", name, f"{key}: its files differ from those of the other nodes",
                "copy them anew (`rsync -c`): ranks would disagree",
            )  # fmt: skip


def check_environment(facts: Facts) -> Iterator[Finding]:
    """Variables that would take GPUs or links away."""
    for node in facts.nodes:
        visible = node.environment.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and node.gpus and len(visible.split(",")) < len(node.gpus):
            yield Finding(
                "warning", "environment", node.name,
                f"CUDA_VISIBLE_DEVICES={visible} hides some of {len(node.gpus)} GPUs from Ray",
                "leave it out of the environment of `ray start` unless it is meant",
            )  # fmt: skip
        if node.environment.get("NCCL_P2P_DISABLE") == "1":
            yield Finding(
                "warning", "environment", node.name, "NCCL_P2P_DISABLE=1: GPUs exchange through "
                "host memory", "leave it out unless peer access is broken on this machine",
            )  # fmt: skip


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *(check_python, check_packages, check_driver, check_gpus, check_pcie, check_memory),
    *(check_shm, check_limits, check_clock, check_interfaces, check_links, check_ports),
    *(check_models, check_environment),
)


def _unseen(facts: Facts) -> Iterator[Finding]:
    """Nodes on which not even the look succeeded."""
    for node in facts.nodes:
        if node.fault:
            yield Finding(
                "error", "look", node.name, node.fault,
                "make the environment there as on the others (same paths, constraints.txt) and "
                "restart Ray on it",
            )  # fmt: skip


def findings(facts: Facts) -> list[Finding]:
    """Everything that is wrong, errors first; else in the order of the checks."""
    found = list(_unseen(facts))
    seen = replace(facts, nodes=tuple(node for node in facts.nodes if not node.fault))
    if seen.nodes:
        found += [finding for check in CHECKS for finding in check(seen)]
    return sorted(found, key=lambda finding: finding.severity != "error")

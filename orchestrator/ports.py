"""TCP ports that a deployment needs, and which of them clash. Pure."""

from dataclasses import dataclass

from overstory.orchestrator.spec import DeploymentSpec

RAY_WORKER_PORTS = range(10002, 20000)
"""Ray's default range for its workers; every node."""


@dataclass(frozen=True)
class PortUse:
    """One port or range. `number` is 0 where it is drawn when it is needed."""

    number: int
    where: str
    what: str
    clients: str


RAY_PORTS = (
    PortUse(6379, "head node", "Ray's GCS", "all nodes"),
    PortUse(8265, "head node", "Ray dashboard and jobs", "people"),
    PortUse(10001, "head node", "Ray client", "people"),
    PortUse(8080, "every node", "metrics of Ray and Overstory", "Prometheus"),
    PortUse(52365, "every node", "Ray's dashboard agent", "head node"),
    PortUse(52366, "every node", "Ray's dashboard agent, gRPC", "head node"),
    PortUse(52367, "every node", "Ray's runtime environments", "the node itself"),
)
"""Fixed ones, as the shipped `ray.yaml` files set them."""


def planned_ports(spec: DeploymentSpec, nodes_per_replica: int) -> tuple[PortUse, ...]:
    """Every port of the deployment and of the Ray below it."""
    gateway = PortUse(spec.gateway.port, "head node", "the OpenAI endpoint", "clients")
    tokens = PortUse(spec.gateway.token_port, "head node", "tokens for the gateway", "replicas")
    drawn = [PortUse(0, "node of rank 0", "where the ranks of a replica meet", "its ranks")]
    if nodes_per_replica > 1:
        drawn.append(PortUse(0, "nodes of a replica", "NCCL or gloo between nodes", "its ranks"))
    return (gateway, tokens, *RAY_PORTS, *drawn)


def port_warnings(spec: DeploymentSpec) -> list[str]:
    """What is likely to clash on nodes that run Ray with its default ports."""
    gateway = spec.gateway
    named = {"gateway.port": gateway.port, "gateway.token_port": gateway.token_port}
    return [f"{name}: {clash}" for name, port in named.items() if (clash := _clash(port))]


def _clash(port: int) -> str | None:
    for used in RAY_PORTS:
        if used.number == port:
            return f"{port} is the port of {used.what}; choose another, e.g. 8000 or 8001"
    if port in RAY_WORKER_PORTS:
        return (
            f"{port} lies in {RAY_WORKER_PORTS[0]} to {RAY_WORKER_PORTS[-1]}, from which Ray draws "
            "ports for workers; choose one outside"
        )
    return None

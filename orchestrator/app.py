"""The Serve application of a deployment: a gateway before its replicas."""

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from overstory.orchestrator.gateway import LAST_ANSWERS_S, Gateway
from overstory.orchestrator.replica import Replica
from overstory.orchestrator.replica_board import DRAIN_S
from overstory.orchestrator.replica_setup import bundles
from overstory.orchestrator.routing import ROUTER
from overstory.orchestrator.spec import DeploymentSpec

_UNBOUNDED = 1_000_000
"""Requests that Serve lets through to one process: the gateway's own admission is the limit.
Serve's default is 5."""

_ONE = 0.01
"""`rolling_update_percentage` by which Serve replaces one replica at a time (it takes at least one;
its percentage is a fraction)."""

_ATTEMPT_S = 0.001

_GATEWAY_VERSION = "gateway"
"""Always the same: Serve draws a new one for each hand-over, and would end the gateway that holds
the clients' connections whenever replicas are to be replaced."""

_QUIET = LoggingConfig(enable_access_log=False)


def build_app(
    spec: DeploymentSpec,
    nodes_per_replica: int = 1,
    version: str | None = None,
    surge: bool = False,
    attempt: int = 0,
    proxied: bool = False,
) -> Application:
    """What `serve.run` deploys.

    Args:
        spec: the deployment.
        nodes_per_replica: 1 keeps a replica on one node; more cuts it into equal parts, one per
            node.
        version: of the replicas; another one than before replaces each of them. Unset: a new one.
        surge: replace a replica only once its successor runs, beside it, instead of ending it
            first.
        attempt: another one than before, with the version that a rolling update has stopped at,
            has Serve go on with it.
        proxied: clients come by Serve's proxies, not to the gateway's own port.
    """
    replicas = replica_deployment(Replica, spec, nodes_per_replica, version, surge, attempt)
    return with_gateway(spec, replicas.bind(spec, nodes_per_replica), proxied)


def replica_deployment(
    replica: type,
    spec: DeploymentSpec,
    nodes_per_replica: int = 1,
    version: str | None = None,
    surge: bool = False,
    attempt: int = 0,
) -> Deployment:
    """A class with the methods of `Replica` under Serve's settings of a replica; the rest is as for
    `build_app`."""
    deployment = serve.deployment(
        replica,
        name="Replica",
        num_replicas=spec.replicas,
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=bundles(spec, nodes_per_replica),
        placement_group_strategy="STRICT_PACK" if nodes_per_replica == 1 else "STRICT_SPREAD",
        max_ongoing_requests=_UNBOUNDED,
        health_check_period_s=2,
        health_check_timeout_s=30,
        # By the attempt, for Serve forgets a stopped update only for settings that differ; these
        # it changes without a word to the replicas.
        graceful_shutdown_timeout_s=DRAIN_S + 10 + attempt * _ATTEMPT_S,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"routing": spec.gateway.routing},
        ),
        max_constructor_retry_count=1,
        rolling_update_percentage=_ONE,
        max_surge_percent=1 if surge else 0,  # Serve rounds up: one replica
        logging_config=_QUIET,
    )
    return deployment.options(version=version, _internal=True)


def with_gateway(spec: DeploymentSpec, replicas: Application, proxied: bool = False) -> Application:
    """A gateway before any replicas that have `generate` and `limits`; `proxied` as for
    `build_app`."""
    gateway = serve.deployment(
        serve.ingress()(Gateway),
        name="Gateway",
        num_replicas=1,
        # Where clients expect the endpoint. The resource is Ray's own; the head node alone has 1.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        max_ongoing_requests=_UNBOUNDED,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=LAST_ANSWERS_S + 4,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=_QUIET,
    )
    pinned = gateway.options(version=_GATEWAY_VERSION, _internal=True)
    return pinned.bind(spec, replicas, proxied)

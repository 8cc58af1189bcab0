"""Deployments that the endpoint tests share: one Serve, one application per kind.

`conftest` makes the fixtures known: imported into two test modules, each would start its own.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import scripted_replica
from leftovers import wait_until
from ray import serve

from overstory.orchestrator.app import build_app, replica_deployment, with_gateway
from overstory.orchestrator.local_ray import free_port
from overstory.orchestrator.spec import DeploymentSpec

REAL_START_S = 400.0


@dataclass(frozen=True)
class Endpoint:
    """A served application; `replica` and `gateway` are handles to call its parts directly."""

    url: str
    spec: DeploymentSpec
    replica: Any
    gateway: Any

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        body = {"model": self.spec.served_model_name, **fields}
        return httpx.post(self.url + path, json=body, timeout=60)

    def stats(self) -> dict[str, Any]:
        return self.replica.stats.remote().result(timeout_s=30)

    def snapshot(self) -> dict[str, Any]:
        return self.gateway.snapshot.remote().result(timeout_s=30)

    def idle(self) -> bool:
        """No sequence in replica, scheduler or gateway, and no slot held."""
        gateway, replica = self.snapshot(), self.stats()
        load = replica.get("load", {})  # a scripted replica has no scheduler
        held = (gateway["running"], gateway["sequences"], replica["running"])
        return not any((*held, load.get("running"), load.get("waiting")))


def ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def serve_here(ray_here: str) -> Iterator[int]:
    """Serve on the tests' Ray; the port of its proxy, for the one application that is `proxied`."""
    ray.cloudpickle.register_pickle_by_value(scripted_replica)
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()


def _serve(
    app: Any, spec: DeploymentSpec, start_s: float, proxy_port: int | None = None
) -> Endpoint:
    route = None if proxy_port is None else f"/{spec.name}"
    serve.run_many(
        [serve.RunTarget(app, name=spec.name, route_prefix=route, external_scaler_enabled=True)]
    )
    url = spec.gateway.url if route is None else f"http://127.0.0.1:{proxy_port}{route}"
    wait_until(lambda: ready(url), start_s, "the endpoint is ready")
    replica, gateway = (
        serve.get_deployment_handle(name, spec.name) for name in ("Replica", "Gateway")
    )
    return Endpoint(url, spec, replica, gateway)


@pytest.fixture(scope="session")
def scripted(serve_here: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """The endpoint before a `ScriptedReplica`: up in seconds, no engine."""
    yield from _scripted("scripted", tmp_path_factory.mktemp("byte-model"), None)


@pytest.fixture
def proxied(serve_here: int, tmp_path: Path) -> Iterator[Endpoint]:
    """The same behind Serve's proxy."""
    yield from _scripted("proxied", tmp_path, serve_here)


@pytest.fixture
def hasty(serve_here: int, tmp_path: Path) -> Iterator[Endpoint]:
    """The same with little time for a request: `scripted` has as much as a busy machine takes."""
    yield from _scripted("hasty", tmp_path, None, request_timeout_s=2)


def _scripted(
    name: str, model: Path, proxy_port: int | None, request_timeout_s: float = 30
) -> Iterator[Endpoint]:
    scripted_replica.write_byte_model(model)
    spec = DeploymentSpec(
        name=name,
        model=str(model),
        served_model_name="scripted",
        tree={"budget": 0},
        engine={"context_length": scripted_replica.CONTEXT_TOKENS},
        gateway={
            "port": free_port(),
            "max_concurrent_requests": 8,
            "max_queued_requests": 64,
            "request_timeout_s": request_timeout_s,
            "max_resumes": 1,
        },
    )
    replicas = replica_deployment(scripted_replica.ScriptedReplica, spec).options(
        placement_group_bundles=[{"CPU": 0.01}]
    )
    app = with_gateway(spec, replicas.bind(spec), proxied=proxy_port is not None)
    yield _serve(app, spec, 60, proxy_port)
    serve.delete(spec.name)


def pair_paths() -> tuple[str, str]:
    """Target and drafter of tests with the real engine, as in `tests/engine`."""
    root = os.environ.get("OVERSTORY_TEST_PAIR")
    if root:
        return str(Path(root) / "target"), str(Path(root) / "drafter")
    return "overstory-tiny", "overstory-tiny-drafter"


@pytest.fixture(scope="session")
def real(serve_here: int) -> Iterator[Endpoint]:
    """The endpoint before the real engine: one rank, trees of 15 nodes."""
    target, drafter = pair_paths()
    spec = DeploymentSpec(
        name="real",
        model=target,
        drafter=drafter,
        served_model_name="tiny",
        tree={"budget": 15},
        engine={"tp_size": 1, "context_length": 1024},
        gateway={
            "port": free_port(),
            "max_concurrent_requests": 4,
            "request_timeout_s": 60,
            "tool_call_parser": "kimi_k2",
        },
    )
    yield _serve(build_app(spec), spec, REAL_START_S)
    serve.delete(spec.name)

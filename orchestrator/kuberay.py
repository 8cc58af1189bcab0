"""A RayService manifest (KubeRay, `ray.io/v1`) from a deployment. Pure.

One pod for each bundle of the plan: it holds that node's ranks. The head pod holds Ray's GCS and no
rank.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from overstory.orchestrator.declared_app import IMPORT_PATH, args_of
from overstory.orchestrator.inventory import NodeInventory
from overstory.orchestrator.local_ray import NICENESS
from overstory.orchestrator.memory import FRONT_HALF_BYTES, GIB, HOST_BYTES_OF_GPU_RANK
from overstory.orchestrator.model_facts import PlanError
from overstory.orchestrator.plan import Plan, make_plan
from overstory.orchestrator.spec import DeploymentSpec

API_VERSION = "ray.io/v1"
RAY_VERSION = "2.60.0"
_HEAD = {"cpu": "4", "memory": "16Gi"}
_SPARE_CPUS = 2
_OBJECT_STORE_BYTES = 200_000_000
_SHM = "16Gi"
_PLENTY = 2.0**60  # bytes: what a pod asks for comes out of the plan, not into it


@dataclass(frozen=True)
class PodSettings:
    """What the deployment file does not say.

    Attributes:
        image: container image with Overstory installed, the same for all pods.
        gpus: of a node: a replica of more ranks is cut over several pods.
        gpu_memory: bytes of one GPU, 0 if unknown (then what must fit it is not checked).
        models_claim: name of a PersistentVolumeClaim with the models; None mounts the node's own
            folder.
        namespace: of the RayService; None leaves it to `kubectl`.
        node_selector: labels of the nodes that pods with ranks may run on.
    """

    image: str
    gpus: int = 8
    gpu_memory: float = 0.0
    models_claim: str | None = None
    namespace: str | None = None
    node_selector: Mapping[str, str] | None = None


def node_labels(entries: Iterable[str]) -> dict[str, str]:
    """`LABEL=VALUE` entries as a node selector.

    Raises:
        PlanError: an entry without a label or a `=`.
    """
    labels = {}
    for entry in entries:
        label, equals, value = entry.partition("=")
        if not equals or not label:
            raise PlanError(f"--select: got {entry!r}, wanted LABEL=VALUE")
        labels[label] = value
    return labels


def _plan(spec: DeploymentSpec, settings: PodSettings) -> Plan:
    """The plan on as many equal pods as it needs.

    Raises:
        PlanError: it cannot run there, or its ranks do not fall into equal pods.
    """
    on_gpu = bool(spec.resources.gpus)
    parts = ceil(spec.tp_size * spec.resources.gpus / settings.gpus) if on_gpu else 1
    if spec.tp_size % parts:
        raise PlanError(
            f"engine.tp_size: {spec.tp_size} ranks do not fall into {parts} equal pods of "
            f"{settings.gpus} GPUs; use a multiple of {settings.gpus}"
        )
    ranks = spec.tp_size // parts
    pods = [
        NodeInventory(
            name=f"pod-{number}",
            cpus=spec.resources.cpus_per_rank * ranks,
            gpus=spec.resources.gpus * ranks,
            memory=_PLENTY,
            gpu_memory=settings.gpu_memory,
        )
        for number in range(spec.replicas * parts)
    ]
    return make_plan(spec, pods, published=True)


def _folders(spec: DeploymentSpec) -> list[str]:
    """Host folders that models lie in; built-in ones come with the image."""
    paths = [path for path in (spec.model, spec.drafter) if path and path.startswith("/")]
    return sorted({str(Path(path).parent) for path in paths})


def _volumes(spec: DeploymentSpec, settings: PodSettings) -> tuple[list[Any], list[Any]]:
    """Volumes and their mounts: shared memory for NCCL and ZMQ, the models."""
    volumes: list[Any] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHM}}]
    mounts: list[Any] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, folder in enumerate(_folders(spec)):
        name = f"models-{number}"
        source = (
            {"persistentVolumeClaim": {"claimName": settings.models_claim, "readOnly": True}}
            if settings.models_claim
            else {"hostPath": {"path": folder, "type": "Directory"}}
        )
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": folder, "readOnly": True})
    return volumes, mounts


def _pod(
    name: str, spec: DeploymentSpec, settings: PodSettings, limits: dict[str, str], selected: bool
) -> dict[str, Any]:
    volumes, mounts = _volumes(spec, settings)
    container: dict[str, Any] = {
        "name": name,
        "image": settings.image,
        "resources": {"limits": limits, "requests": dict(limits)},
        "volumeMounts": mounts,
        "env": [{"name": NICENESS, "value": "0"}],  # as `ray_head` sets it
    }
    ports = [(spec.gateway.port, "serve")]
    if name == "ray-head":
        ports += [(6379, "gcs"), (8265, "dashboard"), (10001, "client")]
    container["ports"] = [{"containerPort": number, "name": what} for number, what in ports]
    pod: dict[str, Any] = {"containers": [container], "volumes": volumes}
    if selected and settings.node_selector:
        pod["nodeSelector"] = dict(settings.node_selector)
    return {"spec": pod}


def _worker_limits(plan: Plan) -> dict[str, str]:
    bundle = plan.replicas[0].bundles[0]
    ranks = len(plan.replicas[0].shares[0].ranks)
    each = HOST_BYTES_OF_GPU_RANK if "GPU" in bundle else plan.memory.total
    memory = FRONT_HALF_BYTES + ranks * each + _OBJECT_STORE_BYTES + 2 * GIB
    limits = {
        "cpu": str(ceil(bundle["CPU"]) + _SPARE_CPUS),
        "memory": f"{ceil(memory / GIB)}Gi",
    }
    if "GPU" in bundle:
        limits["nvidia.com/gpu"] = str(ceil(bundle["GPU"]))
    return limits


def _serve_config(spec: DeploymentSpec, plan: Plan) -> str:
    """`serveConfigV2`: a YAML document in a string, as the CRD wants it."""
    config = {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": "0.0.0.0",
            "port": spec.gateway.port,
            "request_timeout_s": spec.gateway.request_timeout_s + 30,
            "keep_alive_timeout_s": 75,
        },
        "applications": [
            {
                "name": spec.name,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "external_scaler_enabled": True,  # the controller drops what it gives up
                "args": args_of(spec, plan.nodes_per_replica),
            }
        ],
    }
    return yaml.safe_dump(config, sort_keys=False)


def ray_service(spec: DeploymentSpec, settings: PodSettings) -> dict[str, Any]:
    """The manifest as plain data.

    Raises:
        PlanError: the deployment cannot run in such pods; one line for each fault.
    """
    if not settings.image.strip():
        raise PlanError("--image: got none, wanted a container image with Overstory in it")
    plan = _plan(spec, settings)
    pods = sum(len(replica.shares) for replica in plan.replicas)
    start = {"object-store-memory": str(_OBJECT_STORE_BYTES), "metrics-export-port": "8080"}
    labels = {"app.kubernetes.io/name": "overstory"}
    metadata: dict[str, Any] = {"name": spec.name, "labels": labels}
    if settings.namespace:
        metadata["namespace"] = settings.namespace
    bundle = plan.replicas[0].bundles[0]
    return {
        "apiVersion": API_VERSION,
        "kind": "RayService",
        "metadata": metadata,
        "spec": {
            "serveConfigV2": _serve_config(spec, plan),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **start},
                    "template": _pod("ray-head", spec, settings, dict(_HEAD), selected=False),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "ranks",
                        "replicas": pods,
                        "minReplicas": pods,
                        "maxReplicas": pods,
                        "rayStartParams": {"num-cpus": str(ceil(bundle["CPU"])), **start},
                        "template": _pod(
                            "ray-worker", spec, settings, _worker_limits(plan), selected=True
                        ),
                    }
                ],
            },
        },
    }


class _Dumper(yaml.SafeDumper):
    """Strings of several lines as blocks: people read `serveConfigV2`."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def render_manifest(manifest: Mapping[str, Any]) -> str:
    """As YAML for `kubectl apply -f -`."""
    return yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False)

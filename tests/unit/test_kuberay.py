"""The RayService manifest against the fields of KubeRay's CRD, and against the plan."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from overstory.orchestrator.cli import app
from overstory.orchestrator.declared_app import IMPORT_PATH
from overstory.orchestrator.gpus import RTX_PRO_6000
from overstory.orchestrator.kuberay import PodSettings, ray_service, render_manifest
from overstory.orchestrator.model_facts import PlanError
from overstory.orchestrator.spec import DeploymentSpec, load_spec, parse_spec

CLUSTERS = Path(__file__).parents[2] / "clusters"
DEPLOYMENTS = sorted(CLUSTERS.glob("*/deployment*.yaml"))
SETTINGS = PodSettings(image="registry.example/overstory:0.1", gpu_memory=RTX_PRO_6000.memory)

# Fields of ray.io/v1 as KubeRay's Go types declare them (ray-operator/apis/ray/v1, at 0074129 and
# 026f143): name -> whether it must be there, and its type.
SERVICE = {"serveConfigV2": (False, str), "rayClusterConfig": (False, dict)}
CLUSTER = {
    "headGroupSpec": (True, dict),
    "workerGroupSpecs": (False, list),
    "rayVersion": (False, str),
}
HEAD = {"rayStartParams": (True, dict), "template": (True, dict)}
WORKER = {
    **HEAD,
    "groupName": (True, str),
    "replicas": (False, int),
    "minReplicas": (True, int),
    "maxReplicas": (True, int),
}
CONTAINER = {
    "name": (True, str),
    "image": (True, str),
    "ports": (False, list),
    "env": (False, list),
    "resources": (False, dict),
    "volumeMounts": (False, list),
}


def check(row: dict[str, Any], shape: dict[str, tuple[bool, type]]) -> None:
    assert set(row) <= set(shape), "unknown fields"
    for name, (required, kind) in shape.items():
        assert name in row or not required, f"{name} is missing"
        assert name not in row or type(row[name]) is kind, name


def check_pod(template: dict[str, Any]) -> None:
    pod = template["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        check(container, CONTAINER)
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        quantities = container["resources"]
        assert quantities["limits"] == quantities["requests"]
        assert all(type(value) is str for value in quantities["limits"].values())
        names = [port["name"] for port in container["ports"]]
        assert len(set(names)) == len(names)
        assert all(len(name) <= 15 for name in names)


def checked(spec: DeploymentSpec, settings: PodSettings = SETTINGS) -> dict[str, Any]:
    """The manifest as `kubectl` reads it, its shape checked."""
    manifest = yaml.safe_load(render_manifest(ray_service(spec, settings)))
    assert manifest["apiVersion"] == "ray.io/v1"
    assert manifest["kind"] == "RayService"
    check(manifest["spec"], SERVICE)
    cluster = manifest["spec"]["rayClusterConfig"]
    check(cluster, CLUSTER)
    check(cluster["headGroupSpec"], HEAD)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        params = group["rayStartParams"]
        assert all(type(value) is str for value in params.values()), "the CRD wants strings"
        check_pod(group["template"])
    for group in cluster["workerGroupSpecs"]:
        check(group, WORKER)
    return manifest


def worker(manifest: dict[str, Any]) -> dict[str, Any]:
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return group


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_deployment_has_a_manifest(path: Path) -> None:
    spec = load_spec(path)
    gpus = PodSettings(image="i", gpus=8)
    config = yaml.safe_load(checked(spec, gpus)["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    assert application["import_path"] == IMPORT_PATH
    assert parse_spec(application["args"]["deployment"]) == spec
    assert config["http_options"]["port"] == spec.gateway.port


def test_one_pod_for_each_replica_that_fits_a_node() -> None:
    group = worker(checked(load_spec(CLUSTERS / "rtx-pro-6000-2x8" / "deployment.yaml")))
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert group["rayStartParams"]["num-cpus"] == "32"


def test_a_replica_over_two_nodes_is_two_pods() -> None:
    manifest = checked(load_spec(CLUSTERS / "rtx-pro-6000-2x8" / "deployment-tp16.yaml"))
    assert worker(manifest)["replicas"] == 2
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    assert config["applications"][0]["args"]["nodes_per_replica"] == 2


def test_models_come_from_the_node_or_from_a_claim() -> None:
    spec = load_spec(CLUSTERS / "rtx-pro-6000-8x" / "deployment.yaml")
    (_, from_node) = worker(checked(spec))["template"]["spec"]["volumes"]
    assert from_node["hostPath"] == {"path": "/models", "type": "Directory"}
    claim = PodSettings(image="i", models_claim="models")
    (_, from_claim) = worker(checked(spec, claim))["template"]["spec"]["volumes"]
    assert from_claim["persistentVolumeClaim"]["claimName"] == "models"


def test_built_in_models_need_no_volume() -> None:
    spec = load_spec(CLUSTERS / "local" / "deployment.yaml")
    group = worker(checked(spec))
    assert [volume["name"] for volume in group["template"]["spec"]["volumes"]] == ["shm"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert "nvidia.com/gpu" not in limits


def test_the_head_holds_no_rank() -> None:
    manifest = checked(load_spec(CLUSTERS / "rtx-pro-6000-8x" / "deployment.yaml"))
    head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    (container,) = head["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_what_cannot_fit_the_pods_is_refused() -> None:
    spec = load_spec(CLUSTERS / "rtx-pro-6000-8x" / "deployment.yaml")
    with pytest.raises(PlanError, match=r"engine\.tp_size: a rank's weights"):
        ray_service(spec, PodSettings(image="i", gpu_memory=40 * 2**30))
    with pytest.raises(PlanError, match="do not fall into 3 equal pods of 3 GPUs"):
        ray_service(spec, PodSettings(image="i", gpus=3))
    with pytest.raises(PlanError, match="--image: got none"):
        ray_service(spec, PodSettings(image=" "))


def test_command_prints_a_manifest() -> None:
    file = str(CLUSTERS / "rtx-pro-6000-8x" / "deployment.yaml")
    arguments = ["manifest", file, "--image", "i", "--select", "gpu=rtx", "--namespace", "llm"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    manifest = yaml.safe_load(done.stdout)
    assert manifest["metadata"]["namespace"] == "llm"
    assert worker(manifest)["template"]["spec"]["nodeSelector"] == {"gpu": "rtx"}
    assert "\n  serveConfigV2: |\n" in done.stdout
    wrong = CliRunner().invoke(app, ["manifest", file, "--image", "i", "--select", "gpu"])
    assert wrong.exit_code == 1
    assert "wanted LABEL=VALUE" in wrong.output

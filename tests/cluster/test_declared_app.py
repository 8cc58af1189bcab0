"""The application as a Serve config names it: what KubeRay hands to Serve, built on a real Ray."""

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from overstory.orchestrator.controller_actor import end_controller, find_controller
from overstory.orchestrator.declared_app import build
from overstory.orchestrator.kuberay import PodSettings, ray_service
from overstory.orchestrator.spec import load_spec

CLUSTERS = Path(__file__).parents[2] / "clusters"

pytestmark = pytest.mark.full


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*/deployment*.yaml")), ids=str)
def test_serve_takes_the_config_of_a_manifest(path: Path) -> None:
    manifest = ray_service(load_spec(path), PodSettings(image="i"))
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.name == load_spec(path).name
    assert application.args == config["applications"][0]["args"]


def test_building_starts_the_controller_and_gives_the_application() -> None:
    spec = load_spec(CLUSTERS / "local" / "deployment.yaml")
    manifest = ray_service(spec, PodSettings(image="i"))
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    try:
        application = build(config["applications"][0]["args"])
        assert find_controller(spec.name) is not None
        assert application._bound_deployment.name == "Gateway"
    finally:
        end_controller(spec.name)

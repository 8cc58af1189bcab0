"""Every file below clusters/ loads, is planned by the command it gives, agrees with the rest."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from overstory.orchestrator.cli import app
from overstory.orchestrator.dashboards import files
from overstory.orchestrator.ports import RAY_PORTS, RAY_WORKER_PORTS
from overstory.orchestrator.spec import load_spec

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "clusters"
KINDS = sorted(folder.name for folder in CLUSTERS.iterdir() if (folder / "ray.yaml").exists())
DEPLOYMENTS = sorted(CLUSTERS.glob("*/deployment*.yaml"))
RAY_FILES = sorted(CLUSTERS.glob("*/ray.yaml"))
RUN = CliRunner()


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def commands(path: Path, command: str) -> list[list[str]]:
    """Arguments of each `overstory COMMAND` that a file's comments give."""
    found = re.findall(rf"^#\s+overstory {command} (.*)$", path.read_text(), flags=re.MULTILINE)
    return [shlex.split(arguments) for arguments in found]


def starts(document: dict[str, Any], who: str) -> str:
    """The line that starts Ray on a head or on workers."""
    (line,) = [c for c in document[f"{who}_start_ray_commands"] if "ray_head start" in c]
    return str(line)


def option(line: str, name: str) -> str:
    found = re.search(rf"--{name}=(\S+)", line)
    assert found, f"{name} in {line}"
    return found.group(1)


def test_each_kind_has_both_files() -> None:
    wanted = {"local", "h200", "rtx-pro-6000-8x", "rtx-pro-6000-2x8", "on-prem-template"}
    assert wanted <= set(KINDS)
    assert all((CLUSTERS / kind / "deployment.yaml").exists() for kind in KINDS)


def test_no_file_is_left_out() -> None:
    monitoring = {*CLUSTERS.glob("monitoring/*.json"), CLUSTERS / "monitoring" / "alerts.yaml"}
    shipped = {path for path in CLUSTERS.rglob("*") if path.is_file() and path.suffix[:3] != ".py"}
    assert shipped == {*DEPLOYMENTS, *RAY_FILES, *monitoring}
    assert monitoring == {CLUSTERS / "monitoring" / name for name in files()}  # See test_metrics.


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=name_of)
def test_deployment_is_planned_by_the_command_it_gives(path: Path) -> None:
    given = commands(path, "plan") or [[str(path.relative_to(ROOT)), "--cpus", "8"]]
    for file, *options in given:
        done = RUN.invoke(app, ["plan", str(ROOT / file), *options, "--json"])
        assert done.exit_code == 0, done.output
        made = json.loads(done.stdout)
        spec = load_spec(path)
        assert made["deployment"]["name"] == spec.name
        assert len(made["replicas"]) == spec.replicas
        missing = [line for line in made["warnings"] if "mem_fraction_static" in line]
        assert missing == [], "graphs and buffers fit"
        context = spec.engine.get("context_length")
        if spec.resources.device == "cuda":
            assert made["longest_context"][0] == {"batch": 1, "tokens": context}


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=name_of)
def test_deployment_says_how_to_deploy_itself(path: Path) -> None:
    assert [str(path.relative_to(ROOT))] in commands(path, "deploy")


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=name_of)
def test_captured_batches_reach_what_may_run(path: Path) -> None:
    engine = load_spec(path).engine
    if tiers := engine.get("cuda_graph_bs_decode"):
        assert max(tiers) == engine["max_running_requests"]


@pytest.mark.parametrize("path", RAY_FILES, ids=name_of)
def test_ray_takes_the_cluster_file(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.submodule_search_locations
    schema = Path(found.submodule_search_locations[0]) / "autoscaler" / "ray-schema.json"
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(schema.read_text()))


@pytest.mark.parametrize("path", RAY_FILES, ids=name_of)
def test_every_node_asks_for_the_token(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert document["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    for who in ("head", "worker"):
        assert "RAY_AUTH_MODE=token " in starts(document, who)
        assert document[f"{who}_start_ray_commands"][0] == "ray stop"
        # What `ray up` looks for, or it warns that nothing will start.
        assert starts(document, who).startswith(": ray start; ")
    assert "autoscaling-config" in starts(document, "head")


@pytest.mark.parametrize("path", RAY_FILES, ids=name_of)
def test_ports_are_those_that_a_plan_lists(path: Path) -> None:
    if path.parent.name == "local":
        pytest.skip("one machine: Ray draws them")
    document = yaml.safe_load(path.read_text())
    listed = {port.what: port.number for port in RAY_PORTS}
    assert option(starts(document, "head"), "port") == str(listed["Ray's GCS"])
    for who in ("head", "worker"):
        line = starts(document, who)
        metrics = listed["metrics of Ray and Overstory"]
        assert option(line, "metrics-export-port") == str(metrics)
        for name, what in (
            ("dashboard-agent-listen-port", "Ray's dashboard agent"),
            ("dashboard-agent-grpc-port", "Ray's dashboard agent, gRPC"),
            ("runtime-env-agent-port", "Ray's runtime environments"),
        ):
            assert option(line, name) == str(listed[what])
    text = path.read_text()
    assert all(str(port.number) in text for port in RAY_PORTS)
    assert f"{RAY_WORKER_PORTS[0]} to {RAY_WORKER_PORTS[-1]} workers" in text


@pytest.mark.parametrize("path", RAY_FILES, ids=name_of)
def test_several_machines_are_brought_up_by_the_autoscaler_that_starts_them(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    up = [line for line in path.read_text().splitlines() if "ray up -y clusters/" in line]
    assert up
    if document["provider"]["worker_ips"]:
        assert all("RAY_UP_enable_autoscaler_v2=0" in line for line in up)


def test_what_is_to_be_changed_is_marked() -> None:
    folder = CLUSTERS / "on-prem-template"
    for file in ("ray.yaml", "deployment.yaml"):
        assert "CHANGE" in (folder / file).read_text()

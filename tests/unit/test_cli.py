"""The command line: light, quick, and its refusals come without a traceback."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overstory.orchestrator.cli import app
from overstory.orchestrator.state import DeploymentRecord, changing_state

RUN = CliRunner()
LOCAL = str(Path(__file__).parents[2] / "clusters" / "local" / "deployment.yaml")
HEAVY = ("ray", "torch", "sglang", "transformers", "numpy", "fastapi", "pydantic", "yaml", "httpx")
COMMANDS = (
    *("deploy", "status", "generate", "scale", "bench", "defrag", "down", "plan"),
    *("manifest", "capacity", "doctor", "report", "policy"),
)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSTORY_STATE", str(tmp_path / "state.json"))


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, overstory.orchestrator.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(HEAVY) & set(done.stdout.split()) == set()


def test_reading_and_planning_a_deployment_imports_nothing_heavy() -> None:
    code = (
        "import sys, overstory.orchestrator.plan_text, overstory.orchestrator.spec\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"ray", "torch", "sglang", "transformers", "numpy", "fastapi"}
    assert heavy & set(done.stdout.split()) == set()


def test_help_answers_within_a_second() -> None:
    command = [sys.executable, "-m", "overstory.orchestrator.cli", "--help"]

    def once() -> float:
        begun = time.monotonic()
        subprocess.run(command, check=True, capture_output=True)
        return time.monotonic() - begun

    # The best of five: other work on the machine must not fail it.
    assert min(once() for _ in range(5)) < 1.0


def test_help_names_every_command() -> None:
    text = RUN.invoke(app, ["--help"]).output
    assert [command for command in COMMANDS if f"\n  {command} " not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_explained(command: str) -> None:
    done = RUN.invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    options = [line.strip() for line in done.output.splitlines() if line.startswith("  --")]
    assert options
    assert [option for option in options if "  " not in option] == []


def test_dry_run_is_the_plan() -> None:
    arguments = [LOCAL, "--set", "resources.cpus_per_rank=0.1"]
    dry = RUN.invoke(app, ["deploy", *arguments, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert dry.output == RUN.invoke(app, ["plan", *arguments]).output
    assert "Ranks      1 x 2 on cpu" in dry.output


def test_plan_for_a_cluster_that_is_not_here() -> None:
    nodes = ["--nodes", "2", "--cpus", "1", "--memory-gib", "64"]
    done = RUN.invoke(app, ["plan", LOCAL, *nodes])
    assert done.exit_code == 0, done.output
    assert "bundle 0  node-0: rank 0" in done.output
    assert "bundle 1  node-1: rank 1" in done.output


def test_a_plan_that_does_not_fit_this_machine_says_how_to_plan_for_another() -> None:
    plan = ["plan", "clusters/rtx-pro-6000-8x/deployment.yaml"]
    more = ["--set", "resources.cpus_per_rank=512"]
    here = RUN.invoke(app, [*plan, *more])
    assert (here.exit_code, here.output.count("the nodes have")) == (1, 1)
    told = here.output.split("`")[1].removeprefix("overstory plan FILE ").split()
    there = RUN.invoke(app, [*plan, *told])
    assert there.exit_code == 0, there.output
    assert "node-0: rank 0, 1, 2, 3, 4, 5, 6, 7" in there.output
    neither = RUN.invoke(app, [*plan, *told, *more])
    assert "the nodes have" in neither.output
    assert "that is for this machine" not in neither.output


@pytest.mark.parametrize("command", ["plan", "deploy"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tree.budget=64", "error: tree.budget: got 64, wanted less than or equal to 63"),
        ("engine.tpsize=2", "did you mean `tp_size`?"),
        ("model=/nowhere", "error: model: no folder '/nowhere'"),
        ("drafter=null", "error: drafter is missing but tree.budget is 31"),
        ("engine.tp_size=3", "3 does not divide the attention heads 8"),
        ("engine.context_length=999999", "the model was made for at most 8192 positions"),
    ],
)
def test_bad_deployments_end_before_anything_starts(
    command: str, change: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "overstory.orchestrator.deploy", None)
    done = RUN.invoke(app, [command, LOCAL, "--set", change])
    assert done.exit_code == 1
    assert said in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("command", ["generate x", "status", "bench", "scale 2"])
def test_commands_without_a_deployment_say_what_to_do(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None makes an import of it fail: the refusal comes without Ray.
    monkeypatch.setitem(sys.modules, "ray", None)
    done = RUN.invoke(app, command.split())
    assert done.exit_code == 1
    assert "run `overstory deploy FILE`" in done.output


def test_endpoint_that_is_not_there() -> None:
    done = RUN.invoke(app, ["generate", "x", "--endpoint", "http://127.0.0.1:9"])
    assert done.exit_code == 1
    assert "does not answer" in done.output


def test_more_ranks_than_this_machine_has() -> None:
    done = RUN.invoke(app, ["plan", LOCAL, "--set", "resources.cpus_per_rank=1000"])
    assert done.exit_code == 1
    assert "need 2000 CPUs" in done.output


def test_unknown_option_is_refused() -> None:
    assert RUN.invoke(app, ["plan", LOCAL, "--gpu"]).exit_code == 2


def test_console_script_runs() -> None:
    script = Path(sys.executable).with_name("overstory")
    done = subprocess.run(
        [script, "plan", "/nowhere.yaml"], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 1
    assert "cannot be read" in done.stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("cap", "capacity"),
        ("bench --profile c", "churn"),
        ("plan f --gpu rtx", "rtx-pro-6000"),
        ("capacity f --gpu h", "h200"),
        ("policy au", "auto"),
        ("status --name ti", "tiny"),
    ],
)
def test_a_shell_completes(words: str, completed: str, tmp_path: Path) -> None:
    with changing_state() as state:
        state.deployments["tiny"] = DeploymentRecord("tiny", "e", "r", {})
    completing = {
        "_OVERSTORY_COMPLETE": "complete_bash",
        "COMP_WORDS": f"overstory {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    done = RUN.invoke(app, [], env=completing, prog_name="overstory")
    assert done.output.split() == [completed], done.output

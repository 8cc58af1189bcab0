"""What the command line is given: numbers and files are checked before anything is done."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from overstory.orchestrator import deploy
from overstory.orchestrator.bench import run_bench
from overstory.orchestrator.bench_rows import (
    Answer,
    BenchSettings,
    Sample,
    counted,
    default_modes,
)
from overstory.orchestrator.cli import app
from overstory.orchestrator.cli_support import told
from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.output_file import write_output
from overstory.orchestrator.state import (
    DeploymentRecord,
    LocalRayRecord,
    changing_state,
    read_state,
)

RUN = CliRunner()


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSTORY_STATE", str(tmp_path / "state.json"))


@pytest.fixture
def _deployed() -> None:
    record = DeploymentRecord("tiny", "http://127.0.0.1:9", "127.0.0.1:9", {})
    with changing_state() as state:
        state.deployments["tiny"] = record


def _commands(
    group: Any = None, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if getattr(command, "commands", None):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _options(*metavars: str) -> list[tuple[tuple[str, ...], str]]:
    return [
        (path, one.opts[0])
        for path, command in _commands()
        for one in command.params
        if one.param_type_name == "option" and one.metavar in metavars
    ]


def test_every_number_has_bounds() -> None:
    loose = {
        (path, one.name)
        for path, command in _commands()
        for one in command.params
        if one.type_descriptor.annotation in (int, float)
        and one.type_descriptor.parameter_info.parser is None
    }
    # `scale` refuses by itself; a seed may be any number.
    assert loose == {(("scale",), "replicas"), (("generate",), "seed")}
    assert len(_options("N", "NUMBER")) > 25


@pytest.mark.parametrize(
    ("path", "option", "given"),
    [
        *((*one, "-1") for one in _options("N")),
        *((*one, "nan") for one in _options("NUMBER")),
        (("plan",), "--gpus", "x"),
        (("plan",), "--memory-gib", "-1"),
        (("status",), "--every", "inf"),
    ],
)
def test_a_number_out_of_bounds_is_told(path: tuple[str, ...], option: str, given: str) -> None:
    done = RUN.invoke(app, [*path, option, given])
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '{option}': got '{given}', wanted a" in done.output


def test_a_kind_of_gpu_without_a_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = str(Path(__file__).parents[2] / "clusters" / "h200" / "deployment.yaml")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = RUN.invoke(app, ["plan", preset, "--gpu", "h200"])
    assert (done.exit_code, "error: --gpus: " in done.output) == (1, True), done.output


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("bench", "--json"),
        ("bench", "--csv"),
        ("bench", "--plot"),
        ("report", "--out"),
        ("key new me", "--file"),
    ],
)
@pytest.mark.parametrize(("place", "why"), [("nowhere/x", "there is no folder"), (".", "a folder")])
@pytest.mark.usefixtures("_deployed")
def test_a_file_that_cannot_be_written_is_told_first(
    command: str, option: str, place: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / place
    done = RUN.invoke(app, [*command.split(), option, str(path)])
    assert done.exit_code == 1
    assert done.output.startswith(f"error: {option}: {path} cannot be"), done.output
    assert why in done.output or place == "."


def test_a_full_disk_is_told() -> None:
    with pytest.raises(UserFault, match=r"--out: /dev/full cannot be written .No space left"):
        write_output("--out", Path("/dev/full"), "x")


def test_a_state_file_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OVERSTORY_STATE", str(tmp_path / "file" / "state.json"))
    with pytest.raises(UserFault, match="set OVERSTORY_STATE to a file of yours"):
        read_state()
    with pytest.raises(UserFault, match="set OVERSTORY_STATE"), changing_state():
        pass


def test_a_fault_of_ray_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    module = {"__module__": "ray.exceptions"}
    timeout = type("GetTimeoutError", (TimeoutError,), module)
    with pytest.raises(typer.Exit) as ended, told():
        raise timeout("Traceback of a remote task\nGet timed out")
    assert ended.value.exit_code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: Ray: GetTimeoutError: Get timed out\n  `overstory doctor`")
    with pytest.raises(ZeroDivisionError), told():  # Ours: its traceback is wanted.
        raise ZeroDivisionError


def test_down_ends_a_ray_that_a_killed_deploy_left(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LocalRayRecord("127.0.0.1:9", "/tmp/ours", "h", 7, 1)
    with changing_state() as state:
        state.local_ray = own
    ended: list[LocalRayRecord] = []
    monkeypatch.setattr(deploy.local_ray, "stop_local_ray", ended.append)
    done = RUN.invoke(app, ["down"])
    assert (done.exit_code, ended) == (0, [own])
    assert "local Ray in /tmp/ours: ended and removed" in done.output
    assert read_state().local_ray is None


def test_down_with_nothing_there_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for _ in range(2):
        done = RUN.invoke(app, ["down"])
        assert (done.exit_code, "nothing to take away" in done.output) == (0, True)
    assert RUN.invoke(app, ["down", "--name", "x"]).exit_code == 1


def test_keys_are_refused_like_everything_else(tmp_path: Path) -> None:
    file = str(tmp_path / "keys")
    assert RUN.invoke(app, ["key", "new", "me", "--file", file]).exit_code == 0
    for command, said in (
        (["new", "me"], "has a key me already; revoke it first"),
        (["revoke", "you"], "has no key you; `overstory key list"),
        (["new", "a b"], "a b"),
    ):
        done = RUN.invoke(app, ["key", *command, "--file", file])
        assert (done.exit_code, done.output[:7]) == (1, "error: ")
        assert said in done.output


@pytest.mark.parametrize(
    ("budget", "automatic", "modes"),
    [
        (0, False, "plain"),
        (31, False, "plain chain tree-15 tree-31"),
        (15, True, "plain chain tree-15 auto"),
        (63, True, "plain chain tree-15 tree-31 tree-63 auto"),
        (8, False, "plain chain tree-8"),
    ],
)
def test_a_benchmark_takes_what_the_deployment_was_started_for(
    budget: int, automatic: bool, modes: str
) -> None:
    assert " ".join(default_modes(budget, automatic, False)) == modes
    spined = modes.replace("tree", "spine")
    assert " ".join(default_modes(budget, automatic, True)) == spined


@pytest.mark.usefixtures("_deployed")
def test_modes_come_from_the_deployment_and_the_table_before_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from contextlib import nullcontext
    from types import SimpleNamespace

    from overstory.orchestrator import bench

    spec = {"tree": {"budget": 15, "policy": "auto", "spine_first": False}}
    record = SimpleNamespace(name="tiny", spec=spec)
    seen: list[BenchSettings] = []
    monkeypatch.setattr(bench, "connected", lambda _: nullcontext(record))
    sample = Sample("plain", 1, 0.0, 1.0, (Answer(0.1, 1),), counted([], [], "plain"))

    def measure(_: Any, settings: BenchSettings, __: Any, samples: list[Sample]) -> None:
        seen.append(settings)
        samples.append(sample)

    monkeypatch.setattr(bench, "measure", measure)
    asked = BenchSettings((), 1, 1, (1,), (0.0,), 1)
    with pytest.raises(UserFault, match="--csv: /dev/full cannot be written"):
        run_bench(None, asked, tmp_path / "b.json", Path("/dev/full"))
    assert seen[0].modes == ("plain", "chain", "tree-15", "auto")
    assert "tokens/s" in capsys.readouterr().out
    assert json.loads((tmp_path / "b.json").read_text())["settings"]["modes"][-1] == "auto"

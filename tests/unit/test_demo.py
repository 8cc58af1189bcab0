"""`make demo`: what it compares, which device it takes, and how it ends when it is told to."""

import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overstory.orchestrator import demo
from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.errors import UserFault

FILE = Path(__file__).parents[2] / "clusters/local/deployment.yaml"
ENDPOINT = "http://127.0.0.1:8000"


class _Stage:
    """Stands in for everything that would start or ask a deployment; notes what is measured."""

    def __init__(self) -> None:
        self.modes: list[tuple[str, ...]] = []
        self.generate_ends: BaseException | None = None

    def deploy(self, spec: Any, *_: Any) -> Any:
        return SimpleNamespace(name=spec.name, endpoint=ENDPOINT)

    def generate(self, *_: Any, **__: Any) -> None:
        if self.generate_ends is not None:
            raise self.generate_ends

    def measure(self, _: Any, settings: Any, __: Any, samples: list[Any]) -> None:
        self.modes.append(settings.modes)
        samples += settings.modes

    def summarise(self, modes: tuple[str, ...]) -> list[dict[str, Any]]:
        return [{"mode": mode, "tokens_per_forward": 2.0, "speedup": 1.5} for mode in modes]

    def connected(self, _: str) -> Any:
        return nullcontext()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> _Stage:
    stage = _Stage()
    for name in ("deploy", "generate", "measure", "summarise", "connected"):
        monkeypatch.setattr(demo, name, getattr(stage, name))
    monkeypatch.setattr(demo, "render_rows", str)
    monkeypatch.setattr(demo, "local_gpu_memory", list)
    return stage


@pytest.fixture
def terminated() -> Iterator[None]:
    """Leaves the process's handler of SIGTERM as it was."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("overrides", "policy"),
    [
        ((), "tree-31"),
        (("tree.budget=7",), "chain"),
        (("tree.budget=15", "tree.spine_first=true"), "spine-15"),
    ],
)
def test_the_policy_that_it_starts_with_is_compared(
    stage: _Stage, overrides: tuple[str, ...], policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.demo(FILE, "cpu", overrides)
    assert stage.modes == [("plain", policy)]
    assert f"With {policy} a forward" in capsys.readouterr().out


@pytest.mark.parametrize("overrides", [("tree.budget=0",), ("tree.budget=0", "drafter=null")])
def test_without_speculation_there_is_nothing_to_compare(
    stage: _Stage, overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    demo.demo(FILE, "cpu", overrides)
    assert stage.modes == []
    assert "Nothing to compare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wanted", "gpus", "device", "ranks"),
    [
        ("auto", [80e9], "cuda", 1),
        ("auto", [], "cpu", 2),
        ("cpu", [80e9], "cpu", 2),
        ("cuda", [80e9, 80e9], "cuda", 1),
    ],
)
def test_a_gpu_is_taken_where_there_is_one(
    stage: _Stage,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    gpus: list[float],
    device: str,
    ranks: int,
) -> None:
    deployed = []
    monkeypatch.setattr(demo, "local_gpu_memory", lambda: gpus)
    monkeypatch.setattr(
        demo, "deploy", lambda spec, *_: deployed.append(spec) or stage.deploy(spec)
    )
    demo.demo(FILE, wanted)
    assert [(spec.resources.device, spec.tp_size) for spec in deployed] == [(device, ranks)]
    backend = resolve_engine(deployed[0]).server_args["attention_backend"]
    assert backend == ("overstory" if device == "cuda" else "torch_native")


def test_a_gpu_that_is_not_there_is_an_error(stage: _Stage) -> None:
    with pytest.raises(UserFault, match="DEVICE=auto"):
        demo.demo(FILE, "cuda")


@pytest.mark.usefixtures("terminated")
@pytest.mark.parametrize("gpus", [[], [80e9]])
def test_settings_may_be_changed_for_one_run(
    stage: _Stage, monkeypatch: pytest.MonkeyPatch, gpus: list[float]
) -> None:
    deployed = []
    monkeypatch.setattr(demo, "local_gpu_memory", lambda: gpus)
    monkeypatch.setattr(
        demo, "deploy", lambda spec, *_: deployed.append(spec) or stage.deploy(spec)
    )
    changes = ["--set", "gateway.port=8080", "--set", "engine.max_running_requests=4"]
    monkeypatch.setattr(sys, "argv", ["demo", str(FILE), *changes])
    demo.main()
    (spec,) = deployed
    assert (spec.gateway.port, spec.engine["max_running_requests"]) == (8080, 4)


@pytest.mark.usefixtures("terminated")
def test_sigterm_during_the_deployment_ends_it_as_ctrl_c_does(
    stage: _Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deploy(*_: Any) -> Any:
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(demo, "deploy", deploy)
    monkeypatch.setattr(sys, "argv", ["demo", str(FILE)])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == "error: interrupted"


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(15)])
def test_an_interrupt_once_it_is_up_says_what_stays(stage: _Stage, end: BaseException) -> None:
    stage.generate_ends = end
    with pytest.raises(UserFault, match=f"stays up at {ENDPOINT}, `make down`"):
        demo.demo(FILE, "cpu")

"""A benchmark that is stopped before its end keeps what it measured."""

import csv
import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overstory.orchestrator import bench, client
from overstory.orchestrator.bench_load import Load
from overstory.orchestrator.bench_profiles import Asked
from overstory.orchestrator.bench_rows import BenchError, BenchSettings

SPEC = {"served_model_name": "m", "model": "overstory-tiny"}
SETTINGS = BenchSettings(("plain", "chain"), 2, 8, (1,), (0.0,), 2)


class _Broken:
    """In place of `client.stream_completion`: answers, until `good` are given; then `error`."""

    def __init__(self, good: int, error: BaseException) -> None:
        self._left = good
        self._error = error

    def stream(self, _: str, body: dict[str, Any]) -> Iterator[client.Event]:
        self._left -= 1
        if self._left < 0:
            raise self._error
        yield client.Event("x", None, {"completion_tokens": body["max_tokens"]})


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A deployment to measure without Ray; the policies it was given."""
    given: list[str] = []
    record = SimpleNamespace(name="d", endpoint="e", spec=SPEC)
    monkeypatch.setattr(bench, "connected", lambda _: nullcontext(record))
    monkeypatch.setattr(bench, "switch_policy", lambda _, policy: given.append(policy))
    monkeypatch.setattr(bench, "ask_controller", lambda *_: {"policy": "tree-31"})
    monkeypatch.setattr(bench, "_first_ranks", lambda _: [])
    return given


# A warm-up of 2 + 2 requests, then cells of 2.
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), BenchError("lost")])
def test_what_was_measured_is_shown_and_written(
    error: BaseException,
    policies: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(client, "stream_completion", _Broken(4 + 2 + 1, error).stream)
    files = [tmp_path / name for name in ("b.json", "b.csv", "b.svg")]
    with pytest.raises(type(error)):
        bench.run_bench(None, SETTINGS, *files)
    said = "stopped after 1 of 4 measurements: rows have fewer rounds or none"
    assert said in capsys.readouterr().out
    written = json.loads(files[0].read_text())
    assert [row["mode"] for row in written["rows"]] == ["plain"]
    assert written["stopped"] == said
    assert [row["mode"] for row in csv.DictReader(files[1].open())] == ["plain"]
    assert files[2].read_text().startswith("<svg")
    assert policies[-1] == "tree-31", "the policy that was in force is in force again"


@pytest.mark.usefixtures("policies")
def test_stopped_before_its_first_measurement_it_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "stream_completion", _Broken(3, KeyboardInterrupt()).stream)
    with pytest.raises(KeyboardInterrupt):
        bench.run_bench(None, SETTINGS, tmp_path / "b.json")
    assert (capsys.readouterr().out, list(tmp_path.iterdir())) == ("", [])


@pytest.mark.usefixtures("policies")
def test_a_whole_benchmark_says_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "stream_completion", _Broken(99, KeyboardInterrupt()).stream)
    bench.run_bench(None, SETTINGS, tmp_path / "b.json")
    assert "stopped" not in capsys.readouterr().out
    assert json.loads((tmp_path / "b.json").read_text())["stopped"] is None


def test_requests_under_way_and_those_to_come_break_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answers nothing any more, one never ends, one is due in an hour: none is waited for."""
    flowing = threading.Event()

    def stream(_: str, body: dict[str, Any]) -> Iterator[client.Event]:
        if body["seed"] == 0:
            assert flowing.wait(30)
            raise BenchError("lost")
        while True:
            yield client.Event("x")
            flowing.set()

    monkeypatch.setattr(client, "stream_completion", stream)
    record: Any = SimpleNamespace(endpoint="e", spec=SPEC)
    load = Load(record, [])
    asked = [Asked([1]), Asked([2]), Asked([3], at_s=3600.0)]
    done: list[BaseException] = []

    def run() -> None:
        try:
            load.run(8, 3, 0.0, asked, at_their_times=True)
        except BenchError as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert [str(error) for error in done] == ["lost"]

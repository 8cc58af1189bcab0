"""Which Ray is used, and what is remembered between commands."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from overstory.orchestrator.cluster import Cluster, ClusterError, find_cluster, reachable
from overstory.orchestrator.state import (
    DeploymentRecord,
    LocalRayRecord,
    StateError,
    changing_state,
    read_state,
    state_path,
)


@pytest.fixture
def listener() -> Iterator[str]:
    """Address of something that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent() -> str:
    """Address where nothing listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def own(address: str) -> LocalRayRecord:
    return LocalRayRecord(address, "/tmp/x", "host", 1, 2)


def record(name: str) -> DeploymentRecord:
    return DeploymentRecord(name, "http://h:1", "a:1", {"model": "m"})


def test_ray_address_comes_first(listener: str, tmp_path: Path) -> None:
    file = tmp_path / "ray_current_cluster"
    file.write_text(listener)
    found = find_cluster(own(listener), {"RAY_ADDRESS": listener}, file)
    assert found == Cluster(listener, "RAY_ADDRESS")
    client = find_cluster(None, {"RAY_ADDRESS": f"ray://{listener}"}, file)
    assert client == Cluster(f"ray://{listener}", "RAY_ADDRESS")


def test_dead_ray_address_is_an_error_not_a_fallback(silent: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"RAY_ADDRESS is .* but nothing answers there"):
        find_cluster(None, {"RAY_ADDRESS": silent}, tmp_path / "none")


def test_then_the_one_that_ray_start_left(listener: str, tmp_path: Path) -> None:
    file = tmp_path / "ray_current_cluster"
    file.write_text(listener + "\n")
    assert find_cluster(own(listener), {}, file) == Cluster(listener, "ray start")
    assert find_cluster(None, {"RAY_ADDRESS": "auto"}, file) == Cluster(listener, "ray start")


def test_what_a_dead_ray_left_counts_as_none(silent: str, listener: str, tmp_path: Path) -> None:
    file = tmp_path / "ray_current_cluster"
    file.write_text(silent)
    assert find_cluster(None, {}, file) is None
    assert find_cluster(own(listener), {}, file) == Cluster(listener, "own")
    assert find_cluster(own(silent), {}, file) is None


@pytest.mark.parametrize("address", ["", "nonsense", "host:port", "[::1", "127.0.0.1:0"])
def test_addresses_that_are_none(address: str) -> None:
    assert not reachable(address, 0.5)


def test_state_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "state.json"
    assert read_state(file).deployments == {}
    with changing_state(file) as state:
        state.local_ray = own("a:1")
        state.deployments["tiny"] = record("tiny")
    assert read_state(file).local_ray == own("a:1")
    assert read_state(file).pick(None) == record("tiny")


def test_a_failed_change_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "state.json"

    def fail() -> None:
        with changing_state(file) as state:
            state.deployments["x"] = record("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert read_state(file).deployments == {}


def test_changes_do_not_overwrite_each_other(tmp_path: Path) -> None:
    file = tmp_path / "state.json"

    def add(number: int) -> None:
        with changing_state(file) as state:
            state.deployments[f"d{number}"] = record(f"d{number}")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_state(file).deployments) == 16


def test_picking_a_deployment(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with changing_state(file) as state:
        state.deployments = {"a": record("a"), "b": record("b")}
    state = read_state(file)
    assert state.pick("b").name == "b"
    with pytest.raises(StateError, match=r"several deployments \(a, b\); name one with --name"):
        state.pick(None)
    with pytest.raises(StateError, match=r"--name: got 'c', wanted .*: a, b"):
        state.pick("c")


def test_damaged_state(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    for text in ("{", "[]", "{}", '{"local_ray": {"x": 1}, "deployments": {}}'):
        file.write_text(text)
        with pytest.raises(StateError, match="is damaged"):
            read_state(file)


def test_where_the_state_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERSTORY_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert state_path() == Path("/xdg/overstory/state.json")
    monkeypatch.setenv("OVERSTORY_STATE", "/s.json")
    assert state_path() == Path("/s.json")

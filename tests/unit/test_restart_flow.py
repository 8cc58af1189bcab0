"""What `overstory restart` and `scale` tell Serve, and what they make of what it does. Serve, the
nodes and the clock are played."""

import contextlib
import dataclasses
import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.version import DeploymentVersion

from overstory.orchestrator import restart as restart_module
from overstory.orchestrator import scale as scale_module
from overstory.orchestrator.app import build_app, replica_deployment
from overstory.orchestrator.inventory import NodeInventory
from overstory.orchestrator.plan import PlanError
from overstory.orchestrator.progress import Progress
from overstory.orchestrator.replica_board import DRAIN_S
from overstory.orchestrator.replica_handoff import STAY_S
from overstory.orchestrator.restart import _ROOM_S, follow, restart
from overstory.orchestrator.restart_rules import RestartError
from overstory.orchestrator.scale import ScaleError, scale
from overstory.orchestrator.serving import AppStatus
from overstory.orchestrator.spec import DeploymentSpec, parse_spec
from overstory.orchestrator.state import DeploymentRecord, changing_state, read_state
from overstory.workers.tiny.config import TargetConfig

GIB = 2**30
TIMEOUT_S = 900.0
STOPPED = (
    "The deployment failed to start 3 times in a row during a rolling update. The update is "
    "stopped and replicas of the previous version keep running until a new deploy. Error:\n"
    "rank 0 died (exit code 1): SafetensorError"
)


class World:
    """Serve with replicas `a`, `b`, ..., nodes with free CPUs, a clock that sleeping moves.

    `story`: what Serve's replicas are at each look, the last one for ever.
    """

    def __init__(self, spec: DeploymentSpec) -> None:
        self.now = 0.0
        self.free_cpus = 0.0
        self.waits = False
        self.status, self.message = "RUNNING", ""
        self.replicas_status = ""
        self.story: list[dict[str, str]] = [dict.fromkeys("ab"[: spec.replicas], "RUNNING")]
        self.rolls: list[tuple[str, bool, DeploymentSpec]] = []
        self.attempts: list[int] = []
        self.replicas: list[int] = []
        self.roll_fails = False

    # ---- `serving`

    def quiet_serve_logs(self) -> None:
        pass

    def roll(
        self, spec: DeploymentSpec, nodes: int, version: str, surge: bool, attempt: int
    ) -> None:
        if self.roll_fails:
            raise ConnectionError("Serve's controller is gone")
        self.attempts.append(attempt)
        self.rolls.append((version, surge, spec))

    def set_replicas(self, name: str, replicas: int) -> None:
        self.replicas.append(replicas)
        self.story = [dict.fromkeys((f"r{i}" for i in range(replicas)), "RUNNING")]

    def replica_states(self, name: str) -> dict[str, str]:
        return self.story.pop(0) if len(self.story) > 1 else self.story[0]

    def app_status(self, name: str) -> AppStatus:
        counts: dict[str, int] = {}
        for state in self.story[0].values():
            counts[state] = counts.get(state, 0) + 1
        own = {"RUNNING": "HEALTHY", "DEPLOYING": "UPDATING"}.get(self.status, self.status)
        deployments = {"Replica": self.replicas_status or own}
        return AppStatus(self.status, self.message, {"Replica": counts}, deployments)

    def ask_ranks(self, *_: Any) -> dict[str, Any]:
        return {}

    def waits_for_room(self, name: str) -> bool:
        return self.waits

    # ---- `cluster`, `time`

    def ray_inventory(self) -> list[NodeInventory]:
        return [NodeInventory("h1", cpus=self.free_cpus, gpus=0, memory=64 * GIB)]

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def spec(tmp_path: Path) -> DeploymentSpec:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TargetConfig().to_hf()))
    model = str(tmp_path / "model")
    return parse_spec({"name": "d", "model": model, "tree": {"budget": 0}, "replicas": 2})


@pytest.fixture
def world(spec: DeploymentSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(spec)
    monkeypatch.setenv("OVERSTORY_STATE", str(tmp_path / "state.json"))
    with changing_state() as state:
        state.deployments["d"] = DeploymentRecord("d", "http://x", "y", spec.model_dump())

    @contextlib.contextmanager
    def connected(name: str | None) -> Iterator[DeploymentRecord]:
        yield record()

    for module in (restart_module, scale_module):
        for part in ("serving", "cluster", "time"):
            monkeypatch.setattr(module, part, world)
        monkeypatch.setattr(module, "connected", connected)
        monkeypatch.setattr(module, "turn_to_change", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(module, "ask_controller", lambda *_: None)
    return world


def record() -> DeploymentRecord:
    return read_state().deployments["d"]


def told(act: Any, *given: Any) -> str:
    out = io.StringIO()
    act(None, *given, Progress(out, lambda: 0.0), TIMEOUT_S)
    return out.getvalue()


REPLACED = [
    {"a": "RUNNING", "b": "RUNNING"},
    {"b": "STOPPING", "c": "RUNNING"},
    {"c": "RUNNING", "d": "RUNNING"},
]


def test_where_a_replica_s_resources_are_free_successors_start_beside(world: World, spec) -> None:
    world.free_cpus, world.story = 1.0, list(REPLACED)
    text = told(restart, spec.model_copy(update={"environment": {"SGLANG_LOG_MS": "1"}}))
    ((_, surge, rolled),) = world.rolls
    assert surge
    assert "each successor starts beside its predecessor" in text
    assert "environment.SGLANG_LOG_MS: None -> '1'" in text
    assert "all 2 replicas are new" in text
    assert (record().spec, record().restart) == (rolled.model_dump(), None)


def test_where_none_are_free_each_is_drained_first(world: World) -> None:
    world.free_cpus, world.story = 0.5, list(REPLACED)
    text = told(restart, None)
    assert [surge for _, surge, _ in world.rolls] == [False]
    assert "no room for one more replica: each is drained first" in text


def test_each_restart_has_a_version_of_its_own(world: World) -> None:
    """Serve restarts nothing for an application that is the same."""
    for _ in range(2):
        world.story = list(REPLACED)
        told(restart, None)
    versions = [version for version, _, _ in world.rolls]
    assert len(set(versions)) == 2


def test_room_that_has_gone_is_waited_for_only_so_long(world: World) -> None:
    """Serve would wait for ever."""
    world.free_cpus, world.waits = 1.0, True
    waiting = {"a": "RUNNING", "b": "RUNNING", "c": "STARTING"}
    world.story = [REPLACED[0], *[waiting] * int(2 * _ROOM_S + 3), *REPLACED]
    text = told(restart, None)
    (first, surge, _), (second, later, _) = world.rolls
    assert (surge, later, second) == (True, False, first)
    assert "the room is gone; no room for one more replica" in text


def test_in_place_nothing_may_grow(world: World, spec) -> None:
    larger = spec.model_copy(
        update={"resources": spec.resources.model_copy(update={"cpus_per_rank": 2.0})}
    )
    before = record()
    with pytest.raises(RestartError, match="needs 2 CPU where an old one frees 1"):
        told(restart, larger)
    assert (world.rolls, record()) == ([], before)


def test_what_no_room_could_mend_drains_nothing(world: World, spec) -> None:
    """A pool of more rows than the machine has memory for: in place it would fail as well, with one
    replica fewer."""
    huge = spec.model_copy(update={"engine": {"max_total_tokens": 10**9}})
    old = spec.model_copy(update={"engine": {"max_total_tokens": 10**6}})
    with changing_state() as state:
        state.deployments["d"] = dataclasses.replace(record(), spec=old.model_dump())
    before = record()
    with pytest.raises(PlanError, match="GiB"):
        told(restart, huge)
    assert (world.rolls, record()) == ([], before)


@pytest.mark.parametrize(
    ("status", "states"),
    [("DEPLOYING", {"a": "RUNNING"}), ("RUNNING", {"a": "RUNNING", "b": "STARTING"})],
)
def test_a_change_during_a_change_is_refused(world: World, status: str, states: Any) -> None:
    world.status, world.story = status, [states]
    before = record()
    for act, given in ((restart, None), (scale, 3), (scale, 1)):
        with pytest.raises(RestartError, match="is being changed already"):
            told(act, given)
    assert (world.rolls, world.replicas, record()) == ([], [], before)


def test_a_gateway_that_is_lost_hides_no_restart(world: World) -> None:
    """Serve calls the application UNHEALTHY then, whatever its replicas are in the middle of."""
    world.free_cpus, world.status, world.replicas_status = 2.0, "UNHEALTHY", "UPDATING"
    before = record()
    for act, given in ((restart, None), (scale, 3)):
        with pytest.raises(RestartError, match=r"is being changed already .*: a restart"):
            told(act, given)
    assert (world.rolls, world.replicas, record()) == ([], [], before)


def test_it_stops_at_a_replica_that_fails_and_says_why_and_goes_on(world: World, spec) -> None:
    world.free_cpus, world.status, world.message = 1.0, "RUNNING", ""
    roll = world.roll

    def fail(*given: Any) -> None:
        roll(*given)
        world.status, world.message = "DEPLOY_FAILED", STOPPED

    world.roll = fail  # type: ignore[method-assign]
    bad = spec.model_copy(update={"environment": {"X": "bad"}})
    with pytest.raises(RestartError) as stopped:
        told(restart, bad)
    for words in (
        "stopped at a replica that failed (0 of 2 replicas are new, 2 old there; serving on: ",
        "rank 0 died (exit code 1): SafetensorError",
        "The same `overstory restart` again goes on where it stopped",
        "not even in place of one that is lost",
    ):
        assert words in str(stopped.value)
    assert record().spec == spec.model_dump()
    with pytest.raises(RestartError, match="no restart of d is under way"):
        told(follow)
    with pytest.raises(ScaleError, match=r"has stopped at a replica .* `overstory restart`"):
        told(scale, 3)
    assert world.replicas == []

    def succeed(*given: Any) -> None:
        roll(*given)
        world.status, world.message, world.story = "RUNNING", "", list(REPLACED)

    world.roll = succeed  # type: ignore[method-assign]
    assert "all 2 replicas are new" in told(restart, None)
    assert world.rolls[-1][2] == spec
    assert len({version for version, _, _ in world.rolls}) == 2, "old settings: all are replaced"
    assert record().restart is None


HALF_WAY = {"b": "RUNNING", "c": "RUNNING"}


def _stop_half_way(world: World, wanted: DeploymentSpec) -> None:
    """`a` is replaced by `c`, what is to replace `b` fails."""
    world.free_cpus = 1.0
    roll = world.roll

    def fail(*given: Any) -> None:
        roll(*given)
        world.status, world.message, world.story = "DEPLOY_FAILED", STOPPED, [HALF_WAY]

    world.roll = fail  # type: ignore[method-assign]
    with pytest.raises(RestartError, match=r"1 of 2 replicas are new, 1 old there"):
        told(restart, wanted)

    def succeed(*given: Any) -> None:
        roll(*given)
        world.status, world.message = "RUNNING", ""
        world.story = [HALF_WAY, {"c": "RUNNING", "d": "RUNNING"}]

    world.roll = succeed  # type: ignore[method-assign]


def test_the_same_restart_again_goes_on_where_it_stopped(world: World, spec) -> None:
    wanted = spec.model_copy(update={"environment": {"X": "1"}})
    _stop_half_way(world, wanted)
    text = told(restart, wanted)
    assert "new already, and kept: c" in text
    assert "replica d took over" in text
    assert "replica c took over" not in text
    (first, _, _), (second, _, _) = world.rolls
    assert (first, world.attempts) == (second, [0, 1])
    assert (record().spec, record().restart) == (wanted.model_dump(), None)


def test_a_stopped_restart_is_not_gone_on_with_for_other_settings(world: World, spec) -> None:
    _stop_half_way(world, spec.model_copy(update={"environment": {"X": "1"}}))
    roll = world.roll

    def replace_all(*given: Any) -> None:
        roll(*given)
        world.story = [HALF_WAY, {"e": "RUNNING", "f": "RUNNING"}]

    world.roll = replace_all  # type: ignore[method-assign]
    told(restart, spec.model_copy(update={"environment": {"X": "2"}}))
    (first, _, _), (second, _, _) = world.rolls
    assert first != second
    assert world.attempts == [0, 0]


def test_a_stopped_restart_that_serve_does_not_take_again_stays_so(world: World, spec) -> None:
    wanted = spec.model_copy(update={"environment": {"X": "1"}})
    _stop_half_way(world, wanted)
    before = record().restart
    world.roll_fails = True
    world.roll = functools.partial(World.roll, world)  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        told(restart, wanted)
    assert record().restart == before


def test_a_restart_whose_command_is_gone_is_watched_to_its_end(world: World, spec) -> None:
    world.free_cpus = 1.0
    new = spec.model_copy(update={"environment": {"X": "1"}})
    with pytest.raises(RestartError, match=r"nothing happened for 900 s: .*Serve goes on"):
        told(restart, new)
    assert record().restart is not None
    assert record().spec == spec.model_dump(), "nobody has seen it end"
    world.story = list(REPLACED)
    assert "all 2 replicas are new" in told(follow)
    assert (record().spec, record().restart) == (new.model_dump(), None)
    with pytest.raises(RestartError, match="no restart of d is under way"):
        told(follow)


def test_one_that_ended_unseen_counts_for_the_next_command(world: World, spec) -> None:
    world.free_cpus = 2.0
    new = spec.model_copy(update={"environment": {"X": "1"}})
    with pytest.raises(RestartError, match="nothing happened"):
        told(restart, new)
    world.story = [REPLACED[-1]]
    told(scale, 3)
    assert record().spec == new.model_copy(update={"replicas": 3}).model_dump()
    assert record().restart is None


def _watched_while(world: World, spec: DeploymentSpec, meanwhile: Any, story: Any) -> None:
    """`--follow` misses the end of a restart: between two of its looks, something else happens."""
    world.free_cpus = 4.0
    with pytest.raises(RestartError, match="nothing happened"):
        told(restart, spec.model_copy(update={"environment": {"X": "1"}}))
    sleep, world.rolls = world.sleep, []

    def once(seconds: float) -> None:
        world.sleep = sleep  # type: ignore[method-assign]
        meanwhile()
        world.story = list(story)

    world.sleep = once  # type: ignore[method-assign]
    told(follow)


def test_who_watches_does_not_undo_what_came_after_the_end(world: World, spec) -> None:
    def scaled() -> None:
        world.story = [REPLACED[-1]]
        told(scale, 3)

    fresh = dict.fromkeys("cde", "RUNNING")
    _watched_while(world, spec, scaled, [fresh, {"c": "RUNNING", "d": "RUNNING"}])
    assert record().spec["replicas"] == 3


def test_who_watches_does_not_roll_over_a_later_restart(world: World, spec) -> None:
    def restarted() -> None:
        world.story = [REPLACED[-1]]
        with pytest.raises(RestartError, match="nothing happened"):
            told(restart, None)
        world.waits, later[:] = True, [record().restart]

    later: list[Any] = []
    waiting = {"c": "RUNNING", "d": "RUNNING", "e": "STARTING"}
    story = [*[waiting] * int(2 * _ROOM_S + 3), {"e": "RUNNING", "f": "RUNNING"}]
    _watched_while(world, spec, restarted, story)
    assert [version for version, _, _ in world.rolls] == [later[0]["version"]]
    assert record().restart == later[0]


def test_one_that_never_began_is_not_remembered(world: World, spec) -> None:
    world.roll_fails = True
    with pytest.raises(ConnectionError):
        told(restart, spec.model_copy(update={"environment": {"X": "1"}}))
    assert (record().spec, record().restart) == (spec.model_dump(), None)


def test_more_replicas_than_there_is_room_for_are_refused(world: World, spec) -> None:
    world.free_cpus = 1.0
    before = record()
    with pytest.raises(ScaleError, match=r"got 4, 2 more than now; .* need 2 CPUs"):
        told(scale, 4)
    with pytest.raises(ScaleError, match="got 0, wanted at least 1; `overstory down` ends all"):
        told(scale, 0)
    assert (world.replicas, record()) == ([], before)
    told(scale, 3)
    told(scale, 1)
    assert world.replicas == [3, 1]
    assert record().spec["replicas"] == 1


def test_a_number_that_serve_was_not_told_is_not_remembered(world: World, spec) -> None:
    def refuse(*_: Any) -> None:
        assert record().spec["replicas"] == 1, "a command that ends here leaves what Serve has"
        raise ConnectionError("Serve's controller is gone")

    world.set_replicas = refuse  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        told(scale, 1)
    assert record().spec == spec.model_dump()


def test_a_scale_ends_with_its_deployment(world: World) -> None:
    looks = world.app_status

    def gone(name: str) -> AppStatus | None:
        return None if world.replicas else looks(name)

    world.app_status = gone  # type: ignore[method-assign,assignment]
    with pytest.raises(ScaleError, match="d was taken down meanwhile"):
        told(scale, 1)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(15)])
def test_an_interrupted_scale_says_what_goes_on(world: World, end: BaseException) -> None:
    def interrupt(_: float) -> None:
        raise end

    world.free_cpus, world.sleep = 1.0, interrupt  # type: ignore[method-assign]
    world.set_replicas = lambda _, n: world.replicas.append(n)  # type: ignore[method-assign]
    with pytest.raises(ScaleError, match=r"interrupted: Serve goes on to 3 replicas; `overstory"):
        told(scale, 3)
    assert world.replicas == [3]
    assert record().spec["replicas"] == 3


class Copy:
    """What stands in for a replica's class."""


@pytest.mark.parametrize("surge", [True, False])
def test_serve_replaces_one_at_a_time_and_waits_longer_than_we_do(spec, surge: bool) -> None:
    """It kills what has not ended within its limit: by then sequences have left, and their KV has
    been fetched."""
    made = replica_deployment(Copy, spec, 1, "v1", surge)
    config = made._deployment_config
    assert made.version == "v1"
    assert config.graceful_shutdown_timeout_s > DRAIN_S + STAY_S
    for replicas in (1, 3, 50):
        assert max(int(config.rolling_update_percentage * replicas), 1) == 1  # as Serve counts
        assert (config.max_surge_percent * replicas + 99) // 100 == int(surge)


def test_serve_goes_on_with_a_stopped_restart_and_touches_no_new_replica(spec) -> None:
    """By its own rules: other settings make it forget the failure, and these are none that a
    replica is replaced or even told for."""

    def version(attempt: int) -> DeploymentVersion:
        made = replica_deployment(Copy, spec, 1, "v1", True, attempt)
        return DeploymentVersion(made.version, made._deployment_config, {})

    first, again = version(0), version(1)
    assert first != again
    assert not first.requires_actor_restart(again)
    assert not first.requires_actor_reconfigure(again)
    assert not first.requires_long_poll_broadcast(again)


def test_the_gateway_stays_through_a_restart(spec) -> None:
    """Serve draws a new version where none is given, and replaces what has another one."""
    first, second = (build_app(spec, 1, version)._bound_deployment for version in ("v1", "v2"))
    assert first.name == "Gateway"
    assert first.version == second.version is not None

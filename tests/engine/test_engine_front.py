"""The front half's own decisions, on bare objects: no ranks, no Ray."""

from pathlib import Path
from typing import Any

import pytest
from sglang.srt.entrypoints.engine import SchedulerInitResult
from sglang.srt.managers.load_snapshot import (
    LoadSnapshot,
    ShmLoadSnapshotReader,
    ShmLoadSnapshotWriter,
)

from overstory.orchestrator import engine_front
from overstory.orchestrator.engine_errors import EngineBusy, EngineDead, RankDeath, RequestRefused
from overstory.orchestrator.rank_group import RankPlan

DEATH = RankDeath(rank=1, cause="a test", exit_code=70)


class _Group:
    def __init__(self, **plan: Any) -> None:
        self.plan = RankPlan("d", "r", 2, **plan)
        self.moves = 0

    def moved(self) -> None:
        self.moves += 1


@pytest.fixture
def engine() -> engine_front.OverstoryEngine:
    bare = object.__new__(engine_front.OverstoryEngine)
    bare._death = None
    bare._group = _Group()
    return bare


def chunk(ids: list[int], reason: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": reason, **meta}}


def test_a_step_brings_new_ids(engine: engine_front.OverstoryEngine) -> None:
    step = engine._as_step(chunk([5, 6], prompt_tokens=3, output_token_logprobs=[(-0.1, 5, None)]))
    assert step["token_ids"] == [5, 6]
    assert step["logprobs"] == [(-0.1, 5, None)]
    assert step["finish_reason"] is None
    assert engine._group.moves == 1, "a sign of life of the ranks"


def test_an_echoed_abort_does_not_repeat_the_last_id(engine: engine_front.OverstoryEngine) -> None:
    step = engine._as_step(chunk([6], {"type": "abort", "message": "by client"}))
    assert step["token_ids"] == []
    assert step["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, RequestRefused), (503, EngineBusy)],
)
def test_aborts_by_the_scheduler_say_what_to_do(
    engine: engine_front.OverstoryEngine, status: int, error: type[Exception]
) -> None:
    reason = {"type": "abort", "message": "why", "status_code": status}
    with pytest.raises(error, match="why"):
        engine._as_step(chunk([], reason))


def test_an_abort_that_is_the_engine_s_own_fault_is_handed_on(
    engine: engine_front.OverstoryEngine,
) -> None:
    """Not as busy: out of KV slots with nothing left to retract will be so next time as well."""
    reason = {"type": "abort", "message": "out of memory", "status_code": 500}
    assert engine._as_step(chunk([], reason))["finish_reason"] == reason


def test_after_a_death_every_abort_is_that_death(engine: engine_front.OverstoryEngine) -> None:
    engine._death = DEATH
    with pytest.raises(EngineDead, match="rank 1 died") as caught:
        engine._as_step(chunk([], {"type": "abort", "message": "a rank died"}))
    assert caught.value.death == DEATH


def test_the_file_of_rank_0_s_load_keeps_no_name(tmp_path: Path) -> None:
    path = tmp_path / "loads.shm"
    manager = object.__new__(engine_front.FrontManager)
    manager.load_snapshot_reader = ShmLoadSnapshotReader(str(path), 1)  # Before there is a file.
    rank = ShmLoadSnapshotWriter(str(path), 1, 0)
    engine_front._take_load_file_off(manager)
    assert not path.exists()
    rank.write(LoadSnapshot(dp_rank=0, num_running_reqs=3))
    (load,) = manager.load_snapshot_reader.read_all()
    assert load.num_running_reqs == 3
    rank.close()
    manager.load_snapshot_reader.close()


def test_it_tells_what_rank_0_s_scheduler_can_take(engine: engine_front.OverstoryEngine) -> None:
    infos = [{"max_req_input_len": 90}, {"max_req_input_len": 80}]
    engine._scheduler_init_result = SchedulerInitResult(scheduler_infos=infos)
    assert engine.scheduler_info == {"max_req_input_len": 90}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tp_size": 4}, "engine.tp_size must be 2"),
        ({"skip_tokenizer_init": False}, "engine.skip_tokenizer_init must be True"),
        ({"watchdog_timeout": 5}, "lease_timeout_s .5.0 s. must be below"),
    ],
)
def test_fields_that_contradict_the_front_half_are_refused(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        engine_front._fixed_fields(fields, _Group())


def test_fields_of_the_caller_stay() -> None:
    fixed = engine_front._fixed_fields({"tp_size": 2, "log_level": "info"}, _Group())
    assert fixed["log_level"] == "info"
    assert fixed["incremental_streaming_output"] is True


def test_a_bundle_is_needed_for_each_rank() -> None:
    with pytest.raises(ValueError, match="one bundle for each of 2 ranks"):
        _Group(bundles=(0,))
    with pytest.raises(ValueError, match="tp_size"):
        RankPlan("d", "r", 0)

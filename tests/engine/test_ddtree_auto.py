"""The automatic policy in a real engine: same text, ranks alike, a wrong drafter switched off."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import (
    GREEDY,
    ScriptedDrafts,
    random_prompts,
    run_under,
    server_args,
)

from overstory.workers import tree_policy
from overstory.workers.policy import CACHE_ENV, MEASURE_SECONDS_ENV, chooser, steering
from overstory.workers.policy.beliefs import GREEDY as GREEDY_KIND
from overstory.workers.policy.choice import Decision
from overstory.workers.step_stats import STATS
from overstory.workers.tree_policy import AutoPolicy, parse_policy

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
LENGTH = 40
ROWS = 16
CUSTOM = "overstory_speculate"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


@pytest.fixture
def tables(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start now measure a cost table, shortly."""
    monkeypatch.setenv(CACHE_ENV, str(cache))
    monkeypatch.setenv(MEASURE_SECONDS_ENV, "1")


@pytest.fixture
def harness(engine: Engine, pair: tuple[str, str], tables: None) -> Iterator[EngineHarness]:
    # The seed sets these engines apart from those without a table.
    held = engine(**server_args(pair[1], rows=ROWS, random_seed=77))
    worker = held.scheduler.draft_worker
    worker.chooser.start(worker.chooser._auto.table, 0.05)  # nothing learnt yet
    yield held
    tree_policy.set_current(parse_policy("plain"))


def _prompts() -> tuple[list[list[int]], list[dict[str, Any]]]:
    prompts = random_prompts([5, 17, 40, 64], seed=21)
    params: list[dict[str, Any]] = [GREEDY | {"max_new_tokens": LENGTH} for _ in prompts]
    params[1] = {
        "temperature": 1.0,
        "sampling_seed": 9,
        "max_new_tokens": LENGTH,
        "ignore_eos": True,
    }
    return prompts, params


def _know(
    drafts: ScriptedDrafts,
    harness: EngineHarness,
    prompts: list[list[int]],
    texts: list[list[int]],
) -> list[str]:
    rids = [f"auto-{i}-{harness.scheduler.forward_ct}" for i in range(len(prompts))]
    for rid, prompt, text in zip(rids, prompts, texts, strict=True):
        drafts.know(rid, prompt, text)
    return rids


def _auto(
    harness: EngineHarness,
    prompts: list[list[int]],
    params: Any,
    rids: list[str] | None = None,
    rule: str = "auto",
) -> list[list[int]]:
    tree_policy.set_current(parse_policy(rule))
    try:
        submitted = [
            harness.submit(p, one, rid=rids[i] if rids else None)
            for i, (p, one) in enumerate(zip(prompts, params, strict=True))
        ]
        harness.run(submitted)
    finally:
        tree_policy.set_current(parse_policy("plain"))
    harness.assert_no_leak()
    return [harness.outputs[rid].ids for rid in submitted]


def _forwards() -> dict[str, int]:
    return {name: row["forwards"] for name, row in STATS.snapshot()["verify"].items()}


def test_same_text_by_its_own_choices(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = _prompts()
    wanted = run_under(harness, "plain", prompts, params)
    drafts = ScriptedDrafts(seed=1)
    drafts.install(monkeypatch)
    before = _forwards()
    for _ in range(3):
        rids = _know(drafts, harness, prompts, wanted)
        assert _auto(harness, prompts, params, rids) == wanted
    used = {name for name, count in _forwards().items() if count > before.get(name, 0)}
    assert used - {"plain"}, "nothing was drafted"
    shown = harness.scheduler.draft_worker.chooser.report()
    assert shown["greedy"]["seen"] >= 32
    assert shown["sampled"]["seen"] > 0
    assert shown["greedy"]["tokens"]["tree-15"] > 1.3
    assert shown["drafter"] == "on"


def test_same_text_while_the_choice_changes_at_every_step(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = _prompts()
    wanted = run_under(harness, "plain", prompts, params)
    drafts = ScriptedDrafts(seed=2)
    drafts.install(monkeypatch)
    dice = random.Random(3)
    taken = set()

    def anything(_table: Any, _beliefs: Any, _shape: Any, allowed: Any, *_: Any) -> Decision:
        option = dice.choice(allowed)
        taken.add(option)
        return Decision(option, "probe")

    monkeypatch.setattr(chooser, "decide", anything)
    monkeypatch.setattr(chooser, "SYNC_STEPS", 1)
    monkeypatch.setattr(steering, "HOLDS", 1)
    rids = _know(drafts, harness, prompts, wanted)
    assert _auto(harness, prompts, params, rids) == wanted
    assert len(taken) == len(harness.scheduler.draft_worker.chooser.options)


def test_bounds_hold_and_policies_without_room_are_refused(harness: EngineHarness) -> None:
    prompts, params = _prompts()
    before = _forwards()
    _auto(harness, prompts, params, rule="auto<=4")
    used = {name for name, count in _forwards().items() if count > before.get(name, 0)}
    assert used <= {"plain", "tree-4"}
    with pytest.raises(ValueError, match="drafts 16 nodes"):
        tree_policy.set_current(AutoPolicy(16))


def test_a_wrong_drafter_is_switched_off_and_comes_back(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from overstory.workers.ddtree import draft

    prompts, _ = _prompts()
    params = [GREEDY | {"max_new_tokens": 64}] * len(prompts)
    wanted = run_under(harness, "plain", prompts, params)
    merge = draft.merge_candidates
    wrong = True

    def other_words(shards: Any, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, ids = merge(shards, k)
        return logprobs, (ids + 1 if wrong else ids) % 4096

    monkeypatch.setattr(draft, "merge_candidates", other_words)
    asked = harness.scheduler.draft_worker.chooser
    judge = asked._auto.steering
    judge._retry = 10**6
    assert _auto(harness, prompts, params) == wanted
    shown = asked.report()
    assert (shown["drafter"], shown["switched_off"]) == ("off", 1)
    assert "drafter switched off" in caplog.text
    before = _forwards()
    assert _auto(harness, prompts, params) == wanted
    used = {name for name, count in _forwards().items() if count > before.get(name, 0)}
    assert used == {"plain"}

    wrong = False
    scripted = ScriptedDrafts(seed=4)
    scripted.install(monkeypatch)
    judge._retry = 8
    for _ in range(2):
        rids = _know(scripted, harness, prompts, wanted)
        assert _auto(harness, prompts, params, rids) == wanted
    assert asked.report()["drafter"] == "on"
    assert asked.report()["switched_off"] == 1


def test_requests_may_opt_out(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = _prompts()
    wanted = run_under(harness, "plain", prompts, params)
    drafts = ScriptedDrafts(seed=6)
    drafts.install(monkeypatch)
    spared = [dict(one) for one in params]
    spared[0]["custom_params"] = {CUSTOM: False}
    spared[2]["custom_params"] = {CUSTOM: False}
    for name in ("chain", "tree-15"):
        before = STATS.snapshot()["verify"].get(name, {"tokens": 0, "requests": 0, "forwards": 0})
        rids = _know(drafts, harness, prompts, wanted)
        assert run_under(harness, name, prompts, spared, rids) == wanted
        after = STATS.snapshot()["verify"][name]
        # Two requests take a step for each token; the batch goes on as long as they do.
        assert after["forwards"] - before["forwards"] >= LENGTH - 1
        assert after["tokens"] - before["tokens"] == len(prompts) * (LENGTH - 1)
    seen = harness.scheduler.draft_worker.chooser._auto.steering._kinds[GREEDY_KIND].seen()
    rids = _know(drafts, harness, prompts[:1], wanted[:1])
    before_run = _forwards()
    assert _auto(harness, prompts[:1], spared[:1], rids) == wanted[:1]
    used = {name for name, count in _forwards().items() if count > before_run.get(name, 0)}
    assert used == {"plain"}, "a batch that only wants plain decoding gets it"
    after_seen = harness.scheduler.draft_worker.chooser._auto.steering._kinds[GREEDY_KIND].seen()
    assert after_seen == seen
    refused = harness.submit([7, 8, 9], GREEDY | {"custom_params": {CUSTOM: "no"}})
    harness.run([refused])
    assert "must be true or false" in str(
        harness.outputs[refused].refused or harness.outputs[refused].finish_reason
    )


def test_the_table_comes_from_the_cache(
    harness: EngineHarness, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overstory.workers.policy import start

    def never(_worker: Any, _seconds: float) -> None:
        raise AssertionError("measured again")

    files = list((cache / "cost_tables").glob("*.json"))
    assert len(files) == 1
    monkeypatch.setattr(start, "_measured", never)
    worker = harness.scheduler.draft_worker
    assert start._table(worker) == worker.chooser._auto.table
    assert worker.chooser._auto.table.batches[0] == 1


def policy_state(scheduler: Any) -> dict[str, Any]:
    """What two ranks that choose alike have in common."""
    asked = scheduler.draft_worker.chooser
    auto = asked._auto
    return {
        "table": auto.table.version,
        "beliefs": auto.beliefs,
        "before": auto.before,
        "since": auto.since,
        "last": asked._last,
    }


def test_two_ranks_choose_alike(
    engine_tp2: Engine, pair: tuple[str, str], tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = engine_tp2(**server_args(pair[1], rows=ROWS, random_seed=77))
    prompts, params = _prompts()
    wanted = run_under(two, "plain", prompts, params)
    for _ in range(2):
        assert _auto(two, prompts, params) == wanted
        mine, theirs = two.at_boundary(policy_state)
        assert mine == theirs
    assert mine["beliefs"].version > 1


def test_steps_are_priced_at_their_context_where_lengths_stay_on_the_device(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: SGLang forgets the sum of lengths right before each step."""
    prompts = random_prompts([1150, 1100], seed=5)
    tree_policy.set_current(parse_policy("auto"))
    known = harness.generate(prompts, GREEDY | {"max_new_tokens": 12})
    monkeypatch.setattr(harness.scheduler.future_map, "needs_cpu_seq_lens", False)
    harness.flush_cache()
    said = harness.generate(prompts, GREEDY | {"max_new_tokens": 12})
    last = harness.scheduler.draft_worker.chooser._last
    assert said == known
    assert last is not None
    assert last.shape.context == 1024, "the mean of what is committed, rounded down"

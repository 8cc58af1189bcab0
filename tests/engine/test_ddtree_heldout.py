"""The built-in pair on held-out code: the engine against the plain PyTorch oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from ddtree_support import POLICIES, run_under, server_args

from overstory.workers.step_stats import STATS
from overstory.workers.tiny.oracle import Oracle, Sampling
from overstory.workers.tiny.prompts import heldout_prompts

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
NEW = 48
BATCH = 8


KINDS = [
    None,
    Sampling(1.0, seed=5),
    Sampling(0.7, seed=6, top_p=0.9),
    Sampling(1.2, seed=7, top_k=30, min_p=0.02),
]
"""What a mixed batch holds, in turn; None is greedy."""


class Wanted:
    """The oracle's texts of the held-out snippets, each decoded once."""

    def __init__(self, pair: tuple[str, str]) -> None:
        self._oracle = Oracle.load(*pair)
        self._texts: dict[tuple[tuple[int, ...], Sampling | None], list[int]] = {}

    def text(self, prompt: list[int], sampling: Sampling | None = None) -> list[int]:
        key = (tuple(prompt), sampling)
        if key not in self._texts:
            self._texts[key] = (
                self._oracle.greedy(prompt, NEW)
                if sampling is None
                else self._oracle.plain(prompt, NEW, sampling).tokens
            )
        return self._texts[key]


@pytest.fixture(scope="module")
def oracle(pair: tuple[str, str]) -> Wanted:
    return Wanted(pair)


def _prompts(count: int) -> list[list[int]]:
    """Held-out snippets of different lengths, so that batches are ragged."""
    every = [list(prompt.ids) for prompt in heldout_prompts()]
    assert len(every) >= count
    return [ids[: 160 - 13 * (i % 8)] for i, ids in enumerate(every[:count])]


def _in_batches(
    harness: EngineHarness, name: str, prompts: list[list[int]], params: list[dict[str, Any]]
) -> list[list[int]]:
    texts: list[list[int]] = []
    for start in range(0, len(prompts), BATCH):
        stop = start + BATCH
        texts += run_under(harness, name, prompts[start:stop], params[start:stop])
    return texts


def _tokens_per_forward(name: str, before: dict[str, Any]) -> float:
    after = STATS.snapshot()["verify"][name]
    was = before.get(name, {"tokens": 0, "requests": 0})
    return float((after["tokens"] - was["tokens"]) / (after["requests"] - was["requests"]))


def _check_greedy(
    harness: EngineHarness, oracle: Wanted, count: int, policies: tuple[str, ...]
) -> None:
    prompts = _prompts(count)
    wanted = [oracle.text(prompt) for prompt in prompts]
    params = [_params(None)] * count
    gains = {}
    for name in policies:
        before = STATS.snapshot()["verify"]
        got = _in_batches(harness, name, prompts, params)
        _check_texts(name, got, wanted)
        gains[name] = _tokens_per_forward(name, before)
    assert gains["plain"] == 1.0
    assert gains["chain"] > 2.0, gains
    if "tree-31" in gains:
        assert gains["tree-31"] > gains["chain"], gains


def _check_mixed(
    harness: EngineHarness, oracle: Wanted, count: int, policies: tuple[str, ...]
) -> None:
    """Greedy and sampled requests side by side, each with its own seed."""
    prompts = _prompts(count)
    chosen = [_own_seed(KINDS[i % len(KINDS)], i) for i in range(count)]
    wanted = [oracle.text(*each) for each in zip(prompts, chosen, strict=True)]
    params = [_params(sampling) for sampling in chosen]
    for name in policies:
        _check_texts(name, _in_batches(harness, name, prompts, params), wanted)


def _own_seed(sampling: Sampling | None, i: int) -> Sampling | None:
    return sampling and dataclasses.replace(sampling, seed=sampling.seed + i)


def _params(sampling: Sampling | None) -> dict[str, Any]:
    if sampling is None:
        return {"temperature": 0.0, "max_new_tokens": NEW}
    return {
        "temperature": sampling.temperature,
        "sampling_seed": sampling.seed,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_new_tokens": NEW,
    }


def _check_texts(name: str, got: list[list[int]], wanted: list[list[int]]) -> None:
    wrong = [i for i, texts in enumerate(zip(got, wanted, strict=True)) if texts[0] != texts[1]]
    assert not wrong, f"{name}: prompts {wrong} differ from the oracle"


def test_greedy_equals_oracle(engine: Engine, pair: tuple[str, str], oracle: Wanted) -> None:
    harness = engine(**server_args(pair[1], max_total_tokens=8192))
    _check_greedy(harness, oracle, 16, ("plain", "chain", "tree-31"))
    for prompt in _prompts(3):
        assert run_under(harness, "tree-15", [prompt], _params(None)) == [oracle.text(prompt)]


def test_mixed_batches_equal_oracle(engine: Engine, pair: tuple[str, str], oracle: Wanted) -> None:
    """The same noise on both sides: the same tokens, whatever the tree."""
    harness = engine(**server_args(pair[1], max_total_tokens=8192))
    _check_mixed(harness, oracle, 8, ("plain", "chain", "tree-31"))


def test_the_draft_follows_the_logit_bias(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bias forbids is not drafted: more is accepted, and the text is the same."""
    harness = engine(**server_args(pair[1], max_total_tokens=8192))
    from overstory.workers.ddtree.draft import HeadShard

    prompts = _prompts(8)
    frequent = {"203": -100.0, "225": -100.0, "18": -100.0}
    params = [_params(None) | {"logit_bias": frequent, "ignore_eos": True}] * len(prompts)
    before = STATS.snapshot()["verify"]
    texts = _in_batches(harness, "chain", prompts, params)
    told = _tokens_per_forward("chain", before)
    candidates = HeadShard.candidates
    monkeypatch.setattr(
        HeadShard, "candidates", lambda head, hidden, k, bias=None: candidates(head, hidden, k)
    )
    before = STATS.snapshot()["verify"]
    assert _in_batches(harness, "chain", prompts, params) == texts
    assert told > 1.05 * _tokens_per_forward("chain", before)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overlap", [False, True])
def test_all_snippets_equal_oracle(
    engine: Engine, pair: tuple[str, str], oracle: Wanted, overlap: bool
) -> None:
    harness = engine(
        **server_args(pair[1], max_total_tokens=8192, disable_overlap_schedule=not overlap)
    )
    _check_greedy(harness, oracle, 100, POLICIES)
    _check_mixed(harness, oracle, 100, ("plain", "chain", "tree-31"))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_snippets_one_by_one_equal_oracle(
    request: pytest.FixtureRequest, pair: tuple[str, str], oracle: Wanted, ranks: int
) -> None:
    make: Engine = request.getfixturevalue("engine" if ranks == 1 else "engine_tp2")
    harness = make(**server_args(pair[1], max_total_tokens=8192))
    for i, prompt in enumerate(_prompts(100)):
        for name in ("plain", "chain", "tree-31"):
            got = run_under(harness, name, [prompt], _params(None))
            assert got == [oracle.text(prompt)], (i, name)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overlap", [False, True])
def test_all_snippets_on_two_ranks_equal_oracle(
    engine_tp2: Engine, pair: tuple[str, str], oracle: Wanted, overlap: bool
) -> None:
    harness = engine_tp2(
        **server_args(pair[1], max_total_tokens=8192, disable_overlap_schedule=not overlap)
    )
    _check_greedy(harness, oracle, 100, ("plain", "chain", "tree-8", "tree-31", "spine-31"))
    _check_mixed(harness, oracle, 100, ("chain", "tree-31"))

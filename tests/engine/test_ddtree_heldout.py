"""The built-in pair on held-out code: the engine against the plain PyTorch oracle."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def oracle(pair: tuple[str, str]) -> Oracle:
    return Oracle.load(*pair)


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
    harness: EngineHarness, oracle: Oracle, count: int, policies: tuple[str, ...]
) -> None:
    prompts = _prompts(count)
    wanted = [oracle.greedy(prompt, NEW) for prompt in prompts]
    params = [{"temperature": 0.0, "max_new_tokens": NEW}] * count
    gains = {}
    for name in policies:
        before = STATS.snapshot()["verify"]
        got = _in_batches(harness, name, prompts, params)
        wrong = [i for i in range(count) if got[i] != wanted[i]]
        assert not wrong, f"{name}: prompts {wrong} differ from the oracle"
        gains[name] = _tokens_per_forward(name, before)
    assert gains["plain"] == 1.0
    assert gains["chain"] > 2.0, gains
    if "tree-31" in gains:
        assert gains["tree-31"] > gains["chain"], gains


def test_greedy_equals_oracle(engine: Engine, pair: tuple[str, str], oracle: Oracle) -> None:
    harness = engine(**server_args(pair[1], max_total_tokens=8192))
    _check_greedy(harness, oracle, 16, ("plain", "chain", "tree-31"))
    prompts = _prompts(3)
    for prompt in prompts:
        alone = run_under(harness, "tree-15", [prompt], {"temperature": 0, "max_new_tokens": NEW})
        assert alone == [oracle.greedy(prompt, NEW)]


def test_sampled_equals_oracle(engine: Engine, pair: tuple[str, str], oracle: Oracle) -> None:
    """The same noise on both sides: the same tokens, whatever the tree."""
    harness = engine(**server_args(pair[1], max_total_tokens=8192))
    prompts = _prompts(6)
    kinds = [
        Sampling(1.0, seed=5),
        Sampling(0.7, seed=6, top_p=0.9),
        Sampling(1.2, seed=7, top_k=30, min_p=0.02),
    ]
    chosen = [kinds[i % 3] for i in range(len(prompts))]
    wanted = [oracle.plain(p, NEW, s).tokens for p, s in zip(prompts, chosen, strict=True)]
    params = [
        {
            "temperature": s.temperature,
            "sampling_seed": s.seed,
            "top_k": s.top_k,
            "top_p": s.top_p,
            "min_p": s.min_p,
            "max_new_tokens": NEW,
        }
        for s in chosen
    ]
    for name in ("plain", "chain", "tree-31"):
        assert _in_batches(harness, name, prompts, params) == wanted, name


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_equals_oracle_on_all_snippets(
    engine: Engine, pair: tuple[str, str], oracle: Oracle, overlap: bool
) -> None:
    harness = engine(
        **server_args(pair[1], max_total_tokens=8192, disable_overlap_schedule=not overlap)
    )
    _check_greedy(harness, oracle, 100, POLICIES)


@pytest.mark.full
def test_greedy_equals_oracle_one_by_one(
    engine: Engine, pair: tuple[str, str], oracle: Oracle
) -> None:
    harness = engine(**server_args(pair[1], max_total_tokens=8192))
    params = {"temperature": 0.0, "max_new_tokens": NEW}
    for i, prompt in enumerate(_prompts(100)):
        wanted = [oracle.greedy(prompt, NEW)]
        for name in ("chain", "tree-31"):
            assert run_under(harness, name, [prompt], params) == wanted, (i, name)


@pytest.mark.full
def test_two_ranks_equal_oracle(engine_tp2: Engine, pair: tuple[str, str], oracle: Oracle) -> None:
    harness = engine_tp2(**server_args(pair[1], max_total_tokens=8192))
    _check_greedy(harness, oracle, 100, ("plain", "chain", "tree-8", "tree-31", "spine-31"))

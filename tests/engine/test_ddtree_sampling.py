"""The one sampler in the engine: seeds, independence of shape and batch, and the distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import (
    GREEDY,
    POLICIES,
    SAMPLED,
    SOME_POLICIES,
    ScriptedDrafts,
    random_prompts,
    run_under,
    server_args,
)

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
LENGTH = 40


@pytest.fixture
def harness(engine: Engine, pair: tuple[str, str]) -> EngineHarness:
    return engine(**server_args(pair[1]))


def _mixed_requests() -> tuple[list[list[int]], list[dict[str, Any]]]:
    prompts = random_prompts([12, 40, 7, 66, 25, 31], seed=31)
    params: list[dict[str, Any]] = [
        one | {"sampling_seed": 100 + i, "ignore_eos": True, "max_new_tokens": LENGTH}
        for i, one in enumerate(SAMPLED)
    ]
    params.insert(1, GREEDY | {"max_new_tokens": LENGTH})
    params.append(GREEDY | {"max_new_tokens": LENGTH})
    return prompts, params


@pytest.mark.parametrize(
    "policies", [SOME_POLICIES, pytest.param(POLICIES, marks=pytest.mark.full)], ids=["some", "all"]
)
def test_same_seed_same_text_under_all_policies(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, policies: tuple[str, ...]
) -> None:
    prompts, params = _mixed_requests()
    plain = run_under(harness, "plain", prompts, params)
    drafts = ScriptedDrafts(seed=1)
    drafts.install(monkeypatch)
    for name in policies:
        rids = [f"s-{name}-{i}-{harness.scheduler.forward_ct}" for i in range(len(prompts))]
        for rid, prompt, text in zip(rids, prompts, plain, strict=True):
            drafts.know(rid, prompt, text)
        assert run_under(harness, name, prompts, params, rids) == plain, name
    alone = [
        run_under(harness, "tree-15", [p], one)[0] for p, one in zip(prompts, params, strict=True)
    ]
    assert alone == plain
    order = [3, 0, 5, 2, 4, 1]
    shuffled = run_under(harness, "chain", [prompts[i] for i in order], [params[i] for i in order])
    assert shuffled == [plain[i] for i in order]


def test_plain_engine_gives_the_same_text(engine: Engine, pair: tuple[str, str]) -> None:
    """An engine without speculation samples here too."""
    prompts, params = _mixed_requests()
    wanted = run_under(engine(**server_args(pair[1])), "tree-31", prompts, params)
    assert engine(random_seed=1).generate(prompts, params) == wanted


def test_other_seeds_and_no_seeds_differ(harness: EngineHarness) -> None:
    prompt = random_prompts([20], seed=32)[0]
    params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 24}
    seeded = [params | {"sampling_seed": seed} for seed in (1, 2, 1, 0)]
    texts = run_under(harness, "tree-15", [prompt] * 4, seeded)
    assert texts[0] == texts[2]
    assert len({tuple(text) for text in texts}) == 3
    unseeded = run_under(harness, "tree-15", [prompt] * 4, params)
    assert len({tuple(text) for text in unseeded}) == 4


def test_logit_bias_is_exact_at_every_node(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts([15, 30], seed=33)
    first = run_under(harness, "plain", prompts[:1], GREEDY | {"max_new_tokens": 8})[0]
    biased = GREEDY | {
        "max_new_tokens": LENGTH,
        "logit_bias": {str(first[3]): -100.0, "77": 2.0},
    }
    params = [biased, GREEDY | {"max_new_tokens": LENGTH}]
    plain = run_under(harness, "plain", prompts, params)
    assert first[3] not in plain[0]
    drafts = ScriptedDrafts(seed=2)
    drafts.install(monkeypatch)
    for name in ("chain", "tree-31"):
        rids = [f"b-{name}-{i}-{harness.scheduler.forward_ct}" for i in range(2)]
        for rid, prompt, text in zip(rids, prompts, plain, strict=True):
            drafts.know(rid, prompt, text)
        assert run_under(harness, name, prompts, params, rids) == plain


def _target_probs(harness: EngineHarness, prompt: list[int], params: dict[str, Any]) -> Any:
    """[V] distribution of the token after ``prompt``: reference op on the engine's own logits."""
    from overstory.kernels.reference import filtered_probs

    caught: list[torch.Tensor] = []
    from overstory.workers.ddtree import sampler

    real = sampler.draw

    def spy(logits: torch.Tensor, info: Any, positions: torch.Tensor, rows: int = 1) -> Any:
        caught.append(logits[:1].clone())
        return real(logits, info, positions, rows)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "draw", spy)
        run_under(harness, "plain", [prompt], params | {"max_new_tokens": 1, "sampling_seed": 1})
    one = torch.ones(1)
    return filtered_probs(
        caught[0],
        one * params["temperature"],
        (one * params.get("top_k", -1)).to(torch.int64),
        one * params.get("top_p", 1.0),
        one * params.get("min_p", 0.0),
    )[0]


def _chi_square(counts: torch.Tensor, probs: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; outcomes expected less than 5 times are put together."""
    assert int(counts[probs == 0].sum()) == 0, "a filtered token was drawn"
    order = torch.argsort(probs, descending=True)
    expected, observed = (probs * counts.sum())[order], counts[order].double()
    large = int((expected >= 5).sum())
    if large < counts.numel() and float(expected[large:].sum()) < 5:
        large -= 1
    expected = torch.cat([expected[:large], expected[large:].sum().view(1)])
    observed = torch.cat([observed[:large], observed[large:].sum().view(1)])
    keep = expected > 0
    statistic = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    return float(statistic), int(keep.sum()) - 1


PROMPT = random_prompts([24], seed=34)[0]
FILTERS = {"temperature": 1.5, "top_k": 8, "top_p": 0.98}


def _draws(harness: EngineHarness, count: int, first_seed: int) -> list[list[int]]:
    params = [
        FILTERS | {"sampling_seed": first_seed + i, "ignore_eos": True, "max_new_tokens": 2}
        for i in range(count)
    ]
    return run_under(harness, "tree-8", [PROMPT] * count, params)


def _check_distribution(harness: EngineHarness, draws: int) -> None:
    """First tokens (drawn after prefill), and second ones (drawn in a tree) given the first."""
    from scipy.stats import chi2

    texts: list[list[int]] = []
    for start in range(0, draws, 500):
        texts += _draws(harness, min(500, draws - start), 7000 + start)
    probs = _target_probs(harness, PROMPT, FILTERS)
    firsts = torch.bincount(torch.tensor([text[0] for text in texts]), minlength=probs.shape[0])
    statistic, freedom = _chi_square(firsts, probs)
    assert freedom >= 4, "too few outcomes: the test would show nothing"
    assert chi2.sf(statistic, freedom) > 1e-4
    statistic, freedom = 0.0, 0
    for first in firsts.nonzero().flatten().tolist():
        given = _target_probs(harness, [*PROMPT, first], FILTERS)
        seconds = torch.tensor([text[1] for text in texts if text[0] == first])
        more, outcomes = _chi_square(torch.bincount(seconds, minlength=given.shape[0]), given)
        statistic, freedom = statistic + more, freedom + outcomes
    assert freedom >= 10, "too few outcomes: the test would show nothing"
    assert chi2.sf(statistic, freedom) > 1e-4


def test_distribution(engine: Engine, pair: tuple[str, str]) -> None:
    harness = engine(**server_args(pair[1], max_running_requests=64, max_total_tokens=16384))
    _check_distribution(harness, 1000)


@pytest.mark.full
def test_distribution_of_20000_draws(engine: Engine, pair: tuple[str, str]) -> None:
    harness = engine(**server_args(pair[1], max_running_requests=64, max_total_tokens=16384))
    _check_distribution(harness, 20000)

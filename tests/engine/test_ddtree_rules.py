"""Bias, minimum lengths and penalties against a loop of whole forwards, and against SGLang's own.

The loop is the PyTorch oracle's logits of the whole text for every token, the rules in plain Python
on top, and one draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import check_scripted, random_prompts, run_under, server_args

from overstory.kernels.reference import sample_nodes
from overstory.workers.ddtree import EARLIER_OUTPUT
from overstory.workers.tiny.config import EOS
from overstory.workers.tiny.oracle import Oracle

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
LENGTH = 24
HOT = {"temperature": 1.2, "top_p": 0.95}
GREEDY = {"temperature": 0.0}
ASKED: list[dict[str, Any]] = [
    GREEDY | {"repetition_penalty": 1.4},
    GREEDY | {"frequency_penalty": 1.5, "logit_bias": {"77": 3.0}},
    HOT | {"presence_penalty": 1.1, "frequency_penalty": -0.3},
    HOT | {"repetition_penalty": 0.8, "presence_penalty": -0.5, "top_k": 50},
    GREEDY | {"min_new_tokens": 11, "logit_bias": {str(EOS): 30.0}},
    HOT | {"min_new_tokens": 6, "frequency_penalty": 0.7, "logit_bias": {str(EOS): 12.0}},
    HOT,
    GREEDY,
]
"""What a mixed batch holds; the last two ask for no rule."""


def _requests() -> tuple[list[list[int]], list[dict[str, Any]]]:
    prompts = random_prompts([9, 30, 14, 22, 11, 40, 5, 17], seed=51)
    params = [
        {"sampling_seed": 300 + i, "max_new_tokens": LENGTH} | one for i, one in enumerate(ASKED)
    ]
    return prompts, params


def _by_the_loop(oracle: Oracle, prompt: list[int], params: dict[str, Any]) -> Iterator[int]:
    """The tokens of one request."""
    text = list(prompt)
    for new in range(params["max_new_tokens"]):
        logits = _ruled(oracle.logits(text)[-1].tolist(), text[len(prompt) :], new, params)
        one = torch.ones(1)
        token = int(
            sample_nodes(
                torch.tensor([logits]),
                one * params["temperature"],
                torch.tensor([params.get("top_k", -1)]),
                one * params.get("top_p", 1.0),
                one * 0.0,
                torch.tensor([params["sampling_seed"]]),
                torch.tensor([len(text) - 1]),
            )
        )
        yield token
        text.append(token)
        if token == EOS:
            return


def _ruled(logits: list[float], output: list[int], new: int, params: dict[str, Any]) -> list[float]:
    for token in set(output):
        logit = logits[token] - output.count(token) * params.get("frequency_penalty", 0.0)
        logit -= params.get("presence_penalty", 0.0)
        scale = params.get("repetition_penalty", 1.0)
        logits[token] = logit * scale if logit < 0 else logit / scale
    if new < params.get("min_new_tokens", 0):
        logits[EOS] = -torch.inf
    for token, bias in params.get("logit_bias", {}).items():
        logits[int(token)] += bias
    return logits


@pytest.fixture(scope="module")
def wanted(pair: tuple[str, str]) -> list[list[int]]:
    oracle = Oracle.load(*pair)
    return [list(_by_the_loop(oracle, *each)) for each in zip(*_requests(), strict=True)]


def test_the_loop_s_texts_show_every_rule(pair: tuple[str, str], wanted: list[list[int]]) -> None:
    """Each rule changes its text: else the comparisons below would show little."""
    oracle = Oracle.load(*pair)
    for prompt, params, text in zip(*_requests(), wanted, strict=True):
        bare = {
            name: value
            for name, value in params.items()
            if not name.endswith("penalty") and name not in ("min_new_tokens", "logit_bias")
        }
        if len(bare) < len(params):
            assert any(
                token != other
                for token, other in zip(_by_the_loop(oracle, prompt, bare), text, strict=False)
            )
        if "min_new_tokens" in params:
            assert params["min_new_tokens"] < len(text) < LENGTH
            assert text[-1] == EOS


def test_without_overlap_trees_equal_the_loop(
    engine: Engine, pair: tuple[str, str], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = engine(**server_args(pair[1], disable_overlap_schedule=True))
    check_scripted(harness, *_requests(), wanted, monkeypatch, ("tree-31",), seed=6)


def test_an_engine_without_speculation_equals_the_loop(
    engine: Engine, pair: tuple[str, str], wanted: list[list[int]]
) -> None:
    """Under overlap scheduling SGLang's own penalties would be a token behind."""
    assert engine(random_seed=1).generate(*_requests()) == wanted


def test_every_policy_equals_the_loop(
    engine: Engine, pair: tuple[str, str], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = engine(**server_args(pair[1]))
    check_scripted(
        harness, *_requests(), wanted, monkeypatch, ("plain", "chain", "tree-31"), seed=6
    )
    prompts, params = _requests()
    for i in (0, 2, 5):
        assert run_under(harness, "tree-15", prompts[i : i + 1], params[i]) == wanted[i : i + 1]


def test_output_of_an_earlier_replica_counts(
    engine: Engine, pair: tuple[str, str], wanted: list[list[int]]
) -> None:
    """A sequence that goes on elsewhere, its first tokens now in the prompt, ends the same."""
    harness = engine(**server_args(pair[1]))
    prompts, params = _requests()
    for i in (0, 2):
        done = wanted[i][:10]
        left = params[i] | {
            "max_new_tokens": LENGTH - len(done),
            "custom_params": {EARLIER_OUTPUT: len(done)},
        }
        rest = run_under(harness, "chain", [[*prompts[i], *done]], left)[0]
        assert rest == wanted[i][len(done) :]


def test_penalties_are_those_of_sglang() -> None:
    """Against SGLang's penalizers themselves, fed the same output token by token."""
    from sglang.srt.sampling import penaltylib

    from overstory.kernels.reference import EarlyEnd, Penalties, adjust_nodes, chain_tree

    asked = [(0.5, 0.0, 1.0), (0.0, -1.0, 1.0), (1.25, 0.5, 1.5), (0.0, 0.0, 0.5), (0.0, 0.0, 1.0)]
    minimum = [0, 3, 9, 0, 5]
    vocabulary, steps = 50, 6
    tokenizer = SimpleNamespace(eos_token_id=7, additional_stop_token_ids=None)
    reqs = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(
                frequency_penalty=frequency,
                presence_penalty=presence,
                repetition_penalty=repetition,
                min_new_tokens=least,
                stop_token_ids={3},
            ),
            tokenizer=tokenizer,
        )
        for (frequency, presence, repetition), least in zip(asked, minimum, strict=True)
    ]

    class Batch(SimpleNamespace):
        __hash__ = object.__hash__

    batch = Batch(reqs=reqs, device="cpu")
    kinds = (
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    )
    theirs = penaltylib.BatchedPenalizerOrchestrator(vocabulary, batch, set())
    theirs.penalizers = {kind: kind(theirs) for kind in kinds}
    for penalizer in theirs.penalizers.values():
        penalizer.prepare()
    draw = torch.Generator().manual_seed(3)
    ends = torch.zeros(len(reqs), vocabulary, dtype=torch.bool)
    ends[:, [3, 7]] = True
    counts = torch.zeros(len(reqs), vocabulary, dtype=torch.int64)
    roots = torch.zeros(len(reqs), dtype=torch.int64)
    tree = chain_tree(roots, roots.new_empty((len(reqs), 0)))
    columns = [torch.tensor(column) for column in zip(*asked, strict=True)]
    for step in range(steps):
        logits = torch.randn(len(reqs), vocabulary, generator=draw) * 4
        ours = adjust_nodes(
            logits,
            tree,
            torch.full((len(reqs),), step),
            Penalties(*columns, counts),
            EarlyEnd(ends, torch.tensor(minimum)),
        )
        theirs.apply(logits)
        torch.testing.assert_close(ours, logits, atol=1e-6, rtol=1e-6)
        output = torch.randint(0, 5, (len(reqs),), generator=draw)
        theirs.cumulate_output_tokens(output)
        counts.scatter_add_(1, output.unsqueeze(1), torch.ones_like(counts[:, :1]))

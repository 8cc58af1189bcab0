"""Seeds and refusals of requests, with plain objects in place of SGLang's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from overstory.workers.ddtree import EARLIER_OUTPUT
from overstory.workers.ddtree.admission import refusal
from overstory.workers.ddtree.finish import finish_within_limit
from overstory.workers.ddtree.rules import RequestRules
from overstory.workers.ddtree.sampler import request_seed, serves
from overstory.workers.policy import OPT_OUT


def _request(**changes: Any) -> Any:
    params = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": None,
        "logit_bias": None,
        "custom_params": None,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
    }
    request = {
        "return_logprob": False,
        "return_hidden_states": False,
        "custom_logit_processor": None,
        "input_embeds": None,
        "require_reasoning": False,
        "origin_input_ids": [7, 8, 9],
        "output_ids": [],
        "eos_token_ids": {1},
        "tokenizer": None,
        "vocab_size": 16,
    }
    for name, value in changes.items():
        (params if name in params else request)[name] = value
    return SimpleNamespace(sampling_params=SimpleNamespace(**params), **request)


def test_a_plain_request_is_served() -> None:
    assert refusal(_request()) is None
    assert refusal(_request(logit_bias={"5": -100.0, "7": 3.5}, min_new_tokens=3)) is None
    assert refusal(_request(return_logprob=True)) is None
    assert refusal(_request(frequency_penalty=0.1, repetition_penalty=1.1)) is None
    assert refusal(_request(presence_penalty=-0.1, custom_params={EARLIER_OUTPUT: 3})) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"custom_params": {EARLIER_OUTPUT: 4}},
        {"custom_params": {EARLIER_OUTPUT: -1}},
        {"custom_params": {EARLIER_OUTPUT: "2"}},
        {"custom_params": {EARLIER_OUTPUT: True}},
        {"custom_params": {OPT_OUT: "no"}},
        {"custom_params": {OPT_OUT: 0}},
        {"return_hidden_states": True},
        {"custom_logit_processor": "x"},
        {"input_embeds": [[0.0]]},
        {"logit_bias": {"5": float("inf")}},
        {"logit_bias": {"5": float("nan")}},
        {"logit_bias": {"5": 1e39}},
    ],
)
def test_what_a_tree_cannot_do_is_refused_by_name(asked: dict[str, Any]) -> None:
    message = refusal(_request(**asked))
    assert message is not None
    assert next(iter(asked)) in message


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_grammars_need_the_backend_that_was_tested(name: str) -> None:
    asked = _request(**{name: "x"})
    assert refusal(asked, "xgrammar") is None
    for backend in ("outlines", "none"):
        assert f"{name} with DDTREE" in str(refusal(asked, backend))
        assert refusal(_request(), backend) is None
    assert "reasoning" in str(refusal(_request(**{name: "x", "require_reasoning": True})))


def test_rules_of_a_request_that_asks_for_none() -> None:
    assert RequestRules.of(_request()) is None
    assert RequestRules.of(_request(stop_token_ids={3}, custom_params={EARLIER_OUTPUT: 2})) is None


def test_rules_end_where_the_engine_does() -> None:
    """Row 2 is the prompt's last: it draws the first token, and with a minimum of 4 may not end."""
    rules: Any = RequestRules.of(_request(min_new_tokens=4, stop_token_ids={5, 99}))
    assert (rules.ends, rules.first_end) == ([1, 5], 6)
    tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids={3})
    rules = RequestRules.of(_request(min_new_tokens=1, tokenizer=tokenizer))
    assert (rules.ends, rules.first_end) == ([1, 2, 3], 3)


def test_output_is_counted_where_it_is_made() -> None:
    asked = _request(frequency_penalty=1.0, output_ids=[4], custom_params={EARLIER_OUTPUT: 2})
    rules: Any = RequestRules.of(asked)
    counts = rules.counts(10, torch.device("cpu"))
    assert counts.nonzero().flatten().tolist() == [4, 8, 9]
    rules.append(torch.tensor([4, 0, -1, -1]))
    assert rules.counts(10, torch.device("cpu"))[[0, 4, 9]].tolist() == [1, 2, 1]


@given(seed=st.integers(-(2**70), 2**70), rid=st.text(max_size=8))
def test_given_seeds_stay_and_fit_into_64_bits(seed: int, rid: str) -> None:
    kept = request_seed(seed, rid, 1)
    assert 0 <= kept < 2**63
    assert kept == request_seed(seed, "other", 2)
    if 0 <= seed < 2**63:
        assert kept == seed


def test_derived_seeds_differ_by_request_and_by_engine() -> None:
    seeds = {request_seed(None, f"r{i}", engine) for i in range(500) for engine in (1, 2)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(None, "r1", 1) == request_seed(None, "r1", 1)


@pytest.mark.parametrize(
    ("algorithm", "dp", "deterministic", "ours"),
    [
        ("DDTREE", False, False, True),
        (None, False, False, True),
        (None, True, False, False),
        (None, False, True, False),
        ("EAGLE", False, False, False),
    ],
)
def test_which_engines_sample_here(
    algorithm: str | None, dp: bool, deterministic: bool, ours: bool
) -> None:
    arguments: Any = SimpleNamespace(
        speculative_algorithm=algorithm,
        enable_dp_attention=dp,
        enable_deterministic_inference=deterministic,
    )
    assert serves(arguments) is ours


class _Req:
    """The part of SGLang's request that decides where it ends, with SGLang's order of checks."""

    def __init__(self, output: list[int], limit: int, stops: set[int]) -> None:
        self.output_ids = output
        self.sampling_params = SimpleNamespace(
            max_new_tokens=limit,
            ignore_eos=False,
            stop_token_ids=stops,
            stop_strs=[],
            stop_regex_strs=[],
        )
        self.eos_token_ids: set[int] = set()
        self.tokenizer = self.grammar = self.to_finish = None
        self.vocab_size = 4
        self.finished_reason: str | None = None
        self.finished_len: int | None = None

    def finished(self) -> bool:
        return self.finished_reason is not None

    def _check_str_based_finish(self, count: int) -> bool:
        return False

    def _check_token_based_finish(self, tokens: list[int]) -> bool:
        for i, token in enumerate(tokens):
            if token in self.sampling_params.stop_token_ids:
                self.finished_reason = "stop"
                self.finished_len = len(self.output_ids) - len(tokens) + i + 1
                return True
        return False


def _sglang(req: _Req, count: int) -> None:
    if len(req.output_ids) >= req.sampling_params.max_new_tokens:
        req.finished_reason, req.finished_len = "length", req.sampling_params.max_new_tokens
        return
    req._check_token_based_finish(req.output_ids[-count:])


@given(
    before=st.integers(0, 5),
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    limit=st.integers(1, 14),
)
def test_ends_where_one_token_at_a_time_ends(before: int, tokens: list[int], limit: int) -> None:
    """Token 0 stops. A step of many tokens ends as the same tokens in steps of one do."""
    if before >= limit:
        return
    output = [1] * before + tokens
    single = _Req([1] * before, limit, {0})
    for token in tokens:
        single.output_ids = [*single.output_ids, token]
        _sglang(single, 1)
        if single.finished():
            break
    many: Any = _Req(list(output), limit, {0})
    finish_within_limit(_sglang, many, len(tokens))
    assert (many.finished_reason, many.finished_len) == (
        single.finished_reason,
        single.finished_len,
    )
    assert many.output_ids == output

"""Structured output against a loop: whole forwards, and xgrammar's own matcher for each text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xgrammar
from ddtree_support import check_scripted, random_prompts, run_under, server_args

from overstory.kernels.reference import sample_nodes
from overstory.orchestrator.answer_parsers import ParserSettings
from overstory.orchestrator.openai_protocol import ChatCompletionRequest
from overstory.orchestrator.tokenizer import load_tokenizer
from overstory.workers.ddtree import EARLIER_OUTPUT
from overstory.workers.tiny.config import EOS
from overstory.workers.tiny.oracle import Oracle

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
VOCABULARY = 4096
LENGTH = 28
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["a", "bb"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "kind", "count"],
        "additionalProperties": False,
    }
)
REGEX = r"(ab|cd){2}-[0-9]{3}( x)*\."
EBNF = 'root ::= "[" (item ", ")+ item "]"\nitem ::= "x" [0-9] | "[" item "]"'
CITIES = ["Oslo", "Rome"]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def _forced_call() -> str:
    """What the gateway asks of an engine for a call that must be made: a structural tag."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    request = ChatCompletionRequest.model_validate(body)
    constraint = ParserSettings("kimi_k2", None).plan(request).constraint
    assert constraint is not None
    kind, text = constraint
    assert kind == "structural_tag"
    return text


GREEDY = {"temperature": 0.0}
HOT = {"temperature": 1.1, "top_k": 60}
ASKED: list[dict[str, Any]] = [
    GREEDY | {"regex": REGEX},
    HOT | {"regex": REGEX, "frequency_penalty": 1.0},
    HOT | {"json_schema": SCHEMA},
    GREEDY | {"json_schema": SCHEMA, "logit_bias": {"77": 1.0}},
    HOT | {"ebnf": EBNF, "ignore_eos": True},
    GREEDY | {"structural_tag": _forced_call(), "max_new_tokens": 100},
    HOT | {"structural_tag": _forced_call(), "max_new_tokens": 100},
    GREEDY,
    HOT,
]
"""A mixed batch; the last two are free."""


def _requests() -> tuple[list[list[int]], list[dict[str, Any]]]:
    prompts = random_prompts([9, 21, 14, 30, 11, 17, 26, 13, 8], seed=71)
    params = [
        {"sampling_seed": 60 + i, "max_new_tokens": LENGTH} | one for i, one in enumerate(ASKED)
    ]
    return prompts, params


class _Loop:
    """Plain decoding with one matcher per text."""

    def __init__(self, pair: tuple[str, str]) -> None:
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        self._oracle = Oracle.load(*pair)
        info = xgrammar.TokenizerInfo.from_huggingface(
            get_tokenizer(pair[0]), vocab_size=VOCABULARY, stop_token_ids=[EOS]
        )
        self._compiler = xgrammar.GrammarCompiler(info)

    def text(self, prompt: list[int], params: dict[str, Any]) -> list[int]:
        matcher = self._matcher(params)
        output: list[int] = []
        while len(output) < params["max_new_tokens"]:
            logits = self._oracle.logits([*prompt, *output])[-1:].clone()
            if matcher is not None:
                mask = xgrammar.allocate_token_bitmask(1, VOCABULARY)
                matcher.fill_next_token_bitmask(mask)
                xgrammar.apply_token_bitmask_inplace(logits, mask)
            for token in set(output):
                logits[0, token] -= output.count(token) * params.get("frequency_penalty", 0.0)
            for token, bias in params.get("logit_bias", {}).items():
                logits[0, int(token)] += bias
            one = torch.ones(1)
            token = int(
                sample_nodes(
                    logits,
                    one * params["temperature"],
                    torch.tensor([params.get("top_k", -1)]),
                    one,
                    one * 0.0,
                    torch.tensor([params["sampling_seed"]]),
                    torch.tensor([len(prompt) + len(output) - 1]),
                )
            )
            output.append(token)
            if matcher is not None:
                assert matcher.accept_token(token)
            if token == EOS:
                break
        return output

    def _matcher(self, params: dict[str, Any]) -> Any:
        if "regex" in params:
            return xgrammar.GrammarMatcher(self._compiler.compile_regex(params["regex"]))
        if "json_schema" in params:
            compiled = self._compiler.compile_json_schema(params["json_schema"])
            return xgrammar.GrammarMatcher(compiled)
        if "ebnf" in params:
            return xgrammar.GrammarMatcher(self._compiler.compile_grammar(params["ebnf"]))
        if "structural_tag" in params:
            compiled = self._compiler.compile_structural_tag(params["structural_tag"])
            return xgrammar.GrammarMatcher(compiled)
        return None


@pytest.fixture(scope="module")
def wanted(pair: tuple[str, str]) -> list[list[int]]:
    loop = _Loop(pair)
    return [loop.text(*each) for each in zip(*_requests(), strict=True)]


def test_every_policy_equals_the_loop(
    engine: Engine, pair: tuple[str, str], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = engine(**server_args(pair[1]))
    check_scripted(
        harness, *_requests(), wanted, monkeypatch, ("plain", "chain", "tree-31"), seed=8
    )
    tokenizer = load_tokenizer(pair[0])
    ended = 0
    for params, text in zip(ASKED, wanted, strict=True):
        if text[-1] == EOS and "regex" in params:
            assert re.fullmatch(REGEX, tokenizer.decode(text))
            ended += 1
        elif text[-1] == EOS and "json_schema" in params:
            assert set(json.loads(tokenizer.decode(text))) == {"name", "kind", "count"}
            ended += 1
    assert ended >= 2, "too few texts came to their end: the test shows little"
    calls = [
        tokenizer.decode(text)
        for params, text in zip(ASKED, wanted, strict=True)
        if "structural_tag" in params
    ]
    for call in calls:
        assert re.search(r'functions\.weather:\d+.*\{"city": *"(Oslo|Rome)"\}', call), call


def test_a_grammar_goes_on_where_an_earlier_replica_left_it(
    engine: Engine, pair: tuple[str, str], wanted: list[list[int]]
) -> None:
    harness = engine(**server_args(pair[1]))
    prompts, params = _requests()
    done = wanted[0][:4]
    left = params[0] | {
        "max_new_tokens": LENGTH - len(done),
        "custom_params": {EARLIER_OUTPUT: len(done)},
    }
    rest = run_under(harness, "tree-15", [[*prompts[0], *done]], left)[0]
    assert rest == wanted[0][len(done) :]
    misfit = harness.submit(prompts[1], left, rid="misfit")
    harness.run([misfit])
    assert "do not fit" in str(harness.outputs[misfit].finish_reason)
    harness.assert_no_leak()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"regex": "("}, "Failed to compile regex"),
        ({"json_schema": "{"}, "Failed to compile json"),
        ({"regex": "a", "min_new_tokens": 3}, "min_new_tokens is not supported"),
    ],
)
def test_what_has_no_text_is_refused(
    engine: Engine, pair: tuple[str, str], asked: dict[str, Any], said: str
) -> None:
    harness = engine(**server_args(pair[1]))
    rid = harness.submit([7, 8, 9], GREEDY | {"max_new_tokens": 4} | asked)
    harness.run([rid])
    reason = harness.outputs[rid].finish_reason
    assert reason is not None
    assert (reason["type"], int(reason["status_code"])) == ("abort", 400)
    assert said in reason["message"]


def test_a_dead_end_ends_its_request_alone() -> None:
    from types import SimpleNamespace

    from overstory.workers.ddtree.grammar import apply_mask

    logits = torch.zeros(3, 40)
    mask = torch.full((3, 2), -1, dtype=torch.int32)
    mask[1], mask[2, 1] = 0, 0
    apply_mask(
        SimpleNamespace(apply=lambda rows: xgrammar.apply_token_bitmask_inplace(rows, mask)), logits
    )
    assert torch.equal(logits[:2], torch.zeros(2, 40))
    assert torch.isneginf(logits[2]).sum() == 8


def test_without_overlap_and_without_speculation_the_same(
    engine: Engine, pair: tuple[str, str], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = _requests()
    # Without speculation SGLang looks for the end before the grammar takes the token, and so with
    # `ignore_eos` gives one token more than the grammar allows.
    plain = [{k: v for k, v in one.items() if k != "ignore_eos"} for one in params]
    assert engine(random_seed=1).generate(prompts, plain) == wanted
    harness = engine(**server_args(pair[1], disable_overlap_schedule=True))
    check_scripted(harness, prompts, params, wanted, monkeypatch, ("tree-31",), seed=8)

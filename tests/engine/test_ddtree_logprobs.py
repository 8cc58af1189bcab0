"""Log-probabilities of what is handed out: the numbers of plain decoding, whatever the tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import ScriptedDrafts, policy, random_prompts, server_args

from overstory.workers.tiny.oracle import Oracle

if TYPE_CHECKING:
    from harness import EngineHarness, Output

Engine = Callable[..., "EngineHarness"]
LENGTH = 20
CLOSE = 2e-4
"""float32 forwards of other widths, and the oracle's, differ in the last bits of the logits."""

ASKED: list[tuple[dict[str, Any], int | None]] = [
    ({"temperature": 0.0}, 5),
    ({"temperature": 0.7, "top_p": 0.9, "top_k": 30}, 3),
    ({"temperature": 1.3, "frequency_penalty": 0.6, "logit_bias": {"77": 2.0}}, 0),
    ({"temperature": 0.0, "repetition_penalty": 1.3}, None),
    ({"temperature": 0.0, "presence_penalty": 0.8}, 1),
]
"""Parameters, and how many alternatives at each position; None asks for no log-probabilities."""

PROMPTS = random_prompts([12, 33, 8, 20, 27], seed=61)


def _run(
    harness: EngineHarness, name: str, texts: list[list[int]] | None, params: list[dict[str, Any]]
) -> list[Output]:
    rids = []
    for i, ((_, top), one) in enumerate(zip(ASKED, params, strict=True)):
        rid = f"lp-{name}-{i}-{harness.scheduler.forward_ct}"
        asked = {} if top is None else {"return_logprob": True, "top_logprobs_num": top}
        rids.append(harness.submit(PROMPTS[i], one, rid=rid, **asked))
    with pytest.MonkeyPatch.context() as patched, policy(name):
        drafts = ScriptedDrafts(seed=7)
        drafts.install(patched)
        for rid, prompt, text in zip(rids, PROMPTS, texts or [[]] * len(rids), strict=True):
            drafts.know(rid, prompt, text)
        harness.run(rids)
    harness.assert_no_leak()
    return [harness.outputs[rid] for rid in rids]


def _params(**more: Any) -> list[dict[str, Any]]:
    common = {"max_new_tokens": LENGTH, "ignore_eos": True} | more
    return [asked | common | {"sampling_seed": 40 + i} for i, (asked, _) in enumerate(ASKED)]


def _assert_same(got: list[Output], wanted: list[Output]) -> None:
    for (_, top), one, other in zip(ASKED, got, wanted, strict=True):
        assert one.ids == other.ids
        assert len(one.logprobs) == (0 if top is None else len(one.ids))
        assert len(one.top_logprobs) == (len(one.ids) if top else 0)
        assert one.logprobs == pytest.approx(other.logprobs, abs=CLOSE)
        for alternatives, others in zip(one.top_logprobs, other.top_logprobs, strict=True):
            assert len(alternatives) == top
            assert sorted(alternatives.values()) == pytest.approx(
                sorted(others.values()), abs=CLOSE
            )


def test_every_policy_gives_those_of_plain_decoding(engine: Engine, pair: tuple[str, str]) -> None:
    harness = engine(**server_args(pair[1], max_total_tokens=8192))
    plain = _run(harness, "plain", None, _params())
    _assert_by_oracle(Oracle.load(*pair), plain)
    texts = [output.ids for output in plain]
    for name in ("chain", "tree-31"):
        _assert_same(_run(harness, name, texts, _params()), plain)
    for length in (1, 2, 7, 8):
        _assert_same(
            _run(harness, "tree-15", texts, _params(max_new_tokens=length)), _cut(plain, length)
        )


def _cut(outputs: list[Output], length: int) -> list[Output]:
    from harness import Output

    return [
        Output(
            ids=o.ids[:length], logprobs=o.logprobs[:length], top_logprobs=o.top_logprobs[:length]
        )
        for o in outputs
    ]


def _assert_by_oracle(oracle: Oracle, outputs: list[Output], scaled: bool = True) -> None:
    """After the rules and (if ``scaled``) the temperature, before the filters."""
    for prompt, (asked, top), output in zip(PROMPTS, ASKED, outputs, strict=True):
        if top is None:
            continue
        logits = oracle.logits([*prompt, *output.ids])
        for k, token in enumerate(output.ids):
            row = logits[len(prompt) - 1 + k].clone()
            for seen in set(output.ids[:k]):
                row[seen] -= output.ids[:k].count(seen) * asked.get("frequency_penalty", 0.0)
                row[seen] -= asked.get("presence_penalty", 0.0)
            for biased, bias in asked.get("logit_bias", {}).items():
                row[int(biased)] += bias
            temperature = (scaled and asked["temperature"]) or 1.0
            logprobs = torch.log_softmax(row / temperature, dim=0)
            assert output.logprobs[k] == pytest.approx(float(logprobs[token]), abs=CLOSE)
            if top:
                best = logprobs.topk(top).values.tolist()
                assert sorted(output.top_logprobs[k].values()) == pytest.approx(
                    sorted(best), abs=CLOSE
                )
                for other, value in output.top_logprobs[k].items():
                    assert value == pytest.approx(float(logprobs[other]), abs=CLOSE)


def test_those_before_the_temperature_where_sglang_is_told_so(
    engine: Engine, pair: tuple[str, str]
) -> None:
    """SGLANG_RETURN_ORIGINAL_LOGPROB: of the first token, plain steps and paths of trees alike."""
    from sglang.srt.environ import envs

    harness = engine(**server_args(pair[1], max_total_tokens=8192))
    with envs.SGLANG_RETURN_ORIGINAL_LOGPROB.override(True):
        plain = _run(harness, "plain", None, _params())
        _assert_by_oracle(Oracle.load(*pair), plain, scaled=False)
        texts = [output.ids for output in plain]
        _assert_same(_run(harness, "tree-31", texts, _params()), plain)


def test_a_stop_token_inside_a_path_ends_them(engine: Engine, pair: tuple[str, str]) -> None:
    harness = engine(**server_args(pair[1], max_total_tokens=8192))
    plain = _run(harness, "plain", None, _params())
    texts = [output.ids for output in plain]
    stops = [{text[5]} for text in texts]
    params = [
        one | {"stop_token_ids": list(stop), "ignore_eos": False}
        for one, stop in zip(_params(), stops, strict=True)
    ]
    for name in ("plain", "chain"):
        ended = _run(harness, name, texts, params)
        for output, whole, stop in zip(ended, plain, stops, strict=True):
            assert output.ids[-1] in {*stop, 1}
            assert len(output.logprobs) in (0, len(output.ids))
            assert output.logprobs == pytest.approx(
                whole.logprobs[: len(output.logprobs)], abs=CLOSE
            )

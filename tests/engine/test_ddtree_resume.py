"""A sequence that goes on on another replica, as the gateway's journal asks it to: the same tokens,
log-probabilities and end as if it had never been cut, whatever it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from ddtree_support import policy, random_prompts, server_args

from overstory.orchestrator.journal import JournalEntry
from overstory.orchestrator.replica_setup import engine_limits
from overstory.orchestrator.sampling import Sampling
from overstory.workers.tiny.config import EOS

if TYPE_CHECKING:
    from harness import EngineHarness, Output

Engine = Callable[..., "EngineHarness"]
CONTEXT = 256
LENGTH = 20
CLOSE = 2e-4
"""float32 forwards of other widths differ in the last bits of the logits."""

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.1, "top_p": 0.95, "top_k": 200},
    "penalties": {
        "temperature": 0.9,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "bias": {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": ((77, 3.0),)},
    "min tokens": {"temperature": 1.0, "min_new_tokens": 12, "logit_bias": ((EOS, 30.0),)},
    "regex": {"temperature": 1.0, "constraint": ("regex", "[a-z]{4}(, [a-z]{2,6}){3,9}\\n")},
    "stop token": {"temperature": 0.0},  # which one: one of the greedy text
}
PROMPTS = dict(zip(ASKED, random_prompts([9, 30, 14, 22, 11, 40, 9], seed=71), strict=True))
PROMPTS["stop token"] = PROMPTS["greedy"]


def _entry(name: str, **more: Any) -> JournalEntry:
    asked = {"seed": 500 + len(name), "max_new_tokens": LENGTH} | ASKED[name] | more
    return JournalEntry(f"{name}-{len(more)}", tuple(PROMPTS[name]), Sampling(**asked), 0.0)


def _run(harness: EngineHarness, entries: list[JournalEntry], under: str) -> list[Output]:
    """What is left of each sequence, all in one batch, by an engine that has computed nothing of it
    before: as on another replica, what was decoded is prefilled."""
    harness.flush_cache()
    rids = []
    with policy(under):
        for number, entry in enumerate(entries):
            call = entry.call()
            asked = {"return_logprob": True, "top_logprobs_num": 2}
            rid = f"{call.rid}-{number}-{len(entry.committed)}-{under}"
            rids.append(
                harness.submit(call.input_ids, call.sampling.engine_params(), rid=rid, **asked)
            )
        harness.run(rids)
    harness.assert_no_leak()
    outputs = [harness.outputs[rid] for rid in rids]
    assert not any(output.cached_tokens for output in outputs)
    return outputs


def _cut(entry: JournalEntry, whole: Output, at: int) -> JournalEntry:
    """The sequence after `at` tokens, about to be moved."""
    cut = JournalEntry(entry.rid, entry.prompt_ids, entry.sampling, 0.0, moves=1)
    cut.commit(whole.ids[:at])
    return cut


def _assert_goes_on(rest: Output, whole: Output, at: int) -> None:
    assert rest.ids == whole.ids[at:]
    assert rest.finish_reason is not None
    assert whole.finish_reason is not None
    assert rest.finish_reason["type"] == whole.finish_reason["type"]
    assert rest.finish_reason.get("matched") == whole.finish_reason.get("matched")
    assert rest.logprobs == pytest.approx(whole.logprobs[at:], abs=CLOSE)
    for alternatives, others in zip(rest.top_logprobs, whole.top_logprobs[at:], strict=True):
        assert sorted(alternatives.values()) == pytest.approx(sorted(others.values()), abs=CLOSE)


@pytest.fixture
def harness(engine: Engine, pair: tuple[str, str]) -> EngineHarness:
    return engine(**server_args(pair[1], context_length=CONTEXT))


def test_whatever_was_asked_for_goes_on_where_it_was_cut(harness: EngineHarness) -> None:
    names = [name for name in ASKED if name != "stop token"]
    entries = [_entry(name) for name in names]
    wholes = _run(harness, entries, "tree-15")
    ids = wholes[0].ids
    at = next(at for at in range(4, LENGTH - 1) if ids[at] not in ids[:at])
    entries.append(_entry("stop token", stop_token_ids=(ids[at],)))
    wholes += _run(harness, entries[-1:], "tree-15")
    by_name = dict(zip([*names, "stop token"], wholes, strict=True))
    assert len(by_name["stop token"].ids) == at + 1
    assert 12 < len(by_name["min tokens"].ids) < LENGTH, "the rule shows only where it ends early"
    for share in (0.0, 0.5, 1.0):
        cuts = [max(1, int(share * (len(whole.ids) - 1))) for whole in wholes]
        moved = [_cut(*one) for one in zip(entries, wholes, cuts, strict=True)]
        for under in ("tree-31",) if share != 0.5 else ("plain", "chain", "tree-31"):
            for one in zip(_run(harness, moved, under), wholes, cuts, strict=True):
                _assert_goes_on(*one)


def test_moved_twice_it_ends_the_same(harness: EngineHarness) -> None:
    entry = _entry("penalties")
    (whole,) = _run(harness, [entry], "chain")
    moved = _cut(entry, whole, 5)
    moved.commit(_run(harness, [moved], "tree-15")[0].ids[:7])
    _assert_goes_on(_run(harness, [moved], "plain")[0], whole, 12)


def test_near_the_end_of_the_context(harness: EngineHarness) -> None:
    """Where what stands is longer than any prompt may be."""
    limits = engine_limits(harness.scheduler.get_init_info(), 1)
    prompt = random_prompts([limits["prompt_tokens"] - 4], seed=5)[0]
    left = limits["context_tokens"] - len(prompt)
    sampling = Sampling(seed=3, max_new_tokens=left, temperature=0.0, ignore_eos=True)
    entry = JournalEntry("end", tuple(prompt), sampling, 0.0)
    (whole,) = _run(harness, [entry], "tree-15")
    assert len(whole.ids) == left > 7
    for at in range(1, left):
        (rest,) = _run(harness, [_cut(entry, whole, at)], "tree-15")
        _assert_goes_on(rest, whole, at)
    as_prompt = JournalEntry("long", (*prompt, *whole.ids[:-1]), sampling.after(left - 1), 0.0)
    as_prompt.sampling = Sampling(seed=3, max_new_tokens=1, temperature=0.0)
    (refused,) = _run(harness, [as_prompt], "tree-15")
    assert "exceeds the maximum allowed length" in str(refused.finish_reason)

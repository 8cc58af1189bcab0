"""Whether a request ends: the short way says what SGLang says."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

VOCABULARY = 50
ENDS: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_eos": True},
    {"stop_token_ids": [7, 8]},
    {"stop_token_ids": [7], "ignore_eos": True},
    {"max_new_tokens": 12},
    {"stop": ["x"]},
    {"stop_regex": ["x"]},
)


def _request(asked: dict[str, Any], eos: set[int] | None, before: list[int]) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**({"max_new_tokens": 40} | asked))
    # As SGLang's `normalize` leaves them, which asks the engine at hand.
    params.stop_strs, params.stop_regex_strs = asked.get("stop", []), asked.get("stop_regex", [])
    params.stop_str_max_len = params.stop_regex_max_len = 1
    req = Req("r", "", array("q", [1, 2]), params, vocab_size=VOCABULARY, eos_token_ids=eos)
    req.output_ids.extend(before)
    return req


class _Decodes:
    """Says "x" for token 9."""

    eos_token_id = 5
    additional_stop_token_ids: set[int] | None = None

    def decode(self, ids: Any) -> str:
        return "".join("x" if token == 9 else "." for token in ids)


def _ends(asked: dict[str, Any], seed: int, short: bool) -> tuple[Any, ...]:
    """Where a request stands after a few steps, and after how many it was over."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

    from overstory.workers.ddtree.finish import finish_within_limit

    original: Any = Req.update_finish_state
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__
    draw = random.Random(seed)
    req = _request(asked, draw.choice([None, {3}]), [20] * draw.randrange(4))
    if "stop" in asked or "stop_regex" in asked or draw.random() < 0.2:
        req.tokenizer = _Decodes()
    if draw.random() < 0.1:
        req.grammar = SimpleNamespace(is_terminated=lambda: len(req.output_ids) > 6)
    steps = 0
    while steps < 8 and not req.finished():
        steps += 1
        given = [draw.randrange(10, VOCABULARY) for _ in range(draw.randrange(1, 8))]
        if draw.random() < 0.15:
            given[draw.randrange(len(given))] = draw.choice([3, 5, 7, 8, 9, -1, VOCABULARY, 0, 49])
        if draw.random() < 0.03:
            req.to_finish = FINISH_ABORT("told to")
        req.output_ids.extend(given)
        if short:
            finish_within_limit(original, req, len(given))
        else:
            _long_way(original, req, len(given))
    reason = req.finished_reason
    return (
        steps,
        type(reason).__name__,
        None if reason is None else {k: str(v) for k, v in vars(reason).items()},
        req.finished_len,
        req.output_ids.tolist(),
    )


def _long_way(original: Any, req: Any, count: int) -> None:
    """Without the short way."""
    from overstory.workers.ddtree import finish

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "_goes_on", lambda *_: False)
        finish.finish_within_limit(original, req, count)


@pytest.mark.parametrize("asked", ENDS, ids=str)
def test_requests_end_where_they_would_end_by_sglang(asked: dict[str, Any]) -> None:
    found = set()
    for seed in range(300):
        ours, theirs = _ends(asked, seed, True), _ends(asked, seed, False)
        assert ours == theirs
        found.add(ours[1])
    assert "NoneType" in found or asked.get("max_new_tokens") == 12
    assert len(found) > 1


def test_the_short_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from overstory.workers.ddtree.finish import finish_within_limit

    def never(*_: Any) -> None:
        raise AssertionError("asked SGLang")

    req = _request({"stop_token_ids": [7]}, {3}, [])
    req.output_ids.extend([10, 11])
    finish_within_limit(never, req, 2)
    req.output_ids.append(7)
    with pytest.raises(AssertionError):
        finish_within_limit(never, req, 1)

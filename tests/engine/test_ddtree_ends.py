"""Where requests end inside a step's tokens, what is refused, and legal oddities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import (
    GREEDY,
    ScriptedDrafts,
    policy,
    random_prompts,
    run_under,
    server_args,
)

from overstory.workers.step_stats import STATS

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
PROMPT = random_prompts([30], seed=41)[0]
LENGTH = 40


@pytest.fixture(params=[True, False], ids=["no-overlap", "overlap"])
def harness(request: pytest.FixtureRequest, engine: Engine, pair: tuple[str, str]) -> EngineHarness:
    return engine(**server_args(pair[1], disable_overlap_schedule=request.param))


@pytest.fixture
def known(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Any]:
    """A greedy text, and drafts that know it: under chains of 7 most ends lie inside a path."""
    text = run_under(harness, "plain", [PROMPT], GREEDY | {"max_new_tokens": LENGTH})[0]
    drafts = ScriptedDrafts(seed=1)
    drafts._draw = _Eager()
    drafts.install(monkeypatch)
    return text, drafts


class _Eager:
    """Draws that make every draft right to its full depth, at rank 0."""

    def randrange(self, stop: int) -> int:
        return stop - 1

    def choice(self, options: list[int]) -> int:
        return options[0]


def _run(
    harness: EngineHarness, known: tuple[list[int], Any], name: str, params: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    text, drafts = known
    rid = f"end-{name}-{harness.scheduler.forward_ct}"
    drafts.know(rid, PROMPT, text)
    ids = run_under(harness, name, [PROMPT], params, [rid])[0]
    reason = harness.outputs[rid].finish_reason
    assert reason is not None
    return ids, reason


def _counted(name: str) -> int:
    """Tokens that steps under this policy have handed out so far."""
    return int(STATS.snapshot()["verify"].get(name, {"tokens": 0})["tokens"])


@pytest.mark.parametrize("name", ["plain", "chain", "tree-31"])
def test_stop_token_inside_a_path(
    harness: EngineHarness, known: tuple[list[int], Any], name: str
) -> None:
    text, _ = known
    for end in (4, 5, 9, 14, 15):
        stop = text[end]
        first = text.index(stop)
        params = {"temperature": 0.0, "stop_token_ids": [stop], "max_new_tokens": LENGTH}
        before = _counted(name)
        ids, reason = _run(harness, known, name, params)
        assert ids == text[: first + 1]
        assert reason["type"] == "stop"
        assert reason["matched"] == stop
        assert _counted(name) - before == first, "all but the first, which comes from prefill"


@pytest.mark.parametrize("name", ["plain", "chain", "tree-31"])
def test_max_tokens_inside_a_path(
    harness: EngineHarness, known: tuple[list[int], Any], name: str
) -> None:
    text, _ = known
    for limit in (1, 2, 3, 7, 8, 9, 20):
        ids, reason = _run(harness, known, name, GREEDY | {"max_new_tokens": limit})
        assert ids == text[:limit]
        assert reason["type"] == "length"


@pytest.mark.parametrize("name", ["plain", "chain", "tree-31"])
def test_stop_token_before_max_tokens_in_one_step(
    harness: EngineHarness, known: tuple[list[int], Any], name: str
) -> None:
    """Both inside one path: the stop token comes first, so it ends the request (as plain does)."""
    text, _ = known
    for end in range(2, 14):
        first = text.index(text[end])
        for limit in range(first + 1, first + 4):
            params = {
                "temperature": 0.0,
                "stop_token_ids": [text[end]],
                "max_new_tokens": limit,
            }
            ids, reason = _run(harness, known, name, params)
            assert ids == text[: first + 1]
            assert reason["type"] == ("length" if limit == first + 1 else "stop")


def test_token_id_zero_is_a_token(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 0 in the prompt, as a root, in drafts and in the text."""
    prompts = [[0, 0, 5, 0], [*PROMPT, 0]]
    params = GREEDY | {"max_new_tokens": 24, "logit_bias": {"0": 100.0}}
    drafts = ScriptedDrafts(seed=2)
    drafts.install(monkeypatch)
    for name in ("plain", "chain", "tree-15", "spine-31"):
        rids = [f"zero-{name}-{i}-{harness.scheduler.forward_ct}" for i in range(2)]
        for rid, prompt in zip(rids, prompts, strict=True):
            drafts.know(rid, prompt, [0] * 24)
        assert run_under(harness, name, prompts, params, rids) == [[0] * 24] * 2


@pytest.mark.parametrize("overlap", [False, True])
def test_context_end(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Requests run into the end of the context under the largest tree; neighbours are unharmed."""
    context = 128
    harness = engine(
        **server_args(
            pair[1],
            context_length=context,
            disable_overlap_schedule=not overlap,
            max_total_tokens=2048,
        )
    )
    prompts = random_prompts([100, 90, 110, 30], seed=42)
    params = GREEDY | {"max_new_tokens": context}
    plain = run_under(harness, "plain", prompts, params)
    left = [context - len(prompt) - len(text) for prompt, text in zip(prompts, plain, strict=True)]
    assert set(left) == {2}, "SGLang ends a request 2 tokens before its context does"
    drafts = ScriptedDrafts(seed=3)
    drafts.install(monkeypatch)
    for name in ("chain", "tree-63", "spine-63"):
        rids = [f"ctx-{name}-{i}-{harness.scheduler.forward_ct}" for i in range(len(prompts))]
        for rid, prompt, text in zip(rids, prompts, plain, strict=True):
            drafts.know(rid, prompt, text)
        assert run_under(harness, name, prompts, params, rids) == plain
    harness.flush_cache()
    harness.assert_no_leak()


@pytest.mark.parametrize("with_words", [False, True])
def test_rows_beyond_the_context_share_its_last_position(with_words: bool) -> None:
    """The rotary tables end there, on a CPU with an error, on a GPU with another's numbers."""
    from overstory.kernels.reference import tree_build
    from overstory.workers.ddtree.draft import Drafter
    from overstory.workers.ddtree.verify import row_layout

    roots, last = torch.tensor([5, 6]), 127
    logprobs = torch.log_softmax(-torch.arange(2.0 * 7 * 4).view(2, 7, 4), dim=-1)
    tree = tree_build(roots, logprobs, torch.arange(56).view(2, 7, 4), 15)
    lengths = torch.tensor([last - 1, 40])
    at = row_layout(tree, lengths, last, with_words).positions.view(2, -1)
    wanted = (lengths.unsqueeze(1) + tree.depths).clamp(max=last)
    assert torch.equal(at, wanted)
    assert int(tree.depths[0].max()) > 1, "the tree reaches beyond the context"

    drafter = object.__new__(Drafter)
    drafter._block_size, drafter._last_position, drafter._mask_token_id = 8, last, 0
    drafter._offsets, drafter._embed = torch.arange(8), lambda ids: ids
    window = torch.arange(32).view(2, 16)
    drafted_at = drafter.block(lengths, roots, window).positions.view(2, -1)
    assert drafted_at[0].tolist() == [last - 1] + [last] * 7
    assert drafted_at[1].tolist() == list(range(40, 48))


def test_what_trees_cannot_do_is_refused(engine: Engine, pair: tuple[str, str]) -> None:
    harness = engine(**server_args(pair[1]))
    for word, params, fields in (
        ("return_hidden_states", {}, {"return_hidden_states": True}),
        ("logit_bias", {"logit_bias": {"5": 1e7}}, {}),
    ):
        rid = harness.submit(PROMPT, GREEDY | {"max_new_tokens": 4} | params, **fields)
        harness.run([rid])
        reason = harness.outputs[rid].finish_reason
        assert reason is not None
        assert (reason["type"], int(reason["status_code"])) == ("abort", 400)
        assert word in reason["message"]
    harness.assert_no_leak()


def test_policy_beyond_the_engine_is_refused(engine: Engine, pair: tuple[str, str]) -> None:
    from overstory.workers import tree_policy
    from overstory.workers.tree_policy import TreePolicy

    engine(**server_args(pair[1], rows=16))
    with pytest.raises(ValueError, match="at most 15"):
        tree_policy.set_current(TreePolicy.parse("tree-16"))
    with policy("tree-15"):
        assert str(tree_policy.current()) == "tree-15"

"""Rows of others leave the slots alone that requests under way here were promised: SGLang ends the
rank whose prompt in chunks finds none, and with an error the request that is alone and finds none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from ddtree_support import policy, random_prompts, server_args
from handoff_support import command

from overstory.workers.defrag.audit import audit
from overstory.workers.handoff.room import free_for_rows

if TYPE_CHECKING:
    from harness import EngineHarness

POOL = 1024
CHUNK = 64
PARAMS = {"temperature": 0.0, "max_new_tokens": 90, "ignore_eos": True}


@pytest.fixture(params=[512, CHUNK], ids=["generates", "prompt in chunks"])
def here(
    request: pytest.FixtureRequest, engine: Callable[..., EngineHarness], pair: tuple[str, str]
) -> EngineHarness:
    sizes = {"context_length": 512, "max_total_tokens": POOL, "chunked_prefill_size": request.param}
    harness = engine(**server_args(pair[1], **sizes))
    harness.flush_cache()
    return harness


def take(here: EngineHarness, rows: int) -> dict[str, Any]:
    """Asks for so many rows of a replica that is not there."""
    texts = random_prompts([rows // 2, rows - rows // 2], seed=5)
    order = {"key": "k", "name": "nobody", "texts": texts, "budget": 1 << 30}
    return here.at_boundary(command, "kv_take", order)[0]


def give_up(here: EngineHarness) -> None:
    order = {"key": "k", "name": "nobody", "texts": [], "budget": 1, "give_up": True}
    here.at_boundary(command, "kv_take", order)
    here.at_boundary(audit)
    here.assert_no_leak()


@pytest.mark.parametrize("name", ["plain", "tree-15"])
def test_rows_leave_room_for_what_runs(here: EngineHarness, name: str) -> None:
    """As many as may be taken are taken, and the request ends as it would."""
    (prompt,) = random_prompts([400], seed=3)
    with policy(name):
        (whole,) = here.generate([prompt], PARAMS)
        here.flush_cache()
        rid = here.submit(prompt, PARAMS)
        here.step(3)
        free = here.at_boundary(free_for_rows)[0]
        assert 100 < free < here.free_slots() - 80
        assert take(here, free + 2)["failed"] == f"no room for {free + 2} rows"
        assert take(here, free)["under_way"]
        here.run([rid])
    assert here.outputs[rid].ids == whole
    give_up(here)


def test_texts_are_not_held_where_a_request_needs_their_room(here: EngineHarness) -> None:
    """What was to be evicted for it when it was admitted."""
    first, second, prompt = random_prompts([360, 90, 400], seed=4)
    texts = [{"rid": "none", "tokens": tokens} for tokens in (first, second)]
    held = {"key": "h", "texts": texts}
    with policy("plain"):
        (whole,) = here.generate([prompt], PARAMS)
        here.flush_cache()
        here.generate([first, second], PARAMS | {"max_new_tokens": 1})
        assert here.at_boundary(command, "kv_hold", held)[0]["lengths"] == [360, 90]
        here.at_boundary(command, "kv_let_go", held)
        rid = here.submit(prompt, PARAMS)
        here.step(3)
        found = here.at_boundary(command, "kv_hold", held)[0]["lengths"]
        here.run([rid])
    assert here.outputs[rid].ids == whole
    assert found == [360, 0], "what leaves it its room"
    here.at_boundary(command, "kv_let_go", held)
    here.at_boundary(audit)
    here.assert_no_leak()

"""KV after tree steps: what is committed, what the prefix cache hands on, no slot lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from cache_checks import (
    check_aborts,
    check_chunks_between_steps,
    check_committed_kv,
    check_eviction,
    check_prefix_hits,
    check_retraction,
)
from ddtree_support import server_args

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
TREES = ("plain", "chain", "tree-31", "spine-15")


@pytest.fixture
def harness(engine: Engine, pair: tuple[str, str]) -> EngineHarness:
    return engine(**server_args(pair[1], chunked_prefill_size=64))


@pytest.mark.parametrize("name", TREES)
def test_committed_kv_equals_prefill(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    check_committed_kv(harness, monkeypatch, name)


def test_prefix_hits_with_tokens_made_by_trees(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_prefix_hits(harness, monkeypatch, TREES)


def test_chunked_prefill_between_tree_steps(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_chunks_between_steps(harness, monkeypatch)


@pytest.mark.parametrize("overlap", [False, True])
def test_aborts_in_the_middle_of_trees(
    engine: Engine, pair: tuple[str, str], overlap: bool
) -> None:
    check_aborts(
        engine(
            **server_args(pair[1], chunked_prefill_size=64, disable_overlap_schedule=not overlap)
        )
    )


def test_retraction_under_memory_pressure(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_retraction(engine(**server_args(pair[1], rows=32, max_total_tokens=700)), monkeypatch)


def test_eviction(engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_eviction(engine(**server_args(pair[1], rows=32, max_total_tokens=700)), monkeypatch)

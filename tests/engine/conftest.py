"""Fixtures of the engine tests. The process is prepared before any test module imports SGLang."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overstory.workers.environment import prepare_process

prepare_process("cpu")

if TYPE_CHECKING:
    from harness import EngineHarness


@pytest.fixture(scope="session")
def pair() -> tuple[str, str]:
    """Paths of the target and the drafter that the engine tests run."""
    override = os.environ.get("OVERSTORY_TEST_PAIR")
    if override:
        root = Path(override)
        return str(root / "target"), str(root / "drafter")
    from overstory.workers.tiny.paths import resolve_model

    return resolve_model("overstory-tiny"), resolve_model("overstory-tiny-drafter")


@pytest.fixture(scope="session")
def _engines() -> Iterator[dict[str, Any]]:
    held: dict[str, Any] = {}
    yield held
    _close(held)


def _close(engines: dict[str, Any]) -> None:
    if engines:
        engines.pop("engine").close()
        engines.clear()


@pytest.fixture(scope="module")
def no_shared_engine(_engines: dict[str, Any]) -> None:
    """For modules with an engine of their own: SGLang's globals are there for one in a process."""
    _close(_engines)


def _engine_of(
    engines: dict[str, Any], kind: Callable[..., EngineHarness], ranks: int, model: str
) -> Callable[..., EngineHarness]:
    def get(**server_args: Any) -> EngineHarness:
        wanted = {"tp_size": ranks} | server_args
        if engines.get("arguments") != wanted or not engines["engine"].alive():
            _close(engines)
            engines["engine"] = kind(model, **server_args)
            engines["arguments"] = wanted
        held: EngineHarness = engines["engine"]
        return held

    return get


@pytest.fixture
def engine(_engines: dict[str, Any], pair: tuple[str, str]) -> Callable[..., EngineHarness]:
    """Gives the scheduler of the wanted ServerArgs: the one at hand, or a new one in its place.

    Order tests by their arguments: each change costs some seconds.
    """
    from harness import EngineHarness

    return _engine_of(_engines, EngineHarness, 1, pair[0])


@pytest.fixture
def engine_tp2(_engines: dict[str, Any], pair: tuple[str, str]) -> Callable[..., EngineHarness]:
    """As `engine`, at TP 2: rank 1 runs in a child process."""
    from tp2_harness import Tp2Harness

    return _engine_of(_engines, Tp2Harness, 2, pair[0])


@pytest.fixture
def engine_tp4(_engines: dict[str, Any], pair: tuple[str, str]) -> Callable[..., EngineHarness]:
    """As `engine`, at TP 4."""
    from tp2_harness import Tp4Harness

    return _engine_of(_engines, Tp4Harness, 4, pair[0])

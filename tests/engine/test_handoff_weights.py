"""A model that takes its weights from the same one in memory, over a communicator: SGLang's own
loaders, real files. Whatever goes wrong, they come from disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import server_args

from overstory.workers.handoff.identity import weights_move
from overstory.workers.handoff.loading import WeightShelf
from overstory.workers.handoff.peers import Peers
from overstory.workers.handoff.pieces import Conveyor
from overstory.workers.handoff.weights import WeightTable

if TYPE_CHECKING:
    from harness import EngineHarness

PIECE_BYTES = 1 << 20
LIMIT_S = 30.0


class Pair:
    """A shelf that gives and one that takes, with a communicator between them."""

    def __init__(self, name: str, loader: Any, settings: dict[str, Any]) -> None:
        self._name, self._loader, self._settings = name, loader, settings
        self.giving, self.taking = WeightShelf(), WeightShelf()
        self.from_disk = 0
        self._giver = self._peers({"weights": self.giving.give})
        self._taker = self._peers({})

    @staticmethod
    def _peers(answers: dict[str, Any]) -> Peers:
        return Peers(answers, lambda: torch.device("cpu"), lambda: "127.0.0.1")

    def meet(self) -> None:
        ticket = self._giver.offer(self._name)
        limits = ("tcp", None, LIMIT_S, LIMIT_S, PIECE_BYTES)
        opening = threading.Thread(target=self._giver.open, args=(self._name, *limits))
        opening.start()
        self._taker.open(self._name, "tcp", ticket, LIMIT_S, LIMIT_S, PIECE_BYTES)
        opening.join(LIMIT_S)
        self.taking.source = self._taker.taker(self._name)

    def load(self, shelf: WeightShelf) -> torch.nn.Module:
        model = shelf.load(self._original, self._loader, **self._settings)
        assert isinstance(model, torch.nn.Module)
        return model

    def _original(self, loader: Any, **settings: Any) -> Any:
        self.from_disk += 1
        return loader.load_model(**settings)

    def close(self) -> None:
        self._taker.close(self._name)
        self._giver.close(self._name)


@pytest.fixture
def pair_of_shelves(engine: Callable[..., EngineHarness], pair: tuple[str, str]) -> Iterator[Pair]:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    arguments = server_args(pair[1], context_length=512, max_total_tokens=2048)
    runner = engine(**arguments).scheduler.tp_worker.model_runner
    settings = {"model_config": runner.model_config, "device_config": DeviceConfig("cpu", 0)}
    shelves = Pair("weights", DefaultModelLoader(runner.load_config), settings)
    yield shelves
    shelves.close()


def memory(model: torch.nn.Module) -> torch.Tensor:
    """All bytes of it."""
    return torch.cat(WeightTable(model)._memory)


def test_weights_come_from_memory_and_are_those_on_disk(pair_of_shelves: Pair) -> None:
    pair = pair_of_shelves
    given = pair.load(pair.giving)
    assert pair.from_disk == 1
    pair.meet()
    taken = pair.load(pair.taking)
    assert pair.from_disk == 1, pair.taking.reason
    assert pair.taking.taken.bytes >= memory(given).numel() > PIECE_BYTES
    assert torch.equal(memory(taken), memory(given))
    for name, value in given.state_dict().items():
        assert torch.equal(taken.state_dict()[name], value), name


def test_no_tensor_of_a_model_is_left_out(
    engine: Callable[..., EngineHarness], pair: tuple[str, str]
) -> None:
    """Whatever a model's objects hold, in target and drafter as they serve."""
    arguments = server_args(pair[1], context_length=512, max_total_tokens=2048)
    scheduler = engine(**arguments).scheduler
    for worker in (scheduler.tp_worker, scheduler.draft_worker.draft_worker):
        model = worker.model_runner.model
        known = {memory.data_ptr() for memory in WeightTable(model)._memory}
        found = list(held_tensors(model))
        assert len(found) > 20
        for name, tensor in found:
            assert tensor.untyped_storage().data_ptr() in known, name


def held_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that can be reached from a model through objects of SGLang and of containers, but
    for those of process groups."""
    seen: set[int] = set()
    ahead: list[tuple[str, Any]] = [("model", model)]
    while ahead:
        name, value = ahead.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.numel():
                yield name, value
        elif isinstance(value, dict):
            ahead += [(f"{name}[{key!r}]", one) for key, one in value.items()]
        elif isinstance(value, (list, tuple, set)):
            ahead += [(f"{name}[{at}]", one) for at, one in enumerate(value)]
        elif type(value).__module__.startswith("sglang.srt.distributed"):
            continue
        elif type(value).__module__.partition(".")[0] in ("sglang", "torch") and hasattr(
            value, "__dict__"
        ):
            ahead += [(f"{name}.{key}", one) for key, one in vars(value).items()]


@pytest.mark.parametrize("fault", ["other files", "garbage", "nothing served", "peer gone"])
def test_else_they_come_from_disk(
    pair_of_shelves: Pair, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of_shelves
    if fault == "other files":
        pair.giving.settings = "of other settings"
    if fault != "nothing served":
        given = pair.load(pair.giving)
    pair.meet()
    if fault == "peer gone":
        pair._giver.close(pair._name)
    before = pair.from_disk
    with monkeypatch.context() as patch:
        if fault == "garbage":
            garble(patch)
        taken = pair.load(pair.taking)
    assert pair.from_disk == before + 1
    assert {
        "other files": "has other files or settings",
        "garbage": "checksum",
        "nothing served": "is not served there",
        "peer gone": "rank 0",
    }[fault] in pair.taking.reason
    if fault != "nothing served":
        assert torch.equal(memory(taken), memory(given))
    if fault == "garbage":
        pair.load(pair.taking)
        assert pair.from_disk == before + 1, "the next model may come from the peer"


def garble(patch: pytest.MonkeyPatch) -> None:
    """What is sent from now on is not what its checksum says."""
    seal = Conveyor._seal

    def wrong(self: Conveyor, staging: torch.Tensor, size: int) -> None:
        seal(self, staging, size)
        staging[size // 2] += 1

    patch.setattr(Conveyor, "_seal", wrong)


def test_an_error_of_any_kind_leaves_it_to_the_disk(
    pair_of_shelves: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.model_loader.loader import DummyModelLoader

    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError("deliberate")

    pair = pair_of_shelves
    given = pair.load(pair.giving)
    pair.meet()
    monkeypatch.setattr(DummyModelLoader, "load_model", fails)
    assert torch.equal(memory(pair.load(pair.taking)), memory(given))
    assert (pair.from_disk, pair.taking.reason) == (2, "'deliberate'")


def test_weights_that_move_are_not_given(pair_of_shelves: Pair) -> None:
    pair = pair_of_shelves
    pair.load(pair.giving)
    pair.giving.refuses = weights_move(SimpleNamespace(enable_eplb=True))
    pair.meet()
    pair.load(pair.taking)
    assert "enable_eplb" in pair.taking.reason

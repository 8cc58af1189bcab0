"""Tensor-parallel ranks stepped together: rank 0 in the test process, each other in a child.

They do whatever rank 0 is told to: each step, they get the same requests and the same policy
first. So every test that takes an `EngineHarness` runs at TP 2 too.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness import STEP_DEADLINE_S, EngineHarness, Output

from overstory.orchestrator.local_ray import free_port
from overstory.workers import tree_policy
from overstory.workers.environment import prepare_process
from overstory.workers.tree_policy import parse_policy

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

START_DEADLINE_S = 300.0


class Tp2Harness(EngineHarness):
    """Rank 0 and, by pipes, the others."""

    #: Ranks in all.
    ranks = 2
    #: What the others are.
    rank_kind: type[EngineHarness] = EngineHarness

    def __init__(self, model_path: str, **server_args: Any) -> None:
        where = f"127.0.0.1:{free_port()}"
        fields = server_args | {"tp_size": self.ranks, "dist_init_addr": where}
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._children = []
        for rank in range(1, self.ranks):
            ours, theirs = context.Pipe()
            given = (theirs, model_path, fields, self.rank_kind, rank)
            child = context.Process(target=_run_rank, args=given, daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)
        super().__init__(model_path, tp_rank=0, **fields)
        self._told("ready", START_DEADLINE_S)

    def step(self, iterations: int = 1) -> None:
        """One iteration of all ranks; they must have ended alike."""
        for _ in range(iterations):
            self._tell("step", list(self._gate.pending), str(tree_policy.current()))
            super().step()
            self._told("stepped", STEP_DEADLINE_S)

    def step_freely(self, iterations: int) -> None:
        """As on one rank; the others take as many steps."""
        policy = str(tree_policy.current())
        self._tell("step_freely", list(self._gate.pending), policy, iterations)
        super().step_freely(iterations)
        self._told("stepped", STEP_DEADLINE_S)

    def at_boundary(self, act: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As on one rank; the others' results follow, by rank."""
        self._tell("act", act, arguments)
        results = super().at_boundary(act, *arguments)
        return [*results, *self._told("acted", STEP_DEADLINE_S)]

    def flush_cache(self) -> None:
        """Empties all ranks' prefix caches."""
        self._tell("flush")
        super().flush_cache()
        self._told("flushed", STEP_DEADLINE_S)

    def assert_no_leak(self) -> None:
        """As on one rank, and the others are in the same state."""
        super().assert_no_leak()
        self._tell("state")
        ours = state(self)
        for rank, theirs in enumerate(self._told("state", STEP_DEADLINE_S), start=1):
            assert theirs == ours, f"ranks 0 and {rank} differ"

    def alive(self) -> bool:
        """Whether all loops still run."""
        return super().alive() and all(child.is_alive() for child in self._children)

    def close(self) -> None:
        """Ends all ranks."""
        self._tell("close")
        super().close()
        for child in self._children:
            child.join(STEP_DEADLINE_S)
            if child.is_alive():
                child.kill()

    def _tell(self, *what: Any) -> None:
        for pipe in self._pipes:
            pipe.send(what)

    def _told(self, what: str, deadline_s: float) -> list[Any]:
        return [self._told_by(rank, what, deadline_s) for rank in range(1, self.ranks)]

    def _told_by(self, rank: int, what: str, deadline_s: float) -> Any:
        pipe = self._pipes[rank - 1]
        assert pipe.poll(deadline_s), f"rank {rank} did not answer {what!r} in {deadline_s} s"
        answer, value = pipe.recv()
        assert answer == what, f"rank {rank}: {answer} {value}"
        return value


class Tp4Harness(Tp2Harness):
    """Rank 0 and three others."""

    ranks = 4


def state(harness: EngineHarness) -> dict[str, Any]:
    """What ranks that decided alike have in common."""
    scheduler = harness.scheduler
    allocator = scheduler.token_to_kv_pool_allocator
    return {
        "forwards": scheduler.forward_ct,
        "free": [allocator.free_pages.tolist(), allocator.release_pages.tolist()],
        "cached": harness.cached_slots(),
        "texts": {rid: output.ids for rid, output in harness.outputs.items()},
    }


def _run_rank(
    pipe: Connection, model_path: str, fields: dict[str, Any], kind: type[EngineHarness], rank: int
) -> None:
    os.environ["OVERSTORY_TEST_RANK"] = str(rank)
    prepare_process(kind.device)
    try:
        harness = kind(model_path, tp_rank=rank, **fields)
        pipe.send(("ready", None))
        _obey(pipe, harness)
    except BaseException as error:
        pipe.send(("failed", repr(error.__cause__ or error)))
        raise


def _obey(pipe: Connection, harness: EngineHarness) -> None:
    while True:
        what, *values = pipe.recv()
        if what in ("step", "step_freely"):
            requests, name, *iterations = values
            tree_policy.set_current(parse_policy(name))
            harness._gate.pending = requests
            for request in requests:
                harness.outputs.setdefault(request.rid, Output())
            getattr(harness, what)(*iterations)
            pipe.send(("stepped", None))
        elif what == "act":
            act, arguments = values
            pipe.send(("acted", harness.at_boundary(act, *arguments)[0]))
        elif what == "flush":
            harness.flush_cache()
            pipe.send(("flushed", None))
        elif what == "state":
            pipe.send(("state", state(harness)))
        else:
            harness.close()
            gc.freeze()  # or the interpreter looks through all of SGLang before it ends
            return

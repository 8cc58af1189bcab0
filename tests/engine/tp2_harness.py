"""Two tensor-parallel ranks stepped together: rank 0 in the test process, rank 1 in a child.

Rank 1 does whatever rank 0 is told to: each step, it gets the same requests and the same policy
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
    """Rank 0 and, by pipe, rank 1."""

    #: What rank 1 is.
    rank_kind: type[EngineHarness] = EngineHarness

    def __init__(self, model_path: str, **server_args: Any) -> None:
        fields = server_args | {"tp_size": 2, "dist_init_addr": f"127.0.0.1:{free_port()}"}
        context = multiprocessing.get_context("spawn")
        self._peer, theirs = context.Pipe()
        self._child = context.Process(
            target=_run_rank_1, args=(theirs, model_path, fields, self.rank_kind), daemon=True
        )
        self._child.start()
        theirs.close()
        super().__init__(model_path, tp_rank=0, **fields)
        self._told("ready", START_DEADLINE_S)

    def step(self, iterations: int = 1) -> None:
        """One iteration of both ranks; they must have ended alike."""
        for _ in range(iterations):
            self._peer.send(("step", list(self._gate.pending), str(tree_policy.current())))
            super().step()
            self._told("stepped", STEP_DEADLINE_S)

    def step_freely(self, iterations: int) -> None:
        """As on one rank; rank 1 takes as many steps."""
        policy = str(tree_policy.current())
        self._peer.send(("step_freely", list(self._gate.pending), policy, iterations))
        super().step_freely(iterations)
        self._told("stepped", STEP_DEADLINE_S)

    def at_boundary(self, act: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As on one rank; rank 1's result comes second."""
        self._peer.send(("act", act, arguments))
        results = super().at_boundary(act, *arguments)
        return [*results, self._told("acted", STEP_DEADLINE_S)]

    def flush_cache(self) -> None:
        """Empties both ranks' prefix caches."""
        self._peer.send(("flush",))
        super().flush_cache()
        self._told("flushed", STEP_DEADLINE_S)

    def assert_no_leak(self) -> None:
        """As on one rank, and the peer is in the same state."""
        super().assert_no_leak()
        self._peer.send(("state",))
        theirs = self._told("state", STEP_DEADLINE_S)
        assert theirs == state(self), "the ranks differ"

    def alive(self) -> bool:
        """Whether both loops still run."""
        return super().alive() and self._child.is_alive()

    def close(self) -> None:
        """Ends both ranks."""
        self._peer.send(("close",))
        super().close()
        self._child.join(STEP_DEADLINE_S)
        if self._child.is_alive():
            self._child.kill()

    def _told(self, what: str, deadline_s: float) -> Any:
        assert self._peer.poll(deadline_s), f"rank 1 did not answer {what!r} in {deadline_s} s"
        answer, value = self._peer.recv()
        assert answer == what, f"rank 1: {answer} {value}"
        return value


def state(harness: EngineHarness) -> dict[str, Any]:
    """What two ranks that decided alike have in common."""
    scheduler = harness.scheduler
    allocator = scheduler.token_to_kv_pool_allocator
    return {
        "forwards": scheduler.forward_ct,
        "free": [allocator.free_pages.tolist(), allocator.release_pages.tolist()],
        "cached": harness.cached_slots(),
        "texts": {rid: output.ids for rid, output in harness.outputs.items()},
    }


def _run_rank_1(
    pipe: Connection, model_path: str, fields: dict[str, Any], kind: type[EngineHarness]
) -> None:
    os.environ["OVERSTORY_TEST_RANK"] = "1"
    prepare_process(kind.device)
    try:
        harness = kind(model_path, tp_rank=1, **fields)
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

"""Ties a rank's gate, digests and watchdog to the SGLang scheduler in its process.

Only rank actors install these; they come on top of the plugin's own changes. A process hosts one
rank,
so the hooks find it in one module variable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from overstory.workers.death_note import LastWill
from overstory.workers.gate import StepGate
from overstory.workers.scheduler_view import SglangScheduler, already_processed
from overstory.workers.seam.errors import SeamError
from overstory.workers.seam.patches import Patch, hook
from overstory.workers.step_notes import StepNotes
from overstory.workers.watchdog import watch

_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


@dataclass
class HookedRank:
    """What the hooks act upon. `view` and `notes` are set when the scheduler exists; its loop
    starts later."""

    rank: int
    gate: StepGate
    will: LastWill
    enter_phase: Callable[[str], None]
    view: SglangScheduler | None = None
    notes: StepNotes | None = None


_HOOKED: HookedRank | None = None


def install(rank: HookedRank) -> None:
    """Registers the hooks for this process's rank. Before SGLang's `load_plugins` applies hooks."""
    global _HOOKED
    assert _HOOKED is None, "a process hosts one rank"
    _HOOKED = rank
    for patch in patches():
        patch.install()


def verify() -> None:
    """Checks that every hook stands.

    Raises:
        SeamError: names those that do not.
    """
    missing = [patch.name for patch in patches() if not patch.taken()]
    if missing:
        raise SeamError(f"rank hooks that did not take: {', '.join(missing)}")


def patches() -> list[Patch]:
    """Every change that a rank actor makes beyond the plugin."""
    from overstory.workers.handoff import loading  # torch, which a rank does not import at once

    return [
        *loading.patches(),
        hook(
            f"{_RECEIVER}._pull_raw_reqs",
            "around",
            _pull,
            "leases could not enter with the requests of rank 0",
        ),
        hook(
            f"{_RECEIVER}.recv_requests",
            "around",
            _receive,
            "leases would reach SGLang's request dispatcher, which does not know them",
        ),
        hook(
            f"{_SCHEDULER}.process_batch_result",
            "around",
            _process,
            "no digests; a drained result would be taken in twice",
        ),
        hook(
            f"{_SCHEDULER}.init_memory_pools",
            "before",
            _before_memory,
            "the phase 'memory' would not be reported",
        ),
        hook(
            "sglang.srt.utils.watchdog.WatchdogRaw._watchdog_once",
            "replace",
            _watchdog,
            "a time-out would send SIGQUIT to the raylet",
        ),
    ]


def _pull(original: Callable[[Any], Any], receiver: Any) -> Any:
    hooked = _hooked()
    if hooked.rank != 0 or hooked.view is None:
        return original(receiver)
    begins = hooked.gate.before_pull(hooked.view)
    if not (_readable(receiver.recv_from_tokenizer) or _readable(receiver.recv_from_rpc)):
        return begins
    return [*begins, *original(receiver)]


def _readable(source: Any) -> bool:
    """Whether a read may give something: SGLang reads until a socket raises, which costs more."""
    return not isinstance(source, zmq.Socket) or bool(int(source.get(zmq.EVENTS)) & zmq.POLLIN)


def _receive(original: Callable[[Any], list[Any]], receiver: Any) -> list[Any]:
    hooked = _hooked()
    requests = original(receiver)
    assert hooked.view is not None, "the loop runs before the scheduler is hooked"
    return hooked.gate.after_broadcast(requests, hooked.view)


def _process(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    if already_processed(result):
        return None
    notes = _hooked().notes
    outcome = original(scheduler, batch, result)
    assert notes is not None
    notes.note(batch, result)
    return outcome


def _before_memory(*_args: Any, **_kwargs: Any) -> None:
    _hooked().enter_phase("memory")


def _watchdog(raw: Any) -> None:
    watch(raw, _hooked().will)


def _hooked() -> HookedRank:
    assert _HOOKED is not None, "rank hooks run in a process that hosts no rank"
    return _HOOKED

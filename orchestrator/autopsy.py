"""Finds out why a rank died: its own note, its log, Ray's words, and how the others stand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from overstory.orchestrator.death_cause import Ending, ending_of
from overstory.orchestrator.engine_errors import RankDeath
from overstory.orchestrator.local_process import LocalProcess
from overstory.workers.death_note import DeathNote, read_log_tail, read_note
from overstory.workers.process_ids import kernel_memory_kills
from overstory.workers.rank import RankIdentity

ANSWER_TIMEOUT_S = 2.0
NOTE_TIMEOUT_S = 10.0
SHOWN_LINES = 30
READ_LINES = 300
"""A crash's headline stands above the stacks of all threads."""


def examine(
    rank: int,
    identities: Sequence[RankIdentity],
    error: Exception | None,
    observed: str | None,
    others: Mapping[int, Any],
    seen: Mapping[str, Any],
) -> RankDeath:
    """Puts together what can be known of a rank's death.

    Args:
        rank: which.
        identities: of all ranks; empty if the rank died before it could say.
        error: what Ray raised, if it did.
        observed: what the watcher itself saw, if it was that.
        others: references of `health()` calls to the other ranks.
        seen: the last answer of this rank to such a call; may be empty.
    """
    identity = identities[rank] if rank < len(identities) else None
    note, log_tail, kills = _papers(identity) if identity else (None, [], 0)
    vanished = isinstance(error, ray.exceptions.RayActorError)
    ray_says = _exit_detail(str(error)) if vanished else ""
    if identity is None or observed or (note is None and not vanished):
        ending = Ending()
    else:
        ending = ending_of(note.cause if note else None, log_tail, ray_says, kills)
    cause = observed or (note.cause if note else _words(error, ending.words))
    if identity is not None and observed is not None:
        state = LocalProcess(identity.host, identity.pid, identity.started).state()
        cause += f"; its process is {state}" if state else "; its process is gone"
    return RankDeath(
        rank=rank,
        cause=cause,
        exit_code=note.exit_code if note else None,
        signal=ending.signal,
        out_of_memory=ending.out_of_memory,
        phase=note.phase if note else seen.get("phase", "unknown"),
        forwards=note.forwards if note else seen.get("forwards", 0),
        detail=(note.detail if note and note.detail else str(error or "")),
        log_tail=tuple(log_tail[-SHOWN_LINES:]),
        others=_states(others, identities),
    )


Papers = tuple[DeathNote | None, list[str], int]
"""Death note; log tail; processes that the kernel killed for memory since the rank began."""


def _papers(identity: RankIdentity) -> Papers:
    """Read on the rank's own node."""
    log_path = Path(identity.log_path) if identity.log_path else None
    if identity.node_id == ray.get_runtime_context().get_node_id():
        return _read_papers(identity, log_path)
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        identity.node_id, soft=False
    )
    task = ray.remote(_read_papers).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        return ray.get(task.remote(identity, log_path), timeout=NOTE_TIMEOUT_S)
    except ray.exceptions.RayError:  # Its node is gone too: Ray's own words must do.
        return None, [], 0


def _read_papers(identity: RankIdentity, log: Path | None) -> Papers:
    kills = kernel_memory_kills() - identity.memory_kills
    tail = read_log_tail(log, READ_LINES) if log else []
    return read_note(Path(identity.note_path)), tail, kills


def _words(error: Exception | None, ending: str) -> str:
    if error is None:
        return "its event loop ended without being told to"
    if isinstance(error, ray.exceptions.RayActorError):
        how = ending or "its process died before it could say where it lives"
        return f"{how}. Ray says: {_exit_detail(str(error))}"
    return " ".join(str(error).split())


def _exit_detail(text: str) -> str:
    """The part of Ray's message that is about this death, without its general advice."""
    found = re.search(r"Worker exit type: .*?(?=Some common causes|$)", text, re.DOTALL)
    return " ".join((found.group() if found else text).split())


def _states(others: Mapping[int, Any], identities: Sequence[RankIdentity]) -> dict[int, str]:
    """How the other ranks stand, in words, by rank."""
    refs = list(others.values())
    answered = ray.wait(refs, num_returns=len(refs), timeout=ANSWER_TIMEOUT_S)[0] if refs else []
    states = {}
    for rank, ref in others.items():
        identity = identities[rank] if rank < len(identities) else None
        if ref in answered:
            states[rank] = _answer(ref)
            continue
        process = LocalProcess(identity.host, identity.pid, identity.started) if identity else None
        seen = process.state() if process else None
        states[rank] = "does not answer" + (f"; its process is {seen}" if seen else "")
    return states


def _answer(ref: Any) -> str:
    try:
        health = ray.get(ref)
    except ray.exceptions.RayError:
        return "died too"
    return f"answers; {health['phase']}, forward {health['forwards']}"

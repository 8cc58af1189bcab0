"""What each batch did, noted for the rank's digests at the least cost to the step.

A step that a GPU runs in a millisecond is paid for in full by what the host does beside it. So a
batch is only noted (who was in it, how long each output is), and what lies behind a few notes is
read, and hashed, at once: when there are `STEPS` of them, when a request of a batch has ended, and
at each boundary where a lease begins. All of that comes at the same batch on all ranks.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overstory.workers.digest import DigestChain, LinkFacts, RequestFacts, StepFacts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

STEPS = 8
"""Batches of a link, at most."""

_SEEN = "_overstory_seen"
"""Attribute on SGLang's Req: (output tokens, committed positions) that earlier links cover."""


class StepNotes:
    """The notes of one rank since its last link. The loop's thread only, but for `mean_us`.

    Args:
        chain: takes the links.
        slots: KV slots of a request's positions, from the one to before the other.
        free_slots: the KV allocator's count.
    """

    def __init__(
        self,
        chain: DigestChain,
        slots: Callable[[Req, int, int], tuple[int, ...]],
        free_slots: Callable[[], int],
    ) -> None:
        self._chain = chain
        self._slots = slots
        self._free_slots = free_slots
        self._notes: list[tuple[int, str, tuple[Req, ...], tuple[int, ...]]] = []
        self._noted = 0
        self._spent_ns = 0

    def note(self, batch: Any, choice: str) -> None:
        """The results of a batch were taken in; ``choice``: see `StepFacts`."""
        begun = time.perf_counter_ns()
        reqs = tuple(batch.reqs)
        given = tuple([len(req.output_ids) for req in reqs])
        self._notes.append((batch.forward_iter, choice, reqs, given))
        self._noted += 1
        ended = [req for req in reqs if req.finished_reason is not None]
        if ended or len(self._notes) == STEPS:
            self.close()
        self._spent_ns += time.perf_counter_ns() - begun

    def close(self) -> None:
        """Makes a link of what was noted since the last one; none if that is nothing."""
        if not self._notes:
            return
        notes, self._notes = self._notes, []
        number: dict[Req, int] = {}
        last: tuple[Req, ...] = ()
        members: tuple[int, ...] = ()
        steps = []
        for forward, choice, reqs, given in notes:
            if reqs != last:  # Mostly they are the same ones.
                last, members = reqs, tuple([number.setdefault(r, len(number)) for r in reqs])
            steps.append(StepFacts(forward, choice, members, given))
        requests = tuple([self._facts(req) for req in number])
        self._chain.add(LinkFacts(tuple(steps), requests, self._free_slots()))

    def mean_us(self) -> float:
        """Microseconds that a batch has cost on average."""
        return round(self._spent_ns / 1000 / self._noted, 1) if self._noted else 0.0

    def _facts(self, req: Req) -> RequestFacts:
        output, committed = req.output_ids, int(req.kv_committed_len)
        seen_output, seen_slots = getattr(req, _SEEN, (0, 0))
        setattr(req, _SEEN, (len(output), committed))
        reason = req.finished_reason
        return RequestFacts(
            req.rid,
            seen_output,
            array("q", output[seen_output:]),
            len(req.origin_input_ids) + len(output),
            # A retracted request starts over.
            self._slots(req, min(seen_slots, committed), committed),
            "" if reason is None else type(reason).__name__,
        )

"""What each batch did, noted for the rank's digests at the least cost to the step.

A step that a GPU runs in a millisecond is paid for in full by what the host does beside it. So a
batch is only noted (who was in it, how long each output is), and what lies behind a few notes is
read, and hashed, at once: at each boundary where a lease begins, shortly before half of it is run
(where a report comes), and when a request of a batch has ended. All of that comes at the same batch
on all ranks.

Between two steps an engine leaves little of this in the caches, where each call of a function costs
several times what it costs in a loop: so a note is a few calls, and a link holds many.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from overstory.workers.digest import DigestChain, LinkFacts, RequestFacts, Stretch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

STEPS = 64
"""Batches of a link, at most, before the first lease."""
MOST_STEPS = 256
BEHIND = 2
"""Batches of which the results may not have been taken in yet where a report is due."""

CHOICE = "_overstory_choice"
"""Attribute on a batch result: the step's tree policy, with what it was chosen by. A prefill's has
none."""

_SEEN = "_overstory_seen"
"""Attribute on SGLang's Req: (output tokens, committed positions) that earlier links cover."""

_output_of: Callable[[Any], Any] = attrgetter("output_ids")
_end_of: Callable[[Any], Any] = attrgetter("finished_reason")


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
        self._steps = STEPS
        self._begin()
        self._noted = 0
        self._spent_ns = 0

    def _begin(self) -> None:
        """A new link."""
        self._forwards: list[int] = []
        self._given: list[int] = []
        self._stretches: list[tuple[int, str, list[Req]]] = []
        self._reqs: list[Req] | None = None
        self._choice = ""

    def note(self, batch: Any, result: Any) -> None:
        """The results of a batch were taken in."""
        reqs, choice = batch.reqs, getattr(result, CHOICE, "")
        forwards = self._forwards
        if reqs != self._reqs or choice != self._choice:  # Mostly they are the same ones.
            self._reqs, self._choice = [*reqs], choice  # SGLang adds to a list of its own.
            self._stretches.append((len(forwards), choice, self._reqs))
        forwards.append(batch.forward_iter)
        self._given.extend(map(len, map(_output_of, reqs)))
        if len(forwards) >= self._steps or any(map(_end_of, reqs)):
            self.close()

    def lease(self, steps: int) -> None:
        """A lease of ``steps`` begins: the link before it ends, and another at half of it."""
        self.close()
        self._steps = max(1, min(MOST_STEPS, steps // 2 - BEHIND))

    def close(self) -> None:
        """Makes a link of what was noted since the last one; none if that is nothing."""
        forwards, given = self._forwards, self._given
        if not forwards:
            return
        begun = time.perf_counter_ns()
        number: dict[Req, int] = {}
        stretches = []
        for first, choice, reqs in self._stretches:
            members = tuple([number.setdefault(req, len(number)) for req in reqs])
            stretches.append(Stretch(first, choice, members))
        self._begin()
        requests = [self._facts(req) for req in number]
        self._chain.add(LinkFacts(forwards, given, stretches, requests, self._free_slots()))
        self._noted += len(forwards)
        self._spent_ns += time.perf_counter_ns() - begun

    def mean_us(self) -> float:
        """Microseconds of making links, for each batch on average; a note itself is not timed."""
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

"""A rank's chain of digests: one link per few batches whose results were taken in, numbered by the
last one's forward.

Ranks of a replica that stand alike have equal links at equal numbers. A link covers all before it,
so the first difference stays visible; the facts behind recent links are kept, to say what differs
and at which forward. What a step adds to a link: `overstory.workers.step_notes`. Pure standard
library.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LINKS_KEPT = 8192
FACTS_KEPT = 256
DIGEST_BYTES = 8

_Given = dict[str, tuple[int, ...]]
"""Token ids that requests were given, by request id."""


@dataclass(frozen=True)
class RequestFacts:
    """What the batches of one link did to one request.

    Attributes:
        rid: request id.
        begun: tokens of its output before the first of them.
        tokens: token ids added to its output.
        length: prompt and output tokens after the last.
        slots: KV slots of the positions committed since the link before (empty where the device
            cannot be read without a wait, and for a finished request, whose slots are free again).
        finished: finish reason, or empty.
    """

    rid: str
    begun: int
    tokens: array[int]
    length: int
    slots: tuple[int, ...] = ()
    finished: str = ""


class StepFacts(NamedTuple):
    """One batch of a link.

    Attributes:
        forward: its number.
        choice: the tree policy of the step, and what it was chosen by; empty for prefill.
        members: of the batch, as indices into the link's requests.
        given: output tokens of each of them after it.
    """

    forward: int
    choice: str
    members: tuple[int, ...]
    given: tuple[int, ...]


@dataclass(frozen=True)
class LinkFacts:
    """What the batches of one link did.

    Attributes:
        steps: in their order.
        requests: of all of them, in the order in which they first came.
        free_slots: the KV allocator's count after the last.
    """

    steps: tuple[StepFacts, ...]
    requests: tuple[RequestFacts, ...]
    free_slots: int

    def encoded(self) -> bytes:
        """All of it, so that no two links are encoded alike: numbers and tokens as they lie in
        memory, which takes half the time that their text takes, each list behind its length."""
        numbers = [self.free_slots, len(self.steps), len(self.requests)]
        for forward, _, members, given in self.steps:
            numbers += (forward, len(members), *members, len(given), *given)
        for r in self.requests:
            numbers += (r.begun, r.length, len(r.tokens), len(r.slots), *r.slots)
        names = [choice for _, choice, _, _ in self.steps]
        for r in self.requests:
            names += (r.rid, r.finished)
        tokens = [r.tokens.tobytes() for r in self.requests]
        return b"".join((array("q", numbers).tobytes(), *tokens, repr(names).encode()))

    def emitted(self) -> Iterator[_Given]:
        """By step: token ids that each request was given, by request id."""
        reached = [request.begun for request in self.requests]
        for step in self.steps:
            given: _Given = {}
            for member, after in zip(step.members, step.given, strict=True):
                request = self.requests[member]
                since = reached[member] - request.begun
                given[request.rid] = tuple(request.tokens[since : after - request.begun])
                reached[member] = after
            yield given


@dataclass(frozen=True)
class LinksKept:
    """Links of one chain at one moment.

    Attributes:
        links: (forward, hex) in the order in which they were added.
        forgotten: number of the last link that is no longer kept, 0 if all are. Without it a link
            that grew too old could not be told from one that never was.
    """

    links: tuple[tuple[int, str], ...]
    forgotten: int


class DigestChain:
    """The chain of one rank. One thread adds, others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: OrderedDict[int, str] = OrderedDict()
        self._facts: OrderedDict[int, LinkFacts] = OrderedDict()
        self._head = b""
        self._count = 0
        self._forgotten = 0

    def add(self, facts: LinkFacts) -> str:
        """Adds the link of batches up to the last one of `facts`; returns it as hex."""
        forward = facts.steps[-1].forward
        head = hashlib.blake2b(facts.encoded(), key=self._head, digest_size=DIGEST_BYTES).digest()
        with self._lock:
            self._head = head
            self._count += 1
            self._links[forward] = head.hex()
            self._facts[forward] = facts
            while len(self._links) > LINKS_KEPT:
                self._forgotten, _ = self._links.popitem(last=False)
            while len(self._facts) > FACTS_KEPT:
                self._facts.popitem(last=False)
        return head.hex()

    def head(self) -> tuple[int, int]:
        """How many links were added, and the last one as a signed number of 64 bits."""
        with self._lock:
            return self._count, int.from_bytes(self._head or b"\0", "big", signed=True)

    def after(self, forward: int) -> LinksKept:
        """Links numbered above `forward`, in the order in which they were added."""
        with self._lock:
            found: list[tuple[int, str]] = []
            for number, link in reversed(self._links.items()):
                if number <= forward:
                    break
                found.append((number, link))
            return LinksKept(tuple(found[::-1]), self._forgotten)

    def facts(self, forward: int) -> LinkFacts | None:
        """The facts behind a recent link; None if it is too old or does not exist."""
        with self._lock:
            return self._facts.get(forward)


def explain_difference(one: LinkFacts | None, other: LinkFacts | None, link: int) -> str:
    """In words, where and how two ranks first differ: ``forward 37: request ...``.

    Args:
        one, other: what they did in the first link that differs; None if it is no longer known.
        link: its number.
    """
    if one is None or other is None:
        return f"forward {link} or shortly before: the facts behind it are no longer kept"
    steps = zip(one.steps, other.steps, one.emitted(), other.emitted(), strict=False)
    for a, b, gave, gave_other in steps:
        words = _difference_of_steps(a, b, gave, gave_other)
        if words:
            return f"forward {a.forward}: {words}"
    return f"forward {link}: {_difference_at_end(one, other)}"


def _difference_of_steps(a: StepFacts, b: StepFacts, gave: _Given, gave_other: _Given) -> str:
    if a.forward != b.forward:
        return f"the other rank took in forward {b.forward}"
    if a.choice != b.choice:
        return f"tree policy {a.choice!r} and {b.choice!r}"
    if gave.keys() != gave_other.keys():
        return f"batches of {sorted(gave)} and {sorted(gave_other)}"
    for rid, tokens in gave.items():
        if tokens != gave_other[rid]:
            return f"request {rid}: emitted {tokens} and {gave_other[rid]}"
    return ""


def _difference_at_end(one: LinkFacts, other: LinkFacts) -> str:
    if len(one.steps) != len(other.steps):
        return f"links of {len(one.steps)} and {len(other.steps)} batches"
    if one.free_slots != other.free_slots:
        return f"free KV slots {one.free_slots} and {other.free_slots}"
    for a, b in zip(one.requests, other.requests, strict=True):
        for name in ("rid", "begun", "length", "slots", "finished"):
            if getattr(a, name) != getattr(b, name):
                return f"request {a.rid}: {name} {getattr(a, name)!r} and {getattr(b, name)!r}"
    return "all is the same here; an earlier one differs"

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
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LINKS_KEPT = 8192
BATCHES_KEPT = 2048
"""Batches behind the last links whose facts are kept, at least."""
DIGEST_BYTES = 8

_Given = dict[str, tuple[int, ...]]
"""Token ids that requests were given, by request id."""


class RequestFacts(NamedTuple):
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


class Stretch(NamedTuple):
    """Batches of a link on end that are of the same requests, by the same choice.

    Attributes:
        first: how many batches of the link come before it.
        choice: the tree policy of the steps, and what it was chosen by; empty for prefill.
        members: of each batch, as indices into the link's requests.
    """

    first: int
    choice: str
    members: tuple[int, ...]


class StepFacts(NamedTuple):
    """One batch of a link.

    Attributes:
        forward: its number.
        choice, members: as of a `Stretch`.
        given: output tokens of each of them after it.
    """

    forward: int
    choice: str
    members: tuple[int, ...]
    given: tuple[int, ...]


class LinkFacts(NamedTuple):
    """What the batches of one link did, in the lists in which it was noted.

    Attributes:
        forwards: number of each batch, in their order.
        given: output tokens of each member after each batch, batch by batch.
        stretches: of these batches, in their order; the first begins with the first batch.
        requests: of all of them, in the order in which they first came.
        free_slots: the KV allocator's count after the last.
    """

    forwards: Sequence[int]
    given: Sequence[int]
    stretches: Sequence[Stretch]
    requests: Sequence[RequestFacts]
    free_slots: int

    def encoded(self) -> bytes:
        """All of it, so that no two links are encoded alike: numbers and tokens as they lie in
        memory, which takes half the time that their text takes, each list behind its length."""
        forwards, given, stretches, requests, free_slots = self
        numbers = [free_slots, len(forwards), len(given), len(stretches), len(requests)]
        numbers += forwards
        numbers += given
        names = []
        for first, choice, members in stretches:
            numbers += (first, len(members), *members)
            names.append(choice)
        tokens = []
        for rid, begun, added, length, slots, finished in requests:
            numbers += (begun, length, len(added), len(slots), *slots)
            names += (rid, finished)
            tokens.append(added.tobytes())
        return b"".join((array("q", numbers).tobytes(), *tokens, repr(names).encode()))

    def steps(self) -> Iterator[StepFacts]:
        """Batch by batch."""
        ends = [*[stretch.first for stretch in self.stretches[1:]], len(self.forwards)]
        at = 0
        for (first, choice, members), end in zip(self.stretches, ends, strict=True):
            for forward in self.forwards[first:end]:
                given = tuple(self.given[at : at + len(members)])
                at += len(members)
                yield StepFacts(forward, choice, members, given)

    def emitted(self) -> Iterator[_Given]:
        """By step: token ids that each request was given, by request id."""
        reached = [request.begun for request in self.requests]
        for step in self.steps():
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
        self._facts: deque[LinkFacts] = deque()
        self._head = b""
        self._batches = 0  # behind the facts that are kept
        self._count = 0
        self._forgotten = 0

    def add(self, facts: LinkFacts) -> str:
        """Adds the link of batches up to the last one of `facts`; returns it as hex."""
        forward = facts.forwards[-1]
        head = hashlib.blake2b(facts.encoded(), key=self._head, digest_size=DIGEST_BYTES).digest()
        with self._lock:
            self._head = head
            self._count += 1
            self._links[forward] = head.hex()
            self._facts.append(facts)
            self._batches += len(facts.forwards)
            while self._batches - len(self._facts[0].forwards) >= BATCHES_KEPT:
                self._batches -= len(self._facts.popleft().forwards)
            while len(self._links) > LINKS_KEPT:
                self._forgotten, _ = self._links.popitem(last=False)
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
            kept = (facts for facts in reversed(self._facts) if facts.forwards[-1] == forward)
            return next(kept, None)


def explain_difference(one: LinkFacts | None, other: LinkFacts | None, link: int) -> str:
    """In words, where and how two ranks first differ: ``forward 37: request ...``.

    Args:
        one, other: what they did in the first link that differs; None if it is no longer known.
        link: its number.
    """
    if one is None or other is None:
        return f"forward {link} or shortly before: the facts behind it are no longer kept"
    steps = zip(one.steps(), other.steps(), one.emitted(), other.emitted(), strict=False)
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
    if len(one.forwards) != len(other.forwards):
        return f"links of {len(one.forwards)} and {len(other.forwards)} batches"
    if one.free_slots != other.free_slots:
        return f"free KV slots {one.free_slots} and {other.free_slots}"
    for a, b in zip(one.requests, other.requests, strict=True):
        for name in ("rid", "begun", "length", "slots", "finished"):
            if getattr(a, name) != getattr(b, name):
                return f"request {a.rid}: {name} {getattr(a, name)!r} and {getattr(b, name)!r}"
    return "all is the same here; an earlier one differs"

"""A rank's chain of digests: one link per batch whose results were taken in, numbered by forward.

Ranks of a replica that stand alike have equal links at equal numbers. A link covers all before it,
so the first difference stays visible; the facts behind recent links are kept, to say what differs.
Pure standard library.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

LINKS_KEPT = 8192
FACTS_KEPT = 256
DIGEST_BYTES = 8


@dataclass(frozen=True)
class RequestFacts:
    """What one batch did to one request.

    Attributes:
        rid: request id.
        emitted: token ids added to its output.
        length: prompt and output tokens now.
        slots: KV slots of the positions committed since the last link (empty where the device
        cannot
            be read without a wait, and for a finished request, whose slots are free again).
        finished: finish reason, or empty.
    """

    rid: str
    emitted: tuple[int, ...]
    length: int
    slots: tuple[int, ...]
    finished: str = ""


@dataclass(frozen=True)
class StepFacts:
    """What one batch did.

    Attributes:
        requests: of the batch.
        free_slots: the KV allocator's count after it.
        choice: the tree policy of the step, and what it was chosen by; empty for prefill.
    """

    requests: tuple[RequestFacts, ...]
    free_slots: int
    choice: str = ""

    def plain(self) -> tuple[object, ...]:
        """All of it as tuples, strings and numbers, whose text is made in a fifth of the time."""
        each = [(r.rid, r.emitted, r.length, r.slots, r.finished) for r in self.requests]
        return self.free_slots, self.choice, each


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
    """The chain of one rank. One thread adds, others read.

    `spent_ns` is what gathering facts and hashing have cost; whoever adds counts it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: OrderedDict[int, str] = OrderedDict()
        self._facts: OrderedDict[int, StepFacts] = OrderedDict()
        self._head = b""
        self._count = 0
        self._forgotten = 0
        self.spent_ns = 0

    def add(self, forward: int, facts: StepFacts) -> str:
        """Adds the link of batch number `forward`; returns it as hex."""
        text = repr((forward, facts.plain())).encode()
        head = hashlib.blake2b(text, key=self._head, digest_size=DIGEST_BYTES).digest()
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

    def mean_us(self) -> float:
        """Microseconds that a link has cost on average."""
        return round(self.spent_ns / 1000 / self._count, 1) if self._count else 0.0

    def after(self, forward: int) -> LinksKept:
        """Links numbered above `forward`, in the order in which they were added."""
        with self._lock:
            found: list[tuple[int, str]] = []
            for number, link in reversed(self._links.items()):
                if number <= forward:
                    break
                found.append((number, link))
            return LinksKept(tuple(found[::-1]), self._forgotten)

    def facts(self, forward: int) -> StepFacts | None:
        """The facts behind a recent link; None if it is too old or does not exist."""
        with self._lock:
            return self._facts.get(forward)


def explain_difference(one: StepFacts | None, other: StepFacts | None) -> str:
    """In words, where the facts of two ranks first differ."""
    if one is None or other is None:
        return "the facts behind it are no longer kept"
    if one.choice != other.choice:
        return f"tree policy {one.choice!r} and {other.choice!r}"
    if one.free_slots != other.free_slots:
        return f"free KV slots {one.free_slots} and {other.free_slots}"
    if len(one.requests) != len(other.requests):
        return f"batches of {len(one.requests)} and {len(other.requests)} requests"
    for a, b in zip(one.requests, other.requests, strict=True):
        if a == b:
            continue
        for name in ("rid", "emitted", "length", "slots", "finished"):
            if getattr(a, name) != getattr(b, name):
                return f"request {a.rid}: {name} {getattr(a, name)!r} and {getattr(b, name)!r}"
    return "the forward is the same; an earlier one differs"

"""KV that moves between two real replicas: the next one finds it in its prefix cache and goes on
with the same text. Whatever goes wrong on the way, it computes it again; the text is the same."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from ddtree_support import policy, random_prompts, server_args
from handoff_support import (
    PIECE_BYTES,
    OtherReplica,
    arrived,
    close_peer,
    command,
    connect,
    fault,
    led,
    met,
    offer,
    open_beside,
    open_peer,
    outgoing,
    pid,
    rehearse,
    take_all,
    threads,
)

from overstory.orchestrator.journal import JournalEntry
from overstory.orchestrator.sampling import Sampling
from overstory.workers.defrag.audit import audit

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
LENGTH = 24
RUNNING_TOKENS = 400
NOTICED_S = 20.0
STOOD_S = 5.0
"""Of a replica whose peer is stopped for good, over some fifty steps on a busy machine: it does not
wait for the peer, which would be for 20 s and more."""
PROMPTS = random_prompts([190, 37, 120], seed=8)
SAMPLED = {"temperature": 1.1, "top_p": 0.95, "top_k": 200}
_NAMES = (f"c{n}" for n in itertools.count())


def entries(prompts: list[list[int]]) -> list[JournalEntry]:
    """Sequences as the gateway keeps them: greedy ones and sampled ones in turn."""
    name = next(_NAMES)
    return [
        JournalEntry(
            f"{name}-{i}",
            tuple(prompt),
            Sampling(
                **{"temperature": 0.0} | (SAMPLED if i % 2 else {}),
                seed=40 + i,
                max_new_tokens=LENGTH,
                ignore_eos=True,
            ),
            0.0,
        )
        for i, prompt in enumerate(prompts)
    ]


class Move:
    """Sequences begun on the other replica, which stops in the middle of them, and gone on with
    here."""

    def __init__(self, here: EngineHarness, there: OtherReplica, prompts: list[list[int]]) -> None:
        self._here, self._there = here, there
        self.entries = entries(prompts)
        self.name = next(_NAMES)
        rids = [entry.rid for entry in self.entries]
        for entry in self.entries:
            call = entry.call()
            there.call("submit", call.input_ids, call.sampling.engine_params(), rid=entry.rid)
        there.call("step", 4)
        early = self.hold()
        assert set(early["running"]) == set(rids), "what runs has no KV in the cache yet"
        for rid in rids:
            there.call("abort", rid)
        there.call("step", 4)
        for entry in self.entries:
            ids = there.output(entry.rid).ids
            assert 0 < len(ids) < LENGTH
            entry.commit(ids)
            entry.moves = 1
        self.texts = [list(entry.call().input_ids) for entry in self.entries]

    def hold(self) -> dict[str, Any]:
        """On the other replica; its ranks must find the same."""
        texts = [
            {"rid": entry.rid, "tokens": list(entry.call().input_ids)} for entry in self.entries
        ]
        arguments = {"key": self.name, "texts": texts}
        first, *others = self._there.call("at_boundary", command, "kv_hold", arguments)
        assert all(other == first for other in others)
        return first

    def order(self, budget: int = 1 << 30) -> dict[str, Any]:
        """Of a boundary here."""
        return {"key": self.name, "name": self.name, "texts": self._held, "budget": budget}

    def hand_over(self, transfer_s: float = 20.0) -> list[dict[str, Any]]:
        """All of it. Returns the last reports of the ranks here."""
        lengths = self.hold()["lengths"]
        assert lengths == [len(text) - 1 for text in self.texts], "the last token has no KV yet"
        self._held = [text[:n] for text, n in zip(self.texts, lengths, strict=True)]
        connect(self._here, self._there, self.name, transfer_s)
        taken = take_all(self._here, self.order())
        self._here.at_boundary(audit)
        total = [sum(part[rank]["bytes"] for part in taken) for rank in range(len(taken[-1]))]
        return [report | {"bytes": n} for report, n in zip(taken[-1], total, strict=True)]

    def end(self) -> None:
        """The other replica lets go; nothing of the communicator stays."""
        rids = {entry.rid for entry in self.entries}
        before = self._there.call("at_boundary", outgoing)[0]
        assert before["holding"]
        assert not rids & set(before["fetched"]), "still held"
        self._there.call("at_boundary", command, "kv_let_go", {"key": self.name})
        after = self._there.call("at_boundary", outgoing)[0]
        assert not after["holding"]
        assert rids <= set(after["fetched"])
        self._there.call("at_boundary", close_peer, self.name)
        self.end_here()
        assert self._there.call("at_boundary", threads)[0] == []

    def end_here(self) -> None:
        self._here.at_boundary(close_peer, self.name)
        assert self._here.at_boundary(threads)[0] == []

    def resume(self) -> list[int]:
        """Goes on here; checks the texts. Returns how many tokens each found in the cache."""
        calls = [entry.call() for entry in self.entries]
        with policy("tree-15"):
            rids = [
                self._here.submit(call.input_ids, call.sampling.engine_params(), rid=call.rid)
                for call in calls
            ]
            self._here.run(rids)
        whole = self._whole()
        for entry, rid, wanted in zip(self.entries, rids, whole, strict=True):
            assert entry.committed + self._here.outputs[rid].ids == wanted
        self._here.assert_no_leak()
        return [self._here.outputs[rid].cached_tokens for rid in rids]

    def _whole(self) -> list[list[int]]:
        """The texts as they are when nothing is cut or moved."""
        rids = []
        with policy("tree-15"):
            for entry in self.entries:
                params = entry.sampling.engine_params()
                rids.append(self._here.submit(entry.prompt_ids, params, rid=f"{entry.rid}-whole"))
            self._here.run(rids)
        return [self._here.outputs[rid].ids for rid in rids]


def give(
    here: EngineHarness, there: OtherReplica, name: str, text: list[int], transfer_s: float
) -> None:
    """The replica here holds a text for the other one, and they meet."""
    held = {"key": name, "texts": [{"rid": "none", "tokens": text}]}
    assert here.at_boundary(command, "kv_hold", held)[0]["lengths"] == [len(text)]
    tickets = here.at_boundary(offer, name)
    there.begin("at_boundary", open_peer, name, tickets, transfer_s)
    here.at_boundary(open_peer, name, None, transfer_s)
    there.end()


def kind_of(tp_size: int) -> type[EngineHarness]:
    """The harness of so many ranks."""
    from harness import EngineHarness
    from tp2_harness import Tp2Harness, Tp4Harness

    return {1: EngineHarness, 2: Tp2Harness, 4: Tp4Harness}[tp_size]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)])
def tp_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def arguments(pair: tuple[str, str]) -> dict[str, Any]:
    return server_args(pair[1], context_length=512, max_total_tokens=2048)


@pytest.fixture(scope="module")
def replica(
    pair: tuple[str, str], tp_size: int, arguments: dict[str, Any]
) -> Iterator[Callable[[], OtherReplica]]:
    """The other replica; a new one where a test has ended the one before."""
    held: list[OtherReplica] = []

    def get() -> OtherReplica:
        if not held or not held[-1].process.is_alive() or held[-1].spoilt:
            if held:
                held.pop().close()
            held.append(OtherReplica(pair[0], kind_of(tp_size), **arguments))
        return held[-1]

    yield get
    for one in held:
        one.close()


@pytest.fixture
def here(
    engine: Engine,
    engine_tp2: Engine,
    engine_tp4: Engine,
    tp_size: int,
    arguments: dict[str, Any],
) -> EngineHarness:
    harness = {1: engine, 2: engine_tp2, 4: engine_tp4}[tp_size](**arguments)
    harness.flush_cache()
    return harness


Replica = Callable[[], OtherReplica]
AT_TP_2_TOO = pytest.mark.parametrize("tp_size", [1, 2], indirect=True, scope="module")
"""In every run, not only in those of all tests."""
AT_TP_4_TOO = pytest.mark.parametrize(
    "tp_size",
    [1, 2, pytest.param(4, marks=pytest.mark.full)],
    indirect=True,
    scope="module",
)


@AT_TP_4_TOO
def test_what_moves_is_found_in_the_cache(here: EngineHarness, replica: Replica) -> None:
    """Two that begin alike and one of its own, in parts of some rows each."""
    there = replica()
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0][:100] + PROMPTS[2]]
    move = Move(here, there, prompts)
    lengths = move.hold()["lengths"]
    move._held = [text[:n] for text, n in zip(move.texts, lengths, strict=True)]
    connect(here, there, move.name)
    row_bytes = move.hold()["row_bytes"]
    parts = take_all(here, move.order(budget=70 * row_bytes))
    for reports in parts:
        assert {report["failed"] for report in reports} == {""}
        assert len({(tuple(report["cached"]), report["bytes"]) for report in reports}) == 1
    here.at_boundary(audit)
    rows = sum(reports[0]["bytes"] for reports in parts) // row_bytes
    assert reports[0]["cached"] == lengths
    assert rows == sum(lengths) - 100, "what both have in common goes over once"
    assert len(parts) == -(-rows // 70)
    assert 70 * row_bytes > PIECE_BYTES, "a part takes several pieces"
    move.end()
    assert move.resume() == lengths
    there.call("assert_no_leak")


def test_what_is_there_already_is_not_taken(here: EngineHarness, replica: Replica) -> None:
    there = replica()
    here.generate([PROMPTS[0]], {"temperature": 0.0, "max_new_tokens": 1})
    move = Move(here, there, [PROMPTS[0]])
    (report, *_) = move.hand_over()
    row_bytes = move.hold()["row_bytes"]
    assert report["bytes"] <= (LENGTH + 1) * row_bytes
    assert report["cached"] == [len(move.texts[0]) - 1]
    move.end()
    assert move.resume() == report["cached"]


def test_a_rehearsal_changes_nothing(here: EngineHarness) -> None:
    """What a rank does at its start, so that its first hand-off finds all kernels loaded."""
    here.generate([PROMPTS[0]], {"temperature": 0.0, "max_new_tokens": 1})
    assert here.at_boundary(rehearse)[0] == (True, 2)
    here.at_boundary(audit)
    here.assert_no_leak()


def test_a_full_pool_takes_nothing_and_harms_nobody(here: EngineHarness, replica: Replica) -> None:
    """Of 2,048 slots too few for 400 tokens are free, and enough for what runs: nobody is put
    back, which would make room."""
    there = replica()
    move = Move(here, there, random_prompts([400], seed=9))
    mine = random_prompts([440, 440, 440, 100], seed=3)
    with policy("plain"):
        rids = [here.submit(p, {"temperature": 0.0, "max_new_tokens": 40}) for p in mine]
        here.step(8)
        reports = move.hand_over()
        here.run(rids)
    assert all("no room for" in report["failed"] for report in reports)
    move.end()
    assert move.resume() == [0]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["garbage", "let go"])
@pytest.mark.parametrize("rank", [0, 1])
def test_bad_rows_are_not_taken(
    here: EngineHarness, replica: Replica, tp_size: int, kind: str, rank: int
) -> None:
    """Of one rank only, and no rank takes its own."""
    if rank >= tp_size:
        pytest.skip("there is no such rank")
    there = replica()
    move = Move(here, there, [PROMPTS[0]])
    there.call("at_boundary", fault, kind, rank)
    there.spoilt = True
    reports = move.hand_over()
    assert reports[rank]["failed"]
    assert ("checksum" if kind == "garbage" else "let go") in reports[rank]["failed"]
    assert all(report["failed"] and report["bytes"] == 0 for report in reports)
    move.end_here()
    assert move.resume() == [0]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_a_vote_against(
    here: EngineHarness, replica: Replica, tp_size: int, rank: int
) -> None:
    """Of any kind: the others wait for its vote, and it serves on."""
    if rank >= tp_size:
        pytest.skip("there is no such rank")
    move = Move(here, replica(), [PROMPTS[0]])
    here.at_boundary(fault, "error", rank)
    reports = move.hand_over()
    assert "deliberate" in reports[rank]["failed"]
    assert all(report["failed"] and report["bytes"] == 0 for report in reports)
    move.end()
    assert move.resume() == [0]


@AT_TP_2_TOO
@pytest.mark.parametrize("rank", [0, 1])
def test_a_giving_rank_that_is_killed_in_the_middle(
    here: EngineHarness, replica: Replica, tp_size: int, rank: int
) -> None:
    if rank >= tp_size:
        pytest.skip("there is no such rank")
    there = replica()
    move = Move(here, there, [PROMPTS[0], PROMPTS[1]])
    there.call("at_boundary", fault, "killed", rank)
    there.spoilt = True
    begun = time.monotonic()
    reports = move.hand_over(transfer_s=120.0)
    assert time.monotonic() - begun < NOTICED_S
    assert "ended or was cut off" in reports[rank]["failed"]
    assert all(report["failed"] and report["done"] for report in reports)
    move.end_here()
    assert move.resume() == [0, 0]


class Running:
    """Requests that run here while something else happens, one after the other: a quick machine has
    generated all of one within the ten seconds that a stalled transfer takes to end."""

    def __init__(self, here: EngineHarness) -> None:
        self._here = here
        self._brought = 0
        self._begin()
        self.step(5)

    def _begin(self) -> None:
        params = {"temperature": 0.0, "max_new_tokens": RUNNING_TOKENS, "ignore_eos": True}
        self._rid = self._here.submit(random_prompts([50], seed=5)[0], params)

    def step(self, count: int) -> float:
        """Each step must bring tokens. Returns the seconds of the longest."""
        worst_s = 0.0
        with policy("plain"):
            for _ in range(count):
                if self._here.outputs[self._rid].done:
                    self._brought += RUNNING_TOKENS
                    self._begin()
                begun, before = time.perf_counter(), self._tokens()
                while self._tokens() == before and time.perf_counter() - begun < NOTICED_S:
                    self._here.step()
                assert self._tokens() > before
                worst_s = max(worst_s, time.perf_counter() - begun)
        return worst_s

    def end(self) -> None:
        self._here.abort(self._rid)
        self._here.step(4)

    def _tokens(self) -> int:
        return self._brought + len(self._here.outputs[self._rid].ids)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "over",
    [
        "given up",
        *(
            pytest.param(over, marks=pytest.mark.full)
            for over in ("another controller", "its time")
        ),
    ],
)
def test_a_giver_that_stops_in_the_middle_holds_nobody_up(
    here: EngineHarness, replica: Replica, tp_size: int, rank: int, over: str
) -> None:
    """What runs here steps on while rows do not come, and nothing of theirs stays: when whoever
    waited for them gives up, when the controller that began it is gone, or when a transfer has
    taken as long as it may."""
    if rank >= tp_size:
        pytest.skip("there is no such rank")
    there = replica()
    running = Running(here)
    move = Move(here, there, [PROMPTS[0], PROMPTS[1]])
    stopped = there.call("at_boundary", pid)[rank]
    there.call("at_boundary", fault, "stops", rank)
    lengths = move.hold()["lengths"]
    move._held = [text[:n] for text, n in zip(move.texts, lengths, strict=True)]
    connect(here, there, move.name, transfer_s=2.0 if over == "its time" else 60.0)
    try:
        stood_s = 0.0
        for _ in range(2):
            for report in here.at_boundary(command, "kv_take", move.order()):
                assert report["under_way"]
                stood_s += report["stood"]
            stood_s += running.step(20)
            here.at_boundary(audit)
            assert here.at_boundary(led, 1)[0] == 1, "no rows are moved, its controller leads on"
        if over == "its time":
            assert all(here.at_boundary(arrived, move.name, NOTICED_S))
        order = move.order() | {"texts": [], "give_up": over == "given up"}
        if over != "another controller":
            for report in here.at_boundary(command, "kv_take", order):
                assert report["done"]
                assert report["failed"]
                assert report["bytes"] == 0
                stood_s += report["stood"]
        begun = time.monotonic()
        while any(here.at_boundary(led, 2)) and time.monotonic() < begun + NOTICED_S:
            stood_s += running.step(1)
        assert here.at_boundary(led, 2)[0] == 0, "slots are kept for rows that nobody sends"
        assert stood_s < STOOD_S
    finally:
        os.kill(stopped, signal.SIGCONT)
    here.at_boundary(audit)
    running.end()
    move.end()
    assert move.resume() == [0, 0]


def test_a_taker_that_stops_in_the_middle_holds_nobody_up(
    here: EngineHarness, replica: Replica, tp_size: int
) -> None:
    """As a successor may that takes KV, or weights, from a replica that serves: the thread that
    gives waits for it, and nothing else does."""
    there, rank = replica(), tp_size - 1
    name, text = next(_NAMES), random_prompts([190], seed=11)[0]
    here.generate([text], {"temperature": 0.0, "max_new_tokens": 1})
    running = Running(here)
    give(here, there, name, text, 60.0)
    stopped = there.call("at_boundary", pid)[rank]
    there.call("at_boundary", fault, "stops", rank)
    taken = {"key": name, "name": name, "texts": [text], "budget": 1 << 30}
    there.begin("at_boundary", command, "kv_take", taken)
    begun = time.monotonic()
    while _state_of(stopped) != "T" and time.monotonic() < begun + NOTICED_S:
        running.step(1)
    try:
        assert _state_of(stopped) == "T", "it was to stop at its second piece"
        begun = time.monotonic()
        worst_s = running.step(40)
        here.at_boundary(command, "kv_let_go", {"key": name})
        here.at_boundary(audit)
        assert time.monotonic() - begun < STOOD_S, worst_s
    finally:
        os.kill(stopped, signal.SIGCONT)
    there.end()
    assert all(there.call("at_boundary", arrived, name, NOTICED_S))
    order = taken | {"texts": []}  # All may have been sent before it was let go.
    assert all(r["done"] for r in there.call("at_boundary", command, "kv_take", order))
    for close in (here.at_boundary, lambda *what: there.call("at_boundary", *what)):
        close(close_peer, name)
    running.end()
    here.assert_no_leak()
    there.call("assert_no_leak")


def _state_of(process: int) -> str:
    """Of the kernel: `T` is stopped."""
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def test_a_giver_that_does_not_come_to_the_meeting_holds_nobody_up(
    here: EngineHarness, replica: Replica
) -> None:
    there = replica()
    running = Running(here)
    name = next(_NAMES)
    tickets = there.call("at_boundary", offer, name)
    os.kill(there.process.pid, signal.SIGSTOP)
    try:
        here.at_boundary(open_beside, name, tickets, 1.0)
        begun, worst_s = time.monotonic(), 0.0
        while here.at_boundary(met, name)[0] is None and time.monotonic() < begun + NOTICED_S:
            worst_s = max(worst_s, running.step(1))
        assert "rank 0" in here.at_boundary(met, name)[0]
        assert worst_s < STOOD_S
    finally:
        os.kill(there.process.pid, signal.SIGCONT)
    there.call("at_boundary", close_peer, name)
    running.end()
    here.assert_no_leak()


def test_what_a_request_brings_meanwhile_is_kept(here: EngineHarness, replica: Replica) -> None:
    """Somebody asks here for the same text while its rows are on their way."""
    there = replica()
    move = Move(here, there, [PROMPTS[0]])
    lengths = move.hold()["lengths"]
    move._held = [text[:n] for text, n in zip(move.texts, lengths, strict=True)]
    connect(here, there, move.name)
    assert here.at_boundary(command, "kv_take", move.order())[0]["under_way"]
    here.generate([PROMPTS[0]], {"temperature": 0.0, "max_new_tokens": 1})
    here.at_boundary(audit)
    reports = take_all(here, move.order())[-1]
    assert [report["cached"] for report in reports] == [lengths] * len(reports)
    here.at_boundary(audit)
    move.end()
    assert move.resume() == lengths


def test_a_taking_replica_that_is_killed_in_the_middle(
    here: EngineHarness, pair: tuple[str, str], tp_size: int, arguments: dict[str, Any]
) -> None:
    """The giving one, here this time, lets go and serves on."""
    there = OtherReplica(pair[0], kind_of(tp_size), **arguments)
    try:
        name = next(_NAMES)
        text = PROMPTS[0]
        here.generate([text], {"temperature": 0.0, "max_new_tokens": 1})
        give(here, there, name, text, 120.0)
        there.call("at_boundary", fault, "killed", 0)
        taken = {"key": name, "name": name, "texts": [text], "budget": 1 << 30}
        there.begin("at_boundary", command, "kv_take", taken)
        there.process.join(NOTICED_S)
        assert there.process.exitcode == -signal.SIGKILL
        here.at_boundary(command, "kv_let_go", {"key": name})
        here.at_boundary(close_peer, name)
        assert here.at_boundary(threads)[0] == []
    finally:
        there.close()
    here.at_boundary(audit)
    assert here.generate([text], {"temperature": 0.0, "max_new_tokens": 4})
    here.assert_no_leak()


@pytest.mark.full
@pytest.mark.parametrize(("theirs", "ours"), [(16, 16), (16, 64), (64, 1)])
def test_pages(
    engine: Engine, pair: tuple[str, str], arguments: dict[str, Any], theirs: int, ours: int
) -> None:
    """Replicas with pages of several slots, alike or not: what is whole pages here moves."""
    there = OtherReplica(pair[0], kind_of(1), **arguments, page_size=theirs)
    try:
        here = engine(**arguments, page_size=ours)
        here.flush_cache()
        move = Move(here, there, [PROMPTS[0], PROMPTS[1], PROMPTS[0][:100] + PROMPTS[2]])
        found = move.hold()
        lengths = found["lengths"]
        assert lengths == [(len(text) - 1) // theirs * theirs for text in move.texts]
        move._held = [text[:n] for text, n in zip(move.texts, lengths, strict=True)]
        connect(here, there, move.name)
        ((taken,), *_) = reversed(take_all(here, move.order(budget=100 * found["row_bytes"])))
        assert not taken["failed"]
        here.at_boundary(audit)
        whole = [n // ours * ours for n in lengths]
        assert taken["cached"] == whole
        assert move.resume() == whole
        here.at_boundary(audit)
        move.end()
    finally:
        there.close()

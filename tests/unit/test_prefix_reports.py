"""What replicas report of their prefix caches, and what routing makes of it."""

import asyncio
import random
from array import array
from types import SimpleNamespace
from typing import Any

from fake_clock import Clock

from overstory.orchestrator.affinity import SENT_S, Affinity
from overstory.orchestrator.prefix_blocks import BLOCK_TOKENS, blocks_of
from overstory.orchestrator.prefix_watch import PrefixWatch
from overstory.workers import prefix_report
from overstory.workers.prefix_report import PrefixReader, PrefixReport

NAMES = ("a", "b")


def _tokens(seed: int, blocks: float) -> list[int]:
    return random.Random(seed).choices(range(1000), k=int(blocks * BLOCK_TOKENS))


class _Node:
    """As SGLang's TreeNode, with a key of plain tokens."""

    count = 0

    def __init__(self, ids: list[int], extra: str | None = None) -> None:
        _Node.count += 1
        self.id = _Node.count
        self.key = SimpleNamespace(extra_key=extra, raw_token_ids=lambda: array("q", ids))
        self.value: Any = object()
        self.backuped = False
        self.children: dict[int, _Node] = {}

    def below(self, ids: list[int], extra: str | None = None) -> "_Node":
        node = self.children[len(self.children)] = _Node(ids, extra)
        return node


def test_a_tree_is_read_as_the_blocks_of_its_sequences() -> None:
    system, one, two = _tokens(1, 1.5), _tokens(2, 2.2), _tokens(3, 0.4)
    root = _Node([])
    shared = root.below(system)  # ends within a block: what follows completes it
    shared.below(one)
    shared.below(two)
    held = set(PrefixReader().read(root))
    assert held == {*blocks_of(system + one), *blocks_of(system + two)}


def test_what_is_evicted_or_of_another_kind_is_not_reported() -> None:
    root = _Node([])
    kept, gone = root.below(_tokens(1, 2)), root.below(_tokens(2, 2))
    root.below(_tokens(3, 2), extra="adapter")
    reader = PrefixReader()
    assert set(reader.read(root)) == {*blocks_of(_tokens(1, 2)), *blocks_of(_tokens(2, 2))}
    gone.value = None
    assert list(reader.read(root)) == list(blocks_of(_tokens(1, 2)))
    kept.value, kept.backuped = None, True  # in the host's memory: still worth going there
    assert list(reader.read(root)) == list(blocks_of(_tokens(1, 2)))


def test_known_nodes_are_not_hashed_again(monkeypatch: Any) -> None:
    hashed = []
    monkeypatch.setattr(
        prefix_report, "next_block", lambda seen, ids: hashed.append(1) or hash((seen, *ids))
    )
    root, reader = _Node([]), PrefixReader()
    root.below(_tokens(1, 5))
    reader.read(root)
    assert len(hashed) == 5
    root.below(_tokens(2, 2))
    found = reader.read(root)
    assert (len(hashed), len(found)) == (7, 7)


def test_a_report_is_bounded_and_beginnings_come_first(monkeypatch: Any) -> None:
    monkeypatch.setattr(prefix_report, "MOST_BLOCKS", 4)
    root = _Node([])
    for seed in range(3):
        root.below(_tokens(seed, 1)).below(_tokens(seed + 10, 3))
    found = list(PrefixReader().read(root))
    assert len(found) == 4
    assert {next(iter(blocks_of(_tokens(seed, 1)))) for seed in range(3)} <= set(found)


def test_nothing_new_is_no_report_and_another_cache_says_so() -> None:
    reader = PrefixReader()
    sizes = {"evictable_size": lambda: 64, "protected_size": lambda: 0}
    cache = SimpleNamespace(root_node=_Node([]), **sizes)
    cache.root_node.below(_tokens(1, 1))
    report = reader.report(cache, 7, None)
    assert report is not None
    assert list(report.hashes or ()) == list(blocks_of(_tokens(1, 1)))
    assert reader.report(cache, 7, report.version) is None
    assert reader.report(cache, 8, report.version) is not None
    other = reader.report(SimpleNamespace(), 1, None)
    assert other is not None
    assert other.hashes is None


def test_reports_decide_over_what_was_sent() -> None:
    clock = Clock()
    routes = Affinity("prefix_affine", clock=clock)
    asked = _tokens(1, 4)
    routes.routed(asked, "", "a")
    assert routes.prefers(asked, "", {"a": 1}, NAMES) == "a"
    routes.reported("a", ())  # evicted, or not computed yet: believed for a while
    routes.reported("b", list(blocks_of(asked))[:2])
    assert routes.prefers(asked, "", {"a": 1}, NAMES) == "a"
    clock.now += SENT_S + 1
    assert routes.prefers(asked, "", {"b": 1}, NAMES) == "b"
    routes.silent(("a",))  # b no longer reports, and nothing was sent there
    assert routes.prefers(asked, "", {"a": 1}, NAMES) == "b"  # fewest calls: nobody holds it
    routes.silent(())
    assert routes.prefers(asked, "", {"a": 1}, NAMES) == "a"  # what was sent is all there is


def test_what_another_gateway_sent_is_known_by_the_report() -> None:
    routes = Affinity("prefix_affine")
    routes.reported("b", blocks_of(_tokens(5, 3)))
    assert routes.prefers(_tokens(5, 3) + _tokens(6, 1), "", {"b": 1}, NAMES) == "b"


class _Directory:
    """Replicas with what they hold by name; an exception is raised."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held
        self.asked: list[tuple[str, Any]] = []

    async def replicas(self) -> dict[str, int]:
        return dict.fromkeys(self.held, 1)

    async def call(self, replica: str, rank: int, method: str, known: Any, **_: Any) -> Any:
        assert (rank, method) == (0, "prefixes")
        self.asked.append((replica, known))
        held = self.held[replica]
        if isinstance(held, Exception):
            raise held
        return held if held is None or held.version != known else None


def test_the_watch_tells_what_it_hears_and_forgets_who_is_silent() -> None:
    affinity = Affinity("prefix_affine")
    report = PrefixReport((1, 2, 3), array("q", blocks_of(_tokens(1, 2))))
    directory = _Directory({"a": TimeoutError(), "b": report})
    watch = PrefixWatch(directory, lambda: affinity)
    asyncio.run(watch.look())
    assert affinity.prefers(_tokens(1, 2), "", {"b": 1}, NAMES) == "b"
    asyncio.run(watch.look())
    assert directory.asked[-1] == ("b", (1, 2, 3))
    assert affinity.prefers(_tokens(1, 2), "", {"b": 1}, NAMES) == "b"  # unchanged: it stands
    directory.held["b"] = TimeoutError()
    asyncio.run(watch.look())
    assert affinity.prefers(_tokens(1, 2), "", {"b": 1}, NAMES) == "a"


def test_a_new_affinity_is_told_anew_and_one_without_routing_asks_nobody() -> None:
    report = PrefixReport((1, 2, 3), array("q", blocks_of(_tokens(1, 2))))
    directory = _Directory({"b": report})
    current = [Affinity("prefix_affine")]
    watch = PrefixWatch(directory, lambda: current[0])
    asyncio.run(watch.look())
    current[0] = Affinity("prefix_affine")
    asyncio.run(watch.look())
    assert current[0].prefers(_tokens(1, 2), "", {"b": 1}, NAMES) == "b"
    current[0] = Affinity("least_loaded")
    asyncio.run(watch.look())
    assert len(directory.asked) == 2

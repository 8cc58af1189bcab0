"""Cost tables: interpolation, what is no table, measuring in bounded time, the cache on disk."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overstory.workers.policy.cost_table import IN_PARTS, BadTable, CostTable
from overstory.workers.policy.measure import Grid, measure
from overstory.workers.policy.options import Options
from overstory.workers.policy.table_cache import TableCache, cache_folder
from overstory.workers.tree_policy import TreePolicy

OPTIONS = Options.of(8, 15)
GRID = Grid.within((1, 2, 4, 8), (256, 2048), 8, 4096, 8 * 4096, 16)


def table() -> CostTable:
    cells = {
        (o, b, c): 1000 * (o + 1) * (b + 1) + 100 * c
        for o, b, c in itertools.product(range(2), range(2), range(2))
    }
    return CostTable.measured(("plain", "chain"), (1, 4), (256, 2048), cells)


def test_lines_between_cells_and_beyond() -> None:
    costs = table()
    assert costs.cost(0, 1, 256) == 1000
    assert costs.cost(0, 4, 256) == 2000
    assert costs.cost(0, 2, 256) == 1333
    assert costs.cost(0, 7, 256) == 3000
    assert costs.cost(0, 1, 1) == 1000
    assert costs.cost(0, 1, 1152) == 1050
    assert costs.cost(1, 4, 2048) == 4100


@given(st.integers(1, 100), st.integers(0, 10**6), st.integers(0, 1))
def test_more_never_costs_less(batch: int, context: int, option: int) -> None:
    costs = table()
    here = costs.cost(option, batch, context)
    assert here <= costs.cost(option, batch + 1, context)
    assert here <= costs.cost(option, batch, context + 500)


def test_a_disturbed_cell_costs_no_more_than_larger_ones() -> None:
    cells = {
        (o, b, 0): cost for o, row in enumerate([(900, 50), (60, 70)]) for b, cost in enumerate(row)
    }
    costs = CostTable.measured(("plain", "chain"), (1, 2), (10,), cells, [(0, 1)])
    assert costs.cost_us == (((50,), (50,)), ((60,), (70,)))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("batches", [4, 1], "batches of a cost table must rise"),
        ("contexts", [0, 5], "contexts of a cost table must rise"),
        ("contexts", [256], "holds rows of"),
        ("options", [], "holds rows of"),
        ("cost_us", [[[0, 1], [1, 1]]] * 2, "must be 1 to"),
        ("cost_us", [[[1.5, 1], [1, 1]]] * 2, "whole numbers"),
        ("cost_us", 7, "no cost table"),
        ("sampled_us", [[0]], "sampling costs"),
        ("sampled_us", [[0, -1]] * 2, "sampling costs"),
        ("parts_us", [[0]], "costs of parts"),
        ("parts_us", [[0, -1]] * 2, "costs of parts"),
    ],
)
def test_what_is_no_table(field: str, value: Any, said: str) -> None:
    data = json.loads(table().to_json()) | {field: value}
    with pytest.raises(BadTable, match=said):
        CostTable.from_json(data)


def test_the_version_names_the_contents() -> None:
    assert CostTable.from_json(json.loads(table().to_json())) == table()
    other = CostTable.measured(("plain",), (1,), (256,), {(0, 0, 0): 5})
    assert table().version != other.version
    assert 0 <= table().version < 2**31


class FakeTimer:
    """Steps that cost what a formula says, on a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cell = (0, 0)
        self.steps = 0

    def prepare(self, batch: int, context: int) -> None:
        self.cell = (batch, context)

    def cost(self, nodes: int, batch: int, context: int) -> int:
        return 5000 + batch * (nodes + 1) * 100 + batch * context

    def step_us(self, policy: TreePolicy) -> int:
        self.steps += 1
        microseconds = self.cost(policy.drafted_nodes(8), *self.cell)
        self.now += microseconds / 1e6
        return microseconds

    def draw_us(self, policy: TreePolicy) -> int:
        return self.cell[0] * (policy.drafted_nodes(8) + 1)

    def parts_us(self, policy: TreePolicy) -> int | None:
        """Batches of 8 are not captured; a disturbed step is taken for no gain."""
        if self.cell[0] == 8:
            return None
        whole = self.cost(policy.drafted_nodes(8), *self.cell)
        return whole - 50 if policy.mode == "plain" else whole + 700 + self.cell[0]

    def clock(self) -> float:
        return self.now


def _measured(seconds: float) -> tuple[FakeTimer, CostTable]:
    timer = FakeTimer()
    return timer, measure(timer, OPTIONS, GRID, seconds, lambda value: value, timer.clock)


def test_measures_the_whole_grid_when_there_is_time() -> None:
    timer, costs = _measured(1000)
    assert costs.batches == GRID.batches
    assert costs.contexts == GRID.contexts
    for o, nodes in enumerate(OPTIONS.nodes):
        for batch, context in itertools.product(GRID.batches, GRID.contexts):
            cost = timer.cost(nodes, batch, context)
            assert costs.cost(o, batch, context) == cost
            assert costs.cost(o, batch, context, sampled=True) == cost + batch * (nodes + 1)
            more = 700 + batch if nodes and batch < 8 else 0
            assert costs.cost(o, batch, context, launch=IN_PARTS) == cost + more


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 1.0])
def test_measuring_ends_in_time_with_a_usable_table(seconds: float) -> None:
    timer, costs = _measured(seconds)
    longest_round = sum(timer.cost(n, 8, 2048) for n in OPTIONS.nodes) / 1e6
    assert timer.now <= seconds + 2 * longest_round
    assert costs.batches[0] == 1
    by_nodes = sorted(range(len(OPTIONS)), key=lambda o: OPTIONS.nodes[o])
    order = [costs.cost(o, 4, 256) for o in by_nodes]
    assert order == sorted(order), "more rows cost more"


class CutTimer(FakeTimer):
    """A context costs eight requests four and a half times what it costs one."""

    def cost(self, nodes: int, batch: int, context: int) -> int:
        return 5000 + batch * (nodes + 1) * 100 + (batch + 1) * context // 2


def test_cells_that_there_was_no_time_for_lie_on_a_line_between_the_measured_ones() -> None:
    """Not on so many times what their context costs one request: that is too much."""
    timer, cells = CutTimer(), GRID.cells()
    assert cells[:6] == [(1, 256), (8, 256), (2, 256), (4, 256), (1, 2048), (8, 2048)]
    asked: list[tuple[int, int]] = []

    def prepare(batch: int, context: int) -> None:
        asked.append((batch, context))
        timer.cell = batch, context

    timer.prepare = prepare  # type: ignore[method-assign]
    # Time is up when the cell after the corner is at hand.
    costs = measure(timer, OPTIONS, GRID, 1.0, lambda value: value, lambda: float(len(asked) > 6))
    assert asked[:6] == cells[:6]
    for o, nodes in enumerate(OPTIONS.nodes):
        added = [timer.cost(nodes, b, 2048) - timer.cost(nodes, b, 256) for b in (1, 8)]
        for batch in (2, 4):
            more = added[0] + (added[1] - added[0]) * (batch - 1) // 7
            assert costs.cost(o, batch, 2048) == timer.cost(nodes, batch, 256) + more
            assert more < batch * added[0]


def test_all_ranks_run_the_steps_that_rank_0_says() -> None:
    said: list[int] = []

    def rank_0(value: int) -> int:
        said.append(value)
        return value

    first = FakeTimer()
    measure(first, OPTIONS, GRID, 0.2, rank_0, first.clock)
    second = FakeTimer()
    measure(second, OPTIONS, GRID, 0.2, lambda _: said.pop(0), lambda: 0.0)
    assert second.steps == first.steps
    assert not said


def test_a_grid_within_small_engines() -> None:
    small = Grid.within((1, 2, 4, 8), (256, 2048), 2, 100, 90, 8)
    assert small.contexts == (81,)
    assert small.cells() == [(1, 81)]
    assert GRID.cells()[:2] == [(1, 256), (8, 256)]
    assert len(GRID.cells()) == 8


KEY = {"target": ["a", 1], "versions": {"torch": "2"}}


def test_cache_keeps_tables_by_key(tmp_path: Path) -> None:
    cache = TableCache(tmp_path / "new" / "folder", KEY)
    measured = []

    def anew() -> CostTable:
        measured.append(1)
        return table()

    assert cache.load_or_measure(anew, 1) == table()
    assert TableCache(tmp_path / "new" / "folder", KEY).load_or_measure(anew, 1) == table()
    assert len(measured) == 1
    TableCache(tmp_path / "new" / "folder", KEY | {"target": ["a", 2]}).load_or_measure(anew, 1)
    assert len(measured) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1, "table": 2}', '{"table": {}}'])
def test_a_damaged_cache_is_measured_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TableCache(tmp_path, KEY)
    cache.store(table())
    assert cache.load() == table()
    cache.path.write_text(damage)
    other = CostTable.measured(("plain",), (1,), (256,), {(0, 0, 0): 5})
    assert cache.load_or_measure(lambda: other, 1) == other
    assert "measured again" in caplog.text
    assert cache.load() == other


def test_a_table_of_another_key_under_the_same_name_is_refused(tmp_path: Path) -> None:
    cache, other = TableCache(tmp_path, KEY), TableCache(tmp_path, KEY | {"x": 1})
    other.path = cache.path
    other.store(table())
    assert cache.load() is None


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = TableCache(tmp_path / "file" / "below", KEY)
    assert cache.load_or_measure(table, 1) == table()
    assert "not cached" in caplog.text


def _hold(folder: Path, ready: Any, done: Any) -> None:
    with TableCache(folder, KEY).alone(1) as alone:
        assert alone
        ready.set()
        done.wait(30)


def test_one_process_measures_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, done))
    other.start()
    assert ready.wait(30)
    assert TableCache(tmp_path, KEY).load_or_measure(table, 0.2) == table()
    assert "another process" in caplog.text
    done.set()
    other.join(30)
    with TableCache(tmp_path, KEY).alone(5) as alone:
        assert alone


def test_cache_folder_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSTORY_CACHE", "/tmp/somewhere")
    assert cache_folder() == Path("/tmp/somewhere/cost_tables")
    monkeypatch.delenv("OVERSTORY_CACHE")
    assert cache_folder().parts[-3:] == (".cache", "overstory", "cost_tables")

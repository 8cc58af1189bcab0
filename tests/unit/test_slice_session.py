"""The pure parts of a rank slice session: what is left of one that was cut, its further tables."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import slice_prefill
from slice_auto import (
    BLOCK,
    LEARNING_STEPS,
    SETTLING_STEPS,
    SURE,
    AutoBench,
    Drafts,
    chances,
)
from slice_bench import in_parts, keep_launches
from slice_config import published
from slice_counted import automatic, both_ways, fill, kept, long_prompt, touched
from slice_modules import SLOW, modules
from slice_points import CONTEXTS, Cell, again, against_triton, grid, longest, rest, slots
from slice_prefill import Lengths, PrefillBench, compared, table
from slice_report import Report
from slice_resume import cells_left, counts_left, rows_left, stages_left
from slice_roles import (
    AUTO,
    COUNTED,
    ROLES,
    auto_left,
    is_complete,
    largest,
    needed_s,
    not_built,
)
from slice_rows import points_of, read, results, write
from slice_stages import STAGES, Kernel
from slice_tables import TABLES, levers, merged, triton_of_few_layers

from overstory.workers.policy.options import Options
from overstory.workers.seam import extend_blocks
from overstory.workers.tree_policy import TreePolicy

CELL = Cell(4, 1024, (1, 9), "overstory")
STAGES_US = dict.fromkeys((*STAGES, "pauses", "span"), 10.0)


def point(cell: Cell, rows: int, **more: Any) -> dict[str, Any]:
    return cell._asdict() | {"rows": rows, "stages_us": STAGES_US, "run": 1} | more


# ----------------------------------------------------------------------------------- gone on with


def test_rows_that_are_there_are_not_measured_again() -> None:
    assert rows_left(CELL, []) == (1, 9)
    assert rows_left(CELL, [point(CELL, 1)]) == (9,)
    assert rows_left(CELL, [point(CELL._replace(context=8192), 1)]) == (1, 9)
    before_any_profile = CELL._replace(profiled=False)
    assert rows_left(CELL, [point(before_any_profile, 1)]) == (1, 9)
    assert rows_left(before_any_profile, [point(before_any_profile, 1)]) == (9,)


def test_a_cell_is_left_until_each_of_its_points_has_stages() -> None:
    both = [point(CELL, 1), point(CELL, 9)]
    assert cells_left([CELL], both) == []
    both[1].pop("stages_us")
    assert stages_left(CELL, both)
    assert cells_left([CELL], both) == [CELL]
    plain = CELL._replace(profiled=False)
    assert not cells_left([plain], [point(plain, rows, stages_us=None) for rows in (1, 9)])


def test_counts_that_are_there_are_not_counted_again() -> None:
    found = [{"alike": a, "batch": b, "rows": r, "mean": 1.0} for a, b, r in COUNTED[:5]]
    assert counts_left(COUNTED, found) == list(COUNTED[5:])


def test_a_role_is_complete_when_nothing_of_it_is_left() -> None:
    role = ROLES["moe_marlin"]
    content: dict[str, Any] = {"points": [point(c, r) for c in role.cells for r in c.rows]}
    assert not is_complete(role, content, role.cells), "its experts are to be counted"
    content["experts"] = [{"alike": a, "batch": b, "rows": r} for a, b, r in COUNTED]
    assert is_complete(role, content, role.cells)
    content["points"].pop()
    assert not is_complete(role, content, role.cells)
    assert not is_complete(ROLES["long"], {"long": {}}, ())
    assert is_complete(ROLES["long"], {"long": {}, "far_slots": {}}, ())
    assert not is_complete(ROLES["prefill"], {"prefills": [{}]}, ())
    assert is_complete(ROLES["prefill"], {"prefill": "all"}, ())


# ------------------------------------------------------------------------------------- prefill


class PrefillEngine:
    """Answers in the time it is told: 3 s where extends are cut in blocks, else 40 s."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.outputs, self.cleared = clock, {}, []

    def flush_cache(self) -> None:
        self.cached: list[int] = []

    def at_boundary(self, act: Any, given: Any) -> None:
        self.cleared.append((act.__name__, given if isinstance(given, int) else len(given)))
        self.cached = self.cached[:given] if isinstance(given, int) else given

    def submit(self, text: list[int], asked: dict[str, Any], **_more: Any) -> str:
        import itertools

        alike = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(text, self.cached, strict=False)
        )
        hit = min(len(list(alike)), len(text) - 1)
        ours = extend_blocks.left_to_triton([hit], [len(text) - hit], 8) is None
        self.clock[0] += 3 if ours or not hit else 40
        self.cached = text
        self.outputs["r"] = SimpleNamespace(
            ids=[7], refused=None, cached_tokens=hit, top_logprobs=[{7: -1.0 - 0.5 * ours, 8: -2.0}]
        )
        return "r"

    def run(self, rids: list[str]) -> None:
        pass


def test_prefills_are_measured_both_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [0.0]
    monkeypatch.setattr(slice_prefill.time, "perf_counter", lambda: clock[0])
    engine, report = PrefillEngine(clock), Report("prefill", tmp_path)
    bench = PrefillBench(engine, lambda: 400 - clock[0], report)
    bench.run(Lengths((200,), ((300, (1, 70)),), (500, (2,)), 1 << 14))
    rows = {row["what"]: row for row in compared(report.content["prefills"])}
    assert [row.get("times") for row in rows.values()] == [1.0, 13.33, 13.33, 13.33, 1.0]
    assert rows["70 behind 300, compute"]["same_token"]
    assert rows["70 behind 300, compute"]["logprobs_differ"] == 0.5
    assert ("keep_only", 300) in engine.cleared
    assert ("make_up", 500) in engine.cleared
    assert "| 70 behind 300, compute | 3.000 | 40.000 | 13.3 | yes | 0.500 |" in table(
        list(rows.values())
    )
    behind = [f for f in report.content["prefills"] if f["prefix"]]
    assert all(f["cut"] == (f["way"] == "ours") for f in behind)
    assert report.content["prefill"] == "all"


def test_the_page_has_what_was_measured() -> None:
    docs = Path(__file__).parents[2] / "docs"
    stored = json.loads((docs / "benchmarks" / "prefill_h200.json").read_text())
    rows = compared(stored["prefills"])
    assert table(rows) in (docs / "ddtree-cuda.md").read_text()
    cut = [f for f in stored["prefills"] if f["prefix"]]
    assert all(f["cut"] == (f["way"] == "ours") for f in cut), "each way was what it is said to be"


def test_what_triton_has_no_time_for_is_named_and_measured_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = [0.0]
    monkeypatch.setattr(slice_prefill.time, "perf_counter", lambda: clock[0])
    lengths = Lengths((), ((300, (1,)),), (500, (2,)), 600)
    for left in (2.0, 900.0):
        report = Report("prefill", tmp_path)
        PrefillBench(PrefillEngine(clock), lambda: left, report).run(lengths)  # noqa: B023
        complete = is_complete(ROLES["prefill"], report.content, ())
        assert complete == (left > 100)
        assert ("left_out" in report.content) == (left < 100)
    ways = [f["way"] for f in report.content["prefills"]]
    assert ways == ["ours"] * 3 + ["ours", "triton"] * 3


def test_a_report_goes_on_with_what_is_there(tmp_path: Path) -> None:
    first = Report("few", tmp_path)
    first.put("points", [{"rows": 1}])
    first.put("left_out", ["all"])
    first.attempt("broken", lambda: 1 / 0)
    again = Report("few", tmp_path)
    assert again.content["points"] == [{"rows": 1}]
    assert (again.content["runs"], again.content["errors"]) == (2, {})
    assert "left_out" not in again.content
    again.put("more", 1)
    assert json.loads((tmp_path / "few.json").read_text())["points"] == [{"rows": 1}]


def test_a_point_of_another_run_is_untraced_again(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    cells = (CELL, CELL._replace(context=8192), CELL._replace(context=65536))
    times = {"policy": "tree-8", "steps": 2, "step_us": 1.0, "least_us": 1, "most_us": 1}
    points = [point(c, 9, **times) | {"run": n // 2 + 1} for n, c in enumerate(cells)]
    (tmp_path / "slice.json").write_text(json.dumps({"few": {"points": points, "layers": 4}}))
    assert [p["traced"] for p in points_of(tmp_path, "few")] == [0, 1, 0]


def test_the_last_profile_of_a_point_counts(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    for number, us in ((2, 40.0), (10, 70.0)):
        kernels = [
            Kernel(name, at, at + us)
            for name, at in (("rmsnorm", 0.0), ("overstory::mla", 100.0), ("tree_accept", 200.0))
        ]
        file = tmp_path / "roles" / f"launches-few-{number}-overstory-4-1024.json.gz"
        keep_launches(file, kernels, [9], 1)
    times = {"policy": "tree-8", "steps": 2, "step_us": 1.0, "least_us": 1, "most_us": 1}
    document = {"few": {"points": [point(CELL, 9, **times)], "layers": 4}}
    (tmp_path / "slice.json").write_text(json.dumps(document))
    (found,) = points_of(tmp_path, "few")
    assert found["stages_us"]["attention"] == 70.0


def test_a_session_that_was_killed_is_read_by_its_roles(tmp_path: Path) -> None:
    Report("few", tmp_path / "roles").put("points", [])
    assert results(tmp_path)["few"]["points"] == []
    assert points_of(tmp_path, "few") == []


# -------------------------------------------------------------------------------------- modules


def test_a_role_does_not_wait_for_minutes_of_compiling(tmp_path: Path) -> None:
    out = tmp_path / "roles"
    assert not_built(out, ROLES["moe_marlin"]) is None, "not asked"
    name = f"sgl_kernel_jit_{SLOW}_bf16"
    for missing, left_out in (({}, False), ({"qknorm": "no"}, False), ({name: "no"}, True)):
        (tmp_path / "modules.json").write_text(json.dumps({"missing": missing}))
        for role in ("moe_marlin", "moe_fused", "long", "again"):
            why = not_built(out, ROLES[role])
            assert (why is not None) == left_out
            assert why is None or name in why
        assert not_built(out, ROLES["moe_triton"]) is None, "its experts are Triton's"


def test_modules_are_those_of_the_shapes() -> None:
    wanted = {(m.where, m.arguments) for m in modules("bf16")}
    assert ("gemm.dsv3_fused_a_gemm", (7168, 1536 + 512 + 64, True)) in wanted
    assert ("kvcache.kvcache", (256, 256)) in wanted, "one head of 128 in bfloat16"
    assert ("moe.moe_wna16_marlin", ("bf16", False, False)) in wanted
    experts = published("kimi-k2.6")["n_routed_experts"]
    assert ("gemm.dsv3_router_gemm", (experts, 7168, True, True)) in wanted
    assert len(wanted) == 12


# ----------------------------------------------------------------------------- automatic policy


def test_made_up_drafts_yield_what_is_published_and_assumed() -> None:
    drafts = Drafts(Options.of(8, 32), 7, SURE["fits"])
    plain, chain, _, eight, fifteen, thirty_one, _ = drafts.tokens
    assert plain == 1
    assert chain == pytest.approx(sum(0.83**depth for depth in range(8)), rel=0.02)
    assert 4.3 < chain < 4.7
    assert eight == pytest.approx(1.02 * chain, rel=0.02)
    assert fifteen == pytest.approx(1.12 * chain, rel=0.03)
    assert 1.15 < thirty_one / chain < 1.3
    assert Drafts(Options.of(8, 32), 7, SURE["fits badly"]).tokens[1] < 1.5
    assert sum(chances(0.3)) == pytest.approx(1)
    assert list(chances(0.3)) == sorted(chances(0.3), reverse=True)


class FakeEngine:
    """Worker, timer and chooser in one: steps of known length, a rule that is told what to take."""

    def __init__(self, costs_us: dict[str, int], rule: list[TreePolicy]) -> None:
        self.chooser = self._auto = self.steering = self.table = self
        self._batch = None
        self.now, self._costs, self._rule = 0, costs_us, rule
        self.walks: list[Any] = []
        self.prepared: tuple[int, int] | None = None

    def prepare(self, batch: int, context: int) -> None:
        self.prepared = batch, context

    def next(self, batch: Any) -> tuple[TreePolicy, str]:
        self._rule.append(self._rule.pop(0))
        return self._rule[-1], ""

    def launch(self, policy: TreePolicy) -> None:
        self.now += 1000 * self._costs[str(policy)]

    def observe(self, kind: int, walk: Any) -> None:
        self.walks.append(walk)

    def costs(self, batch: int, context: int) -> list[int]:
        assert (batch, context) == self.prepared
        return [*self._costs.values()]

    def report(self) -> dict[str, Any]:
        return {"believed": {"batch": 4}, "drafter": "on"}

    def ended(self, batch: Any) -> None: ...
    def interrupted(self) -> None: ...
    def wait(self) -> None: ...


def _weighed(rule: list[str]) -> tuple[dict[str, Any], FakeEngine, Drafts]:
    """A point of 9 seconds whose steps take as long as their option's cost here."""
    engine = FakeEngine(COSTS, [TreePolicy.parse(name) for name in rule])
    drafts = Drafts(OPTIONS, 7, SURE["fits"])
    bench = AutoBench(engine, engine, on_cuda=False, clock=lambda: engine.now)
    return bench.cell(4, 1024, drafts, 9.0), engine, drafts


OPTIONS = Options.of(8, 15)
COSTS = dict(zip(OPTIONS.names, (5000, 10_000, 11_000, 12_000, 20_000), strict=True))


@pytest.mark.parametrize("rule", [["chain"], ["chain", "plain"]])
def test_the_automatic_policy_is_weighed_against_the_best_fixed_one(rule: list[str]) -> None:
    found, engine, drafts = _weighed(rule)
    assert engine.prepared == (4, 1024)
    chain = drafts.tokens[1]
    assert found["best"] == "chain"
    assert found["rates"]["chain"] == pytest.approx(4 * chain / 0.010, rel=1e-3)
    assert found["rates"]["plain"] == pytest.approx(4 / 0.005, rel=1e-3)
    taken = [1.0 if name == "plain" else chain for name in rule]
    rate = 4 * sum(taken) / sum(COSTS[name] / 1e6 for name in rule)
    assert found["rates"]["auto"] == pytest.approx(rate, rel=1e-3)
    assert found["of_best"] == pytest.approx(rate * 0.010 / (4 * chain), rel=1e-3)
    assert sum(found["used"].values()) == BLOCK * found["rounds"]
    assert sum(found["used_learning"].values()) == LEARNING_STEPS
    assert found["table_us"] == [*COSTS.values()]
    assert found["believed"] == {"batch": 4}
    assert all(walk.chain for walk in engine.walks)
    line = automatic([found | {"drafter": "fits", "commit": "abc"}])[2]
    assert f"| {found['of_best']:.1%} |" in line
    assert line.startswith(f"| fits | 4 | 1024 | chain | {4 * chain / 0.010:.0f} |")
    assert line.endswith("| abc |")


def test_a_trial_counts_by_its_share_of_all_timed_steps() -> None:
    """A median of rounds would leave out a round with a trial, or show it alone."""
    rule = ["chain"] * (LEARNING_STEPS + BLOCK) + ["plain"] * 5 + ["chain"] * (BLOCK - 5)
    found, _, drafts = _weighed(rule)
    assert found["used"] == {"plain": 5, "chain": 2 * BLOCK - 5}
    chain, steps = drafts.tokens[1], 2 * BLOCK
    tokens, us = 5 + (steps - 5) * chain, 5 * 5000 + (steps - 5) * 10_000
    assert found["of_best"] == pytest.approx(tokens / us / (chain / 10_000), rel=1e-3)
    assert found["of_best"] < 1


def test_learning_goes_on_between_points_of_a_batch_size() -> None:
    engine = FakeEngine(COSTS, [TreePolicy.parse("chain")])
    drafts = Drafts(OPTIONS, 7, SURE["fits"])
    bench = AutoBench(engine, engine, on_cuda=False, clock=lambda: engine.now)
    learnt = [bench.cell(b, 1024, drafts, 0.0)["used_learning"]["chain"] for b in (1, 1, 4, 1)]
    assert learnt == [LEARNING_STEPS, SETTLING_STEPS, LEARNING_STEPS, SETTLING_STEPS]


@pytest.mark.parametrize("name", ["auto", "auto_fits", "auto_badly", "rest"])
def test_points_of_the_automatic_policy_that_are_there_are_left_out(name: str) -> None:
    role = ROLES[name]
    wanted = [(kind, *point) for kind in role.auto for point in role.auto_at]
    assert len(wanted) == 10 * len(role.auto)
    assert sorted(role.auto_at) == sorted(AUTO)
    assert set(role.auto) <= set(SURE)
    found = _points(wanted[:3])
    assert auto_left(role, found) == wanted[3:]
    assert not is_complete(role, {"auto": found}, ())
    assert is_complete(role, {"auto": _points(wanted)}, ())


def test_steps_in_parts_that_are_there_are_left_out() -> None:
    role = ROLES["parts"]
    parts = [c._asdict() | {"rows": rows} for c in role.parts for rows in c.rows]
    assert is_complete(role, {"parts": parts}, ())
    assert not is_complete(role, {"parts": parts[1:]}, ())


def test_an_engine_holds_the_largest_that_its_role_measures() -> None:
    for name, batch, context in (("auto", 16, 65536), ("rest", 16, 65536), ("parts", 1, 200_000)):
        cell = Cell(batch, context, (), "overstory")
        assert slots(largest(ROLES[name]), 33) == slots([cell], 33), name


def test_steps_in_parts_stand_beside_those_of_one_graph() -> None:
    def way(alone: float, row: float) -> dict[str, float]:
        return {"step_us": alone, "in_a_row_us": row}

    point = {"batch": 1, "context": 1024, "rows": 9}
    found = point | {"whole": way(11_600, 11_500), "in_parts": way(17_000, 11_900)}
    again = found | {"whole": way(11_604, 11_504)}
    long = found | {"batch": 16, "whole": {"step_us": 250_000}}  # not timed in a row
    assert both_ways([found, again, long])[2:] == [
        "| 1 | 1024 | 9 | 11.50 | 11.90 | 11.60 | 17.00 |",
        "| 16 | 1024 | 9 | 250.00 | 11.90 | 250.00 | 17.00 |",
    ]


def test_a_worker_s_steps_are_one_graph_again_after_those_in_parts() -> None:
    worker = SimpleNamespace(_step_graphs="graphs", _tiers="tiers")

    def lost() -> None:
        with in_parts(worker):
            assert (worker._step_graphs, worker._tiers) == (None, "tiers")
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        lost()
    assert worker._step_graphs == "graphs"


def test_again_and_rest_time_every_point_of_the_grid_with_our_attention_once() -> None:
    wanted = {(c.batch, c.context, r) for c in grid() if c.backend == "overstory" for r in c.rows}
    made = [
        (c.batch, c.context, r)
        for cell in (again(), rest(), longest())
        for c in cell
        if c.profiled
        for r in c.rows
    ]
    assert sorted(made) == sorted(wanted)


def test_triton_is_timed_with_all_layers_but_for_four_requests_of_200k() -> None:
    cells = [c for c in (*grid()[:9], *ROLES["again"].cells) if c.backend == "triton"]
    every = {(b, c) for b in (1, 4) for c in CONTEXTS}
    assert {(c.batch, c.context) for c in cells} == every - {(4, 200_000)}
    assert len(cells) == 7, "each once"


def _points(triples: Any) -> list[dict[str, Any]]:
    return [{"drafter": d, "batch": b, "context": c} for d, b, c in triples]


# --------------------------------------------------------------------------------------- tables


def few(backend: str, role: str, attention: float, moe: float) -> dict[str, Any]:
    stages = STAGES_US | {"attention": attention, "moe": moe, "dense": 40.0}
    cell = Cell(1, 65536, (9,), backend)
    own = {"role": role, "layers": 4, "step_us": 900.0, "in_a_row_us": 800.0}
    return point(cell, 9, stages_us=stages, **own)


def test_triton_and_ours_with_few_layers_scale_to_all() -> None:
    ours, theirs = few("overstory", "triton", 280.0, 270.0), few("triton", "triton", 48000.0, 270.0)
    theirs |= {"step_us": 48_520.0, "in_a_row_us": None}
    line = triton_of_few_layers([ours, theirs], ())[2]
    step = 800 - (280 + 270 + 40) + 61 * (70 + 10) + 60 * 90
    slow = 48_520 - (48_000 + 270 + 40) + 61 * (12_000 + 10) + 60 * 90
    wanted = ["12000.0", "70.0", "171", f"{slow / 1000:.2f}", f"{step / 1000:.2f}"]
    assert [c.strip() for c in line.strip("|").split("|")][3:] == [*wanted, f"{slow / step:.0f}"]
    whole = {("triton", 1, 65536, 9)}
    line = triton_of_few_layers([ours, theirs], whole)[2]
    assert [c.strip() for c in line.strip("|").split("|")][3:] == [*wanted[:3], "", "", ""]
    assert len(triton_of_few_layers([theirs], ())) == 2, "nothing to compare with"


def test_levers_are_told_apart() -> None:
    roles = (("moe_marlin", 270.0), ("moe_triton", 540.0), ("few", 300.0))
    points = merged([few("overstory", role, 280.0, moe) for role, moe in roles])
    assert len(points) == 3
    (line,) = levers(points)[2:]
    assert "| 90.0, 10.0; 0.80 | 180.0, 10.0; 0.80 |  |" in line
    assert len(TABLES["few"](points)) == 3, "levers are no points of the others' table"


def test_rows_of_levers_come_back_from_their_file(tmp_path: Path) -> None:
    made = few("overstory", "moe_fused", 280.0, 270.0) | {"policy": "tree-8", "traced": 0}
    made |= {"steps": 2, "least_us": 1, "most_us": 1}
    out = io.StringIO()
    write([made], dict.fromkeys(("gpu", "versions", "commit"), ""), out)
    file = tmp_path / "rows.csv"
    file.write_text(out.getvalue())
    assert merged(read(file))[0]["role"] == "moe_fused"


def test_counted_experts_beside_even_routers() -> None:
    counts = [
        {"batch": 1, "rows": 9, "alike": a, "mean": 60.2, "least": 55, "most": 66} for a in (0, 0.5)
    ]
    head, _, line = touched(counts[:1] + counts[1:])
    assert "0% alike" in head
    assert "50% alike" in head
    assert line == "| 1 | 9 | 66 | 60 (55 to 66) | 60 (55 to 66) |"


def test_a_long_prompt_is_told_as_far_as_it_came() -> None:
    chunk = {"seconds": 0.5, "allocated_gb": 60.0, "peak_gb": 61.0}
    role: dict[str, Any] = {"chunks": [chunk, chunk | {"seconds": 1.5, "allocated_gb": 60.25}]}
    (line,) = long_prompt(role)
    assert "chunks: 2, 2.00 s in all, each 0.500 to 1.500 s" in line
    assert "60.00 GB after the first, 60.25 after the last, peak 61.00" in line
    role["long"] = {"tokens": 200_000}
    assert long_prompt(role)[-1] == "prompt of 200000 tokens: to its end"
    assert long_prompt({}) == ["nothing"]


def test_the_goal_s_point_is_the_first_of_triton_s() -> None:
    cells = against_triton()
    assert [(c.batch, c.context, c.backend) for c in cells[:2]] == [
        (1, 65536, "overstory"),
        (1, 65536, "triton"),
    ]
    assert {(c.batch, c.context) for c in cells if c.backend == "triton"} == {
        (b, c) for b in (1, 4) for c in (1024, 8192, 65536, 200_000)
    }
    assert needed_s(Cell(4, 200_000, (9,), "triton"), 4) < 10
    assert needed_s(Cell(1, 65536, (9,), "triton"), 61) == pytest.approx(5 + 65536 / 12_000)


def test_what_is_kept_of_sessions_fills_a_page(tmp_path: Path) -> None:
    """Of two sessions, the later one's figures of a point."""
    cells = {
        "batch": 1,
        "context": 1024,
        "best": "chain",
        "used": {"chain": 128},
        "drafter": "fits",
    }
    for name, rate in (("one", 90.0), ("two", 99.0)):
        roles = tmp_path / name / "roles"
        roles.mkdir(parents=True)
        auto = [cells | {"rates": {"chain": 100.0, "auto": rate}}]
        (roles / "auto.json").write_text(json.dumps({"layers": 61, "auto": auto, "errors": {}}))
        long = {"layers": 3, "chunks": [{"seconds": 0.5}], "long": {"tokens": 8192}}
        (roles / "long.json").write_text(json.dumps(long))
        (roles / "empty.json").write_text(json.dumps({"layers": 4, "errors": {}}))
    older = tmp_path / "older.json"
    older.write_text(json.dumps(kept([f"abc={tmp_path / 'one'}"])))
    stored = kept([str(older), f"abc={tmp_path / 'two'}"])
    assert [role["role"] for role in stored["roles"]] == ["auto", "long"] * 2
    assert {role["commit"] for role in stored["roles"]} == {"abc"}
    assert "errors" not in stored["roles"][0]
    page = "a\n<!-- counted automatic -->\nold\n<!-- end -->\nb\n<!-- counted long --><!-- end -->"
    text = fill(page, json.loads(json.dumps(stored)))
    assert text.count("| fits | 1 | 1024 | chain | 100 | 99 | 99.0% | chain 128 | abc |") == 1
    assert "90.0%" not in text
    assert "old" not in text
    assert "- prompt of 8192 tokens: to its end" in text
    assert fill(text, stored) == text

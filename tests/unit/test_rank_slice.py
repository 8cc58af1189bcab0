"""The pure parts of the rank slice: configs, points, and which kernel belongs to which stage."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from slice_bench import keep_launches, read_launches
from slice_config import published, rank_drafter, rank_target, toy, write_pair
from slice_counted import fill as counted_fill
from slice_plot import draw, parts_ms
from slice_points import POLICIES, ROWS, Cell, grid, slots
from slice_policy import CHAIN_MEANS, judge, tokens_of
from slice_rows import WHERE, read, write
from slice_stages import (
    STAGES,
    Kernel,
    from_trace,
    median_times,
    split_steps,
    stage_times,
    stages_of,
)
from slice_tables import (
    TABLES,
    exchanges_us,
    fill,
    kimi_on,
    merged,
    model_step,
    serving_us,
    whole,
)

from overstory.orchestrator.capacity import step_time
from overstory.orchestrator.experts import distinct_experts
from overstory.orchestrator.gpu_memory import WHOLE_STEP_DRAWS, capture_bytes
from overstory.orchestrator.gpus import RTX_PRO_6000
from overstory.orchestrator.memory import GIB
from overstory.orchestrator.model_facts import drafter_from_config, target_from_config
from overstory.workers.tree_policy import TreePolicy


def launches(*parts: tuple[str, float], start: float = 0.0, pause: float = 0.0) -> list[Kernel]:
    """Kernels one after the other, with a pause before each but the first."""
    found, now = [], start
    for name, microseconds in parts:
        found.append(Kernel(name, now, now + microseconds))
        now += microseconds + pause
    return found


NORM = ("void flashinfer::norm::RMSNormKernel<8u>", 2.0)
GEMM = ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", 5.0)
GATED = ("void (anonymous namespace)::act_and_mul_kernel<>", 1.0)
ATTENTION = [("overstory::mla::attention<8, 4>", 40.0), ("overstory::mla::combine(Args, int)", 6.0)]
DRAFT = [NORM, GEMM, ("_fwd_kernel", 30.0), GEMM, ("overstory::candidates_topk_kernel<>", 4.0)]
MERGED = [("overstory::merge_candidates_kernel(Args)", 3.0)]
BUILD = [("overstory::tree_build_kernel<1>", 5.0), ("overstory::tree_mask_kernel", 2.0)]
EXPERTS = [
    ("dsv3_router_gemm", 3.0),
    ("moe_align_block_size_kernel", 2.0),
    ("device::marlin_moe::Marlin<>", 50.0),
    GATED,
    ("device::marlin_moe::Marlin<>", 25.0),
    ("moe_sum_reduce_kernel", 2.0),
]
SHARED = [GEMM, GATED, GEMM]
LAYER = [NORM, GEMM, *ATTENTION, GEMM, NORM, *EXPERTS, *SHARED]
END = [NORM, GEMM, ("at::native::reduce_kernel<512, 1, ArgMaxOps>", 4.0)]
COMMIT = [("overstory::tree_accept_kernel", 3.0), ("overstory::kv_relocate", 2.0), GEMM, NORM]


def test_stages_add_up_and_are_told_apart() -> None:
    step = launches(*DRAFT, *MERGED, *BUILD, *LAYER, *LAYER, *END, *COMMIT, pause=0.5)
    times = stage_times(step)
    assert set(times) == {*STAGES, "pauses", "span"}
    assert times["span"] == pytest.approx(sum(v for k, v in times.items() if k != "span"))
    assert times["draft"] == pytest.approx(2 + 5 + 30 + 5 + 4 + 3)
    assert times["build"] == pytest.approx(7)
    assert times["attention"] == pytest.approx(92)
    assert times["moe"] == pytest.approx(2 * (3 + 2 + 50 + 1 + 25 + 2))
    assert times["dense"] == pytest.approx(2 * (2 + 5 + 5 + 2 + 5 + 1 + 5) + 2)
    assert times["head"] == pytest.approx(9)
    assert times["commit"] == pytest.approx(12)


def test_a_plain_step_has_no_draft() -> None:
    times = stage_times(launches(("index", 1.0), *LAYER, *END, *COMMIT))
    assert times["draft"] == 0
    assert times["build"] == pytest.approx(1)
    assert times["attention"] == pytest.approx(46)


def test_overlapping_kernels_are_counted_once() -> None:
    step = launches(*LAYER, *END, *COMMIT)
    beside = Kernel("nvjet_beside_the_experts", step[8].start + 1, step[8].start + 11)
    both = sorted([*step, beside], key=lambda k: k.start)
    assert stage_times(both)["span"] == pytest.approx(stage_times(step)["span"])
    assert sum(stage_times(both)[s] for s in (*STAGES, "pauses")) == pytest.approx(
        stage_times(both)["span"]
    )


def test_tritons_verify_attention_is_no_drafters() -> None:
    triton = [NORM, GEMM, ("_fwd_kernel", 900.0), GEMM, NORM, *EXPERTS]
    step = launches(*DRAFT, *MERGED, *triton, *END, *COMMIT)
    assert stage_times(step)["attention"] == pytest.approx(900)
    assert stage_times(step)["draft"] == pytest.approx(49)


def test_what_is_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no norm"):
        stages_of(launches(GEMM, *COMMIT))
    with pytest.raises(ValueError, match="no attention"):
        stages_of(launches(NORM, GEMM, *COMMIT))


def test_a_profile_is_cut_where_the_device_idles_after_a_walk() -> None:
    step = [*LAYER, *END, *COMMIT]
    late = [Kernel("copy", 0.0, 1.0), *launches(*step, start=7000.0)]
    found = split_steps([*late, *launches(*step, start=14_000.0)], 2)
    assert [len(part) for part in found] == [len(step) + 1, len(step)], "a launch held back"
    with pytest.raises(ValueError, match="got 1 steps in a profile of 2"):
        split_steps(late, 2)
    run = [k for i in range(3) for k in launches(*step, start=i * 9000.0, pause=0.7)]
    parts = split_steps(run, 3)
    assert [len(part) for part in parts] == [len(step)] * 3
    assert median_times([stage_times(p) for p in parts])["attention"] == pytest.approx(46)


def test_a_trace_gives_device_work_alone() -> None:
    events = [
        {"cat": "kernel", "name": "b", "ts": 5, "dur": 2},
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 9},
        {"cat": "gpu_memcpy", "name": "a", "ts": 1, "dur": 1},
        {"cat": "gpu_user_annotation", "name": "step", "ts": 0, "dur": 99},
    ]
    assert from_trace(events) == [Kernel("a", 1.0, 2.0), Kernel("b", 5.0, 7.0)]


def test_a_rank_of_eight_has_an_eighth_of_what_is_split() -> None:
    target = rank_target(published("kimi-k2.6"), 8)
    assert (target["num_attention_heads"], target["moe_intermediate_size"]) == (8, 256)
    assert (target["intermediate_size"], target["vocab_size"]) == (2304, 20480)
    assert (target["hidden_size"], target["n_routed_experts"]) == (7168, 384)
    assert target["num_hidden_layers"] == 61
    weights = target["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"]) == (4, 32)
    drafter = rank_drafter(published("kimi-k2.6-dflash"), target, 8)
    assert (drafter["num_attention_heads"], drafter["num_key_value_heads"]) == (8, 1)
    assert drafter["dflash_config"]["target_layer_ids"] == [1, 12, 24, 35, 47, 58]
    assert drafter["vocab_size"] == target["vocab_size"]


def test_fewer_layers_keep_the_drafter_within_them(tmp_path: Path) -> None:
    target = rank_target(published("kimi-k2.6"), 8, layers=4, quantised=False)
    drafter = rank_drafter(published("kimi-k2.6-dflash"), target, 8)
    assert drafter["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    assert "quantization_config" not in target
    folders = write_pair(tmp_path, target, drafter)
    assert json.loads((Path(folders[0]) / "config.json").read_text()) == target


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_attention_heads=64 cannot be shared by 5"):
        rank_target(published("kimi-k2.6"), 5)
    assert rank_target(toy()[0], 2)["num_attention_heads"] == 8


def test_the_grid_has_the_points_asked_for_in_order_of_worth() -> None:
    cells = grid()
    ours = {(c.batch, c.context, r) for c in cells if c.backend == "overstory" for r in c.rows}
    asked = {(b, c, r) for b in (1, 4, 16) for c in (1024, 8192, 65536, 200_000) for r in ROWS}
    assert asked <= ours
    triton = {(c.batch, c.context) for c in cells if c.backend == "triton"}
    assert triton == {(b, c) for b in (1, 4) for c in (1024, 8192, 65536, 200_000)}
    assert [c.context for c in cells[:4]] == [65536, 200_000, 8192, 1024]
    assert all(c.rows == (9,) for c in cells[:9])
    assert not any(c.profiled for c in cells[:4])
    assert cells[8] == Cell(1, 65536, (9,), "triton")


def test_rows_are_those_of_their_policies() -> None:
    for rows, policy in POLICIES.items():
        assert 1 + TreePolicy.parse(policy).drafted_nodes(8) == rows
    assert slots([Cell(2, 100, (1,), ""), Cell(1, 150, (1,), "")], 33) == 1 + 2 * 133


def step_cost(batch: int, context: int, rows: int) -> int:
    """Made up: weights of the experts that rows touch, then keys, then operations."""
    touched = 384 * (1 - (1 - 8 / 384) ** (batch * rows))
    return round(4000 + 25 * touched + 0.02 * batch * context + 6 * batch * rows)


def test_the_automatic_choice_is_the_best_fixed_one_where_costs_are_known() -> None:
    points = [
        {"backend": backend, "batch": b, "context": c, "rows": r, "step_us": step_cost(b, c, r)}
        for backend in ("overstory", "triton")
        for b in (1, 4, 16)
        for c in (1024, 8192, 65536, 200_000)
        for r in POLICIES
    ]
    for tokens in CHAIN_MEANS:
        found = judge(points, tokens)
        assert len(found) == 12
        assert all(verdict.ratio > 0.984 and verdict.in_table for verdict in found)
    between = judge(points, 4.5, without=frozenset({8192, 65536}))
    assert [v.in_table for v in between[:4]] == [True, False, False, True]
    assert all(verdict.ratio > 0.98 for verdict in between)
    assert {v.chosen for tokens in CHAIN_MEANS for v in judge(points, tokens)} != {"chain"}


def test_tokens_grow_with_rows() -> None:
    tokens = tokens_of(4.5)
    assert tokens[1] == 1
    assert tokens[8] == 4.5 < tokens[9] < tokens[17] < tokens[33]
    assert tokens[33] == pytest.approx(4.5 * 1.205)


def test_launches_are_kept_for_another_cut(tmp_path: Path) -> None:
    step = [*LAYER, *END, *COMMIT]
    run = [k for i in range(2) for k in launches(*step, start=500 + i * 9000.0)]
    keep_launches(tmp_path / "kept.json.gz", run, (9,), 2)
    rows, count, found = read_launches(tmp_path / "kept.json.gz")
    assert (rows, count) == ([9], 2)
    assert [k.name for k in found] == [k.name for k in run]
    parts = split_steps(found, count)
    assert stage_times(parts[1])["attention"] == pytest.approx(
        stage_times(run[-len(step) :])["attention"]
    )


ROWS_FILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "rank_slice_h200.csv"
PAGES = (ROWS_FILE.with_suffix(".md"), ROWS_FILE.parents[1] / "capacity.md")
COMMON = dict.fromkeys(("gpu", "versions", "commit"), "")


def test_the_pages_tables_are_those_of_its_rows() -> None:
    points = merged(read(ROWS_FILE))
    for page in PAGES:
        text = page.read_text()
        assert fill(text, points) == text, f"run slice_tables.py ROWS.csv {page}"
    found = [re.findall("<!-- table (.*) -->", page.read_text()) for page in PAGES]
    measured = [name for name, make in TABLES.items() if len(make(points)) > 2]
    assert sorted(name for names in found for name in names) == sorted(measured)


def test_the_page_s_counts_are_those_that_are_stored() -> None:
    text, stored = PAGES[0].read_text(), json.loads(ROWS_FILE.with_suffix(".json").read_text())
    assert counted_fill(text, stored) == text, "run slice_counted.py FILE.json PAGE.md"
    found = re.findall("<!-- counted (.*) -->", text)
    assert sorted(found) == ["automatic", "long", "parts", "touched"]


def test_the_page_tells_how_many_points_the_automatic_budget_reached() -> None:
    """Within 2% of the best fixed one, by commit, the last time at each point."""
    roles = json.loads(ROWS_FILE.with_suffix(".json").read_text())["roles"]
    text, reached = PAGES[0].read_text(), dict[str, dict[tuple[str, int, int], bool]]()
    for role in roles:
        for row in role.get("auto", []):
            where = row["drafter"], row["batch"], row["context"]
            reached.setdefault(role["commit"], {})[where] = round(row["of_best"], 3) >= 0.98
    assert len(reached) > 2
    for commit, points in reached.items():
        assert f"{sum(points.values())} of {len(points)} points at {commit}" in text


def test_independent_rows_touch_the_experts_that_the_plan_counts() -> None:
    """Counted on the GPU, against the even router of plan and capacity model."""
    roles = json.loads(ROWS_FILE.with_suffix(".json").read_text())["roles"]
    counts = [count for role in roles for count in role.get("experts", [])]
    own = [count for count in counts if count["alike"] == 0]
    assert len(own) == 12
    for count in own:
        expected = distinct_experts(384, 8, count["batch"] * count["rows"])
        assert count["mean"] == pytest.approx(expected, rel=0.05), count
    for count in counts:
        if count["alike"] and count["batch"] * count["rows"] > 1:
            least = next(c for c in own if all(c[n] == count[n] for n in ("batch", "rows")))
            assert count["mean"] < least["mean"], "rows that are alike choose alike"


def test_memory_was_flat_over_a_long_prompt_and_far_slots_are_no_others() -> None:
    """By SGLang's chunks and, in the last run, by ours."""
    stored = json.loads(ROWS_FILE.with_suffix(".json").read_text())["roles"]
    runs = [role for role in stored if "long" in role]
    assert len(runs) == 2
    for run in runs:
        assert run["long"]["tokens"] == 200_000
        for what in ("chunks", "decode"):
            held = [f["allocated_gb"] for f in run[what]]
            assert max(held) - min(held) < 0.01
        far = run["far_slots"]
        assert far["equal"]
        assert far["logprobs_apart"] < 1e-3
        assert far["highest_element"][1] > 2**31 > far["highest_element"][0]


def test_attention_s_share_is_beside_its_goal() -> None:
    """By hand for 65k: 3901.7 of 14344.5 us; for a quarter of the step a layer may take 57.1."""
    points = merged(read(ROWS_FILE))
    line = next(line for line in TABLES["goals"](points) if line.startswith("| 65536 "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:7] == ["14.34", "3.90", "27.2%", "25%", "64.0", "57.1"]
    with_exchanges = 3901.7 / (14344.5 + exchanges_us(1, 9))
    assert cells[7] == f"{with_exchanges:.1%}"


def test_the_page_says_what_the_model_makes_of_the_deployment_s_own_gpu() -> None:
    found = [step_time(kimi_on(RTX_PRO_6000), 1, 9, context) for context in (65536, 200_000)]
    shares = " and ".join(f"{step.attention / step.total:.0%}" for step in found)
    whole = " and ".join(f"{1e3 * step.total:.1f}" for step in found)
    assert f"spends {shares} of its {whole} ms there" in PAGES[0].read_text()


def test_attention_is_the_two_kernels_of_the_verify_alone() -> None:
    """Not what absorbs queries, rotates or writes KV beside it."""
    names = ["nvjet_absorb", "fused_rope_kernel", "void overstory::mla::attention<9>(Args)"]
    names += ["overstory::mla::combine(Args)", "nvjet_back", "rmsnorm", "nvjet_head"]
    kernels = [Kernel("rmsnorm", 0.0, 1.0)]
    kernels += [Kernel(name, 1.0 + i, 2.0 + i) for i, name in enumerate(names)]
    kernels.append(Kernel("tree_accept_kernel", 20.0, 21.0))
    stages = stages_of(kernels)
    assert [k.name for k, s in zip(kernels, stages, strict=True) if s == "attention"] == names[2:4]


def test_the_capacity_model_meets_every_measured_step() -> None:
    for point in whole(merged(read(ROWS_FILE))):
        if point["backend"] == "overstory":
            said = 1e6 * model_step(point).total
            assert said == pytest.approx(serving_us(point), rel=0.08), point


def test_half_of_the_steps_are_met_within_three_hundredths() -> None:
    """As the capacity page says."""
    points = [p for p in whole(merged(read(ROWS_FILE))) if p["backend"] == "overstory"]
    off = [abs(1e6 * model_step(p).total / serving_us(p) - 1) for p in points]
    assert statistics.median(off) < 0.03
    assert "to 8%; half of them are within 3%" in PAGES[1].read_text()


def test_the_plot_is_that_of_its_rows() -> None:
    points = [
        p
        for p in whole(merged(read(ROWS_FILE)))
        if (p["backend"], p["batch"], p["rows"]) == ("overstory", 1, 9)
    ]
    assert draw(points) == ROWS_FILE.with_suffix(".svg").read_text(), "run slice_plot.py"
    for point in points:
        assert sum(parts_ms(point).values()) == pytest.approx(
            (serving_us(point) + exchanges_us(1, 9)) / 1000, abs=0.01
        )


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "again.csv"
    points = read(ROWS_FILE)
    with file.open("w") as out:
        write(points, {}, out)
    assert [p | COMMON for p in read(file)] == [p | COMMON for p in points]
    assert len(points) == 127


def test_tables_keep_the_last_timed_of_equal_points() -> None:
    points = whole(read(ROWS_FILE))
    late = [p for p in merged(points) if p["backend"] == "overstory" and p["rows"] == 9]
    assert {p["traced"] for p in late if p["context"] != 65536} == {1}
    assert len(merged(points)) == len({tuple(p[name] for name in WHERE) for p in points})
    assert 0 < exchanges_us(1, 9) < exchanges_us(4, 33)


@pytest.mark.parametrize("context", [1024, 200_000])
def test_the_budget_falls_back_where_acceptance_falls(context: int) -> None:
    """By the measured costs of one request: from the chain to plain decoding, never below it."""
    costs = [{**p, "step_us": serving_us(p)} for p in whole(merged(read(ROWS_FILE)))]
    for tokens, expected in ((4.5, "chain"), (1.3, "plain")):
        found = {(v.batch, v.context): v for v in judge(costs, tokens)}
        assert found[1, context].chosen == expected
        assert found[1, context].ratio > 0.98


def test_steps_of_few_layers_scale_to_those_of_all() -> None:
    """Where both were measured: by a tenth, of which the attention's newer version is a part."""
    points = merged(read(ROWS_FILE))
    whole_ones = {
        tuple(p[name] for name in WHERE): serving_us(p) / 1000
        for p in whole(points)
        if p["backend"] == "overstory"
    }
    compared = 0
    for line in TABLES["few"](points)[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        key = ("overstory", *map(int, cells[:3]))
        if key in whole_ones:
            compared += 1
            assert float(cells[8]) == pytest.approx(whole_ones[key], rel=0.1)
    assert compared >= 6


GRAPHS_GIB = 1.21
"""What SGLang said that the slice's captures took: 3 batches, 5 numbers of rows, greedy steps."""


def test_the_plan_s_graphs_hold_what_the_slice_s_took() -> None:
    config = rank_target(published("kimi-k2.6"), 8)
    target = target_from_config("slice", config)
    drafter = drafter_from_config("draft", rank_drafter(published("kimi-k2.6-dflash"), config, 8))
    planned = capture_bytes(target, drafter, [1, 4, 16], (1, 8, 9, 17, 33), 1, draws=1)
    assert GRAPHS_GIB < planned / GIB < 1.2 * GRAPHS_GIB
    fewer = capture_bytes(target, drafter, [1, 4], (1, 8, 9), 1, draws=0)
    assert fewer < 0.4 * planned, "sets do not share their buffers"


def test_whole_steps_are_captured_in_as_many_ways_as_the_plan_thinks() -> None:
    source = Path(__file__).parents[2] / "workers" / "ddtree" / "step_graph.py"
    names = re.search(r"^DRAWS = \((.*)\)$", source.read_text(), re.MULTILINE)
    assert names is not None
    assert len(names[1].split(",")) == WHOLE_STEP_DRAWS

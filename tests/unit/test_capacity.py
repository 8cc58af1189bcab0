"""The model of a step: held to what was measured and published, and to its own page."""

import csv
import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from capacity_page import GENERATED, against_published, document, tables
from capacity_page import PUBLISHED as SHOWN

from overstory.orchestrator.attention_cost import attention_seconds, measured
from overstory.orchestrator.capacity import (
    BASIS,
    Draft,
    Replica,
    StepTime,
    all_reduce,
    drafts,
    estimate,
    step_time,
)
from overstory.orchestrator.capacity_grid import make_grid
from overstory.orchestrator.cli import app
from overstory.orchestrator.gpus import H200, RTX_PRO_6000, GpuFacts, another
from overstory.orchestrator.known_models import known_model
from overstory.orchestrator.model_facts import (
    PlanError,
    drafter_from_config,
    target_from_config,
)
from overstory.orchestrator.spec import load_spec

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "clusters" / "rtx-pro-6000-8x" / "deployment.yaml"
PAGE = ROOT / "docs" / "capacity.md"

# Published by others for Kimi-K2.6 on 8 RTX PRO 6000, plain decoding: (context, batch, tokens/s).
PUBLISHED = [
    *((500, 1, 91.5), (500, 2, 151.3), (500, 4, 242.6), (500, 8, 350.0)),
    *((500, 16, 492.7), (500, 32, 858.8), (500, 64, 1398.0), (500, 128, 2164.7)),
    *((20_800, 1, 79.6), (20_800, 8, 286.1), (20_800, 32, 573.1), (20_800, 64, 763.9)),
]


def kimi(tp_size: int = 8, nodes: int = 1) -> Replica:
    target, drafter = known_model("Kimi-K2.6"), known_model("Kimi-K2.6-DFlash")
    assert target is not None
    assert drafter is not None
    return Replica(
        target_from_config("kimi", target.config),
        drafter_from_config("drafter", drafter.config),
        RTX_PRO_6000,
        tp_size,
        nodes,
    )


# ------------------------------------------------------------------------- against measurements


def test_measured_points_are_those_of_the_benchmark() -> None:
    source, _, points = measured()
    rows = csv.DictReader((ROOT / source.split(":")[0]).open())
    ours = {
        (int(row["bs"]), int(row["q"]), int(row["context"])): float(row["us_median"]) * 1e-6
        for row in rows
        if row["impl"] == "ours"
        and row["op"] in ("verify_attention", "decode_attention")
        and row["kv_dtype"] == "bf16"
    }
    assert {(p.batch, p.rows, p.context): p.seconds for p in points} == pytest.approx(ours)


def test_attention_model_meets_every_measured_point() -> None:
    _, sms, points = measured()
    for p in points:
        said = attention_seconds(
            p.batch, p.rows, p.heads, p.context, sms, 1.0, H200.dram, H200.flops
        )
        assert said == pytest.approx(p.seconds, rel=0.3), p


@pytest.mark.parametrize(("context", "batch", "rate"), PUBLISHED)
def test_plain_decoding_as_others_measured_it(context: int, batch: int, rate: float) -> None:
    step = step_time(kimi(), batch, 1, context)
    assert batch / step.total == pytest.approx(rate, rel=0.3)


def test_the_page_shows_these_ratios() -> None:
    text = PAGE.read_text()
    lines = against_published()
    assert "\n".join(["<!-- computed published -->", *lines]) in text, "run capacity_page.py"
    assert {(tokens, b, r) for tokens, rates in SHOWN.values() for b, r in rates.items()} <= set(
        PUBLISHED
    )
    assert len(lines) == 2 + 7
    short = float(lines[2].split("|")[4])
    assert short == pytest.approx(1 / step_time(kimi(), 1, 1, 500).total, abs=0.05)


def test_points_of_several_gpus_are_refused() -> None:
    """A file that two runs were put into would make one line of both."""
    row = {
        "op": "verify_attention",
        "impl": "ours",
        "kv_dtype": "bf16",
        "gpu": "NVIDIA H200",
        "commit": "abc",
        "bs": "1",
        "q": "9",
        "heads": "8",
        "context": "1024",
        "us_median": "14.1",
    }
    others = {"impl": "sglang-triton"}, {"op": "copy", "commit": "old"}, {"kv_dtype": "e4m3"}
    made = document({"sms": 132}, [row, *(row | other for other in others)])
    point = {"batch": 1, "rows": 9, "heads": 8, "context": 1024, "seconds": 1.41e-05}
    assert made["points"] == [point]
    assert made["sms"] == 132
    assert "abc" in made["source"]
    for other in ({"commit": "def"}, {"gpu": "NVIDIA H100"}):
        with pytest.raises(ValueError, match="several GPUs or commits"):
            document({"sms": 132}, [row, row | other])


# ------------------------------------------------------------------------- shape of the model


def test_every_stage_has_a_basis() -> None:
    assert set(BASIS) == set(StepTime.__dataclass_fields__)


def test_attention_grows_with_context_and_nothing_else_of_the_target_does() -> None:
    short, long = step_time(kimi(), 1, 8, 8_000), step_time(kimi(), 1, 8, 200_000)
    assert long.attention > 5 * short.attention
    assert (long.experts, long.exchange, long.host) == (short.experts, short.exchange, short.host)


def test_rows_cost_experts_until_all_are_read() -> None:
    costs = [step_time(kimi(), 1, rows, 1_000).experts for rows in (1, 8, 16, 64, 256, 512)]
    assert costs == sorted(costs)
    assert costs[1] > 4 * costs[0]
    assert costs[4] - costs[3] > 2 * (costs[5] - costs[4]), "nearly all are read from 256 on"


def test_two_nodes_halve_the_experts_and_pay_for_the_network() -> None:
    one, two = step_time(kimi(), 1, 8, 1_000), step_time(kimi(16, 2), 1, 8, 1_000)
    assert two.experts == pytest.approx(one.experts / 2, rel=0.1)
    assert two.exchange > 2 * one.exchange


def test_a_large_reduction_runs_at_the_links_rate() -> None:
    size = 1e9
    assert all_reduce(kimi(), size) == pytest.approx(2 * 7 / 8 * size / 46e9, rel=0.01)
    assert all_reduce(kimi(1), size) == 0.0


def test_the_fastest_way_to_draft_is_taken() -> None:
    ways = (Draft("plain", 1, 1.0), Draft("wide", 32, 1.01))
    assert estimate(kimi(), 1, 1, 1_000, ways, 200_000).draft == ways[0]
    generous = (Draft("plain", 1, 1.0), Draft("wide", 32, 30.0))
    assert estimate(kimi(), 1, 1, 1_000, generous, 200_000).draft == generous[1]


def test_without_a_drafter_only_plain_decoding_counts() -> None:
    from dataclasses import replace

    found = estimate(replace(kimi(), drafter=None), 1, 1, 1_000, drafts(4.5, 8), 200_000)
    assert found.draft is not None
    assert found.draft.name == "plain"


def test_what_does_not_fit_is_not_estimated() -> None:
    assert estimate(kimi(), 1, 8, 65_000, drafts(4.5, 8), 208_000).draft is None
    assert estimate(kimi(), 4, 8, 65_000, drafts(4.5, 8), 208_000).draft is not None


# ------------------------------------------------------------------------- command and page


def test_another_gpu_changes_the_estimates() -> None:
    slow = another(RTX_PRO_6000, dram=0.5e12, rate=None)
    assert slow.name == "rtx-pro-6000, changed"
    assert another(RTX_PRO_6000, dram=None) is RTX_PRO_6000
    link = another(RTX_PRO_6000, latency_s=1e-3)
    assert link.inside.latency_s == 1e-3
    assert link.inside.rate == RTX_PRO_6000.inside.rate
    spec = load_spec(PRESET)
    fast_rows, slow_rows = (
        make_grid(spec, gpu, [1], [1], [1_000]).estimates for gpu in (RTX_PRO_6000, slow)
    )
    assert slow_rows[0].tokens_per_s < 0.7 * fast_rows[0].tokens_per_s


def test_nodes_that_hold_no_replica_are_refused() -> None:
    spec = load_spec(ROOT / "clusters" / "rtx-pro-6000-2x8" / "deployment-tp16.yaml")
    with pytest.raises(PlanError, match=r"hold no replica of 16 ranks; it needs 2"):
        make_grid(spec, RTX_PRO_6000, [1])
    with pytest.raises(PlanError, match="--gpus: 16 ranks do not fall into 3 equal parts"):
        make_grid(spec, RTX_PRO_6000, [3], [1], [1000], gpus_per_node=6)


def test_command_as_json() -> None:
    arguments = ["capacity", str(PRESET), "--nodes", "1", "--batch", "1", "--context", "8k"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    grid = json.loads(done.stdout)
    assert grid["basis"]["tokens_per_s"] == "estimated"
    (row,) = grid["estimates"]
    assert row["context"] == 8000
    assert row["tokens_per_s"] == pytest.approx(row["draft"]["tokens"] / sum(row["step"].values()))


@pytest.mark.parametrize("option", [["--nodes", "x"], ["--batch", "0"], ["--gpu", "h300"]])
def test_wrong_options_are_told(option: list[str]) -> None:
    done = CliRunner().invoke(app, ["capacity", str(PRESET), *option])
    assert done.exit_code == 1
    assert done.output.startswith("error: --")


def test_the_pages_tables_are_what_the_command_prints() -> None:
    text = PAGE.read_text()
    blocks = GENERATED.findall(text)
    assert len(blocks) == 2
    for command, block in blocks:
        arguments = [str(ROOT / w) if "/" in w else w for w in shlex.split(command)]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert block.strip() == done.stdout.strip(), f"run capacity_page.py: overstory {command}"
    assert tables(text, lambda _: "old").count("\nold\n") == 2


def test_every_number_is_marked() -> None:
    """Columns of the tables, their captions, and what the first line says."""
    done = CliRunner().invoke(app, ["capacity", str(PRESET), "--nodes", "1"])
    marks = ("(measured)", "(modelled)", "(estimated)")
    lines = done.stdout.splitlines()
    assert all(mark in lines[0] for mark in ("tokens (modelled)", "4.5 (estimated)"))
    assert "(estimated):" in lines[2]
    header = next(line for line in lines if line.startswith("| batch | context | draft |"))
    cells = [cell.strip() for cell in header.strip("|").split("|")][3:]
    assert len(cells) == 10
    assert all(cell.endswith(marks) for cell in cells), cells


def test_a_deployment_without_a_drafter_says_so() -> None:
    preset = PRESET.with_name("deployment-deepseek-r1.yaml")
    done = CliRunner().invoke(app, ["capacity", str(preset), "--nodes", "1", "--batch", "1"])
    assert done.stdout.splitlines()[0].endswith("(modelled); no drafter.")


def test_what_a_tree_costs_over_a_chain_as_the_page_says() -> None:
    assert (
        "costs 1.2 to 1.4\n  times that of a chain, of 31 nodes 1.7 to 2.1 times"
        in PAGE.read_text()
    )
    for batch, context in ((1, 8_000), (1, 200_000), (4, 8_000), (16, 8_000), (32, 1_000)):
        chain, small, large = (
            step_time(kimi(), batch, rows, context).total for rows in (8, 16, 32)
        )
        assert 1.2 <= round(small / chain, 1) <= 1.4
        assert 1.7 <= round(large / chain, 1) <= 2.1


def test_experts_are_bound_by_what_the_gpu_has_least_of() -> None:
    """Memory on an RTX PRO 6000, multiprocessors on an H200: more of the other changes nothing."""
    from dataclasses import replace

    def cost(gpu: GpuFacts) -> float:
        return step_time(replace(kimi(), gpu=gpu), 1, 16, 1_000).experts

    assert cost(another(RTX_PRO_6000, dram=2 * RTX_PRO_6000.dram)) < 0.6 * cost(RTX_PRO_6000)
    assert cost(another(RTX_PRO_6000, sms=2 * RTX_PRO_6000.sms)) == cost(RTX_PRO_6000)
    assert cost(another(H200, dram=2 * H200.dram)) == cost(H200)
    assert cost(another(H200, sms=2 * H200.sms)) < cost(H200)

"""The benchmark's parts that need no GPU: cases, rows, tables, plots, other people's files."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from overstory.kernels.bench import inputs, measure, plot
from overstory.kernels.bench.__main__ import _parse, main
from overstory.kernels.bench.baselines import foreign_sglang
from overstory.kernels.bench.baselines.foreign_sglang import ForeignSglang
from overstory.kernels.bench.cases import FP8, GOALS, MAX_SLOTS, AttentionCase, every_case
from overstory.kernels.bench.ceilings import Ceilings
from overstory.kernels.bench.goals import goal_table
from overstory.kernels.bench.implementations import Implementation, from_sglang
from overstory.kernels.bench.oracle import check_output
from overstory.kernels.bench.results import COLUMNS, ResultFile, Row, read_rows
from overstory.kernels.bench.small_cases import small_cases
from overstory.kernels.bench.timing import Launch, Timing

TINY = AttentionCase("verify_attention", 2, 3, 40)


def row(**changes: object) -> Row:
    values = {field.name: 1 for field in dataclasses.fields(Row)}
    values |= {"op": "verify_attention", "impl": "ours", "gpu": "a GPU", "kv_dtype": "bf16"}
    values |= {"bs": 1, "q": 9, "heads": 8, "context": 1024, "us_median": 9.0, "floor_us": 0.25}
    values |= {"versions": "torch 2, more", "commit": "abc"} | changes
    return Row(**values)


def test_work_is_counted() -> None:
    case = AttentionCase("verify_attention", 1, 9, 1024)
    assert case.kv_bytes == (1024 + 9) * 1152
    assert case.flops == 2 * 72 * (1024 + 9) * 1088
    assert AttentionCase("decode_attention", 4, 1, 100).kv_bytes == 4 * 100 * 1152
    assert dataclasses.replace(case, kv_dtype=FP8).kv_bytes == (1024 + 9) * 576


def test_every_case_fits_and_comes_once() -> None:
    cases = every_case()
    assert cases[: len(GOALS)] == GOALS
    shapes = [(c.op, c.bs, c.q, c.context, c.heads, c.kv_dtype) for c in cases]
    assert len(set(shapes)) == len(shapes)
    for case in cases:
        sets = inputs.number_of_sets(case, 60 << 20)
        assert sets >= 4
        assert sets * case.bs * (case.context + case.tail) <= MAX_SLOTS


def test_sets_pass_through_the_cache_before_one_comes_again() -> None:
    l2 = 60 << 20
    for case in (AttentionCase("verify_attention", 1, 9, 8192), GOALS[4]):
        assert inputs.number_of_sets(case, l2) * case.kv_bytes >= 2 * l2


def test_rows_survive_the_file(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "new" / "results.csv")
    file.add(row())
    file.add(row(impl="other", us_median=123.456789))
    text = file.path.read_text().splitlines()
    assert text[0] == ",".join(COLUMNS)
    again = ResultFile(file.path, keep=True)
    assert [r.impl for r in again.rows] == ["ours", "other"]
    assert read_rows(file.path)[1].us_median == 123.5
    assert read_rows(ResultFile(file.path).path) == []


def test_columns_are_those_that_were_asked_for() -> None:
    assert ",".join(COLUMNS) == (
        "op,impl,gpu,bs,q,heads,context,kv_dtype,us_median,us_p20,us_p80,gb_per_s,tflops,"
        "floor_us,versions,commit"
    )


def test_goals_are_compared() -> None:
    small = row(op="tree_build", bs=64, q=32, heads=1, context=0)
    rows = [row(), row(impl="other", us_median=220.5), small]
    table = goal_table([*rows, row(context=65536, us_median=50.0)])
    assert "| verify_attention | 1 | 9 | 1,024 | 9.0 | 10 us | yes | 0.2 | other 24.5 |" in table
    assert "| 65,536 | 50.0 | 45 us | no |" in table
    assert "| tree_build | 64 | 32 | 0 | 9.0 | 40 us | yes |" in table


def test_goals_in_parts_of_a_copy() -> None:
    logits = {"op": "candidates_topk", "bs": 16, "q": 8, "heads": 1, "context": 163_840}
    rows = [row(**logits, floor_us=5.0, us_median=9.0), row(**logits, impl="x", us_median=18.0)]
    assert "| 9.0 | 60% of copy | no | 5.0 | x 2.0 |" in goal_table(rows)


def test_plot_draws_a_line_for_each_and_the_floor(tmp_path: Path) -> None:
    rows = [
        row(context=context, impl=impl, us_median=context / 100)
        for context in (1024, 8192)
        for impl in ("ours", "other <a>")
    ]
    plot.write_plot([*rows, row(bs=16)], tmp_path / "plot.svg")
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    names = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"ours", "other <a>", "floor"} <= set(names)
    assert len([e for e in root.iter() if e.tag.endswith("polyline")]) == 3
    plot.write_plot([], tmp_path / "empty.svg")


def test_small_cases_have_names_of_their_own() -> None:
    names = [(case.name, case.impl, case.dtype) for case in small_cases()]
    assert len(set(names)) == len(names)


def fake_sglang(folder: Path) -> Path:
    kernels = folder / "kernels" / "ops" / "attention"
    kernels.mkdir(parents=True)
    (folder / "_version.py").write_text("__version__ = version = '9.8.7'\n")
    (kernels / "score_mod.py").write_text("ONE = 1\n")
    (kernels / "extend_attention.py").write_text(
        "import torch\n"
        "from sglang.kernels.ops.attention.score_mod import ONE\n"
        "from sglang.srt.utils import is_cuda, is_hip\n"
        "HIP = is_hip()\n"
    )
    return folder


def test_kernel_files_of_sglang_load_without_sglang(tmp_path: Path) -> None:
    sglang = ForeignSglang(fake_sglang(tmp_path))
    assert sglang.version == "9.8.7"
    module = sglang.module("extend_attention")
    assert (module.ONE, module.HIP) == (1, False)
    assert sglang.has("extend_attention")
    assert not sglang.has("verify_mla")
    with pytest.raises(FileNotFoundError, match="is no sglang folder"):
        ForeignSglang(tmp_path / "nothing")


def test_the_installed_sglang_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run without `--sglang` has its kernels too."""
    (tmp_path / "sglang").mkdir()
    folder = fake_sglang(tmp_path / "sglang")
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert foreign_sglang.installed() == [folder]
    assert _parse([]).sglang == [folder]
    assert _parse(["--sglang", "other"]).sglang == [Path("other")]
    shutil.rmtree(folder / "kernels")
    assert foreign_sglang.installed() == []


def test_settings_of_newer_kernel_files_are_copied_too(tmp_path: Path) -> None:
    folder = fake_sglang(tmp_path)
    decode = folder / "kernels/ops/attention/decode_attention.py"
    decode.write_text("from sglang.srt.environ import FOUR\n")
    with pytest.raises(ImportError, match=r"decode_attention\.py of .* 9\.8\.7 .* srt/environ\.py"):
        ForeignSglang(folder).module("decode_attention")
    (folder / "srt").mkdir()
    (folder / "srt/environ.py").write_text("FOUR = 4\n")
    (folder / "_version.py").write_text("__version__ = version = '9.8.8'\n")
    assert ForeignSglang(folder).module("decode_attention").FOUR == 4


def test_which_of_the_foreign_kernels_run_where(tmp_path: Path) -> None:
    folder = fake_sglang(tmp_path)
    for name in ("decode_attention", "verify_mla"):
        (folder / "kernels/ops/attention" / f"{name}.py").touch()
    quick, full = from_sglang([folder], True), from_sglang([folder], False)
    assert [i.name for i in quick] == [i.name for i in full]
    assert {i.version for i in full} == {"sglang 9.8.7"}
    case = AttentionCase("verify_attention", 1, 9, 65536)
    splits = [i.name for i in quick if "split_decode" in i.name and i.takes(case)]
    assert splits == ["sglang_9.8.7_triton_split_decode_128"]
    rows = [AttentionCase("verify_attention", 1, q, 65536) for q in (9, 17, 33)]
    for chosen, wanted in ((quick, [True, False, False]), (full, [True, True, False])):
        chain = next(i for i in chosen if "shared_kv" in i.name)
        assert [chain.takes(case) for case in rows] == wanted


def test_kernels_of_two_versions_of_sglang_have_names_of_their_own(tmp_path: Path) -> None:
    """Or the goals page, the plot and the CSV say one name for both."""
    folders = []
    for version in ("9.8.7", "9.8.8"):
        (tmp_path / version).mkdir()
        folders.append(fake_sglang(tmp_path / version))
        (folders[-1] / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    for folder in folders:
        for name in ("decode_attention", "verify_mla"):
            (folder / "kernels/ops/attention" / f"{name}.py").touch()
    names = [i.name for i in from_sglang(folders, quick=False)]
    assert len(set(names)) == len(names)
    assert all(("9.8.7" in name) != ("9.8.8" in name) for name in names)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny case on the CPU, by the reference, with a clock that stands still."""
    monkeypatch.setenv("OVERSTORY_KERNELS", "reference")
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(500, 1, 576, generator=generator).bfloat16()
    slots = torch.randperm(500, generator=generator)
    drawn = [inputs._one_set(TINY, kv, part, generator) for part in inputs._parts(TINY, slots, 4)]
    monkeypatch.setattr(measure, "_inputs", lambda case: drawn)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")

    def run_all(launches: list[Launch], budget_s: float = 0.0) -> Timing:
        for launch in launches:
            launch()
        return Timing(2.0, 1.0, 3.0)

    monkeypatch.setattr(measure, "time_launches", run_all)


CEILINGS = Ceilings(Timing(500.0, 1, 1), Timing(1400.0, 1, 1))


def test_a_job_becomes_a_row(on_cpu: None) -> None:
    from overstory.kernels.bench.implementations import OURS

    (job,) = measure.attention_jobs([TINY], [OURS])
    got = job.run(CEILINGS)
    assert (got.op, got.impl, got.bs, got.q, got.context) == ("verify_attention", "ours", 2, 3, 40)
    assert got.gb_per_s == pytest.approx(TINY.kv_bytes / 2.0 / 1e3)
    assert got.floor_us == pytest.approx(
        max(TINY.kv_bytes / (2 << 30) * 500, TINY.flops / (2 * 8192**3) * 1400)
    )


def test_no_number_for_a_wrong_answer(on_cpu: None) -> None:
    wrong = Implementation("zeros", lambda i: lambda: i.out.zero_(), lambda case: True, True)
    (job,) = measure.attention_jobs([TINY], [wrong])
    with pytest.raises(ArithmeticError, match="wrong result: relative error 1"):
        job.run(CEILINGS)


def test_an_output_that_nobody_wrote_is_wrong(on_cpu: None) -> None:
    drawn = measure._inputs(TINY)[0]
    drawn.out.fill_(torch.nan)
    with pytest.raises(ArithmeticError):
        check_output(drawn)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--out", str(tmp_path / "results")]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()

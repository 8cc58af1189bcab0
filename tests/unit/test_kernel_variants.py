"""The benchmark of the attention kernel's variants: its parts, on the CPU."""

import csv
import io
import re
import shutil
from collections.abc import Sequence

import pytest
import torch

from overstory.kernels.bench import variants
from overstory.kernels.bench.cases import KEY_WIDTH, VALUE_WIDTH, AttentionCase
from overstory.kernels.bench.inputs import AttentionInputs
from overstory.kernels.bench.timing import Launch, Timing
from overstory.kernels.build import SOURCES
from overstory.kernels.cuda_library import simulator_library

CASE = AttentionCase("verify_attention", 1, 3, 40)


def drawn(case: AttentionCase) -> list[AttentionInputs]:
    keys = case.context + case.q
    slots = torch.randperm(keys)
    mask = torch.ones(case.q, keys, dtype=torch.bool).tril(case.context)
    indptr = [torch.tensor([0, n], dtype=torch.int32) for n in (case.q, case.context)]
    return [
        AttentionInputs(
            case,
            torch.randn(case.q, case.heads, KEY_WIDTH).bfloat16(),
            torch.randn(keys, 1, KEY_WIDTH).bfloat16(),
            *indptr,
            slots[: case.context],
            slots[case.context :],
            mask.flatten(),
            torch.tensor([0, mask.numel()]),
            torch.empty(case.q, case.heads, VALUE_WIDTH).bfloat16(),
        )
    ]


def test_every_macro_is_one_of_the_sources() -> None:
    known = re.findall(r"#ifndef (OVERSTORY_MLA_\w+)", (SOURCES / "mla_tuning.cuh").read_text())
    used = {macro for macros in variants.VARIANTS.values() for macro in macros}
    assert used == set(known)
    assert variants.VARIANTS[variants.IN_USE] == ()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the simulator")
def test_variants_are_compared_and_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    def timed(launches: Sequence[Launch], _budget_s: float) -> Timing:
        for launch in launches:
            launch()
        order.append(len(order))
        return Timing(float(len(order)), 0.0, 0.0)

    monkeypatch.setattr(variants, "time_launches", timed)
    source = [SOURCES / "mla_attention.cu"]
    libraries = {
        name: simulator_library(source, variants.VARIANTS[name])
        for name in (variants.IN_USE, "lean, whole values")
    }
    got = variants.measure(CASE, libraries, drawn, rounds=2)
    assert [m.us for m in got.values()] == [[1.0, 3.0], [2.0, 4.0]]
    assert all(0 < m.error < 6e-3 for m in got.values())


def test_one_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([1e-3, 0.5])
    monkeypatch.setattr(variants, "_error", lambda *_: next(errors))
    monkeypatch.setattr(variants, "ours", lambda inputs: None)
    monkeypatch.setattr(variants, "time_launches", lambda *_: Timing(7.0, 7.0, 7.0))
    libraries = {"in use": object(), "other": object()}
    got = variants.measure(CASE, libraries, drawn, rounds=2)  # type: ignore[arg-type]
    assert got["in use"].us == [7.0, 7.0]
    assert got["other"].us == []
    file = io.StringIO()
    variants.write_rows(file, CASE, got, "a GPU")
    rows = list(csv.reader(io.StringIO(file.getvalue())))
    assert [row[6] for row in rows] == ["7.00", "nan"]
    assert all(len(row) == len(variants.COLUMNS) for row in rows)

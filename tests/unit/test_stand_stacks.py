"""Which kernels were compiled since when, by what Triton leaves in its cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from stand_stacks import compiled_since

TTIR = """\
module {
  tt.func public @kern(%idx: !tt.ptr<i64> {tt.divisibility = 16 : i32} loc("idx"(#loc)), \
%out: !tt.ptr<i64> loc("out"(#loc)), %n: i32 loc("n"(#loc))) attributes {noinline = false} {
    %o = tt.make_range {end = 8 : i32, start = 0 : i32} : tensor<8xi32> loc(#loc11)
    %p = tt.make_range {end = 32 : i32, start = 0 : i32} : tensor<32xi32> loc(#loc12)
"""


def test_kernels_since_then_with_what_tells_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for place, name, at in (("a", "old", 50.0), ("b", "kern", 103.0), ("c", "other", 102.0)):
        (tmp_path / place).mkdir()
        for file in (f"{name}.json", f"__grp__{name}.json"):
            (tmp_path / place / file).write_text("{}")
            os.utime(tmp_path / place / file, (at, at))
    (tmp_path / "b" / "kern.ttir").write_text(TTIR)
    assert compiled_since(100.0) == [
        (2.0, "other", ""),
        (3.0, "kern", "not by 16: out n; ranges: [8, 32]"),
    ]

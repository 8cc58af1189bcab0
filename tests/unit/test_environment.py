"""The environment of a rank process, and what a spawned process makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overstory.workers import environment
from overstory.workers.environment import prepare_process, rank_environment
from overstory.workers.seam.errors import SeamError


def _python(code: str, **env: str) -> str:
    """Output of a fresh Python with `env` over a clean environment."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("OVERSTORY_", "SGLANG_"))}
    base.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=base | env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cuda_rank_gets_nothing_but_its_mark() -> None:
    assert rank_environment("cuda") == {"OVERSTORY_DEVICE": "cuda"}


def test_cpu_rank_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS", raising=False)
    got = rank_environment("cpu", threads=2)
    assert got["OMP_NUM_THREADS"] == "2"
    assert got["CUDA_VISIBLE_DEVICES"] == ""
    ours, rest = got["PYTHONPATH"].split(os.pathsep)
    assert (Path(ours) / "sitecustomize.py").is_file()
    assert rest == "/elsewhere"
    disabled = got["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert "llama" in disabled
    assert not {"deepseek_v2", "dflash", "registry"} & set(disabled)


def test_models_disabled_by_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "")
    assert "SGLANG_DISABLED_MODEL_ARCHS" not in rank_environment("cpu")


def test_python_path_is_extended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", rank_environment("cpu")["PYTHONPATH"])
    assert rank_environment("cpu")["PYTHONPATH"] == os.environ["PYTHONPATH"]


@pytest.mark.parametrize(("device", "threads"), [("tpu", 1), ("cpu", 0)])
def test_nonsense_is_refused(device: str, threads: int) -> None:
    with pytest.raises(ValueError, match=r"device must be|threads must be"):
        rank_environment(device, threads)


def test_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.DEVICE_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", sys)
    with pytest.raises(SeamError, match="after `import sglang`"):
        prepare_process("cpu")
    assert environment.DEVICE_VARIABLE not in os.environ


STATE = """
import json, sys
from overstory.workers.seam.standins import standins_active
import importlib.util
print(json.dumps([standins_active(), importlib.util.find_spec("sklearn") is None,
                  "torch" in sys.modules]))
"""


def test_prepared_process_and_its_children_have_the_standins() -> None:
    code = (
        "import subprocess, sys\n"
        "from overstory.workers.environment import prepare_process\n"
        "prepare_process('cpu'); prepare_process('cpu')\n"
        f"exec({STATE!r})\n"
        f"subprocess.run([sys.executable, '-c', {STATE!r}], check=True)\n"
    )
    here, child = (json.loads(line) for line in _python(code).splitlines())
    assert here == child == [True, True, False]


def test_a_cuda_process_has_none() -> None:
    code = "from overstory.workers.environment import prepare_process\nprepare_process('cuda')\n"
    assert json.loads(_python(code + STATE))[0] is False


def test_our_sitecustomize_runs_the_one_it_hides(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.their_mark = 1")
    path = os.pathsep.join([str(environment.SITECUSTOMIZE_FOLDER), str(tmp_path)])
    code = f"import sys; print(sys.their_mark)\n{STATE}"
    mark, state = _python(code, PYTHONPATH=path, OVERSTORY_DEVICE="cpu").splitlines()
    assert mark == "1"
    assert json.loads(state)[0] is True
    unmarked = _python(code, PYTHONPATH=path).splitlines()
    assert unmarked[0] == "1"
    assert json.loads(unmarked[1])[0] is False


def test_a_standin_says_what_was_called() -> None:
    code = """
from overstory.workers.environment import prepare_process
prepare_process('cpu')
from torchvision.io import decode_jpeg
from torchvision.transforms import functional as tvf
print(tvf.InterpolationMode.NEAREST)
try:
    decode_jpeg(b"")
except NotImplementedError as error:
    print(error)
"""
    mode, said = _python(code).splitlines()
    assert mode == "<no portable torchvision.transforms.functional.InterpolationMode.NEAREST>"
    assert said.startswith("torchvision.io.decode_jpeg was called, but torchvision is only a stand")


def test_process_reports_are_written_where_wanted(tmp_path: Path) -> None:
    path = str(environment.SITECUSTOMIZE_FOLDER)
    code = "import os; print(os.getpid())"
    pid = _python(
        code, PYTHONPATH=path, OVERSTORY_DEVICE="cpu", OVERSTORY_SEAM_REPORT_DIR=str(tmp_path)
    ).strip()
    note = json.loads((tmp_path / f"sitecustomize-{pid}.json").read_text())
    assert note["pid"] == int(pid)

"""The folder `kernels/` does not shadow the package of that name that Transformers imports."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def in_a_new_process(code: str, tmp_path: Path, *flags: str) -> Any:
    """What `code` prints as JSON, run with the repository's root first on `sys.path`."""
    start = f"import json, sys; sys.path.insert(0, {str(ROOT)!r})\n"
    done = subprocess.run(
        [sys.executable, *flags, "-c", start + code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_bare_name_is_the_other_project_and_ours_is_ours(tmp_path: Path) -> None:
    try:
        theirs = distribution("kernels").locate_file("kernels/__init__.py")
    except PackageNotFoundError:
        pytest.skip("the other project's package is not installed")
    code = (
        "import kernels, overstory.kernels, kernels.utils\n"
        "print(json.dumps([kernels.__file__, kernels.__spec__.origin, kernels.utils.__file__,\n"
        "                  overstory.kernels.__file__]))"
    )
    bare, origin, submodule, ours = in_a_new_process(code, tmp_path)
    assert Path(bare) == Path(origin) == Path(str(theirs))
    assert Path(submodule).parent == Path(bare).parent
    assert Path(ours) == ROOT / "kernels/__init__.py"


def test_where_the_other_project_is_absent_so_is_the_bare_name(tmp_path: Path) -> None:
    code = (
        "faults = []\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        import kernels\n"
        "    except ModuleNotFoundError as fault:\n"
        "        faults.append([fault.name, str(fault)])\n"
        "print(json.dumps([faults, 'kernels' in sys.modules]))"
    )
    # -S: without the environment's packages.
    faults, left = in_a_new_process(code, tmp_path, "-S")
    assert faults == [["kernels", "No module named 'kernels'"]] * 2
    assert not left

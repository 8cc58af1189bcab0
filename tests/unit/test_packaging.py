"""What is installed is what is in the tree."""

import fnmatch
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("orchestrator", "workers", "kernels", "clusters")


def tracked_files() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def test_every_data_file_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = [*project["tool"]["setuptools"]["package-data"]["*"], "*.py"]
    left_out = [
        name
        for name in tracked_files()
        if not any(fnmatch.fnmatch(Path(name).name, pattern) for pattern in patterns)
    ]
    assert left_out == [], "add their patterns to tool.setuptools.package-data"


def test_pins_name_no_index() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if "://" in line or line.startswith("-")] == []
    assert all(line.count("==") == 1 for line in lines)


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {
        "".join(c for c in entry.split("[")[0] if c not in "<>=,.0123456789").lower()
        if "cupy" not in entry
        else "cupy-cuda13x"
        for entry in wanted
    }
    assert names - pinned == set()


@pytest.mark.full
def test_wheel_holds_everything_and_works_by_itself(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*run, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    source = tmp_path / "source"
    # From a copy: building leaves files beside the sources.
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    subprocess.run(build, cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name.removeprefix("overstory/") for name in zipfile.ZipFile(wheel).namelist()}
    cloned = {str(f.relative_to(source)) for d in FOLDERS for f in (source / d).rglob("*")}
    missing = {name for name in cloned if (source / name).is_file()} - held
    assert missing == set()

    target = tmp_path / "target"
    subprocess.run(
        [*run, "install", "-q", "--no-deps", "--target", str(target), str(wheel)], check=True
    )
    # -S leaves the editable install's finder out; dependencies come from the environment.
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    code = (
        f"import sys; sys.path[:0] = [{str(target)!r}]; sys.path.append({packages!r})\n"
        "from overstory.orchestrator.cli import app\n"
        "from overstory.orchestrator.spec import load_spec\n"
        "from overstory.orchestrator.plan import check_models\n"
        f"spec = load_spec({str(target / 'overstory/clusters/local/deployment.yaml')!r})\n"
        "print(check_models(spec).target.path)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(target / "overstory/workers/tiny/pair/target")

"""The documentation builds as a site, strictly: no page left out, no broken link or anchor."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fixtures_hosts import ray_here  # noqa: F401
from throwaway_tools import tool

ROOT = Path(__file__).parents[2]
BUILD_S = 120.0

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def mkdocs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool("mkdocs", tmp_path_factory.mktemp("tools"))


def build(mkdocs: Path, root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [mkdocs, "build", "--strict", "--config-file", root / "mkdocs.yml", "--site-dir", site],
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )


def test_the_site_builds(mkdocs: Path, tmp_path: Path) -> None:
    done = build(mkdocs, ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (tmp_path / "site").rglob("*.html")}
    assert {path.stem for path in (ROOT / "docs").rglob("*.md")} <= pages
    start = (tmp_path / "site" / "index.html").read_text()
    assert 'href="quickstart.html"' in start
    assert not re.findall(r'href="[^":]*\.md[#"]', start), "README links to sources, not pages"


@pytest.mark.parametrize(
    ("written", "broken"),
    [
        ("](monitoring.md)", "](monitorings.md)"),
        ("](#with-gpus-and-a-large-model)", "](#with-tpus)"),
        ("](../tests/cluster/test_quickstart.py)", "](../tests/cluster/none.py)"),
    ],
)
def test_a_broken_link_fails_the_build(
    mkdocs: Path, tmp_path: Path, written: str, broken: str
) -> None:
    copy = tmp_path / "project"
    for name in ("docs", "workers/tiny/MODEL_CARD.md", "tests/cluster", "orchestrator", "clusters"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        whole = (ROOT / name).is_dir()
        (shutil.copytree if whole else shutil.copy)(ROOT / name, copy / name)
    for name in ("README.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, copy / name)
    page = copy / "docs" / "quickstart.md"
    assert page.read_text().count(written) >= 1
    page.write_text(page.read_text().replace(written, broken, 1))
    done = build(mkdocs, copy, tmp_path / "site")
    assert done.returncode != 0
    assert broken.strip("](").rstrip(")") in done.stderr

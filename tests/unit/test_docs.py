"""Pages that are made from the code are up to date, and no page links to what is not there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from overstory.orchestrator import cli_reference, spec_reference
from overstory.orchestrator.spec import DeploymentSpec

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("workers/**/*.md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TEST = re.compile(r"`(test_\w+)(?:::(\w+))?`")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them; none where there is no page."""
    found: set[str] = set()
    if not page.exists():
        return found
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            found.add(title.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        lost = bool(anchor) and there.suffix == ".md" and anchor not in anchors(there)
        if not there.exists() or lost:
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize(
    ("page", "module"), [("cli.md", cli_reference), ("configuration.md", spec_reference)]
)
def test_references_are_up_to_date(page: str, module: object) -> None:
    made = module.reference()  # type: ignore[attr-defined]
    assert (ROOT / "docs" / page).read_text() == made, (
        f"run: python -m {module.__name__} > docs/{page}"  # type: ignore[attr-defined]
    )


def test_every_command_is_in_the_reference() -> None:
    from overstory.orchestrator.cli import app

    text = cli_reference.reference()
    named = [info.name or info.callback.__name__ for info in app.registered_commands]
    assert len(named) >= 12
    assert [name for name in named if f"## overstory {name}" not in text] == []


def test_the_readme_lists_every_command() -> None:
    from overstory.orchestrator.cli import app

    listed = set(re.findall(r"^overstory (\w+) ", PAGES[0].read_text(), re.MULTILINE))
    commands = {info.name or info.callback.__name__ for info in app.registered_commands}
    assert listed == commands | {group.name for group in app.registered_groups}


def _settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _settings(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def test_every_setting_is_in_the_reference_with_its_bounds_and_meaning() -> None:
    text = spec_reference.reference()
    settings = dict(_settings(DeploymentSpec))
    assert len(settings) > 40
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text, re.MULTILINE))
    assert set(settings) <= set(rows)
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for name, field in settings.items():
        for rule in field.metadata:
            for bound in words.keys() & set(dir(rule)):
                assert f"{words[bound]} {getattr(rule, bound)}" in rows[name], name
        assert rows[name].split(" | ")[-1].strip(), f"{name} has no meaning"


@pytest.mark.parametrize("page", ["failure.md", "field-reports.md"])
def test_tests_that_a_page_names_are_there(page: str) -> None:
    files = {file.stem: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    named = TEST.findall((ROOT / "docs" / page).read_text())
    assert len(named) > 20
    assert [file for file, _ in named if file not in files] == []
    assert [test for file, test in named if test and f"def {test}(" not in files[file]] == []

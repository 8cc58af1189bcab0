"""Hooks of mkdocs: README and the model card become pages, links to code become its path.

Only what lies below `docs/` is a page of the site. A link that leads elsewhere must lead to a file
of the project, else the build fails.
"""

import logging
import re
from pathlib import Path, PurePosixPath
from typing import Any

log = logging.getLogger("mkdocs.hooks.overstory")  # mkdocs counts warnings below its own logger

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "model-card.md": "workers/tiny/MODEL_CARD.md"}
"""Page of the site -> file of the project."""

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that lie outside `docs/`."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links within the project to pages of the site, or shows the path of what is none."""
    here = PurePosixPath(PAGES.get(page.file.src_uri) or f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda found: _led(found, here, page.file.src_uri), markdown)


def _led(found: re.Match[str], here: PurePosixPath, page: str) -> str:
    words, target, anchor = found[1], found[2], found[3] or ""
    if re.match(r"[a-z]+:", target):
        return found[0]
    path = (ROOT / here.parent / target).resolve()
    if not path.exists() or ROOT not in path.parents:
        log.warning("%s links to %s, which is not there", here, target)
        return found[0]
    inside = str(path.relative_to(ROOT))
    known = {source: name for name, source in PAGES.items()}
    if inside in known:
        return f"[{words}]({_from(page, known[inside])}{anchor})"
    if inside.startswith("docs/") and path.is_file():
        return f"[{words}]({_from(page, inside.removeprefix('docs/'))}{anchor})"
    return words if inside in words else f"{words} (`{inside}`)"


def _from(page: str, target: str) -> str:
    """The way from one page to another."""
    return "../" * page.count("/") + target

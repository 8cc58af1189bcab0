"""Blocks of the rank slice's pages that scripts make. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any


def table_row(cells: Iterable[Any]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def filled(text: str, kind: str, lines: Callable[[str], Iterable[str]]) -> str:
    """The page with every block between `<!-- KIND NAME -->` and `<!-- end -->` made anew.

    Args:
        lines: of a block, by its name.
    """

    def block(found: re.Match[str]) -> str:
        return "\n".join([f"<!-- {kind} {found[1]} -->", *lines(found[1]), "<!-- end -->"])

    return re.sub(rf"<!-- {kind} (\w+) -->.*?<!-- end -->", block, text, flags=re.DOTALL)

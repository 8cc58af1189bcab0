"""Text in pieces that SGLang's stream parsers were written for: token by token.

They take it that a marker (`<tool_call>`, `</think>`) comes alone and whole. A speculative step
commits many tokens at once, and a vocabulary without a token for a marker splits it.
"""

import re
from collections.abc import Iterable


class MarkerCut:
    """Cuts text so that every marker is a piece of its own, whatever the chunks it came in."""

    def __init__(self, markers: Iterable[str]) -> None:
        """Markers of one character are left alone."""
        self._markers = sorted({m for m in markers if len(m.strip()) > 1}, key=len, reverse=True)
        pattern = "|".join(map(re.escape, self._markers))
        self._split = re.compile(f"({pattern})") if pattern else None
        self._held = ""

    def feed(self, text: str, last: bool) -> list[str]:
        """Pieces to hand on; unless it is the `last`, what may be the start of a marker is kept."""
        text = self._held + text
        keep = 0 if last else max((_overlap(text, marker) for marker in self._markers), default=0)
        self._held = text[len(text) - keep :]
        text = text[: len(text) - keep]
        pieces = [text] if self._split is None else self._split.split(text)
        return [piece for piece in pieces if piece]


def markers_of(parser: object) -> set[str]:
    """The strings that an instance of SGLang's detectors looks for, of whatever names."""
    return {value for value in vars(parser).values() if isinstance(value, str)}


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0

"""Token ids to text as they arrive, and stop strings in that text.

Pure: decoding is a function handed in. The pieces that come out, joined, equal the decoding of all
ids at once, however the ids were cut into chunks; a chunk can end inside a multi-byte character.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

Decode = Callable[[Sequence[int]], str]
"""Token ids to text; bytes that are not UTF-8 become U+FFFD, as in Hugging Face tokenizers."""

_REPLACEMENT = "\ufffd"
_CONTEXT_IDS = 4  # decoders that join words look at the neighbour before a token
_WINDOW_IDS = 64
_OPEN_TAIL_IDS = 4  # an unfinished UTF-8 character has at most 3 bytes, and a token at least one


class Detokenizer:
    """Incremental decoding of one sequence.

    Only a window of ids is decoded again at each step. The last character is held back while it is
    U+FFFD: it may be the start of a character whose other bytes have not come yet.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that are out

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` make certain."""
        if not ids:
            return ""
        self._window.extend(ids)
        text = self._decode(self._window)
        certain = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if certain == len(text):
            self._keep(self._window[-_CONTEXT_IDS:])
        elif len(self._window) > _WINDOW_IDS:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """What is still held back; the sequence has ended."""
        piece = self._decode(self._window)[self._emitted :]
        self._window, self._emitted = [], 0
        return piece

    def _keep(self, context: list[int]) -> None:
        self._window = context
        self._emitted = len(self._decode(context))

    def _cut(self, text: str) -> None:
        """Drop the head of a window of undecodable bytes, where both sides decode as they do
        together."""
        for cut in range(len(self._window) - _OPEN_TAIL_IDS, 0, -1):
            tail = self._decode(self._window[cut:])
            if self._decode(self._window[:cut]) + tail == text:
                self._window = self._window[cut:]
                self._emitted = len(tail) - (len(text) - self._emitted)
                return


class StopScanner:
    """Finds the first stop string in text that comes in pieces.

    Text that could be the start of a stop string is held back. The result does not depend on the
    pieces: the stop string that is complete first wins, and of those that end together the
    longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Text that may be sent, and the stop string that ends it, if one did."""
        text = self._held + piece
        found = [
            (at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) != -1
        ]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return text[:at], stop
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What is still held back; no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


@dataclass(frozen=True, slots=True)
class TextStep:
    """What a chunk of token ids came to: text to send, ids used of it, and the stop string met."""

    text: str
    used: int
    stop: str | None = None


class TextStream:
    """Detokenizing and stop strings of one sequence.

    `decoded` is the number of characters that the ids have made certain, held back ones included:
    where the text of the next token starts.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._scanner = StopScanner(stops) if stops else None
        self.decoded = 0

    def feed(self, ids: Sequence[int]) -> TextStep:
        """Text of `ids`.

        With stop strings, ids are taken one by one, so that what a sequence used up does not
        depend on how many tokens a speculative step committed at once.
        """
        if self._scanner is None:
            return TextStep(self._decode(ids), len(ids))
        pieces: list[str] = []
        for used, token in enumerate(ids, 1):
            piece, stop = self._scanner.feed(self._decode((token,)))
            pieces.append(piece)
            if stop is not None:
                return TextStep("".join(pieces), used, stop)
        return TextStep("".join(pieces), len(ids))

    def _decode(self, ids: Sequence[int]) -> str:
        piece = self._detokenizer.feed(ids)
        self.decoded += len(piece)
        return piece

    def finish(self) -> TextStep:
        """What was held back, at the end of the sequence; its last bytes can complete a stop
        string."""
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return TextStep(rest, 0)
        piece, stop = self._scanner.feed(rest)
        return TextStep(piece if stop else piece + self._scanner.flush(), 0, stop)


class TokenTrail(Generic[T]):
    """Something about each token, held until its text is sent."""

    def __init__(self) -> None:
        self._held: deque[tuple[int, T]] = deque()
        self._sent = 0

    def add(self, start: int, item: T) -> None:
        """The next token, whose text starts at character `start`, no lower than the last."""
        self._held.append((start, item))

    def sent(self, characters: int) -> list[T]:
        """That many more are sent: the tokens of which at least one is among them."""
        self._sent += characters
        items = []
        while self._held and self._held[0][0] < self._sent:
            items.append(self._held.popleft()[1])
        return items

    def rest(self) -> list[T]:
        """What is left where nothing was cut off: tokens without text of their own."""
        items = [item for _, item in self._held]
        self._held.clear()
        return items

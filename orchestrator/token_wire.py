"""What goes over a token line, on which a replica delivers tokens to a gateway. Pure.

A line is one TCP connection. It begins with the gateway's secret, then come frames: a length of 4
bytes (big endian) and one `Frame` in MessagePack. Nothing goes the other way: calls, their errors
and their cancellation are Serve's.
"""

import hmac
from dataclasses import dataclass, field
from typing import Any

import msgspec

from overstory.orchestrator.backend import TokenChunk, TokenLogprobs

SECRET_BYTES = 32
MOST_BYTES = 64 * 2**20
"""Longest frame: log-probabilities of a whole context."""


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one call. `number` counts the frames of the call from 0."""

    rid: str
    number: int
    ids: list[int]
    finish: dict[str, Any] | None = None
    logprobs: list[TokenLogprobs] | None = None

    def chunk(self) -> TokenChunk:
        """The tokens."""
        return TokenChunk(self.ids, self.finish, self.logprobs)


class BadLine(ValueError):
    """What came is not a token line."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encoded(rid: str, number: int, chunk: TokenChunk) -> bytes:
    """One frame with its length."""
    body = _encoder.encode(Frame(rid, number, chunk.ids, chunk.finish, chunk.logprobs))
    return len(body).to_bytes(4, "big") + body


@dataclass(slots=True)
class LineReader:
    """Takes bytes as they come and gives frames.

    Raises:
        BadLine: another secret, or bytes that are no frame.
    """

    secret: bytes
    greeted: bool = False
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now."""
        self._rest += data
        at = 0
        if not self.greeted:
            at = len(self.secret)
            if len(self._rest) < at:
                # No word yet of what is right so far: it could be guessed by bytes.
                return []
            if not hmac.compare_digest(self._rest[:at], self.secret):
                raise BadLine("it does not begin with this gateway's secret")
            self.greeted = True
        with memoryview(self._rest) as view:
            frames, at = _frames(view, at)
        del self._rest[:at]
        return frames


def _frames(view: memoryview, at: int) -> tuple[list[Frame], int]:
    """Whole frames from `at` on, and where the rest begins."""
    frames = []
    while len(view) - at >= 4:
        size = int.from_bytes(view[at : at + 4], "big")
        if size > MOST_BYTES:
            raise BadLine(f"a frame of {size} bytes")
        if len(view) - at - 4 < size:
            break
        try:
            frames.append(_decoder.decode(view[at + 4 : at + 4 + size]))
        except msgspec.MsgspecError as error:
            raise BadLine(str(error)) from error
        at += 4 + size
    return frames, at

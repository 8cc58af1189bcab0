"""What a single token stands for: its text, and its bytes where they are no text by themselves.

Log-probabilities name tokens one by one, also such as hold a part of a character.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

_REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"  # SentencePiece's space; decoders drop it at the start of a text


@dataclass(frozen=True, slots=True)
class TokenText:
    """`text` names the token (`bytes:\\xf0\\x9f` as OpenAI does where its bytes are no text);
    `raw` are its bytes, None where they are not known."""

    text: str
    raw: bytes | None


def token_text(piece: str | None, decode: Callable[[], str]) -> TokenText:
    """What a token stands for.

    Args:
        piece: the token as the vocabulary spells it; None if it is not there.
        decode: the tokenizer's text of the token alone, special tokens included.
    """
    if piece is None:
        return TokenText("", None)
    text = decode()
    if piece.startswith(_WORD_START) and not text.startswith(" "):
        text = " " + text
    if _REPLACEMENT not in text:
        return TokenText(text, text.encode("utf-8", "surrogatepass"))
    raw = _bytes_of(piece)
    if raw is None:
        return TokenText(text, None)
    try:
        return TokenText(raw.decode("utf-8"), raw)  # the text is U+FFFD itself
    except UnicodeDecodeError:
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


def _bytes_of(piece: str) -> bytes | None:
    """From the spelling of byte tokens (`<0xAB>`) and of byte-level vocabularies."""
    match = _BYTE_PIECE.fullmatch(piece)
    if match:
        return bytes([int(match[1], 16)])
    alphabet = _byte_alphabet()
    if all(char in alphabet for char in piece):
        return bytes(alphabet[char] for char in piece)
    return None


@cache
def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable ones of Latin-1 as they are, the others
    as the characters from 256 on (GPT-2's `bytes_to_unicode`)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }

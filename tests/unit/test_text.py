import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from overstory.orchestrator.text import Decode, Detokenizer, StopScanner, TextStream, TokenTrail


def _bytes_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, and merged ones that begin and end inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    merges = []
    for left, right in (("Ã", "©"), ("ð", "Ł"), ("ĺ", "Ģ"), ("Ł", "ĺ"), ("a", "b"), ("ab", "Ã")):
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = _bytes_tokenizer()
DECODE: Decode = TOKENIZER.decode
IDS = st.integers(0, TOKENIZER.get_vocab_size() - 1)


def _chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    chunks, at = [], 0
    for size in cuts:
        chunks.append(ids[at : at + size])
        at += size
    return [*chunks, ids[at:]]


@given(st.lists(IDS, max_size=120), st.lists(st.integers(0, 9), max_size=40))
def test_pieces_join_to_the_text_of_all_ids_whatever_the_bytes(
    ids: list[int], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(DECODE)
    pieces = [detokenizer.feed(chunk) for chunk in _chunked(ids, cuts)]
    assert "".join(pieces) + detokenizer.flush() == DECODE(ids)


@given(st.text(max_size=60))
def test_valid_text_never_shows_a_broken_character(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    detokenizer = Detokenizer(DECODE)
    pieces = [detokenizer.feed([token]) for token in ids]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_a_character_split_over_tokens_comes_out_whole_and_as_soon_as_it_can() -> None:
    ids = [TOKENIZER.token_to_id(char) for char in "ðŁĺĢ"]  # the four bytes of 😀
    detokenizer = Detokenizer(DECODE)
    assert [detokenizer.feed([token]) for token in ids] == ["", "", "", "😀"]


@pytest.mark.parametrize("byte", ["Ģ", "ÿ", "ð"])
def test_endless_broken_bytes_keep_the_window_small(byte: str) -> None:
    longest = 0

    def decode(ids: object) -> str:
        nonlocal longest
        longest = max(longest, len(ids))  # type: ignore[arg-type]
        return DECODE(ids)

    ids = [TOKENIZER.token_to_id(byte)] * 500
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.feed([token]) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == DECODE(ids)
    assert longest < 80


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 5), max_size=12),
)
def test_stop_strings_do_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    scanner = StopScanner(stops)
    out, matched = "", None
    for piece in _chunked(list(text), cuts):  # type: ignore[arg-type]
        safe, matched = scanner.feed("".join(map(str, piece)))
        out += safe
        if matched:
            break
    if not ends:
        assert matched is None
        assert out + scanner.flush() == text
    else:
        end = min(ends)
        longest = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
        assert matched == longest
        assert out == text[: end - len(longest)]


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1))
def test_nothing_is_shown_that_a_stop_string_could_still_take_back(
    text: str, stops: list[str]
) -> None:
    scanner = StopScanner(stops)
    shown = ""
    for char in text:
        safe, matched = scanner.feed(char)
        shown += safe
        assert not any(stop in shown for stop in stops)
        if matched:
            return


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner([""])


def test_tokens_used_do_not_depend_on_how_many_come_at_once() -> None:
    ids = TOKENIZER.encode("one two STOP three").ids
    used = []
    for size in (1, 3, len(ids)):
        stream = TextStream(DECODE, ["STOP"])
        total, text = 0, ""
        for at in range(0, len(ids), size):
            step = stream.feed(ids[at : at + size])
            total, text = total + step.used, text + step.text
            if step.stop:
                break
        assert text == "one two "
        used.append(total)
    assert used == [len("one two STOP")] * 3


def test_a_held_back_ending_comes_out_at_the_end() -> None:
    stream = TextStream(DECODE, ["STOP"])
    assert stream.feed(TOKENIZER.encode("go ST").ids).text == "go "
    assert stream.finish().text == "ST"


def test_a_broken_ending_can_complete_a_stop_string() -> None:
    stream = TextStream(DECODE, ["\ufffd"])
    assert stream.feed([TOKENIZER.token_to_id("ð")]).text == ""
    assert stream.finish().stop == "\ufffd"


def test_tokens_leave_the_trail_with_the_first_character_of_their_text() -> None:
    trail: TokenTrail[str] = TokenTrail()
    for start, item in ((0, "a"), (1, "part of b"), (1, "b"), (3, "c"), (4, "nothing")):
        trail.add(start, item)
    assert trail.sent(0) == []
    assert trail.sent(1) == ["a"]
    assert trail.sent(1) == ["part of b", "b"]
    assert trail.sent(2) == ["c"]
    assert trail.rest() == ["nothing"]
    assert trail.rest() == []

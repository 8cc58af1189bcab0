"""The recipe's parts that can go wrong quietly: choice of text, streams, framing, loops."""

import random
from pathlib import Path

import numpy as np
import torch

from overstory.workers.tiny.config import ASSISTANT, BOS, EOS, USER
from overstory.workers.tiny.corpus import Document, is_held_out, without_copies
from overstory.workers.tiny.prepare import CHAT_SHARE, frame
from overstory.workers.tiny.rollouts import REPEAT, looping
from overstory.workers.tiny.streams import STREAM_NAMES, read_streams, write_streams
from overstory.workers.tiny.train_drafter import block_mask


def lines(first: int, count: int) -> str:
    return "\n".join(
        f"    value_{i} = compute_something_long({i})" for i in range(first, first + count)
    )


def test_copies_of_held_out_text_are_dropped() -> None:
    held_out = [Document("held.py", lines(0, 60))]
    fresh = Document("fresh.py", lines(1000, 60))
    renamed = Document("vendored/copy.py", "# a copy\n" + lines(0, 60) + "\n" + lines(2000, 10))
    excerpt = Document("excerpt.py", lines(0, 12) + "\n" + lines(3000, 40))
    mention = Document("mention.py", lines(0, 3) + "\n" + lines(4000, 60))
    kept = list(without_copies([fresh, renamed, excerpt, mention], held_out))
    assert kept == [fresh, mention]


def test_repeats_within_training_are_dropped() -> None:
    first = Document("a.py", lines(0, 60))
    again = Document("b.py", lines(0, 50) + "\n" + lines(100, 10))
    half = Document("c.py", lines(0, 30) + "\n" + lines(200, 30))
    assert list(without_copies([first, again, half], [])) == [first, half]


def test_held_out_split_depends_on_the_path_alone() -> None:
    text = lines(0, 300)
    names = [f"module_{i}.py" for i in range(400)]
    chosen = {name for name in names if is_held_out(Document(name, text))}
    assert 10 < len(chosen) < 60
    assert not any(is_held_out(Document(f"test/{name}", text)) for name in chosen)
    assert not any(is_held_out(Document(name, "short")) for name in chosen)


def test_streams_survive_the_disk(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    streams = {
        name: rng.integers(0, 4096, 1000 + i, dtype=np.uint16)
        for i, name in enumerate(STREAM_NAMES)
    }
    size = write_streams(streams, tmp_path / "streams.bin")
    assert size == (tmp_path / "streams.bin").stat().st_size
    back = read_streams(tmp_path / "streams.bin")
    assert list(back) == list(streams)
    assert all((back[name] == streams[name]).all() for name in streams)


def test_chat_frame_cuts_at_a_line_and_keeps_the_text() -> None:
    newline, rng = 9, random.Random(0)
    framed = 0
    for _ in range(400):
        ids = [newline if i % 7 == 6 else 100 + i % 50 for i in range(300)]
        out = frame(ids, newline, rng)
        assert out[0] == BOS
        assert out[-1] == EOS
        if USER in out:
            framed += 1
            cut = out.index(ASSISTANT)
            assert out[cut - 1] == newline
            assert out[2:cut] + out[cut + 1 : -1] == ids
        else:
            assert out[1:-1] == ids
    assert 0.25 * CHAT_SHARE < framed / 400 < 4 * CHAT_SHARE


def test_looping_marks_repeats_only() -> None:
    text = torch.arange(100, 150)
    ids = torch.cat([text, text])[None]
    marked = looping(ids)[0]
    assert not marked[: 50 + REPEAT - 1].any()
    assert marked[50 + REPEAT - 1 :].all()


def test_block_mask_shows_context_before_the_anchor_and_the_own_block() -> None:
    anchors = torch.tensor([[2, 5]])
    seen = block_mask(anchors, length=7, block=3)[0, 0] == 0
    assert seen.shape == (6, 7 + 6)
    for query in range(6):
        own = query // 3
        expected = [key < anchors[0, own] for key in range(7)]
        expected += [key // 3 == own for key in range(6)]
        assert seen[query].tolist() == expected

"""Data preparation: source files to a tokenizer and token streams. Runs on a CPU, once.

    python -m overstory.workers.tiny.prepare --extra FOLDER_OF_UNPACKED_WHEELS --out FOLDER

Writes `tokenizer/`, `streams.bin` (see `streams`), and `corpus.json` with files and sizes.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .config import ASSISTANT, BOS, EOS, USER
from .corpus import (
    Document,
    is_held_out,
    is_reserved,
    read_package,
    read_standard_library,
    without_copies,
)
from .sources import DOWNLOADED, INSTALLED
from .streams import STREAM_NAMES, write_streams
from .tokenizer import train_tokenizer, write_tokenizer

CHAT_SHARE = 0.04
"""Share of training files framed as a chat: the head as the user's turn, the rest as the answer."""


def collect(standard_library: Path, site: Path, extra: Path) -> dict[str, list[Document]]:
    """Documents by stream name (`STREAM_NAMES`), free of copies and shuffled with a fixed seed."""
    standard = list(read_standard_library(standard_library))
    held_out = [d for d in standard if is_held_out(d)]
    seen: set[int] = set()
    own = list(without_copies((d for d in standard if not is_held_out(d)), held_out, seen))
    roots = [(site, source) for source in INSTALLED] + [(extra, source) for source in DOWNLOADED]
    packages = (document for root, source in roots for document in read_package(root, source))
    other = list(without_copies(packages, held_out, seen))
    streams = {
        "standard": [d for d in own if not is_reserved(d)],
        "other": [d for d in other if not is_reserved(d)],
        "reserved_standard": [d for d in own if is_reserved(d)],
        "reserved_other": [d for d in other if is_reserved(d)],
        "held_out": held_out,
    }
    assert tuple(streams) == STREAM_NAMES
    for name in STREAM_NAMES[:-1]:
        random.Random(0).shuffle(streams[name])
    return streams


def frame(ids: Sequence[int], newline: int, rng: random.Random | None) -> list[int]:
    """A document as `bos ... eos`; with `rng`, sometimes framed as a chat turn and its answer."""
    if rng is not None and rng.random() < CHAT_SHARE and len(ids) > 64:
        cut = rng.randrange(8, min(256, len(ids) // 2))
        while cut < len(ids) and ids[cut - 1] != newline:
            cut += 1
        return [BOS, USER, *ids[:cut], ASSISTANT, *ids[cut:], EOS]
    return [BOS, *ids, EOS]


def encode(
    tokenizer: Tokenizer, documents: Iterable[Document], rng: random.Random | None
) -> np.ndarray:
    """All documents one after the other, uint16 [tokens]."""
    newline = tokenizer.encode("\n").ids[-1]
    pieces: list[np.ndarray] = []
    batch: list[str] = []

    def flush() -> None:
        for encoding in tokenizer.encode_batch_fast(batch):
            pieces.append(np.array(frame(encoding.ids, newline, rng), dtype=np.uint16))
        batch.clear()

    for document in documents:
        batch.append(document.text)
        if len(batch) == 256:
            flush()
    flush()
    return np.concatenate(pieces)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="prepare training data of the built-in pair")
    paths = sysconfig.get_paths()
    parser.add_argument("--standard-library", type=Path, default=Path(paths["stdlib"]))
    parser.add_argument("--site", type=Path, default=Path(paths["purelib"]))
    parser.add_argument("--extra", type=Path, required=True, help="unpacked wheels")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to keep")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    documents = collect(arguments.standard_library, arguments.site, arguments.extra)
    if arguments.tokenizer:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    else:
        sample = [*documents["standard"], *documents["other"][::6]]
        tokenizer = train_tokenizer(d.text for d in sample)
    write_tokenizer(tokenizer, out / "tokenizer")
    rng = random.Random(0)
    streams = {
        name: encode(tokenizer, documents[name], None if name == "held_out" else rng)
        for name in STREAM_NAMES
    }
    size = write_streams(streams, out / "streams.bin")
    report = {
        name: {
            "files": len(documents[name]),
            "bytes": sum(len(d.text.encode()) for d in documents[name]),
            "tokens": int(streams[name].size),
        }
        for name in STREAM_NAMES
    }
    listing = {"held_out_files": [d.origin for d in documents["held_out"]], "streams": report}
    (out / "corpus.json").write_text(json.dumps(listing, indent=2) + "\n")
    print(json.dumps(report, indent=2), f"streams.bin: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()

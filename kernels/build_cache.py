"""A folder of build results, each made once for all processes of the machine.

An entry is a folder named by its key. Whoever holds the key's file lock makes it under another
name and renames it when it is whole, so that a reader without the lock sees all of it or nothing
and a builder that dies leaves only a part that the next one deletes. The operating system frees
the lock of a dead process. Everything here may be deleted at any time when nothing is building.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

CACHE_VARIABLE = "OVERSTORY_KERNEL_CACHE"


def cache_folder() -> Path:
    """$OVERSTORY_KERNEL_CACHE, else overstory/kernels under the user's cache folder (XDG)."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "overstory" / "kernels"


def key_of(parts: Iterable[str | bytes]) -> str:
    """24 hex digits of the parts; ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:24]


def cached(cache: Path, key: str, make: Callable[[Path], None]) -> Path:
    """The entry `key`, by `make(empty folder)` if nobody has made it yet.

    Two processes that ask at once: one makes it, the other waits and takes what the first made.
    An exception of `make` goes to its caller and leaves no entry.

    Raises:
        OSError: the cache folder cannot be written.
    """
    entry = cache / key
    if entry.is_dir():
        return entry
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if entry.is_dir():
            return entry
        part = cache / f"{key}.part"
        shutil.rmtree(part, ignore_errors=True)  # of a builder that died
        part.mkdir()
        try:
            make(part)
            part.rename(entry)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return entry

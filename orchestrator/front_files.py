"""Files of a front half: the folder of its sockets and, while it starts, SGLang's load file in
/dev/shm. They are named after the process that owns them, so that whoever comes later on that host
can tell those of a dead one and take them away: a process that is killed cannot.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from overstory.workers.process_ids import process_start_ticks

_NAME = re.compile(r"overstory-ipc-(\d+)-(\d+)-(\d+)-\w+")
SHARED_MEMORY = Path("/dev/shm")


def make_front_folder() -> Path:
    """A new folder that only this user can enter. Its name is also the engine's `instance_id`, from
    which SGLang makes the load file's name."""
    pid = os.getpid()
    prefix = f"overstory-ipc-{_namespace()}-{pid}-{process_start_ticks(pid)}-"
    return Path(tempfile.mkdtemp(prefix=prefix))


def sweep_dead(folders: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> list[str]:
    """Removes what dead processes of this host have left; their names. What another user owns, or
    lives in another container on the same host, is left alone."""
    swept = []
    for place in (folders or Path(tempfile.gettempdir()), shared_memory):
        for path in place.glob("*overstory-ipc-*") if place.is_dir() else ():
            if is_dead(path.name):
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    swept.append(path.name)
    return swept


def is_dead(name: str) -> bool:
    """Whether a file of this name belongs to a process of this host that is gone."""
    found = _NAME.search(name)
    if found is None:
        return False
    namespace, pid, started = (int(part) for part in found.groups())
    return namespace == _namespace() and process_start_ticks(pid) != started


def _namespace() -> int:
    """Identity of this process's pid namespace: a pid means nothing in another."""
    return Path("/proc/self/ns/pid").stat().st_ino

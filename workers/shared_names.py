"""Takes the names off SGLang's shared memory as soon as all ranks have mapped it.

SGLang removes its segments when an object is finalised. A rank that is killed, or ends itself by
`os._exit`, gets no such chance, and each restart would leave 25 MB in /dev/shm behind. A segment
without a name lives exactly as long as a process has it mapped.
"""

from __future__ import annotations

import os
from multiprocessing import resource_tracker
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def own_segments(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Named segments that SGLang made in this process (`sgl_shm_<kind>_<pid>_<random>`)."""
    return sorted(folder.glob(f"sgl_shm_*_{os.getpid()}_*"))


def take_names_off(folder: Path = SHARED_MEMORY) -> list[str]:
    """Unlinks this process's segments; those who mapped them keep them. Returns their names.

    Call it when every rank has mapped them: once the scheduler is built.
    """
    names = []
    for segment in own_segments(folder):
        segment.unlink(missing_ok=True)
        # Else Python's tracker, at a regular exit, warns that it cannot remove it.
        resource_tracker.unregister(f"/{segment.name}", "shared_memory")
        names.append(segment.name)
    return names

"""Shared memory without a name goes with its last user."""

import os
import subprocess
import sys
from multiprocessing import shared_memory

from overstory.workers.shared_names import SHARED_MEMORY, own_segments, take_names_off


def test_a_segment_stays_usable_and_leaves_no_name():
    name = f"sgl_shm_test_{os.getpid()}_0"
    writer = shared_memory.SharedMemory(name, create=True, size=64)
    reader = shared_memory.SharedMemory(name)
    other = shared_memory.SharedMemory(f"sgl_shm_test_{os.getpid() + 1}_0", create=True, size=64)
    try:
        assert take_names_off() == [name]
        assert own_segments() == []
        assert not (SHARED_MEMORY / name).exists()
        assert (SHARED_MEMORY / other.name).exists(), "segments of other processes stay"
        writer.buf[0] = 7
        assert reader.buf[0] == 7
    finally:
        reader.close()
        writer.close()
        other.close()
        other.unlink()


def test_a_regular_exit_after_it_is_silent():
    program = (
        "import os\n"
        "from multiprocessing import shared_memory\n"
        "from overstory.workers.shared_names import take_names_off\n"
        "kept = shared_memory.SharedMemory(f'sgl_shm_test_{os.getpid()}_0', create=True, size=64)\n"
        "assert take_names_off()\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""

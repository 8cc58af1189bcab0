"""Names a process beyond doubt: its pid with its start, since pids are used again. And how many
processes this host's kernel has killed for want of memory, which tells who was killed so."""

from __future__ import annotations

from pathlib import Path


def process_start_ticks(pid: int) -> int:
    """Start of process `pid` in clock ticks since boot; 0 if there is none (or no /proc)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def kernel_memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Processes that the kernel's out-of-memory killer has ended since boot; 0 where it does not
    count them."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

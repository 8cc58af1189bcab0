"""Names a process beyond doubt: its pid with its start, since pids are used again."""

from __future__ import annotations

from pathlib import Path


def process_start_ticks(pid: int) -> int:
    """Start of process `pid` in clock ticks since boot; 0 if there is none (or no /proc)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])

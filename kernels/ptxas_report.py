"""What ptxas says of each kernel: registers, spills, static shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelResources:
    """One kernel as it was compiled for one architecture."""

    name: str
    """Mangled."""
    arch: str
    registers: int
    """Per thread."""
    stack_bytes: int
    spill_bytes: int
    """Stores and loads of local memory together."""
    static_shared_bytes: int
    """Without what a launch asks for."""


def read_report(text: str) -> list[KernelResources]:
    """Kernels of `nvcc -Xptxas -v` output, in order.

    Raises:
        ValueError: an entry without its numbers; ptxas has changed how it prints.
    """
    found = []
    parts = re.split(r"(?=ptxas info\s*: Compiling entry function)", text)
    for part in parts:
        entry = _ENTRY.search(part)
        if entry is None:
            continue
        spills, used, shared = _SPILLS.search(part), _USED.search(part), _SHARED.search(part)
        if spills is None or used is None:
            raise ValueError(f"ptxas printed no resources for {entry[1]}:\n{part}")
        stack, stores, loads = (int(number) for number in spills.groups())
        static = int(shared[1]) if shared else 0
        found.append(
            KernelResources(entry[1], entry[2], int(used[1]), stack, stores + loads, static)
        )
    return found


def as_table(kernels: list[KernelResources]) -> str:
    """Aligned columns, one kernel a line."""
    head = f"{'arch':8}{'registers':>10}{'stack B':>9}{'spill B':>9}{'smem B':>8}  kernel"
    rows = [
        f"{k.arch:8}{k.registers:10}{k.stack_bytes:9}{k.spill_bytes:9}"
        f"{k.static_shared_bytes:8}  {k.name}"
        for k in kernels
    ]
    return "\n".join([head, *rows])

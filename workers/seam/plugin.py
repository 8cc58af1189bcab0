"""Entry point of SGLang's plugin loader: composes everything that Overstory changes in SGLang.

`register` runs in every process in which SGLang loads plugins. SGLang swallows what it raises and
skips hooks that do not fit, so a rank calls `verify_installed` before it serves.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from overstory.workers.environment import is_cpu_process
from overstory.workers.seam.errors import SeamError
from overstory.workers.seam.patches import Patch
from overstory.workers.seam.process_report import write_process_report

#: Modules whose `patches()` are installed on a plain CPU only.
CPU_INSTALLERS = (
    "overstory.workers.seam.portable.installer",
    "overstory.workers.seam.attention",
)

#: Modules whose `patches()` are installed in all other processes.
CUDA_INSTALLERS = ("overstory.workers.seam.cuda_installer",)

#: Modules whose `patches()` are installed on every device.
INSTALLERS = ("overstory.workers.ddtree.hooks", "overstory.workers.defrag.sorted_slots")


@dataclass
class _State:
    """What this process has of the seam."""

    registered: bool = False
    patches: list[Patch] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


_STATE = _State()


def register() -> None:
    """Makes or registers every change. Idempotent.

    A change that fails does not keep the others from being made; `verify_installed` reports it.
    """
    if _STATE.registered:
        return
    _STATE.registered = True
    for module in (*(CPU_INSTALLERS if is_cpu_process() else CUDA_INSTALLERS), *INSTALLERS):
        try:
            _install(importlib.import_module(module).patches())
        except Exception as error:
            _STATE.failures[module] = f"{type(error).__name__}: {error}"
    write_process_report(
        "plugin",
        {"patches": [patch.name for patch in _STATE.patches], "failures": _STATE.failures},
    )


def verify_installed() -> None:
    """Checks that every change stands. Call it after SGLang's `load_plugins`.

    Raises:
        SeamError: names each change that did not take, with its cause and reason.
    """
    if not _STATE.registered:
        raise SeamError("SGLang did not load the Overstory plugin in this process")
    problems = [f"{name}: {cause}" for name, cause in _STATE.failures.items()]
    problems += [
        f"{patch.name}: unchanged though registered (without it: {patch.reason})"
        for patch in _STATE.patches
        if patch.name not in _STATE.failures and not patch.taken()
    ]
    if problems:
        raise SeamError("changes to SGLang that did not take:\n  " + "\n  ".join(problems))


def report() -> dict[str, bool]:
    """Name of each change of this process -> whether it stands."""
    stands = {
        patch.name: patch.name not in _STATE.failures and patch.taken() for patch in _STATE.patches
    }
    return dict.fromkeys(_STATE.failures, False) | stands


def installed() -> tuple[Patch, ...]:
    """The changes registered in this process, in their order."""
    return tuple(_STATE.patches)


def _install(patches: list[Patch]) -> None:
    for patch in patches:
        _STATE.patches.append(patch)
        try:
            patch.install()
        except Exception as error:
            _STATE.failures[patch.name] = f"{type(error).__name__}: {error}"

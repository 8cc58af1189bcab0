"""Entry point of SGLang's plugin loader: composes everything that Overstory changes in SGLang.

`register` runs in every process in which SGLang loads plugins. SGLang swallows what it raises and skips
hooks that do not fit, so a rank calls `verify_installed` before it serves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from overstory.workers.environment import is_cpu_process
from overstory.workers.seam.errors import SeamError
from overstory.workers.seam.patches import Patch
from overstory.workers.seam.process_report import write_process_report


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
    _STATE.patches = _all_patches()
    for patch in _STATE.patches:
        try:
            patch.install()
        except Exception as error:
            _STATE.failures[patch.name] = f"{type(error).__name__}: {error}"
    write_process_report("plugin", {"patches": [patch.name for patch in _STATE.patches]})


def verify_installed() -> None:
    """Checks that every change stands. Call it after SGLang's `load_plugins`.

    Raises:
        SeamError: names each change that did not take, with its reason.
    """
    if not _STATE.registered:
        raise SeamError("SGLang did not load the Overstory plugin in this process")
    missing = [patch for patch in _STATE.patches if not _stands(patch)]
    if missing:
        lines = [
            f"  {patch.name} ({patch.reason}): {_STATE.failures.get(patch.name, 'target unchanged')}"
            for patch in missing
        ]
        raise SeamError("changes to SGLang that did not take:\n" + "\n".join(lines))


def report() -> dict[str, bool]:
    """Name of each change of this process -> whether it stands."""
    return {patch.name: _stands(patch) for patch in _STATE.patches}


def _stands(patch: Patch) -> bool:
    return patch.name not in _STATE.failures and patch.taken()


def _all_patches() -> list[Patch]:
    found: list[Patch] = []
    if is_cpu_process():
        from overstory.workers.seam import attention
        from overstory.workers.seam.portable import installer

        found += installer.patches() + attention.patches()
    return found + _decoding_patches()


def _decoding_patches() -> list[Patch]:
    """DDTREE and the sampler, on any device."""
    from overstory.workers.ddtree import hooks

    return hooks.patches()

"""Which environment variables a deployment may give to its ranks. Pure."""

import re
from collections.abc import Mapping
from typing import Any

_OURS = {
    "CUDA_VISIBLE_DEVICES": "Ray gives each rank its GPU",
    "MKL_NUM_THREADS": "use resources.cpus_per_rank",
    "OMP_NUM_THREADS": "use resources.cpus_per_rank",
    "PYTHONPATH": "ranks find their modules by it",
    "SGLANG_USE_CPU_ENGINE": "use resources.device",
}
_OUR_PREFIXES = ("OVERSTORY_", "RAY_")


def check_environment(given: Any) -> dict[str, str]:
    """The variables as strings; numbers are taken as they are written.

    Raises:
        ValueError: not a mapping of names to strings or numbers, or a name that is not the user's
            to set.
    """
    if not isinstance(given, Mapping):
        raise ValueError("wanted names and values, such as SGLANG_LOG_MS: 1")
    checked: dict[str, str] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if name in _OURS or name.startswith(_OUR_PREFIXES):
            reason = _OURS.get(name, "Overstory and Ray set what begins so")
            raise ValueError(f"{name} is not for the deployment to set ({reason}); remove it")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{name} is {value!r}; wanted a string or a number")
        checked[name] = str(value)
    return checked

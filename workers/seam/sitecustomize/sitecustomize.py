"""Runs at the start of every Python process that inherits our PYTHONPATH (SGLang spawns such).

Does nothing but in a process marked for the CPU. Chains to the sitecustomize it shadows, if any.
"""

import importlib.util
import os
import sys


def _chain() -> None:
    """Runs the next `sitecustomize` on the path, the one that ours hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in sys.path:
        path = os.path.join(folder or os.curdir, "sitecustomize.py")
        if os.path.abspath(folder or os.curdir) == here or not os.path.isfile(path):
            continue
        spec = importlib.util.spec_from_file_location("_chained_sitecustomize", path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        return


def _install() -> None:
    if os.environ.get("OVERSTORY_DEVICE") != "cpu":
        return
    from overstory.workers.seam.process_report import write_process_report
    from overstory.workers.seam.standins import install_standins

    install_standins()
    write_process_report("sitecustomize")


_chain()
_install()

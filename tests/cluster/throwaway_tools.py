"""Programs of others that a test runs as they are, each in an environment of its own.

`OVERSTORY_TEST_TOOLS` names a folder that has such environments already (`NAME/bin/NAME`); else one
is made for the test run, where a package index can be reached.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL_S = 600.0


def tool(name: str, folder: Path) -> Path:
    """The program `name` of the package of that name; skips the test where it cannot be had."""
    ready = Path(os.environ.get("OVERSTORY_TEST_TOOLS", "/nonexistent")) / name / "bin" / name
    if ready.is_file():
        return ready
    home = folder / name
    subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=120)
    install = [home / "bin" / "pip", "install", "-q", "--disable-pip-version-check", name]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} could not be installed in {INSTALL_S:.0f} s")
    if done.returncode:
        pytest.skip(f"{name} cannot be installed here: {done.stderr.strip()[-300:]}")
    return home / "bin" / name

"""SGLang's Triton kernels without SGLang: copies of single files among stubs.

The kernel files import little of SGLang, but its packages import all of it (and much that a
machine with torch alone does not have). So they are copied into a package of their own, in which
`sglang` is renamed and the few helpers that they ask for are stubs. `srt/environ.py`, which newer
ones take their settings from, needs Python alone and is copied as it is. Nothing of SGLang is kept
in this repository: the path to an installed or unpacked `sglang` folder is given at run time.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

_KERNELS = Path("kernels/ops/attention")
_COPIED = (
    _KERNELS / "extend_attention.py",
    _KERNELS / "decode_attention.py",
    _KERNELS / "prefill_attention.py",
    _KERNELS / "score_mod.py",
    _KERNELS / "verify_splitkv.py",
    _KERNELS / "verify_mla.py",
    Path("srt/environ.py"),
)
_UTILS = """
import torch

def is_cuda(): return torch.cuda.is_available()
def is_hip(): return False
def is_gfx95_supported(): return False
def is_gfx1250_supported(): return False
def get_device_core_count(device_id=0):
    return torch.cuda.get_device_properties(device_id).multi_processor_count
"""


class ForeignSglang:
    """Kernel modules of one `sglang` folder.

    Attributes:
        version: what the folder calls itself, "unknown" where it does not.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` holds `kernels/ops/attention/` and, from 0.5.23 on, `srt/environ.py`.

        Raises:
            FileNotFoundError: it does not.
        """
        source = folder / _KERNELS
        if not source.is_dir():
            raise FileNotFoundError(f"{folder} is no sglang folder: {source} is not there")
        self.version = _version_of(folder)
        self._kept = tempfile.TemporaryDirectory(prefix="overstory-sglang-")
        self._package = "foreign_sglang_" + re.sub(r"\W", "_", self.version)
        _copy(folder, Path(self._kept.name) / self._package, self._package)
        sys.path.append(self._kept.name)

    def has(self, name: str) -> bool:
        """Whether the folder has the kernel file `name`."""
        return (Path(self._kept.name) / self._package / _KERNELS / f"{name}.py").exists()

    def module(self, name: str) -> ModuleType:
        """Import a kernel file, say "extend_attention".

        Raises:
            ImportError: it needs more than the copies and stubs have; says what.
        """
        try:
            return importlib.import_module(f"{self._package}.{'.'.join(_KERNELS.parts)}.{name}")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(f"{self._package}."):
                raise
            missing = error.name.removeprefix(f"{self._package}.").replace(".", "/") + ".py"
            raise ImportError(
                f"{name}.py of SGLang {self.version} imports {missing}; want its folder to hold it "
                f"and that to be one of the files that are copied: {', '.join(map(str, _COPIED))}",
                name=error.name,
            ) from error


def _copy(folder: Path, package: Path, name: str) -> None:
    (package / _KERNELS).mkdir(parents=True)
    (package / "srt").mkdir()
    (package / "srt" / "utils.py").write_text(_UTILS)
    for file in _COPIED:
        if (folder / file).exists():
            text = (folder / file).read_text()
            (package / file).write_text(re.sub(r"\b(from|import) sglang\.", rf"\1 {name}.", text))


def installed() -> list[Path]:
    """The folder of the sglang that an import would find, if it holds kernel files."""
    spec = importlib.util.find_spec("sglang")
    folders = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    return [folder for folder in folders if (folder / _KERNELS).is_dir()]


def _version_of(folder: Path) -> str:
    file = folder / "_version.py"
    found = re.search(r"__version__.*?'([^']+)'", file.read_text()) if file.exists() else None
    return found[1] if found else "unknown"

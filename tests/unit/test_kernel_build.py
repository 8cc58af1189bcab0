"""Building and caching, with compilers that are scripts; and once with the real g++."""

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from overstory.kernels import build, compilers
from overstory.kernels.build_cache import CACHE_VARIABLE, cache_folder, cached, key_of
from overstory.kernels.cuda_library import KernelLibrary, arch_of
from overstory.kernels.errors import CompileError, KernelError, NoCompilerError, NoDeviceError
from overstory.kernels.signatures import launchers_of

SOURCE = """
#include "scale.h"
extern "C" int overstory_scale(float* x, int64_t n,
                               float factor /* of each */, void* stream) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
  return n == 0 ? 7 : 0;
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(build.JOBS_VARIABLE, "2")
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "scale.h").write_text("#include <cstdint>\n")
    path = tmp_path / "scale.cu"
    path.write_text(SOURCE)
    return path


Compiler = Callable[[str], build.Target]


@pytest.fixture
def scripted(tmp_path: Path) -> Compiler:
    """A target whose compiler is a shell script; $out is the file it was asked to make."""

    def make(body: str, version: str = "scripted 1.0") -> build.Target:
        script = tmp_path / "compiler"
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "{version}"; exit; }}\n'
            f'echo run >>{tmp_path}/runs\nwhile [ "$1" != -o ]; do shift; done; out=$2\n{body}\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return build.Target("simulator", script, ("-x", "c++"), ())

    return make


def runs(tmp_path: Path) -> int:
    file = tmp_path / "runs"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_second_build_runs_no_compiler(source: Path, scripted: Compiler, tmp_path: Path) -> None:
    target = scripted("echo built >$out")
    first = build.build_library(target, [source])
    assert first.read_text() == "built\n"
    assert runs(tmp_path) == 2  # an object, a library
    assert build.build_library(target, [source]) == first
    assert runs(tmp_path) == 2


def test_key_holds_source_headers_flags_and_compiler(
    source: Path, scripted: Callable[..., build.Target]
) -> None:
    body = "echo built >$out"
    entries = [build.build_object(scripted(body), source)]
    source.write_text(SOURCE + "// changed\n")
    entries.append(build.build_object(scripted(body), source))
    (source.parent / "scale.h").write_text("#include <cstdint>\n// changed\n")
    entries.append(build.build_object(scripted(body), source))
    target = scripted(body)
    flagged = build.Target("simulator", target.compiler, ("-O0",), ())
    entries.append(build.build_object(flagged, source))
    entries.append(build.build_object(scripted(body, version="scripted 1.0.1"), source))
    assert len(set(entries)) == len(entries)


def test_key_does_not_hold_the_folder(source: Path, scripted: Compiler, tmp_path: Path) -> None:
    target = scripted("echo built >$out")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("scale.cu", "scale.h"):
        shutil.copy(tmp_path / name, elsewhere / name)
    assert build.build_object(target, source) == build.build_object(target, elsewhere / "scale.cu")


def test_a_source_edited_while_it_compiles_is_compiled_again(
    source: Path, scripted: Compiler, tmp_path: Path
) -> None:
    # Only the first run of the compiler edits.
    edit = f"[ $(wc -l <{tmp_path}/runs) = 1 ] && echo '// edited' >>{source}"
    entry = build.build_object(scripted(f"cat {source} >$out; {edit}; true"), source)
    assert runs(tmp_path) == 2
    assert "// edited" in (entry / build.OBJECT).read_text()
    assert list(entry.parent.glob("scale-simulator-*/")) == [entry]


def test_parts_of_a_key_do_not_run_together() -> None:
    assert key_of(["ab", "c"]) != key_of(["a", "bc"])


def test_architectures_have_entries_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compilers.NVCC_VARIABLE, "/bin/true")
    flags = [build.cuda_target(arch).compile_flags for arch in ("sm_90", "sm_120", "sm_120a")]
    assert len(set(flags)) == 3
    with pytest.raises(ValueError, match="arch is '90'"):
        build.cuda_target("90")


def test_refused_source_is_named_and_leaves_nothing(
    source: Path, scripted: Compiler, cache: Path
) -> None:
    with pytest.raises(CompileError, match=r"compiling scale\.cu .*exit code 3(.|\n)*no such type"):
        build.build_library(scripted("echo half >$out; echo no such type >&2; exit 3"), [source])
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []
    assert build.build_library(scripted("echo built >$out"), [source]).exists()


def test_builder_that_dies_leaves_nothing_that_counts(cache: Path) -> None:
    code = (
        "import sys, signal, os\n"
        "from pathlib import Path\n"
        "from overstory.kernels.build_cache import cached\n"
        "def make(folder):\n"
        "    (folder / 'half').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached(Path(sys.argv[1]), 'key', make)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(cache)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (cache / "key.part" / "half").exists()
    assert not (cache / "key").exists()
    entry = cached(cache, "key", lambda folder: (folder / "whole").touch())
    assert [path.name for path in entry.iterdir()] == ["whole"]


def test_two_processes_build_once(source: Path, cache: Path, tmp_path: Path) -> None:
    """The first waits inside `make` until the second has asked too."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from overstory.kernels.build_cache import cached\n"
        "cache, me = Path(sys.argv[1]), sys.argv[2]\n"
        "def make(folder):\n"
        "    (cache / f'making-{me}').touch()\n"
        "    sys.stdin.readline()\n"
        "    (folder / 'by').write_text(me)\n"
        "print('asks', flush=True)\n"
        "print((cached(cache, 'key', make) / 'by').read_text())\n"
    )
    cache.mkdir()
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(cache), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "asks\n"
    for process in both:
        assert process.stdin is not None
        # One that was quick has ended already.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("go\n")
            process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].strip() for process in both]
    assert outputs[0] == outputs[1]
    assert [path.name for path in cache.glob("making-*")] == [f"making-{outputs[0]}"]


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/some/where")
    assert cache_folder() == Path("/some/where")
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/overstory/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/overstory/kernels"


def test_missing_compilers_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for variable in (compilers.NVCC_VARIABLE, "CUDA_HOME", compilers.CXX_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(NoCompilerError, match="install the CUDA toolkit"):
        build.cuda_target("sm_90")
    with pytest.raises(NoCompilerError, match="install g\\+\\+"):
        build.simulator_target()
    monkeypatch.setenv(compilers.NVCC_VARIABLE, "/no/nvcc")
    with pytest.raises(NoCompilerError, match="OVERSTORY_NVCC is '/no/nvcc'"):
        build.cuda_target("sm_90")


def test_compiler_that_does_not_run_is_named(source: Path, tmp_path: Path) -> None:
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(NoCompilerError, match="nvcc --version does not run"):
        build.build_library(build.Target("sm_90", broken, (), ()), [source])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_says_what_to_do() -> None:
    with pytest.raises(NoDeviceError, match="OVERSTORY_KERNELS=reference"):
        arch_of()


def test_jobs_must_be_a_number(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    monkeypatch.setenv(build.JOBS_VARIABLE, "many")
    with pytest.raises(ValueError, match="OVERSTORY_BUILD_JOBS is 'many'"):
        build.build_library(build.Target("simulator", Path("/bin/true"), (), ()), [source])


def test_signatures_are_read_from_the_source(source: Path) -> None:
    (launcher,) = launchers_of(source).values()
    assert [(p.name, p.c_type) for p in launcher.parameters] == [
        ("x", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("factor", ctypes.c_float),
        ("stream", ctypes.c_void_p),
    ]
    assert launcher.result is ctypes.c_int32
    source.write_text('extern "C" int64_t overstory_bytes(int n) {}')
    assert launchers_of(source)["bytes"].result is ctypes.c_int64
    source.write_text('extern "C" float overstory_bad(int n) {}')
    with pytest.raises(ValueError, match="overstory_bad returns float; want int or int64_t"):
        launchers_of(source)
    source.write_text('extern "C" int overstory_bad(Tensor x) {}')
    with pytest.raises(ValueError, match="overstory_bad: parameter 'Tensor x'"):
        launchers_of(source)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "g++") is None, reason="no g++")
def test_a_library_is_called_by_name(source: Path) -> None:
    library = KernelLibrary(build.simulator_target(), [source])
    x = torch.tensor([1.0, 2.0])
    library.launch("scale", x=x, n=2, factor=2.5)
    assert x.tolist() == [2.5, 5.0]
    assert library.query("scale", x=None, n=0, factor=1.0, stream=None) == 7
    with pytest.raises(TypeError, match=r"missing \['factor'\], unknown \['scale'\]"):
        library.launch("scale", x=x, n=2, scale=2.5)
    with pytest.raises(KernelError, match="scale: CUDA error 7"):
        library.launch("scale", x=x, n=0, factor=2.5)
    with pytest.raises(KernelError, match="no launcher overstory_other"):
        library.launch("other")

"""CUDA sources to a shared library, by nvcc for a GPU or by g++ for the simulator.

The sources know nothing of torch (docs/decisions/0005), so a build takes seconds and its result
serves every torch. Each .cu becomes an object and the objects a library, both kept in a cache
(`build_cache`) under keys of all that goes into them: the texts of the source and of every header
it includes, the compiler's version, the flags with the architecture.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .build_cache import cache_folder, cached, key_of
from .compilers import find_cxx, find_nvcc, version_of
from .errors import CompileError
from .ptxas_report import as_table, read_report

SOURCES = Path(__file__).parent / "cuda"
JOBS_VARIABLE = "OVERSTORY_BUILD_JOBS"

LIBRARY = "liboverstory.so"
OBJECT = "kernel.o"
REPORT = "compiler.txt"
"""In an object's entry: what the compiler printed, ptxas' resource report among it."""

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """A compiler and the flags that make one kind of library of it."""

    name: str
    """"sm_90", "simulator"."""
    compiler: Path
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @property
    def is_cuda(self) -> bool:
        """Whether the library needs a GPU."""
        return self.name != "simulator"


def cuda_target(arch: str) -> Target:
    """For one GPU architecture, say "sm_90"; no PTX for others is put in.

    Raises:
        ValueError: not the name of an architecture.
        NoCompilerError: no nvcc.
    """
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ValueError(f"arch is {arch!r}; want a name like sm_90 or sm_120")
    number = arch.removeprefix("sm_")
    gencode = f"-gencode=arch=compute_{number},code={arch}"
    common = (gencode, "-std=c++17", "-O3", "-lineinfo", "-Xcompiler=-fPIC")
    # --keep: the PTX stays beside the object, for the test that looks for instructions.
    return Target(arch, find_nvcc(), (*common, "-Xptxas=-v", "--keep"), (gencode, "-cudart=static"))


def simulator_target(defines: Sequence[str] = ()) -> Target:
    """For the CPU: the sources with OVERSTORY_SIM defined, the grid run by cuda/sim.

    Args:
        defines: macros set to 1.

    Raises:
        NoCompilerError: no g++.
    """
    # A variable read before it is written holds the same garbage every time, and never luck's 0.
    poison = "-ftrivial-auto-var-init=pattern"
    flags = ("-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", poison, "-x", "c++", "-DOVERSTORY_SIM")
    macros = (f"-D{name}=1" for name in defines)
    return Target("simulator", find_cxx(), (*flags, *macros), ())


def sources() -> list[Path]:
    """Every .cu of the package, by name."""
    return sorted(SOURCES.glob("*.cu"))


def build_library(target: Target, of: Sequence[Path] | None = None) -> Path:
    """The shared library of the sources `of` (default: all of the package), built if need be.

    Raises:
        NoCompilerError: the compiler does not run.
        CompileError: a source does not compile.
        OSError: the cache cannot be written.
    """
    chosen = sources() if of is None else list(of)
    if not chosen:
        raise ValueError(f"no CUDA sources in {SOURCES}")
    with ThreadPoolExecutor(_jobs()) as pool:
        objects = [entry / OBJECT for entry in pool.map(lambda s: build_object(target, s), chosen)]
    key = key_of(["library", *_of_compiler(target), *target.link_flags, *map(_entry_of, objects)])

    def link(folder: Path) -> None:
        command: list[str | Path]
        command = [target.compiler, "-shared", *target.link_flags, "-o", folder / LIBRARY, *objects]
        _run(command, folder, f"linking the kernels for {target.name}")

    return cached(cache_folder(), f"lib-{key}", link) / LIBRARY


def build_object(target: Target, source: Path) -> Path:
    """Entry of one source's object: folder with `OBJECT`, `REPORT` and, from nvcc, <name>.ptx.

    Raises: as `build_library`.
    """
    key = _object_key(target, source)

    def compile_into(folder: Path) -> None:
        flags = [*target.compile_flags, f"-I{SOURCES}", f"-I{source.parent}"]
        command: list[str | Path]
        command = [target.compiler, *flags, "-c", source, "-o", folder / OBJECT]
        printed = _run(command, folder, f"compiling {source.name} for {target.name}")
        (folder / REPORT).write_text(printed)
        _drop_intermediates(folder)
        if _object_key(target, source) != key:
            raise _ChangedMeanwhile

    try:
        return cached(cache_folder(), f"{source.stem}-{target.name}-{key}", compile_into)
    except _ChangedMeanwhile:
        return build_object(target, source)


class _ChangedMeanwhile(Exception):
    """A source was edited while the compiler read it: the object is not what its key says."""


def _object_key(target: Target, source: Path) -> str:
    texts = [part for file in included(source) for part in (file.name, file.read_bytes())]
    return key_of(["object", *_of_compiler(target), *target.compile_flags, *texts])


def included(source: Path) -> list[Path]:
    """`source` and every file that its `#include "..."` lines reach, by name.

    Conditions are not evaluated: a header of the other mode counts too, which costs at most a
    build too many.
    """
    found: dict[Path, None] = {}
    waiting = [source.resolve()]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = None
        for name in _INCLUDE.findall(file.read_bytes()):
            places = (folder / name.decode() for folder in (file.parent, SOURCES))
            waiting += [place.resolve() for place in places if place.is_file()][:1]
    first = source.resolve()
    return [first, *sorted(found.keys() - {first}, key=lambda file: (file.name, file))]


def _entry_of(built: Path) -> str:
    return built.parent.name


def _of_compiler(target: Target) -> tuple[str, str]:
    return target.compiler.name, version_of(target.compiler)


def _jobs() -> int:
    named = os.environ.get(JOBS_VARIABLE)
    if not named:
        return len(os.sched_getaffinity(0))
    if not named.isdigit() or int(named) < 1:
        raise ValueError(f"{JOBS_VARIABLE} is {named!r}; want the number of compilers at a time")
    return int(named)


def _run(command: Sequence[str | Path], folder: Path, what: str) -> str:
    words = [str(word) for word in command]
    pipe = subprocess.PIPE
    try:
        done = subprocess.run(
            words, cwd=folder, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise CompileError(f"{what}: {words[0]} does not run: {error}") from error
    if done.returncode:
        raise CompileError(
            f"{what} failed (exit code {done.returncode})\n{' '.join(words)}\n{done.stdout}"
        )
    return done.stdout


def _drop_intermediates(folder: Path) -> None:
    for file in folder.iterdir():
        if file.suffix != ".ptx" and file.name not in (OBJECT, REPORT):
            file.unlink()


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m overstory.kernels.build`: build ahead of first use, show what ptxas says."""
    parser = argparse.ArgumentParser(prog="overstory.kernels.build", description=main.__doc__)
    parser.add_argument("--arch", help="say sm_120; default: the GPU of this machine")
    parser.add_argument("--simulator", action="store_true", help="build for the CPU instead")
    parser.add_argument("--report", action="store_true", help="registers, spills, shared memory")
    chosen = parser.parse_args(arguments)
    target = simulator_target() if chosen.simulator else cuda_target(chosen.arch or _arch_here())
    print(build_library(target))
    if chosen.report and target.is_cuda:
        texts = [(build_object(target, source) / REPORT).read_text() for source in sources()]
        print(as_table([kernel for text in texts for kernel in read_report(text)]))


def _arch_here() -> str:
    from .cuda_library import arch_of

    return arch_of()


if __name__ == "__main__":
    main()

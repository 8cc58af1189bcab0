"""Turns pytest's JUnit files into docs/test-results.md: date, machine, versions, results."""

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

LONG_S = 10.0
PACKAGES = ("ray", "sglang", "torch", "transformers")


def machine() -> str:
    """Processor, cores and memory of this machine."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB"


def result_of(case: ElementTree.Element) -> str:
    """How one test ended, with the reason where it was skipped."""
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            reason = (found.get("message") or "").splitlines()
            return f"{kind}: {reason[0]}" if kind == "skipped" and reason else kind
    return "passed"


class Case(NamedTuple):
    """One test."""

    file: str
    name: str
    result: str
    seconds: float


def cases_of(file: Path) -> list[Case]:
    """Tests of one JUnit file."""
    return [
        Case(
            case.get("classname", "").removeprefix("tests."),
            case.get("name", ""),
            result_of(case),
            float(case.get("time", 0)),
        )
        for case in ElementTree.parse(file).getroot().iter("testcase")
    ]


def tables(cases: list[Case]) -> str:
    """A row for each file, then one for each test that took long or did not pass."""
    lines = ["| file | passed | other | s |", "|---|---|---|---|"]
    for file in sorted({case.file for case in cases}):
        some = [case for case in cases if case.file == file]
        passed = sum(case.result == "passed" for case in some)
        seconds = sum(case.seconds for case in some)
        lines.append(f"| {file} | {passed} | {len(some) - passed} | {seconds:.1f} |")
    lines += ["", f"Tests of {LONG_S:g} s and more, and those that did not pass:", ""]
    lines += ["| file | test | result | s |", "|---|---|---|---|"]
    lines += [
        f"| {case.file} | {case.name} | {case.result} | {case.seconds:.1f} |"
        for case in sorted(cases)
        if case.seconds >= LONG_S or case.result != "passed"
    ]
    return "\n".join(lines)


def main(folder: Path, summary: list[str]) -> None:
    """Print the page."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    print("# Results of `make test-full`\n")
    now = datetime.datetime.now(datetime.UTC)
    print(f"- {now:%Y-%m-%d %H:%M} UTC, commit {commit.stdout.strip()}")
    print(f"- {machine()}; Python {platform.python_version()}, {versions}")
    for line in summary:
        print(f"- {line}")
    print()
    print(tables([case for file in folder.glob("*.xml") for case in cases_of(file)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

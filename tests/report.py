"""Turns pytest's JUnit files into docs/test-results.md: date, machine, versions, each result."""

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

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


def rows(file: Path) -> list[str]:
    """Table rows of one JUnit file."""
    cases = ElementTree.parse(file).getroot().iter("testcase")
    return [
        f"| {case.get('classname', '').removeprefix('tests.')} | {case.get('name')} "
        f"| {result_of(case)} | {float(case.get('time', 0)):.1f} |"
        for case in cases
    ]


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
    print("\n| file | test | result | s |\n|---|---|---|---|")
    for file in sorted(folder.glob("*.xml")):
        print("\n".join(rows(file)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

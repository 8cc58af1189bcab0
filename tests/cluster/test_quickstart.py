"""docs/quickstart.md as a new user follows it: every command, in order, on two hosts."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_hosts import ray_here  # noqa: F401
from hosts_lab import Host, Lab

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "quickstart.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
STEP_S = 500.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def steps(text: str) -> Iterator[tuple[str, str]]:
    """Each command of the page with what it must print."""
    for block in BLOCK.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            yield command, expected


def pattern(expected: str) -> re.Pattern[str]:
    """What is expected as a pattern; `...` stands for anything."""
    pieces = [re.escape(piece) for piece in expected.strip().split("...")]
    return re.compile(".*".join(pieces), re.DOTALL)


def test_pattern_takes_anything_for_dots_alone() -> None:
    assert pattern("a\n...\nb").search("x\na\n1\n2\nb\n")
    assert not pattern("a ... b").search("a\nb")
    assert pattern("").search("")


def test_the_page(lab: Lab) -> None:
    head, worker = lab.hosts["h1"], lab.hosts["h2"]
    text = PAGE.read_text().replace("192.0.2.1", head.address).replace("192.0.2.2", worker.address)
    done = list(steps(text))
    assert len(done) >= 15
    for command, expected in done:
        print(f"$ {command}")  # Shown with a failure: how far it came.
        said = run(head, command)
        assert pattern(expected).search(said), f"$ {command}\n{said}"
    for host in (head, worker):
        assert not host.processes("raylet"), "Ray is still there"
        assert host.check("ls", "/dev/shm").split() == []


def run(host: Host, command: str) -> str:
    """Standard output of a command in the project's folder; it must succeed."""
    done = host.run("bash", "-c", f"cd {ROOT} && {command}", timeout_s=STEP_S)
    assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
    return done.stdout

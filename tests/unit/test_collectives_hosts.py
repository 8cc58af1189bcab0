"""A host that vanishes without a word: nothing closes its connections. As a network namespace whose
link goes down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from overstory.workers.collectives import Door, Seat, connect, meeting

CPU = torch.device("cpu")
SILENT_S, LIMIT_S = 4, 60.0
NAME = f"gone{os.getpid()}"
HERE, THERE = "10.231.77.1", "10.231.77.2"
RANK_1 = f"""
import sys, time, torch
from overstory.workers.collectives import Seat, connect
connect("tcp", Seat("hosts", 1, 2), sys.argv[1].encode(), torch.device("cpu"), {LIMIT_S}, {LIMIT_S})
print("up", flush=True)
time.sleep({LIMIT_S})
"""

pytestmark = pytest.mark.full


def ip(*words: str, inside: bool = False) -> None:
    before = ["ip", "netns", "exec", NAME] if inside else []
    subprocess.run([*before, "ip", *words], check=True, capture_output=True)


@pytest.fixture
def host() -> Iterator[None]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces want root and iproute2")
    try:
        ip("netns", "add", NAME)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        near, far = f"n{os.getpid()}", f"f{os.getpid()}"
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", NAME)
        ip("addr", "add", f"{HERE}/30", "dev", near)
        ip("link", "set", near, "up")
        ip("addr", "add", f"{THERE}/30", "dev", far, inside=True)
        ip("link", "set", far, "up", inside=True)
        yield
    finally:
        ip("netns", "del", NAME)  # and with it the link


def test_a_host_that_vanishes_is_noticed(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_SILENT_S", SILENT_S)
    door = Door(HERE)
    words = ["ip", "netns", "exec", NAME, sys.executable, "-c", RANK_1, door.ticket.decode()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            comm = connect("tcp", Seat("hosts", 0, 2), door, CPU, LIMIT_S, LIMIT_S)
            try:
                assert process.stdout.readline() == "up\n"
                ip("link", "set", f"f{os.getpid()}", "down", inside=True)
                begun = time.monotonic()
                while comm.lost is None:
                    assert time.monotonic() - begun < 3 * SILENT_S
                    time.sleep(0.05)
                assert comm.lost.rank == 1
            finally:
                comm.close()
        finally:
            process.kill()

"""The lab of hosts itself: hosts are apart, reach each other by SSH, and leave nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_hosts import ray_here  # noqa: F401
from hosts_lab import Lab, hosts_lab, lives, why_no_lab
from hosts_layout import TOOLS, host_plans, missing_packages, plug_in, set_up_cable, visible_folders
from leftovers import wait_until


def test_hosts_have_different_names_and_addresses() -> None:
    first, second = host_plans(["a", "b"])
    assert (first.address, second.address) == ("10.77.0.1", "10.77.0.2")
    assert first.port != second.port
    with pytest.raises(ValueError, match="different names"):
        host_plans(["a", "a"])


def test_a_cable_leads_from_the_switch_to_the_host() -> None:
    (host,) = host_plans(["a"])
    assert f"link add {host.port} type veth peer name eth0 netns 42" in plug_in(host, 42)
    assert "address add 10.77.0.1/24 dev eth0" in set_up_cable(host)
    assert "route add default via 10.77.0.254" in set_up_cable(host)


def test_packages_of_missing_tools() -> None:
    assert missing_packages(lambda tool: "/usr/bin/" + tool) == []
    assert missing_packages(lambda tool: None) == sorted(set(TOOLS.values()))
    assert missing_packages(lambda tool: None if tool == "sshd" else tool) == ["openssh-server"]


def test_only_what_a_host_hides_is_kept_in_sight() -> None:
    folders = ["/tmp/clone/.venv", "/tmp/clone", "/srv/x", "/root/py", "/tmpfiles"]
    assert visible_folders(folders) == ["/root/py", "/tmp/clone"]


def test_hosts_are_apart(lab: Lab) -> None:
    first, second = lab.hosts.values()
    assert first.check("hostname").strip() == "h1"
    for folder in ("/tmp", "/root", "/run", "/dev/shm"):
        first.write(f"{folder}/only-here", "x")
        assert second.run("test", "-e", f"{folder}/only-here").returncode == 1
        assert not Path(folder, "only-here").exists()
    assert "only-here" in first.check("ls"), "commands begin in the host's own home"
    listen = "import socket; s = socket.create_server(('127.0.0.1', 5000)); print('up', flush=True)"
    server = first.popen("python", "-c", f"{listen}; s.accept()", stdout=subprocess.PIPE)
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        reach = ("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/5000")
        assert second.run(*reach).returncode == 1, "a loopback of its own"
        assert first.run(*reach).returncode == 0
    assert second.processes("only-second") == []
    sleeper = second.popen("sh", "-c", "sleep 60; : only-second")
    wait_until(lambda: second.processes("only-second"), 10, "the process on h2")
    assert first.processes("only-second") == []
    sleeper.kill()
    sleeper.wait()


def test_hosts_reach_each_other_by_ssh_and_nothing_else(lab: Lab) -> None:
    first, second = lab.hosts.values()
    ssh = ("ssh", "-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes", second.address)
    command = "hostname; python -c 'import overstory.workers.environment as e; print(e.__file__)'"
    name, module = first.check(*ssh, f"source ~/.bashrc; {command}").split()
    assert name == "h2"
    assert Path(module).parts[-2:] == ("workers", "environment.py")
    outside = first.run("bash", "-c", "exec 3<>/dev/tcp/192.0.2.1/80", timeout_s=20)
    assert outside.returncode == 1, "no way out"


@pytest.fixture
def needs_a_lab() -> None:
    if reason := why_no_lab():
        pytest.skip(reason)


@pytest.fixture
def interfaces() -> Iterator[None]:
    """The real machine got no interface of a lab's; others may come and go."""
    before = set(os.listdir("/sys/class/net"))
    yield
    assert not (set(os.listdir("/sys/class/net")) - before) & {"bridge", "port1", "port2"}


@pytest.mark.usefixtures("needs_a_lab", "interfaces")
def test_a_closed_lab_leaves_nothing() -> None:
    with hosts_lab("a") as lab:
        (host,) = lab.hosts.values()
        stray = host.popen("bash", "-c", "setsid sleep 1000 & setsid sleep 1000")
        wait_until(lambda: len(host.processes("sleep 1000")) >= 2, 10, "processes on the host")
        pids = lab.pids()
        assert len(pids) > 4
    assert stray.wait(10) != 0
    assert not [pid for pid in pids if lives(pid)]


@pytest.mark.usefixtures("needs_a_lab", "interfaces")
def test_a_lab_goes_with_the_process_that_made_it() -> None:
    program = (
        "import time\n"
        "from hosts_lab import hosts_lab\n"
        "with hosts_lab('a') as lab:\n"
        "    print(*lab.pids(), flush=True)\n"
        "    time.sleep(1000)\n"
    )
    folder = Path(__file__).parent
    maker = subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    with maker:
        assert maker.stdout is not None
        pids = maker.stdout.readline().split()
        assert len(pids) > 2
        maker.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(lives(int(pid)) for pid in pids), 20, "the lab to end")

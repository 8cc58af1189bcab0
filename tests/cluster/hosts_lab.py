"""Several hosts on one machine, for tests: real network namespaces and real SSH.

```
real machine: this process, its network untouched
  switch      a process in namespaces of its own, with a bridge
    h1, h2    one process each in namespaces below the switch's: network with its own loopback,
              process ids, /tmp, /root, /run, /dev/shm, host name, SSH server
```
Everything is held by processes below the switch's first one, and nothing has a name or a file
outside: killing that one ends processes, interfaces and files. The kernel kills it when this
process ends, however it ends.
"""

import contextlib
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hosts_layout import (
    NAMESPACES,
    SWITCH,
    HostPlan,
    host_plans,
    login_path,
    missing_packages,
    plug_in,
    python_folders,
    set_up_cable,
    visible_folders,
)

SCRIPT = Path(__file__).with_name("hosts_lab.sh")
START_S = 60.0
GONE_S = 20.0


class LabError(RuntimeError):
    """The lab could not be made; the message has the last words of what failed."""


def why_no_lab() -> str | None:
    """Why this machine cannot have a lab; None if it can."""
    if reason := _refusal("true"):
        return reason
    if missing := missing_packages():
        return f"needs the Debian packages {', '.join(missing)}"
    return _refusal(
        "ip link add type veth && ip link add type bridge && mount -t tmpfs own /run"
        " && mount --bind /run /mnt && echo 1 >/proc/sys/net/ipv4/ip_forward"
    )


def packages_to_install() -> list[str]:
    """Debian packages that alone keep this machine from having a lab."""
    return [] if _refusal("true") else missing_packages()


def _refusal(command: str) -> str | None:
    """Why a shell command does not work in namespaces of its own; None if it does."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("unshare") is None:
        return "needs the Debian package util-linux"
    done = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    if done.returncode == 0:
        return None
    words = done.stderr.strip() or f"exit code {done.returncode}"
    return f"network namespaces cannot be made here: {words}"


class Host:
    """One host of a running lab."""

    def __init__(self, plan: HostPlan, pid: int) -> None:
        self.name = plan.name
        self.address = plan.address
        self.pid = pid

    def popen(
        self, *command: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Starts a command there, as root in its home, with a clean environment."""
        clean = {"HOME": "/root", "USER": "root", "TERM": "dumb", "PATH": login_path()}
        variables = {**clean, "RAY_USAGE_STATS_ENABLED": "0", **(environment or {})}
        enter = ("nsenter", f"--target={self.pid}", *NAMESPACES, "--root")
        return subprocess.Popen(
            # Not nsenter's --wd: it looks for the folder before it enters.
            [
                *enter,
                "env",
                "--chdir=/root",
                "-i",
                *(f"{k}={v}" for k, v in variables.items()),
                *command,
            ],
            stdin=subprocess.DEVNULL,
            text=True,
            **options,
        )

    def run(
        self, *command: str, timeout_s: float = 60, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command there to its end; its output is captured.

        Raises:
            subprocess.TimeoutExpired: it was killed after `timeout_s`.
        """
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(*command, environment=environment, **pipes) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def check(self, *command: str, **options: Any) -> str:
        """Standard output of a command that must succeed."""
        done = self.run(*command, **options)
        assert done.returncode == 0, f"{command} on {self.name}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def processes(self, name: str = "") -> list[int]:
        """Its processes whose command line holds `name`, as the real machine counts them."""
        here = _namespace(self.pid, "pid")
        pids = [pid for pid in _all_pids() if _namespace(pid, "pid") == here]
        return [pid for pid in pids if name in _command_line(pid)]

    def write(self, path: str, text: str, mode: int = 0o600) -> None:
        """Writes a file there, making its folder."""
        file = Path(f"/proc/{self.pid}/root{path}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode)
        file.write_text(text)


class Lab:
    """A switch with hosts at it. Made by `hosts_lab`."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._switch = self._start("setpriv", "--pdeathsig", "KILL", *_unshare("switch", SWITCH))

    def add(self, plan: HostPlan) -> Host:
        """Boots a host and plugs it in."""
        enter = ("nsenter", f"--target={self._switch}", "--mount", "--net", "--pid")
        visible = visible_folders(python_folders())
        pid = self._start(*enter, *_unshare("host", plan.name, login_path(), *visible))
        _ip(self._switch, plug_in(plan, pid))
        _ip(pid, set_up_cable(plan))
        host = self.hosts[plan.name] = Host(plan, pid)
        return host

    def set_port(self, host: Host, up: bool) -> None:
        """Plugs a host's cable in at the switch, or pulls it."""
        number = int(host.address.rpartition(".")[2])
        port = HostPlan(host.name, number).port
        _ip(self._switch, f"link set {port} {'up' if up else 'down'}\n")

    def pids(self) -> list[int]:
        """Processes of the lab, as the real machine counts them."""
        firsts = [self._switch, *(host.pid for host in self.hosts.values())]
        ours = {_namespace(pid, "pid") for pid in firsts} - {None}
        return [pid for pid in _all_pids() if _namespace(pid, "pid") in ours]

    def close(self) -> None:
        """Ends every process of the lab, and with them all that it was made of.

        Raises:
            LabError: some would not go.
        """
        pids = self.pids()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(GONE_S)
        deadline = time.monotonic() + GONE_S
        while left := [pid for pid in pids if lives(pid)]:
            if time.monotonic() > deadline:
                raise LabError(f"processes of the lab that would not end: {left}")
            time.sleep(0.02)

    def _start(self, *command: str) -> int:
        """Starts a first process; its id, when it is ready."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            said = process.stdout.readline() if selector.select(START_S) else ""
        if said.strip():
            return int(said)
        process.kill()
        raise LabError(f"{command[-3:]} did not start: {process.communicate()[1].strip()}")


def _unshare(*arguments: str) -> list[str]:
    # The child's end is tied to this process's, and so to that of who started it.
    return ["unshare", *NAMESPACES, "--fork", "--kill-child", "bash", str(SCRIPT), *arguments]


def _ip(pid: int, batch: str) -> None:
    """Carries out `ip` commands in the network of a process."""
    done = subprocess.run(
        ["nsenter", f"--target={pid}", "--net", "ip", "-batch", "-"],
        input=batch,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    if done.returncode:
        raise LabError(f"ip: {done.stderr.strip()} in:\n{batch}")


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def lives(pid: int) -> bool:
    """Whether a process runs: not one that only waits to be reaped, perhaps for ever."""
    return _namespace(pid, "pid") is not None


def _namespace(pid: int, kind: str) -> str | None:
    """A name for a namespace of a process; None if the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


@contextlib.contextmanager
def hosts_lab(*names: str) -> Iterator[Lab]:
    """A lab with hosts of these names, at 10.77.0.1, .2 and so on, in their order; gone after."""
    plans = host_plans(names)
    lab = Lab()
    try:
        for plan in plans:
            lab.add(plan)
        yield lab
    finally:
        lab.close()


if __name__ == "__main__":
    print(*packages_to_install())

"""What a lab of hosts looks like: names, addresses, commands. Pure; `hosts_lab` carries it out."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

NETWORK = IPv4Network("10.77.0.0/24")
SWITCH = f"{NETWORK[254]}/{NETWORK.prefixlen}"

OWN_FOLDERS = ("/tmp", "/root")
"""Folders that every host has of its own and in which a Python or the project may lie. It has /run
and /dev/shm of its own as well."""

TOOLS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "rsync": "rsync",
}
"""Programs that a lab needs, with their Debian packages."""

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")


@dataclass(frozen=True)
class HostPlan:
    """One host: its name and its place in the network, from 1."""

    name: str
    number: int

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return str(NETWORK[self.number])

    @property
    def port(self) -> str:
        """Name of its port at the switch (an interface name may have 15 characters)."""
        return f"port{self.number}"


def host_plans(names: Sequence[str]) -> list[HostPlan]:
    """Hosts of these names.

    Raises:
        ValueError: two have one name.
    """
    if len(set(names)) != len(names):
        raise ValueError(f"hosts must have different names, got {list(names)}")
    return [HostPlan(name, number) for number, name in enumerate(names, start=1)]


def missing_packages(which: Callable[[str], str | None] = shutil.which) -> list[str]:
    """Debian packages of the tools that are not installed."""
    return sorted({package for tool, package in TOOLS.items() if which(tool) is None})


def visible_folders(folders: Iterable[str | Path]) -> list[str]:
    """Those that a host's own folders would hide, without those inside others of them."""
    real = sorted({os.path.realpath(folder) for folder in folders})
    hidden = [f for f in real if f.startswith(tuple(f"{own}/" for own in OWN_FOLDERS))]
    return [f for f in hidden if not any(f.startswith(f"{other}/") for other in hidden)]


def python_folders() -> list[str]:
    """Folders that this Python, its environment and the project live in."""
    return [sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])]


def login_path() -> str:
    """PATH of a host's shells: the environment of this Python first."""
    return f"{Path(sys.executable).parent}:{SYSTEM_PATH}"


def plug_in(host: HostPlan, pid: int) -> str:
    """`ip -batch` input, in the switch's network: a cable to the host whose first process is
    `pid`."""
    return (
        f"link add {host.port} type veth peer name eth0 netns {pid}\n"
        f"link set {host.port} master bridge up\n"
    )


def set_up_cable(host: HostPlan) -> str:
    """`ip -batch` input, in the host's network: its end of the cable."""
    gateway = SWITCH.partition("/")[0]
    return (
        f"address add {host.address}/{NETWORK.prefixlen} dev eth0\n"
        f"link set eth0 up\n"
        f"route add default via {gateway}\n"
    )

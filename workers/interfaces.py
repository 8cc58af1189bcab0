"""Which network interface the ranks of a replica meet over when they run on several nodes.

Left alone, gloo takes the address that the host's own name leads to, which on Debian is one of its
loopback, and NCCL and SGLang take the first interface they like. Ray's address of the node is the
one that the other nodes can reach.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Mapping, MutableMapping, Sequence

GLOO, NCCL, SGLANG = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SGLANG_HOST_IP"


def is_loopback(address: str) -> bool:
    """Whether an IP address, or a `host:port` with one, is of the host itself."""
    host = address.rpartition(":")[0] if address.count(":") == 1 or "]" in address else address
    return ipaddress.ip_address(host.strip("[]")).is_loopback


def addresses_by_interface() -> dict[str, list[str]]:
    """IP addresses of this host's interfaces (its network namespace's), by interface name."""
    import psutil  # A dependency of SGLang; only ranks over several nodes need it.

    return {
        name: [address.address.partition("%")[0] for address in addresses]
        for name, addresses in psutil.net_if_addrs().items()
    }


def meeting_environment(
    node_address: str, interfaces: Mapping[str, Sequence[str]], environ: Mapping[str, str]
) -> dict[str, str]:
    """Environment variables that make gloo, NCCL and SGLang meet at this node's address.

    What the user has set on this node stands and is not in the result.

    Args:
        node_address: Ray's address of this node.
        interfaces: addresses by interface name.
        environ: as it is.

    Raises:
        ValueError: no interface has the address and the user has not named one.
    """
    wanted = {SGLANG: node_address}
    if GLOO not in environ or NCCL not in environ:
        name = next((name for name, have in interfaces.items() if node_address in have), None)
        if name is None:
            listed = ", ".join(f"{name} {' '.join(have)}" for name, have in interfaces.items())
            raise ValueError(
                f"Ray knows this node as {node_address}, but none of its interfaces has that "
                f"address ({listed}): start Ray here with `--node-ip-address=` one that the "
                f"other nodes reach, or name the interface in {GLOO} and {NCCL} before that"
            )
        wanted |= {GLOO: name, NCCL: f"={name}"}  # NCCL takes a bare name for a prefix.
    return {key: value for key, value in wanted.items() if key not in environ}


def meet_over_network(node_address: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets `meeting_environment` for this process; before its first process group."""
    environ.update(meeting_environment(node_address, addresses_by_interface(), environ))


def meet_nccl_over_network(
    node_address: str, environ: MutableMapping[str, str] = os.environ
) -> None:
    """As `meet_over_network`, for NCCL alone, which looks once in a process, at its first use.

    Left to NCCL where Ray knows the node by a loopback address or by one of no interface.
    """
    if NCCL in environ or is_loopback(node_address):
        return
    with contextlib.suppress(ValueError):
        found = meeting_environment(node_address, addresses_by_interface(), environ)
        environ[NCCL] = found[NCCL]

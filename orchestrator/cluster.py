"""Which Ray to use, and what its nodes offer. A Ray that is not ours is only connected to."""

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.inventory import NodeInventory
from overstory.orchestrator.local_ray import auth_environment
from overstory.orchestrator.state import LocalRayRecord

STARTED_RAY_FILE = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` (and `ray up` through it) leaves the address of the Ray on this machine."""

CONNECT_TIMEOUT_S = 3.0


class ClusterError(UserFault, RuntimeError):
    """No usable Ray, with what was tried and what to do."""


@dataclass(frozen=True)
class Cluster:
    """A Ray to use. `origin` says why this one."""

    address: str
    origin: Literal["RAY_ADDRESS", "ray start", "own"]

    def describe(self) -> str:
        """For the user."""
        match self.origin:
            case "RAY_ADDRESS":
                return f"Ray at {self.address} (RAY_ADDRESS)"
            case "ray start":
                return f"Ray at {self.address} (running on this machine)"
        return f"a local Ray of our own at {self.address}"


def reachable(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """Whether something listens at `host:port`."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except (OSError, ValueError):
        return False


def find_cluster(
    local_ray: LocalRayRecord | None = None,
    environ: Mapping[str, str] = os.environ,
    started_file: Path = STARTED_RAY_FILE,
) -> Cluster | None:
    """The Ray to use: `RAY_ADDRESS`, else the one that `ray start` left, else our own if it runs.

    Returns None where a local one has to be started. What a Ray that is gone left counts as none.

    Raises:
        ClusterError: `RAY_ADDRESS` is set but nothing answers there.
    """
    wanted = environ.get("RAY_ADDRESS", "")
    if wanted and wanted not in ("auto", "local"):
        if not reachable(wanted):
            raise ClusterError(
                f"RAY_ADDRESS is {wanted!r} but nothing answers there; start that Ray, correct the "
                "address, or unset RAY_ADDRESS"
            )
        return Cluster(wanted, "RAY_ADDRESS")
    left = started_file.read_text().strip() if started_file.exists() else ""
    if left and reachable(left):
        return Cluster(left, "ray start")
    if local_ray is not None and reachable(local_ray.address):
        return Cluster(local_ray.address, "own")
    return None


def _authenticate(address: str, own: LocalRayRecord | None) -> None:
    """Sets the token to use: ours for our own Ray; the user's for one that `ray start` left here,
    which took it into use by itself. Elsewhere the user's own settings stand.
    """
    from ray._private.authentication import authentication_token_setup as setup
    from ray._raylet import AuthenticationTokenLoader, Config

    if own is not None and own.address == address:
        os.environ.update(auth_environment(own.folder))
        Config.initialize("")  # Ray reads its configuration once; this reads it anew.
        AuthenticationTokenLoader.instance().reset_cache()
    elif not os.environ.get("RAY_ADDRESS"):
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def connect(address: str, own: LocalRayRecord | None) -> None:
    """Makes this process a driver of the Ray at `address`; fine if it is one already.

    Args:
        address: of the Ray.
        own: our local Ray, if there is one.

    Raises:
        ClusterError: it does not let us in (another Ray or Python version, no token, ...).
    """
    import ray

    if ray.is_initialized():
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    _authenticate(address, own)
    try:
        ray.init(
            address=address,
            namespace="overstory",
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
        )
    except Exception as error:
        raise ClusterError(
            f"Ray at {address} cannot be joined: {type(error).__name__}: {error}; it must be of "
            "the same Ray and Python version, and if it asks for a token (`ray get-auth-token`), "
            "RAY_AUTH_MODE=token must be set"
        ) from error


def disconnect() -> None:
    """Leaves the Ray this process is connected to, if any."""
    import ray

    ray.shutdown()


def ray_inventory() -> list[NodeInventory]:
    """What the living nodes of the connected Ray have left for new work, head node first.

    GPU memory is unknown to Ray and stays 0 for nodes other than this machine.
    """
    import ray

    free = ray._private.state.available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda node: "node:__internal_head__" not in node["Resources"])
    return [_inventory(node, free.get(node["NodeID"], {})) for node in nodes]


def _inventory(node: Mapping[str, Any], free: Mapping[str, float]) -> NodeInventory:
    return NodeInventory(
        name=node["NodeManagerHostname"],
        cpus=free.get("CPU", 0.0),
        gpus=free.get("GPU", 0.0),
        memory=float(node["Resources"].get("memory", 0.0)),
        node_id=node["NodeID"],
    )

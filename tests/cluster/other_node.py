"""A driver for a lab's host: what is on which node of the Ray there. Prints one line of JSON.

python other_node.py seam ADDRESS    the seam as an actor on the node at ADDRESS finds it
python other_node.py left            named actors and placement groups
python other_node.py nodes COUNT     addresses of the living nodes, once there are so many
"""

import json
import os
import socket
import sys
from typing import Any

import ray
from leftovers import placement_groups, wait_until
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from overstory.orchestrator.cluster import connect, find_cluster


class SeamProbe:
    """Prepares its process as a rank does."""

    def look(self) -> dict[str, Any]:
        from overstory.workers.environment import prepare_process

        prepare_process("cpu")
        from sglang.srt.plugins import load_plugins

        from overstory.workers.seam import plugin

        load_plugins()
        plugin.verify_installed()
        return {
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "seam": plugin.report(),
        }


def seam(address: str) -> dict[str, Any]:
    (node,) = (n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == address)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    probe = ray.remote(SeamProbe).options(num_cpus=0, scheduling_strategy=strategy)
    return ray.get(probe.remote().look.remote())


def nodes(count: str) -> list[str]:
    def living() -> list[str]:
        return sorted(n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"])

    wait_until(lambda: len(living()) >= int(count), 120, f"{count} nodes")
    return living()


def left() -> dict[str, Any]:
    return {
        "actors": ray.util.list_named_actors(all_namespaces=True),
        "placement_groups": placement_groups(),
    }


def main(what: str, *arguments: str) -> None:
    cluster = find_cluster()
    assert cluster is not None, "no Ray on this host"
    connect(cluster.address, None)
    print(json.dumps({"seam": seam, "left": left, "nodes": nodes}[what](*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])

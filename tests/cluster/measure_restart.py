"""Restart, other numbers of replicas and a crash under continuous load, measured.

`.venv/bin/python tests/cluster/measure_restart.py --json docs/benchmarks/restart.json`
"""

import argparse
import json
import tempfile
from pathlib import Path

from test_restart_load import Deployed, measure

from overstory.orchestrator.host_facts import host_facts


def main() -> None:
    """Deploys, measures, takes all away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16)
    given = parser.parse_args()
    host = host_facts()
    with tempfile.TemporaryDirectory() as folder:
        deployed = Deployed(Path(folder))
        try:
            measured = measure(deployed, given.replicas, given.clients)
        finally:
            deployed.down()
    where = {
        "host": host,
        "model": "overstory-tiny on a CPU, fp32, one rank a replica, trees of 15 nodes",
    }
    given.json.write_text(json.dumps(where | measured, indent=1) + "\n")


if __name__ == "__main__":
    main()

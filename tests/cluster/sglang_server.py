"""A program: SGLang's own HTTP server with the engine that a deployment's replicas have.

Usage: sglang_server.py DEVICE THREADS PORT FIELDS, the last one JSON of ServerArgs. The rank gate,
leases and Ray are not in it; DDTREE and what SGLang needs on a CPU are (the plugin brings them).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from overstory.workers.environment import prepare_process

_OURS_ALONE = ("skip_tokenizer_init", "incremental_streaming_output")


def main(port: int, fields: dict[str, Any]) -> None:
    """Serves until it is killed."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    own = {name: value for name, value in fields.items() if name not in _OURS_ALONE}
    launch_server(ServerArgs(**own, host="127.0.0.1", port=port, log_level="warning"))


if __name__ == "__main__":
    device, threads, port, fields = sys.argv[1:]
    prepare_process(device, int(threads))
    main(int(port), json.loads(fields))

"""The committed table of server arguments is that of the installed SGLang."""

import json

from overstory.orchestrator.engine_args_table import TABLE_PATH, describe_server_args
from overstory.workers.environment import prepare_process


def test_table_matches_server_args() -> None:
    prepare_process("cpu")
    committed = json.loads(TABLE_PATH.read_text())
    described = json.loads(json.dumps(describe_server_args()))
    assert described["sglang"] == committed["sglang"]
    assert described["fields"].keys() == committed["fields"].keys()
    changed = [k for k, row in described["fields"].items() if row != committed["fields"][k]]
    assert changed == [], "run `python -m overstory.orchestrator.engine_args_table`"

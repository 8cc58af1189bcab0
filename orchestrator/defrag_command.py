"""`overstory defrag`: passes now, or only the plan."""

import json

from overstory.orchestrator.control import ask_controller, connected
from overstory.orchestrator.defrag import DefragOrder
from overstory.orchestrator.defrag_text import render_defrag

ANSWER_S = 60.0
"""Longest that a pass with its picture may take, of each replica."""


def defrag(name: str | None, order: DefragOrder, replica: str | None, as_json: bool) -> None:
    """Lets the controller do it and prints what came of it.

    Raises:
        ControlError: no controller, no answer in time, or its refusal with the reason.
    """
    with connected(name) as record:
        timeout_s = ANSWER_S * (order.passes + 1)
        done = ask_controller(record.name, "defrag", order, replica, timeout_s=timeout_s)
        print(json.dumps(done, indent=1) if as_json else render_defrag(done, order.dry_run))

"""How Serve routes to our replicas: by prefix or session within a bound on load where that is set,
else of two at random the shorter queue; none that is known bad.

Serve makes a router in every process that holds a handle; it is Serve's own "power of two choices"
with an eye on the process's `ReplicaBoard`, which it also feeds: which replicas run, and which one
a call went to. Serve itself tells user code neither.

Serve pickles this module's class by value, with all it refers to here: nothing that is to be one
per process may live in this module.
"""

import random
from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from overstory.orchestrator.affinity import Routing, affinity_of
from overstory.orchestrator.replica_board import board_of

ROUTER = f"{__name__}:BoardRouter"
"""Import path for `RequestRouterConfig`."""


class BoardRouter(PowerOfTwoChoicesRequestRouter):
    """Told by Serve; runs on Serve's router loop."""

    def initialize_state(self, routing: Routing = "least_loaded", **_: Any) -> None:
        """Serve hands over `request_router_kwargs`."""
        affinity_of(self.app_name, routing)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """At most two of those that are not shunned; Serve tries again where there is none."""
        if pending_request is not None:  # Without it, Serve asks again and again without a pause.
            pending_request.routing_context.should_backoff = True
        board = board_of(self.app_name)
        usable = [one for one in candidate_replicas if board.usable(one.replica_id.unique_id)]
        if not usable:
            return []
        call = _call(pending_request)
        if call is not None:
            by_name = {one.replica_id.unique_id: one for one in usable}
            wanted = affinity_of(self.app_name).prefers(
                call.input_ids, call.session, board.loads(), by_name
            )
            if wanted is not None:
                board.chosen(call.rid, wanted)
                return [[by_name[wanted]]]
        return [random.sample(usable, min(2, len(usable)))]

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve's news of which replicas run."""
        super().update_replicas(replicas)
        names = [one.replica_id.unique_id for one in replicas]
        board_of(self.app_name).update(names)
        affinity_of(self.app_name).keep(names)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Serve has sent a request."""
        super().on_request_routed(pending_request, replica_id, result)
        call = _call(pending_request)
        if call is not None:
            board_of(self.app_name).routed(call.rid, replica_id.unique_id)
            affinity_of(self.app_name).routed(call.input_ids, call.session, replica_id.unique_id)


def _call(pending_request: Any) -> Any | None:
    """The `GenerateCall` that waits to be routed; None where it is another call."""
    arguments = pending_request.args if pending_request is not None else ()
    return arguments[0] if arguments and hasattr(arguments[0], "input_ids") else None

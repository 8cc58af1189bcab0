"""How Serve routes to our replicas: of two at random the shorter queue, none that is known bad.

Serve makes a router in every process that holds a handle; it is Serve's own "power of two choices"
with an eye on the process's `ReplicaBoard`, which it also feeds: which replicas run, and which one
a call went to. Serve itself tells user code neither.

Serve pickles this module's class by value, with all it refers to here: nothing that is to be one
per process may live in this module.
"""

import random
from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from overstory.orchestrator.replica_board import board_of

ROUTER = f"{__name__}:BoardRouter"
"""Import path for `RequestRouterConfig`."""


class BoardRouter(PowerOfTwoChoicesRequestRouter):
    """Told by Serve; runs on Serve's router loop."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """At most two of those that are not shunned; Serve tries again where there is none."""
        if pending_request is not None:  # Without it, Serve asks again and again without a pause.
            pending_request.routing_context.should_backoff = True
        board = board_of(self.app_name)
        usable = [one for one in candidate_replicas if board.usable(one.replica_id.unique_id)]
        return [random.sample(usable, min(2, len(usable)))] if usable else []

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve's news of which replicas run."""
        super().update_replicas(replicas)
        board_of(self.app_name).update([one.replica_id.unique_id for one in replicas])

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Serve has sent a request."""
        super().on_request_routed(pending_request, replica_id, result)
        rid = getattr(pending_request.args[0], "rid", None) if pending_request.args else None
        if rid is not None:
            board_of(self.app_name).routed(rid, replica_id.unique_id)

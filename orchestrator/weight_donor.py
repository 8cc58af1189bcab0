"""Weights from a live replica: which one, and how its ranks meet those that start."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import ray

from overstory.orchestrator.controller_actor import find_controller
from overstory.orchestrator.rank_group import CONTROL, NAMESPACE, call, rank_name

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
MEET_S = 20.0
TRANSFER_S = 180.0


class Donor:
    """A replica that gives its weights to the ranks of a new one.

    Args:
        deployment: of both.
        replica: the one that gives.
    """

    def __init__(self, deployment: str, replica: str) -> None:
        self.replica = replica
        self._deployment = deployment
        self._name = ""
        self._givers: list[Any] = []

    def meet(self, takers: Sequence[Any]) -> str:
        """Rank i with rank i. Returns the communicators' name; empty, with a line in the log, if
        they do not come together."""
        name = f"weights-{self.replica}-{uuid.uuid4().hex[:8]}"
        try:
            self._givers = [
                ray.get_actor(rank_name(self._deployment, self.replica, rank), NAMESPACE)
                for rank in range(len(takers))
            ]
            kind = ray.get(call(self._givers[0], CONTROL, "peer", "kind"), timeout=ANSWER_S)
            self._name = name  # From now on there is something to close.
            tickets = ray.get(
                [call(giver, CONTROL, "peer", "offer", name) for giver in self._givers],
                timeout=ANSWER_S,
            )
            calls = [
                call(actor, CONTROL, "peer", "open", name, kind, ticket, MEET_S, TRANSFER_S)
                for giver, taker, given in zip(self._givers, takers, tickets, strict=True)
                for actor, ticket in ((giver, None), (taker, given))
            ]
            ray.get(calls, timeout=MEET_S + ANSWER_S)
        except Exception as error:  # Disk is as good.
            logger.warning(
                "weights come from disk, replica %s cannot give: %s", self.replica, error
            )
            self.part()
            return ""
        return name

    def part(self) -> None:
        """The giving ranks close; those that took have."""
        name, self._name = self._name, ""
        if name:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                ray.get(
                    [call(giver, CONTROL, "peer", "close", name) for giver in self._givers],
                    timeout=ANSWER_S,
                )


def find_donor(deployment: str) -> Donor | None:
    """A replica that serves and stays; else one that goes; None if there is none, or nobody to
    ask."""
    controller = find_controller(deployment)
    if controller is None:
        return None
    try:
        replica = ray.get(controller.donor.remote(), timeout=ANSWER_S)
    except (ray.exceptions.RayError, TimeoutError):
        return None
    return Donor(deployment, replica) if replica else None

"""Keeps the controller's fleet true: takes in what replicas say, looks whether their processes are
there, and has Serve stop starting what was given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from overstory.orchestrator.fleet import Fleet
from overstory.orchestrator.replica_health import HealthLimits

logger = logging.getLogger(__name__)

LOOK_S = 2.0


class FleetWatch:
    """Belongs to one event loop.

    Args:
        fleet: what is known.
        actors: names of all actors that Ray knows.
        serve_view: names of the replicas that Serve is taking out, and how many it wants (None
            where it does not say).
        drop_replica: has Serve want one replica fewer.
    """

    def __init__(
        self,
        fleet: Fleet,
        actors: Callable[[], Awaitable[Collection[str]]],
        serve_view: Callable[[], Awaitable[tuple[Collection[str], int | None]]],
        drop_replica: Callable[[], Awaitable[None]],
    ) -> None:
        self.fleet = fleet
        self._actors = actors
        self._serve_view = serve_view
        self._drop_replica = drop_replica
        self._too_many = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # Ray's own store may be away for a moment: look again later.
                logger.exception("looking after replicas failed")

    async def look(self) -> None:
        """One look; what Serve could not be told before is told now."""
        actors = await self._actors()
        self._give_up(self.fleet.look(actors, *await self._serve_view()))
        while self._too_many:
            await self._drop_replica()
            self._too_many = max(0, self._too_many - 1)

    def event(self, event: str, name: str, actor: str, limits: HealthLimits, detail: Any) -> None:
        """What a replica says, see `Herald`.

        Raises:
            GivenUp: it says that it has begun, and may not.
        """
        match event:
            case "begun":
                self.fleet.begun(name, actor, limits)
            case "said":
                self.fleet.said(name, actor, limits, detail)
            case "draining":
                self.fleet.draining(name, str(detail))
            case "ended":
                self.fleet.ended(name)
            case "died":
                self._give_up(int(self.fleet.died(name, str(detail))))
            case _:
                raise ValueError(f"unknown event {event!r} of replica {name}")

    def asked_for(self, replicas: int) -> None:
        """See `Fleet.asked_for`; a verdict that Serve has not heard yet is void."""
        self._too_many = 0
        self.fleet.asked_for(replicas)

    def _give_up(self, replicas: int) -> None:
        if replicas:
            logger.error("%d replicas are given up: %s", replicas, self.fleet.given_up())
            self._too_many += replicas

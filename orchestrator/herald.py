"""What a replica tells the controller about itself: begun, how it stands, drains, ended, died.

Nothing here waits for long or fails: a replica serves without a controller too. Only a controller
that has given the replica up keeps it from starting.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import ray
from ray.exceptions import RayError

from overstory.orchestrator.controller_actor import find_controller
from overstory.orchestrator.fleet import GivenUp
from overstory.orchestrator.replica_health import HealthLimits

logger = logging.getLogger(__name__)

ASK_S = 5.0
"""For leave to start, and for last words to leave the process."""
LOOK_EVERY = 15
"""Words after which the controller is looked for by its name again: another may have taken its
place, and nobody reads the answers to these words."""


class Herald:
    """Speaks for one replica's process.

    Args:
        deployment: its name.
        replica: name of this process.
        limits: of its health.
    """

    def __init__(self, deployment: str, replica: str, limits: HealthLimits) -> None:
        self._deployment = deployment
        self._replica = replica
        self._limits = limits
        self._actor = ray.get_runtime_context().get_actor_name() or ""
        self._controller: Any = None
        self._words = 0

    def begun(self) -> None:
        """Asks for leave to start.

        Raises:
            GivenUp: the restart budget of the replica that this one replaces is spent.
        """
        try:
            self._say("begun", wait=True)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, GivenUp):
                raise error.cause from None
            logger.warning("the controller could not take in a new replica: %s", error)

    def stands(self, word: dict[str, Any]) -> None:
        """Its regular word, see `Fleet.said`."""
        self._words += 1
        if self._words % LOOK_EVERY == 0:
            self._controller = None
        self._say("said", word)

    def draining(self, why: str) -> None:
        """It takes nothing new."""
        self._say("draining", why)

    def ended(self) -> None:
        """It was told to end."""
        self._say("ended", wait=True)

    def died(self, cause: str) -> None:
        """It ends by itself; the first line of `cause` goes into the status."""
        self._say("died", cause, wait=True)

    def _say(self, event: str, detail: Any = None, wait: bool = False) -> None:
        if self._controller is None:
            self._controller = self._find()
        if self._controller is None:
            return
        try:
            said = self._controller.replica_event.remote(
                event, self._replica, self._actor, self._limits, detail
            )
            if wait:
                ray.get(said, timeout=ASK_S)
        except ray.exceptions.RayTaskError:
            if event == "begun":
                raise
            logger.exception("the controller did not take in: %s", event)
        except (RayError, TimeoutError):  # It may be restarting; the next one is looked for.
            self._controller = None

    def _find(self) -> Any:
        with contextlib.suppress(RayError, TimeoutError):
            return find_controller(self._deployment)
        return None

"""A replica's part in handing KV over: it fetches that of sequences that come from one that goes,
and stays until its own has been fetched when it goes itself."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from overstory.orchestrator.controller_actor import find_controller
from overstory.orchestrator.departures import Departures
from overstory.orchestrator.handoff import BRING_S, Text
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.rank_group import CONTROL, call

logger = logging.getLogger(__name__)

STAY_S = 8.0
"""Longest stay. With `replica_board.DRAIN_S` less than Serve's limit for a graceful end."""
_LOOK_S = 0.1
_ANSWER_S = 2.0
_PART_S = 1.0


class ReplicaHandOff:
    """One replica's.

    Args:
        deployment: its name.
        replica: this one's name.
        on: whether KV is handed over at all.
        least_tokens: shorter sequences are computed again.
        rank_0: this replica's rank actor.
    """

    def __init__(
        self, deployment: str, replica: str, on: bool, least_tokens: int, rank_0: Any
    ) -> None:
        self._deployment, self._replica = deployment, replica
        self._on, self._least_tokens, self._rank_0 = on, least_tokens, rank_0
        self._departures = Departures(least_tokens, time.monotonic)

    async def bring(self, request: GenerateCall) -> None:
        """Before the engine gets it: its KV from where it was, if there is any to be had. Never
        fails the request."""
        if not self._on or request.kv_at is None or len(request.input_ids) < self._least_tokens:
            return
        giver, rid = request.kv_at
        begun = time.monotonic()
        try:
            async with asyncio.timeout(BRING_S):
                controller = await asyncio.to_thread(find_controller, self._deployment)
                if controller is None:
                    return
                text = Text(rid, tuple(request.input_ids))
                tokens = await controller.hand_off.remote(giver, self._replica, text)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                raise
            why = str(getattr(error, "cause", None) or error) or type(error).__name__
            logger.warning("request %s is computed again: %s", request.rid, why.splitlines()[-1])
            return
        logger.info(
            "request %s: KV of %d of its %d tokens came from replica %s in %.2f s",
            request.rid,
            tokens,
            len(request.input_ids),
            giver,
            time.monotonic() - begun,
        )

    def left(self, rid: str, tokens: int) -> None:
        """A sequence of so many tokens went before its end: another replica may ask for its KV."""
        if self._on:
            self._departures.left(rid, tokens)

    def stay(self) -> None:
        """Before the end of this replica: blocks while its KV is fetched, or may be soon, and until
        its ranks have parted from others."""
        if self._on:
            self._await_fetching()
            self._part()

    def _await_fetching(self) -> None:
        deadline = time.monotonic() + STAY_S
        while time.monotonic() < deadline:
            asked = call(self._rank_0, CONTROL, "peer", "outgoing")
            try:
                outgoing = ray.get(asked, timeout=_ANSWER_S)
            except GetTimeoutError:
                continue  # A machine with too much to do; it may hold all the same.
            except RayError:
                return
            if not outgoing["holding"] and not self._departures.awaited(outgoing["fetched"]):
                return
            time.sleep(_LOOK_S)

    def _part(self) -> None:
        """Others would stand still for a peer whose process is gone."""
        try:
            controller = find_controller(self._deployment)
            if controller is not None:
                ray.get(controller.part.remote(self._replica), timeout=_PART_S)
        except (RayError, TimeoutError) as error:
            logger.warning("ranks end before they have parted from others: %s", error)

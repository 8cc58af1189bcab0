"""A gateway's part in handing KV over: before its calls leave a replica that is to go, the ranks of
that one meet those of the others, while it still brings tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from overstory.orchestrator.controller_actor import find_controller
from overstory.orchestrator.replica_board import PREPARE_S, ReplicaBoard

logger = logging.getLogger(__name__)


class MeetingsAhead:
    """Of one gateway process.

    Args:
        deployment: its name.
        board: whose calls wait for it.
    """

    def __init__(self, deployment: str, board: ReplicaBoard) -> None:
        self._deployment, self._board = deployment, board
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """From now on, on the running event loop."""
        loop = asyncio.get_running_loop()

        def start(giver: str, takers: list[str]) -> None:
            task = loop.create_task(self._meet(giver, takers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        def leaving(giver: str, takers: list[str]) -> None:
            with contextlib.suppress(RuntimeError):  # The gateway has ended.
                loop.call_soon_threadsafe(start, giver, takers)

        self._board.before_leaving = leaving

    async def _meet(self, giver: str, takers: list[str]) -> None:
        """Whatever happens, the calls leave after it."""
        try:
            async with asyncio.timeout(PREPARE_S):
                controller = await asyncio.to_thread(find_controller, self._deployment)
                if controller is not None:
                    await controller.meet_ahead.remote(giver, takers)
        except Exception as error:
            why = str(error) or type(error).__name__
            logger.warning("ranks of replica %s do not meet ahead: %s", giver, why)
        finally:
            self._board.may_leave(giver)

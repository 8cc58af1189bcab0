"""Finds rank actors by name and calls their control side. The controller's only way to Ray."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import ray

from overstory.orchestrator.rank_group import CONTROL, NAMESPACE, call, rank_name

LIST_TIMEOUT_S = 10.0


class RankGone(RuntimeError):
    """The rank's process is gone (or its node): nothing more will come from it."""


class RankDirectory:
    """The ranks of one deployment.

    Args:
        deployment: its name.
    """

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._actors: dict[tuple[str, int], Any] = {}

    async def replicas(self) -> dict[str, int]:
        """Number of ranks by replica, for all whose ranks' names stand without a gap."""
        names = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        pattern = re.compile(rf"overstory/{re.escape(self._deployment)}/(.+)/rank-(\d+)")
        ranks: dict[str, set[int]] = {}
        for entry in names:
            found = pattern.fullmatch(entry["name"])
            if found and entry["namespace"] == NAMESPACE:
                ranks.setdefault(found[1], set()).add(int(found[2]))
        return {name: len(some) for name, some in ranks.items() if some == set(range(len(some)))}

    async def call(
        self, replica: str, rank: int, method: str, *arguments: Any, timeout_s: float
    ) -> Any:
        """Calls a control method of a rank.

        Raises:
            RankGone: there is no such rank any more.
            TimeoutError: no answer in time, or no way to the rank at the moment; it may be busy,
                stopped or cut off. Whether the call took effect is unknown.
            Exception: whatever the method itself raises.
        """
        name = rank_name(self._deployment, replica, rank)
        try:
            actor = await self._actor(replica, rank)
            async with asyncio.timeout(timeout_s):  # wait_for of 3.11 can swallow a cancellation.
                return await call(actor, CONTROL, method, *arguments)
        except ray.exceptions.ActorUnavailableError as error:  # Ray: it may come back.
            raise TimeoutError(f"{name} cannot be reached at the moment ({method})") from error
        except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError) as error:
            raise RankGone(f"{name} is gone") from error
        except TimeoutError as error:
            raise TimeoutError(f"{name} did not answer {method} in {timeout_s:.0f} s") from error

    def forget(self, replica: str) -> None:
        """Drops the handles of a replica."""
        self._actors = {key: actor for key, actor in self._actors.items() if key[0] != replica}

    async def _actor(self, replica: str, rank: int) -> Any:
        key = (replica, rank)
        if key not in self._actors:
            name = rank_name(self._deployment, replica, rank)
            try:
                self._actors[key] = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            except ValueError as error:
                raise RankGone(f"{name} is gone") from error
        return self._actors[key]

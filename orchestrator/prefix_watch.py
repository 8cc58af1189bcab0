"""Asks replicas, every so often, what their prefix caches hold, for a gateway's routing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from overstory.orchestrator.affinity import Affinity

if TYPE_CHECKING:
    from overstory.workers.prefix_report import PrefixReport, Version

logger = logging.getLogger(__name__)

EVERY_S = 2.0
ANSWER_S = 5.0


class Directory(Protocol):
    """Of `RankDirectory` what is needed here."""

    async def replicas(self) -> dict[str, int]:
        """Number of ranks by replica."""
        ...

    async def call(
        self, replica: str, rank: int, method: str, known: Version | None, *, timeout_s: float
    ) -> PrefixReport | None:
        """Calls a method of a rank."""
        ...


class PrefixWatch:
    """Keeps an `Affinity` told. A replica that does not answer counts as one that never reported.

    Args:
        directory: the replicas' ranks.
        affinity: the one in force; it may become another one.
    """

    def __init__(self, directory: Directory, affinity: Callable[[], Affinity]) -> None:
        self._directory = directory
        self._affinity = affinity
        self._told: Affinity | None = None
        self._versions: dict[str, Version] = {}

    async def run(self, every_s: float = EVERY_S) -> None:
        """Until it is cancelled. An error is logged once and costs that look alone."""
        complained = False
        while True:
            try:
                await self.look()
            except Exception:
                if not complained:
                    logger.exception("prefix caches could not be looked at")
                complained = True
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Asks every replica once."""
        affinity = self._affinity()
        if not affinity.wants_reports:
            return
        if affinity is not self._told:
            self._told, self._versions = affinity, {}
        names = list(await self._directory.replicas())
        reporting = await asyncio.gather(*(self._ask(affinity, name) for name in names))
        affinity.silent([name for name, does in zip(names, reporting, strict=True) if does])

    async def _ask(self, affinity: Affinity, name: str) -> bool:
        """Whether the replica's report stands."""
        known = self._versions.get(name)
        try:
            report = await self._directory.call(name, 0, "prefixes", known, timeout_s=ANSWER_S)
        except Exception as error:
            logger.debug("%s does not say what its prefix cache holds: %s", name, error)
            self._versions.pop(name, None)
            return False
        if report is None:
            return known is not None
        if report.hashes is None:
            return False
        affinity.reported(name, report.hashes)
        self._versions[name] = report.version
        return True

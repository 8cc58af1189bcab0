"""A replica as Serve sees it: one engine over its ranks, token ids in and out.

Serve places it (bundle 0 of its placement group holds the front half and rank 0), asks after its
health and starts a new one when it ends. At the first rank lost, requests in flight fail with the
cause and the process ends itself.
"""

import logging
import os
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.generation import TokenChunk
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.launch import launch_engine
from overstory.orchestrator.replica_setup import engine_limits, rank_plan
from overstory.orchestrator.spec import DeploymentSpec
from ray import serve

logger = logging.getLogger(__name__)

EXIT_ENGINE_LOST = 70
"""Exit code of a replica whose engine has died (EX_SOFTWARE of sysexits.h)."""

_LAST_WORDS_S = 1.0  # for the failed requests' errors and this check's to leave the process


class Replica:
    """A plain class that `app` makes a Serve deployment. Raises what `launch_engine` raises when
    the engine does not come up."""

    def __init__(self, spec: DeploymentSpec, nodes: int = 1) -> None:
        replica = serve.get_replica_context().replica_id.unique_id
        settings = resolve_engine(spec)
        self._engine = launch_engine(rank_plan(spec, replica, nodes), settings.server_args)
        self._limits = engine_limits(
            self._engine._scheduler_init_result.scheduler_infos[0],
            self._engine.server_args.page_size,
        )
        self._ending = False

    async def generate(self, call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        """Tokens as the engine commits them; a cancelled call aborts in the engine.

        Raises:
            RequestRefused, EngineBusy, EngineDead: see `engine_errors`.
        """
        steps = cast(
            AsyncGenerator[dict[str, Any], None],
            self._engine.generate_ids(call.input_ids, call.sampling.engine_params(), call.rid),
        )
        async with aclosing(steps):
            async for step in steps:
                yield TokenChunk(step["token_ids"], step["finish_reason"])

    async def limits(self) -> dict[str, int]:
        """See `engine_limits`."""
        return self._limits

    async def stats(self) -> dict[str, Any]:
        """`running`: requests that the engine has accepted and not finished."""
        return {"running": self._engine.running()}

    def check_health(self) -> None:
        """Asked by Serve every few seconds.

        Raises: RuntimeError: the engine is gone; the process ends itself a moment later, for Serve
            to replace it.
        """
        death = self._engine.death
        if death is None:
            return
        if not self._ending:
            self._ending = True
            self._engine.shutdown()
            threading.Timer(_LAST_WORDS_S, os._exit, (EXIT_ENGINE_LOST,)).start()
        raise RuntimeError(str(death))

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()

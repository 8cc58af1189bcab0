"""A replica as Serve sees it: one engine over its ranks, token ids in and out.

Serve places it (bundle 0 of its placement group holds the front half and rank 0), asks after its
health and starts a new one when it ends. At the first rank lost, and when work stands still,
requests in flight fail with the cause and the process ends itself.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast

from ray import serve
from ray.exceptions import RayError

from overstory.orchestrator.controller_actor import find_controller
from overstory.orchestrator.engine_errors import EngineDead, RankDeath
from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.generation import TokenChunk, TokenLogprobs, held_together
from overstory.orchestrator.health import ProgressJudge
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.launch import launch_engine
from overstory.orchestrator.rank_group import CONTROL, call
from overstory.orchestrator.replica_setup import engine_limits, rank_plan, stall_limit_s
from overstory.orchestrator.spec import DeploymentSpec

logger = logging.getLogger(__name__)

EXIT_ENGINE_LOST = 70
"""Exit code of a replica whose engine has died or stalled (EX_SOFTWARE of sysexits.h)."""

_LAST_WORDS_S = 1.0  # for the failed requests' errors and this check's to leave the process
_ANSWER_S = 5.0  # a rank's control side answers in milliseconds, also while its loop runs
_SILENCE_S = 3600.0  # the rank group itself ends ranks that do not answer


class Replica:
    """A plain class that `app` makes a Serve deployment. Raises what `launch_engine` raises when
    the engine does not come up."""

    def __init__(self, spec: DeploymentSpec, nodes: int = 1) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        settings = resolve_engine(spec)
        self._engine = launch_engine(rank_plan(spec, name, nodes), settings.server_args)
        self._limits = engine_limits(
            self._engine.scheduler_info, self._engine.server_args.page_size
        )
        self._judge = ProgressJudge(stall_limit_s(spec), _SILENCE_S, time.monotonic())
        self._ending = threading.Event()
        _register(spec, name)

    async def generate(self, request: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        """Tokens as the engine commits them; a cancelled call aborts in the engine.

        Raises:
            RequestRefused, EngineBusy, EngineDead: see `engine_errors`.
        """
        steps = cast(
            AsyncGenerator[dict[str, Any], None],
            self._engine.generate_ids(
                request.input_ids,
                request.sampling.engine_params(),
                request.rid,
                return_logprob=request.logprobs is not None,
                top_logprobs_num=request.logprobs or 0,
            ),
        )
        async with aclosing(steps):
            chunks = (_chunk(step) async for step in steps)
            async for chunk in held_together(chunks, request.hold_s, time.monotonic):
                yield chunk

    async def limits(self) -> dict[str, int]:
        """See `engine_limits`."""
        return self._limits

    async def stats(self) -> dict[str, Any]:
        """`running`: requests that the front half has accepted and not finished; `load`: what rank
        0's scheduler has in hand (`running`, `waiting`, and of its KV slots `free_slots`,
        `cached_slots`, `max_slots`)."""
        async with asyncio.timeout(_ANSWER_S):
            report = await call(self._engine.group.actors[0], CONTROL, "report")
        return {"running": self._engine.running(), "load": report["load"]}

    async def check_health(self) -> None:
        """Asked by Serve every few seconds.

        Raises:
            EngineDead: the engine is gone or stands still with work in hand; the process ends
                itself a moment later, for Serve to replace it.
        """
        death = self._engine.death or await self._stalled()
        if death is None:
            return
        self._end()
        raise EngineDead(death)

    async def _stalled(self) -> RankDeath | None:
        """Judged by rank 0's count of batches and by the requests that the front half waits for, so
        that a request lost between the two is noticed as well."""
        with contextlib.suppress(RayError, TimeoutError):  # Its loss is the rank group's to tell.
            async with asyncio.timeout(_ANSWER_S):
                health = await call(self._engine.group.actors[0], CONTROL, "health")
            load = {"running": self._engine.running()}
            self._judge.report(time.monotonic(), {**health, "load": load})
        verdict = self._judge.judge(time.monotonic())
        if verdict.state != "stalled":
            return None
        return RankDeath(rank=0, cause=verdict.reason, phase="serving")

    def _end(self) -> None:
        if self._ending.is_set():
            return
        self._ending.set()
        threading.Thread(target=self._engine.shutdown, name="replica-end", daemon=True).start()
        threading.Timer(_LAST_WORDS_S, os._exit, (EXIT_ENGINE_LOST,)).start()

    def __del__(self) -> None:
        """Called by Serve at the end of a graceful shutdown: no rank stays behind."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()


def _chunk(step: Mapping[str, Any]) -> TokenChunk:
    """A step of `OverstoryEngine.generate_ids`, whose log-probabilities come as SGLang's triples of
    (value, token id, text)."""
    logged = step["logprobs"]
    if logged is None:
        return TokenChunk(step["token_ids"], step["finish_reason"])
    tops = step["top_logprobs"] or [()] * len(logged)
    logprobs = [
        TokenLogprobs(own[0], tuple((token, value) for value, token, _ in top or ()))
        for own, top in zip(logged, tops, strict=True)
    ]
    return TokenChunk(step["token_ids"], step["finish_reason"], logprobs)


def _register(spec: DeploymentSpec, name: str) -> None:
    """Tell the controller, if one runs; else it finds the ranks by their names once it does."""
    controller = find_controller(spec.name)
    if controller is not None:
        controller.register.remote(name, spec.tp_size)

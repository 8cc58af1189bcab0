"""A replica as Serve sees it: one engine over its ranks, token ids in and out.

Serve places it (bundle 0 of its placement group holds the front half and rank 0), asks after its
health and starts a new one when it ends. At the first rank lost, and when work stands still,
requests in flight fail with the cause and the process ends itself.
"""

import asyncio
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast

from ray import serve
from ray.exceptions import RayError

from overstory.orchestrator.backend import TokenChunk, TokenLogprobs
from overstory.orchestrator.chunk_pace import paced
from overstory.orchestrator.controller_actor import find_controller
from overstory.orchestrator.engine_errors import EngineBusy, EngineDead, RankDeath, RequestRefused
from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.herald import Herald
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.launch import launch_engine
from overstory.orchestrator.rank_group import CONTROL, call
from overstory.orchestrator.replica_handoff import ReplicaHandOff
from overstory.orchestrator.replica_health import ReplicaHealth, State
from overstory.orchestrator.replica_proof import prove
from overstory.orchestrator.replica_setup import (
    engine_limits,
    health_limits,
    rank_plan,
    refuse_beyond,
)
from overstory.orchestrator.spec import DeploymentSpec
from overstory.orchestrator.token_line import TokenLines
from overstory.orchestrator.weight_donor import find_donor
from overstory.workers.log_context import label_process, name_request
from overstory.workers.settled_heap import settle_heap
from overstory.workers.sglang_metrics import pass_on

logger = logging.getLogger(__name__)

EXIT_ENGINE_LOST = 70
"""Exit code of a replica whose engine has died or stalled (EX_SOFTWARE of sysexits.h)."""

_LAST_WORDS_S = 1.0  # for the failed requests' errors and this check's to leave the process
_ANSWER_S = 5.0  # a rank's control side answers in milliseconds, also while its loop runs


class Replica:
    """A plain class that `app` makes a Serve deployment. Raises what `launch_engine` raises when
    the engine does not come up."""

    def __init__(self, spec: DeploymentSpec, nodes: int = 1) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        label_process(f"replica {name} front")
        settings = resolve_engine(spec)
        limits = health_limits(spec)
        self._herald = Herald(spec.name, name, limits)
        self._herald.begun()
        try:
            self._engine = launch_engine(
                rank_plan(spec, name, nodes),
                settings.server_args,
                donor=find_donor(spec.name) if spec.hands_over_weights else None,
            )
        except BaseException as error:
            self._herald.died(str(error))
            raise
        self._limits = engine_limits(
            self._engine.scheduler_info, self._engine.server_args.page_size
        )
        # Silence is not judged here: the rank group ends ranks that do not answer.
        limits = dataclasses.replace(limits, silence_s=math.inf)
        self._health = ReplicaHealth(limits, time.monotonic, name)
        self._lines = TokenLines()
        self._word: dict[str, Any] = {"forwards": 0, "work": 0, "prefilling": False}
        self._ending = threading.Event()
        self._engine.on_death = self._end
        self._handoff = ReplicaHandOff(
            spec.name,
            name,
            spec.hands_over_kv,
            spec.control.kv_hand_off_tokens,
            self._engine.group.actors[0],
        )
        if self._engine.server_args.enable_metrics:
            pass_on({"deployment": spec.name, "replica": name, "process": "front"})
        settle_heap()
        _register(spec, name)

    async def generate(self, request: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        """Tokens as the engine commits them, along the gateway's line where the call names one and
        it can be reached, else as the call's answer. A cancelled call aborts in the engine.

        Raises:
            RequestRefused, EngineBusy, EngineDead: see `engine_errors`.
            LineLost: see `TokenLines`.
        """
        async with (
            aclosing(self._generated(request)) as chunks,
            aclosing(self._lines.deliver(chunks, request)) as rest,
        ):
            async for chunk in rest:
                yield chunk

    async def _generated(self, request: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        name_request(f"request {request.rid}")
        refuse_beyond(self._limits, request)
        await self._handoff.bring(request)
        finished, tokens = False, len(request.input_ids)
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
            try:
                async with aclosing(paced(chunks, request.hold_s)) as together:
                    async for chunk in together:
                        self._health.generated()
                        finished = chunk.finish is not None
                        tokens += len(chunk.ids)
                        yield chunk
            except (RequestRefused, EngineBusy):  # The client's doing, or nobody's.
                raise
            except Exception as error:
                self._health.request_failed(f"{type(error).__name__}: {error}")
                raise
            finally:
                if not finished:
                    self._handoff.left(request.rid, tokens)

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
        """Asked by Serve every few seconds, and before it counts the replica as running: the first
        time it generates, later it looks at the progress of what others generate.

        Raises:
            EngineDead: the engine is gone (the process ends itself, with or without this call) or
                stands still with work in hand; the process ends itself a moment later, for Serve to
                replace it.
        """
        death = self._engine.death or await self._stalled()
        if death is None and self._health.state is State.WARMING:
            await self._prove()
        if death is None:
            self._herald.stands(
                {**self._word, "generated": self._health.state is not State.WARMING}
            )
            return
        self._end(death)
        raise EngineDead(death)

    async def _prove(self) -> None:
        """See `replica_proof`. However long that takes: a rank that hangs is ended."""
        settings = self._engine.server_args
        await prove(
            self.generate,
            self._limits,
            settings.page_size,
            settings.max_running_requests,
            compiles=settings.device != "cpu",
        )

    async def _stalled(self) -> RankDeath | None:
        """Judged by rank 0's count of batches and by the requests that the front half waits for, so
        that a request lost between the two is noticed as well."""
        work = self._engine.running()
        try:
            async with asyncio.timeout(_ANSWER_S):
                rank = await call(self._engine.group.actors[0], CONTROL, "health")
        except (RayError, TimeoutError) as error:  # Its loss is the rank group's to tell.
            self._health.probe_failed(type(error).__name__)
        else:
            progress = {key: rank[key] for key in ("forwards", "prefilling")}
            self._health.reported(work=work, **progress)
            self._word |= {**progress, "work": work}
        self._word["probe_failures"] = self._health.probe_failures
        self._word["request_failures"] = self._health.request_failures
        if self._health.state is not State.DEAD:
            return None
        return RankDeath(rank=0, cause=self._health.reason, phase="serving")

    def _end(self, death: RankDeath) -> None:
        """The engine is gone: tell the controller why, end the ranks and this process. From any
        thread."""
        if self._ending.is_set():
            return
        self._ending.set()
        last_words = threading.Thread(target=self._herald.died, args=(str(death),), daemon=True)
        last_words.start()
        threading.Thread(target=self._engine.shutdown, name="replica-end", daemon=True).start()
        threading.Timer(_LAST_WORDS_S, os._exit, (EXIT_ENGINE_LOST,)).start()

    def __del__(self) -> None:
        """Called by Serve at the end of a graceful shutdown: no rank stays behind."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            handoff = getattr(self, "_handoff", None)
            if handoff is not None and engine.death is None:
                handoff.stay()
            engine.shutdown()
            self._herald.ended()


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

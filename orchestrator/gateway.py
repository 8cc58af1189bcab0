"""The Serve ingress: the endpoint with replicas of this deployment behind it.

The one module of the gateway that touches Ray. Imports neither torch nor SGLang, so a gateway is
up in seconds and answers `/health` while replicas load.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import ReplicaState
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from overstory.orchestrator.admission import Admission
from overstory.orchestrator.affinity import affinity_of
from overstory.orchestrator.answer_parsers import ParserSettings
from overstory.orchestrator.api_keys import key_ring
from overstory.orchestrator.backend import EngineRefused, ReplicaLeaving, ReplicaLost, TokenChunk
from overstory.orchestrator.controller_actor import hopeless
from overstory.orchestrator.endpoint import build_http_app
from overstory.orchestrator.engine_errors import EngineBusy, EngineDead, RequestRefused
from overstory.orchestrator.fleet import GivenUp
from overstory.orchestrator.gateway_handoff import MeetingsAhead
from overstory.orchestrator.generation_config import sampling_defaults
from overstory.orchestrator.http_server import HttpServer
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.meters import Meters
from overstory.orchestrator.metric_table import GATEWAY
from overstory.orchestrator.model_facts import read_target
from overstory.orchestrator.prefix_watch import PrefixWatch
from overstory.orchestrator.rank_directory import RankDirectory
from overstory.orchestrator.readiness import Readiness
from overstory.orchestrator.replica_board import ReplicaBoard, board_of
from overstory.orchestrator.request_metrics import keep_gauges
from overstory.orchestrator.resume import MOVES, ResumeLimits
from overstory.orchestrator.service import EndpointService, ServiceLimits
from overstory.orchestrator.spec import DeploymentSpec
from overstory.orchestrator.token_line import LineLost
from overstory.orchestrator.token_sink import FLUSH_S, Inbox, TokenSink
from overstory.orchestrator.tokenizer import load_tokenizer
from overstory.workers.log_context import label_process
from overstory.workers.settled_heap import settle_heap
from overstory.workers.tiny.paths import resolve_model

logger = logging.getLogger(__name__)


LAST_ANSWERS_S = 4.0
"""How long requests may go on in a gateway that is to go."""

_HOPE_S = 5.0  # between two looks whether a replica can still come

T = TypeVar("T")

_SHUN_DEAD_S = 120.0  # it ends itself and leaves Serve's list long before
_SHUN_ODD_S = 5.0  # nobody knows what ails it


class ReplicaBackend:
    """Tokens from whichever replica Serve picks."""

    def __init__(
        self,
        replicas: DeploymentHandle,
        board: ReplicaBoard,
        sink: TokenSink,
        hands_over_kv: bool = False,
    ) -> None:
        self._hands_over_kv = hands_over_kv
        self._stream = replicas.options(stream=True)
        self._call = replicas
        self._board = board
        self._sink = sink
        self._ending: set[asyncio.Task[None]] = set()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        """See `Backend.generate`. Closing cancels the replica's call, which aborts in its
        engine."""
        with self._board.following(call.rid) as placed, self._sink.expecting(call.rid) as inbox:
            placed.on_leave = lambda: inbox.end(_Leaves())
            response = self._stream.generate.remote(replace(call, sink=self._sink.address))
            answering = asyncio.create_task(_answer(response, inbox))
            finished = False
            try:
                async with contextlib.aclosing(inbox.chunks()) as chunks:
                    async for chunk in chunks:
                        finished = chunk.finish is not None
                        yield chunk
            except _Leaves:
                giver = (placed.replica or "") if self._hands_over_kv else ""
                raise ReplicaLeaving(f"replica {placed.replica} is to go", giver) from None
            except RequestRefused as error:
                raise EngineRefused(_cause(error), 400) from error
            except EngineBusy as error:
                raise EngineRefused(_cause(error), 503) from error
            except (EngineDead, LineLost, RayError, RayServeException) as error:
                dead = isinstance(error, EngineDead)
                if not isinstance(error, LineLost):  # That ails neither of the two.
                    self._board.shun(placed.replica, _SHUN_DEAD_S if dead else _SHUN_ODD_S)
                raise ReplicaLost(_cause(error)) from error
            finally:
                if finished:  # The answer ends by itself a moment later.
                    self._ending.add(answering)
                    answering.add_done_callback(self._ending.discard)
                else:
                    answering.cancel()
                    response.cancel()

    async def replicas(self) -> int:
        """Replicas that serve now, at least 1."""
        return await asyncio.to_thread(_running_replicas, self._call)

    async def limits(self) -> dict[str, int]:
        """`Replica.limits` of one replica; raises what Ray raises."""
        return await self._call.limits.remote()


class _Leaves(Exception):
    """The replica of a call is to go."""


async def _answer(response: DeploymentResponseGenerator[TokenChunk], inbox: Inbox) -> None:
    """Puts what Serve brings of a call, its end and its errors included, into the inbox."""
    try:
        async for chunk in response:
            inbox.put(chunk)
        async with asyncio.timeout(FLUSH_S):
            await inbox.finished.wait()
    except TimeoutError:
        inbox.end(ReplicaLost("the replica's answer ended before the sequence did"))
    except Exception as error:
        inbox.end(error)


class Gateway:
    """One gateway process; a plain class that `app` makes a Serve ingress. Unless it is `proxied`,
    clients reach it at its own port, past Serve's proxies."""

    def __init__(
        self, spec: DeploymentSpec, replicas: DeploymentHandle, proxied: bool = False
    ) -> None:
        label_process(f"gateway of {spec.name}")
        self._server = None if proxied else HttpServer(spec.gateway)
        gateway, model_dir = spec.gateway, resolve_model(spec.model)
        self._deployment = replicas.app_name
        self._sink = TokenSink()
        self._backend = ReplicaBackend(
            replicas, board_of(replicas.app_name), self._sink, spec.hands_over_kv
        )
        self._hands_over_kv = spec.hands_over_kv
        context = spec.engine.get("context_length") or read_target(model_dir).max_positions
        tokenizer = load_tokenizer(model_dir, bool(spec.engine.get("trust_remote_code")))
        self._service = EndpointService(
            spec.served_model_name,
            tokenizer,
            self._backend,
            Admission(
                gateway.max_concurrent_requests * spec.replicas,
                gateway.max_queued_requests,
                largest=gateway.max_concurrent_requests,  # as few as one replica may be left
            ),
            Readiness(self._prove, self._look),
            ServiceLimits(context, context - 1, gateway.request_timeout_s),
            resume=ResumeLimits(gateway.max_resumes, gateway.resume_wait_s),
            on_move=lambda why: self._meters.add("sequences_moved", why=why),
            parsers=ParserSettings(
                gateway.tool_call_parser,
                gateway.reasoning_parser,
                tokenizer.template,
                tokenizer.vocabulary,
            ),
            chat_defaults=sampling_defaults(model_dir)
            if gateway.sampling_defaults == "model"
            else None,
        )
        self._settings = gateway
        self._meters = Meters(GATEWAY, spec.name, through_ray=True)
        for why in MOVES:
            self._meters.add("sequences_moved", 0, why=why)
        self._keys = key_ring(gateway.api_keys_file, gateway.api_keys_env)
        self._per_replica = gateway.max_concurrent_requests

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        app = build_http_app(
            self._service,
            self._settings.max_body_bytes,
            self._keys,
            self._settings.cors_origins,
            self._meters,
            proxied=self._server is None,
        )
        app.router.lifespan_context = self._lifespan
        return app

    async def check_health(self) -> None:
        """Asked by Serve, which replaces the gateway if this raises: clients could not reach it."""
        if self._server is not None:
            self._server.check()

    async def snapshot(self) -> dict[str, Any]:
        """What runs here, for status and tests: `running` sequences, `queued` requests, blocks of
        prompts that each replica reports to hold (`prefix_blocks`)."""
        service = self._service
        return {
            "ready": service.readiness.ready,
            "reason": service.readiness.reason,
            "running": service.admission.running,
            "queued": service.admission.queued,
            "max_concurrent": service.admission.max_concurrent,
            "sequences": len(service.journal),
            "ended": service.journal.ended(),
            "prefix_blocks": affinity_of(self._deployment).held(),
        }

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncGenerator[None, None]:
        await self._sink.open(ray.util.get_node_ip_address(), self._settings.token_port)
        loop = asyncio.get_running_loop()
        if self._hands_over_kv:
            MeetingsAhead(self._deployment, board_of(self._deployment)).begin()
        # Serve's news, as soon as its router has them; what comes before is looked for.
        board_of(self._deployment).on_running = lambda running: loop.call_soon_threadsafe(
            self._run_on, running
        )
        prefixes = PrefixWatch(
            RankDirectory(self._deployment), lambda: affinity_of(self._deployment)
        )
        tasks = [
            loop.create_task(self._service.readiness.watch()),
            loop.create_task(keep_gauges(self._meters, self._service)),
            loop.create_task(prefixes.run()),
        ]
        settle_heap()
        if self._server is not None:
            self._server.start(app)
        try:
            yield
        finally:
            if self._server is not None:
                await self._server.stop(LAST_ANSWERS_S)
            for task in tasks:
                task.cancel()
            self._sink.close()

    async def _prove(self) -> None:
        """Learn the engine's limits, then generate as a request would."""
        self._take_limits(await self._unless_hopeless(self._backend.limits()))
        await self._service.prove()

    def _take_limits(self, limits: dict[str, int]) -> None:
        longest = self._settings.max_prompt_tokens or limits["prompt_tokens"]
        self._service.limits = ServiceLimits(
            limits["context_tokens"],
            min(limits["prompt_tokens"], longest),
            self._service.limits.request_timeout_s,
        )

    async def _unless_hopeless(self, answer: Coroutine[Any, Any, T]) -> T:
        """A replica's answer; `GivenUp` instead of a long wait where none will come any more."""
        waiting = asyncio.ensure_future(answer)
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=_HOPE_S)
                if not waiting.done():
                    reason = await asyncio.to_thread(hopeless, self._deployment)
                    if reason:
                        raise GivenUp(reason)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _look(self) -> None:
        """A replica answers; as many sequences may run as the present replicas take."""
        self._take_limits(await self._backend.limits())  # a restart may have changed them
        self._run_on(await self._backend.replicas())

    def _run_on(self, replicas: int) -> None:
        """As many sequences may run as so many replicas take; as one does, where none is left."""
        self._service.admission.set_max_concurrent(self._per_replica * max(1, replicas))


def _running_replicas(replicas: DeploymentHandle) -> int:
    application = serve.status().applications.get(replicas.app_name)
    if application is None:
        return 1
    states = application.deployments[replicas.deployment_name].replica_states
    return max(1, states.get(ReplicaState.RUNNING, 0))


def _cause(error: BaseException) -> str:
    """What happened, without Ray's traceback text where the error carries its own words."""
    cause = getattr(error, "cause", None) or error
    return str(cause).strip() or type(cause).__name__

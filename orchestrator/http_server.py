"""The endpoint's HTTP server: uvicorn in the gateway's process, on its event loop.

Serve's own proxy would be one more process and one more streaming call on the way of every piece of
an answer (measured in docs/benchmarks/gateway.md).
"""

import asyncio
import contextlib
import functools
import resource
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from overstory.orchestrator.http_protocol import ConnectionLimits, GuardedProtocol
from overstory.orchestrator.listening import listening
from overstory.orchestrator.spec import GatewaySpec

_KEEP_ALIVE_S = 75
_MOST = 10_000  # connections


class _Server(uvicorn.Server):
    """uvicorn's server without a grip on the process's signals: those are Ray's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class HttpServer:
    """Listens from the start, so that a port that is taken is told at once; answers from `start`.

    Raises:
        CannotListen: as `listening`.
    """

    def __init__(self, spec: GatewaySpec, limits: ConnectionLimits | None = None) -> None:
        self._spec = spec
        self._limits = limits or ConnectionLimits(
            idle_s=_KEEP_ALIVE_S, connections=_most_connections()
        )
        self._socket = listening(spec.host, spec.port, "gateway.port")
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        """Serves `app`, whose lifespan is somebody else's concern, on the running loop."""
        config = uvicorn.Config(
            app,
            http=functools.partial(GuardedProtocol, limits=self._limits),  # type: ignore[arg-type]
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ssl_certfile=self._spec.tls_cert_file,
            ssl_keyfile=self._spec.tls_key_file,
        )
        config.load()  # a certificate that cannot be read is told here
        self._server = _Server(config)
        loop = asyncio.get_running_loop()
        self._serving = loop.create_task(self._server.serve(sockets=[self._socket]))

    def check(self) -> None:
        """Raises `RuntimeError` where it no longer serves: clients get no answer."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    async def stop(self, grace_s: float) -> None:
        """Takes no new connection, lets requests end for `grace_s`, then cancels them."""
        if self._server is None or self._serving is None:
            self._socket.close()
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await asyncio.wait((self._serving,), timeout=grace_s + 2)


def _most_connections() -> int:
    """Half of the files that this process may have open, at most 10,000: Ray and the replicas'
    lines need some. What it may have it takes: many systems give 1,024 and more when asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _MOST if hard == resource.RLIM_INFINITY else min(_MOST, max(16, hard // 2))

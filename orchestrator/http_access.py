"""Who may ask for what: API keys and browsers' origins, as ASGI layers."""

from collections.abc import Sequence

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from overstory.orchestrator.api_keys import KeyRing
from overstory.orchestrator.http_layers import send_error
from overstory.orchestrator.openai_errors import ApiError

PUBLIC = frozenset({"/health", "/ready", "/openapi.json", "/docs"})
"""What needs no key: probes, and what the endpoint can do."""

ADMIN = ("/admin/", "/metrics")
"""What needs a key of scope `admin`, where there are keys; `/admin/` needs one in any case."""


class KeyGuard:
    """Lets through who has a key: `Authorization: Bearer KEY`, or `x-api-key: KEY`.

    Args:
        app: what is guarded.
        ring: the keys; None for none, which leaves all but `/admin/` open.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing | None) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            error = self._refusal(get_route_path(scope), Headers(scope=scope))
            if error is not None:
                await send_error(send, error)
                return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        admin = path.startswith(ADMIN)
        if self._ring is None:
            return _closed() if path.startswith("/admin/") else None
        if path in PUBLIC:
            return None
        secret = _secret(headers)
        key = self._ring.find(secret) if secret else None
        if key is None:
            return _unknown(bool(secret))
        return _not_admin(key.name) if admin and key.scope != "admin" else None


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets web pages of these origins ask; `*` for all. The key is what protects, not the
    origin."""
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


def _secret(headers: Headers) -> str:
    kind, _, secret = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and secret.strip():
        return secret.strip()
    return headers.get("x-api-key", "").strip()


def _unknown(given: bool) -> ApiError:
    what = "The API key is not known here" if given else "No API key was sent"
    return ApiError(
        401,
        f"{what}: send Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _not_admin(name: str) -> ApiError:
    return ApiError(
        403,
        f"The API key {name} is of scope user; this needs one of scope admin",
        kind="permission_error",
        code="admin_key_needed",
    )


def _closed() -> ApiError:
    return ApiError(
        403,
        "The endpoint has no API keys, so nobody may use /admin (gateway.api_keys_file)",
        kind="permission_error",
        code="admin_key_needed",
    )

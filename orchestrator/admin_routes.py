"""`/admin`: for operators. `http_access` lets in only keys of scope `admin`."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from overstory.orchestrator import openai_errors
from overstory.orchestrator.api_keys import ApiKeyError, KeyRing
from overstory.orchestrator.openai_documents import documented
from overstory.orchestrator.service import EndpointService


class GatewayState(BaseModel):
    """What runs in a gateway."""

    model_config = ConfigDict(extra="forbid")

    ready: bool
    reason: str
    running: int
    """Sequences in the engine."""
    queued: int
    """Requests that wait."""
    max_concurrent: int
    ended: dict[str, int]
    """Sequences since the start, by how they ended."""


class KeysInForce(BaseModel):
    """How many API keys there are."""

    model_config = ConfigDict(extra="forbid")

    keys: int


def add_admin_routes(
    app: FastAPI, service: EndpointService, ring: KeyRing | None, answer: Callable[[Any], Response]
) -> None:
    """The routes; `answer` makes a response of JSON."""

    @app.get("/admin/status", **documented(GatewayState))
    async def status() -> Response:
        """What runs in this gateway."""
        return answer(
            {
                "ready": service.readiness.ready,
                "reason": service.readiness.reason,
                "running": service.admission.running,
                "queued": service.admission.queued,
                "max_concurrent": service.admission.max_concurrent,
                "ended": service.journal.ended(),
            }
        )

    @app.post("/admin/keys/reload", **documented(KeysInForce))
    async def reload_keys() -> Response:
        """Read the key file now; it is also read by itself within a second of a change."""
        assert ring is not None, "the guard lets nobody in without keys"
        try:
            return answer({"keys": ring.reload()})
        except ApiKeyError as error:
            raise openai_errors.invalid(str(error), code="key_file") from error

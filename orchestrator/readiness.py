"""Whether the endpoint can generate: proved by generating, and proved again when there is reason
to doubt.

The tokens of ordinary requests prove it as well. Under load a proof waits in the engine behind
them, so its own delay says nothing.

Alive and ready differ: `/v1/models` and `/health` answer while every replica is still loading or
has died.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadinessTimes:
    """Seconds. `first_proof`: for a generation while not ready (the call waits for a replica to
    come up). `proof`: for one after a doubt. `retry`: between failed proofs. `check_every`:
    between looks at an idle replica."""

    first_proof: float = 300.0
    proof: float = 10.0
    retry: float = 1.0
    check_every: float = 10.0


class Readiness:
    """The state, and the loop that keeps it true."""

    def __init__(
        self,
        prove: Callable[[], Awaitable[None]],
        check: Callable[[], Awaitable[None]],
        times: ReadinessTimes | None = None,
    ) -> None:
        """`prove` generates through the whole path, `check` only looks whether a replica answers;
        both raise."""
        self._prove = prove
        self._check = check
        self._times = times or ReadinessTimes()
        self._doubt = asyncio.Event()
        self._generated = asyncio.Event()  # since the last doubt
        self.ready = False
        self.reason = "nothing has been generated yet"

    def doubt(self, cause: str) -> None:
        """Something failed: prove anew. The endpoint stays ready until that proof fails."""
        if self.ready:
            logger.warning("readiness in doubt: %s", cause)
        self._generated.clear()
        self._doubt.set()

    def generated(self) -> None:
        """A replica has committed a token of a request: as good as a proof."""
        self._generated.set()
        self._set(True, "")

    async def watch(self) -> None:
        """Run until cancelled."""
        while True:
            self._doubt.clear()
            if await self._proved():
                await self._until_doubt()
            else:
                await self._wait_for_doubt(self._times.retry)

    async def _proved(self) -> bool:
        limit_s = self._times.proof if self.ready else self._times.first_proof
        try:
            async with asyncio.timeout(limit_s):
                await self._proof_or_tokens()
        except Exception as error:
            self._set(False, _reason(error, limit_s))
            return False
        self._set(True, "")
        return True

    async def _proof_or_tokens(self) -> None:
        proof = asyncio.ensure_future(self._prove())
        tokens = asyncio.ensure_future(self._generated.wait())
        try:
            done, _ = await asyncio.wait((proof, tokens), return_when=asyncio.FIRST_COMPLETED)
            if tokens not in done:
                proof.result()
        finally:
            proof.cancel()
            tokens.cancel()
            await asyncio.gather(proof, tokens, return_exceptions=True)

    async def _until_doubt(self) -> None:
        while not await self._wait_for_doubt(self._times.check_every):
            try:
                async with asyncio.timeout(self._times.proof):
                    await self._check()
            except Exception as error:
                self.doubt(_reason(error, self._times.proof))

    async def _wait_for_doubt(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._doubt.wait()
        except TimeoutError:
            return False
        return True

    def _set(self, ready: bool, reason: str) -> None:
        if ready != self.ready:
            logger.warning("ready" if ready else "not ready: %s", *([] if ready else [reason]))
        self.ready, self.reason = ready, reason


def _reason(error: Exception, limit_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no replica generated within {limit_s:g} s"
    first_line = str(error).split("\n", 1)[0]
    return f"{type(error).__name__}: {first_line}"

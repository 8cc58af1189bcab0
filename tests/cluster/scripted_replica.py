"""A replica without an engine: writes a known text, at a known pace, and obeys orders found in the
prompt.

Serves tests of everything in front of the engine. Not collected: it holds no test.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any

from overstory.orchestrator.engine_errors import EngineDead, RankDeath, RequestRefused
from overstory.orchestrator.generation import TokenChunk
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.spec import DeploymentSpec
from overstory.orchestrator.tokenizer import load_tokenizer
from overstory.workers.tiny.paths import resolve_model

TEXT = "héllo wörld 😀 — 数字 one two three four five six seven eight nine ten\n" * 8
CONTEXT_TOKENS = 4000


class ScriptedReplica:
    """Orders in the prompt: `<slow>` (20 ms a step), `<refuse>`, `<lose>` (the engine dies after 3
    steps), `<exit>` (so does the process), `<seed>` (the text is the seed)."""

    def __init__(self, spec: DeploymentSpec) -> None:
        self._tokenizer = load_tokenizer(resolve_model(spec.model))
        self._running: set[str] = set()
        self._aborted: list[str] = []
        self._most = 0

    async def generate(self, call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        prompt = self._tokenizer.decode(call.input_ids)
        self._running.add(call.rid)
        self._most = max(self._most, len(self._running))
        try:
            async for chunk in self._steps(prompt, call):
                yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            self._aborted.append(call.rid)
            raise
        finally:
            self._running.discard(call.rid)

    async def _steps(self, prompt: str, call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        if "<refuse>" in prompt:
            raise RequestRefused("not this one")
        text = f"seed {call.sampling.seed}" if "<seed>" in prompt else TEXT
        ids = self._tokenizer.encode(text, special=False)
        limit = min(len(ids), call.sampling.max_new_tokens)
        for at in range(0, limit, 3):
            await asyncio.sleep(0.02 if "<slow>" in prompt else 0)
            if at == 9 and "<exit>" in prompt:
                os._exit(3)
            if at == 9 and "<lose>" in prompt:
                raise EngineDead(RankDeath(rank=1, cause="told to"))
            end = min(at + 3, limit)
            done = {"type": "length", "length": limit} if end == limit else None
            yield TokenChunk(ids[at:end], done)

    async def limits(self) -> dict[str, int]:
        return {"context_tokens": CONTEXT_TOKENS, "prompt_tokens": CONTEXT_TOKENS - 1}

    async def stats(self) -> dict[str, Any]:
        return {"running": len(self._running), "aborted": list(self._aborted), "most": self._most}

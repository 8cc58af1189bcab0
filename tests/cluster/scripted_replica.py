"""A replica without an engine: writes a known text, at a known pace, and obeys orders found in the
prompt.

Serves tests of everything in front of the engine. Not collected: it holds no test.
"""

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from overstory.orchestrator.backend import TokenChunk, TokenLogprobs
from overstory.orchestrator.engine_errors import EngineDead, RankDeath, RequestRefused
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.spec import DeploymentSpec
from overstory.orchestrator.token_line import TokenLines
from overstory.orchestrator.tokenizer import load_tokenizer

TEXT = "héllo wörld 😀 — 数字 one two three four five six seven eight nine ten\n" * 4
CONTEXT_TOKENS = 4000
STEP_TOKENS = 3
SLOW_STEP_S = 0.02
LAST_WORDS_S = 0.5


def write_byte_model(folder: Path) -> None:
    """A model folder with all that the gateway reads: a tokenizer of one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _logged(ids: list[int], top: int | None) -> list[TokenLogprobs] | None:
    """Log-probabilities where a call asks for them: the same for every token."""
    if top is None:
        return None
    return [TokenLogprobs(-1.0, tuple((token + n, -1.0) for n in range(top))) for token in ids]


class ScriptedReplica:
    """In place of `Replica`.

    Orders in a prompt: `<slow>` (20 ms a step), `<stuck>` (nothing ever), `<refuse>`, `<lose>` (the
    engine dies at the 4th step, and a moment later the process), `<exit-once>` (the process dies,
    but not where the sequence goes on), `<seed>` (the text is the seed).
    """

    def __init__(self, spec: DeploymentSpec) -> None:
        self._tokenizer = load_tokenizer(spec.model)
        self._running: set[str] = set()
        self._lines = TokenLines()
        self._aborted = 0
        self._most = 0

    async def generate(self, call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        async with (
            aclosing(self._generated(call)) as chunks,
            aclosing(self._lines.deliver(chunks, call)) as rest,
        ):
            async for chunk in rest:
                yield chunk

    async def _generated(self, call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        earlier = call.sampling.earlier_output
        prompt = self._tokenizer.decode(call.input_ids[: len(call.input_ids) - earlier])
        self._running.add(call.rid)
        self._most = max(self._most, len(self._running))
        try:
            async for chunk in self._steps(prompt, call):
                yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            self._aborted += 1
            raise
        finally:
            self._running.discard(call.rid)

    async def _steps(self, prompt: str, call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        if "<refuse>" in prompt:
            raise RequestRefused("not this one")
        if "<stuck>" in prompt:
            await asyncio.Event().wait()
        text = f"seed {call.sampling.seed}" if "<seed>" in prompt else TEXT
        ids = self._tokenizer.encode(text, special=False)
        begun = call.sampling.earlier_output
        limit = min(len(ids), begun + call.sampling.max_new_tokens)
        for at in range(begun, limit, STEP_TOKENS):
            await asyncio.sleep(SLOW_STEP_S if "<slow>" in prompt else 0)
            if at == 3 * STEP_TOKENS:
                await self._obey(prompt, begun)
            end = min(at + STEP_TOKENS, limit)
            done = {"type": "length", "length": limit} if end == limit else None
            yield TokenChunk(ids[at:end], done, _logged(ids[at:end], call.logprobs))

    async def _obey(self, prompt: str, begun: int) -> None:
        if "<exit-once>" in prompt and begun == 0:
            await asyncio.sleep(LAST_WORDS_S)  # what was sent has left the process
            os._exit(3)
        if "<lose>" in prompt:
            threading.Timer(LAST_WORDS_S, os._exit, (3,)).start()
            raise EngineDead(RankDeath(rank=1, cause="told to"))

    async def limits(self) -> dict[str, int]:
        return {"context_tokens": CONTEXT_TOKENS, "prompt_tokens": CONTEXT_TOKENS - 1}

    async def stats(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "running": len(self._running),
            "aborted": self._aborted,
            "most": self._most,
        }

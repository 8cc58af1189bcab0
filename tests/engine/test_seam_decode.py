"""Plain decoding through the scheduler: against transformers, chunked prefill, prefix hits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness import EngineHarness

GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


def _prompts(lengths: list[int], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(5, 4096) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def reference(pair: tuple[str, str]) -> Callable[[list[int], int], list[int]]:
    """Greedy decoding by transformers' own model, in float32, without a cache."""
    import torch
    from transformers import DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return greedy


def test_greedy_equals_transformers(
    engine: Callable[..., EngineHarness], reference: Callable[[list[int], int], list[int]]
) -> None:
    prompts = _prompts([1, 7, 33, 160], seed=1)
    got = engine().generate(prompts, GREEDY)
    assert got == [reference(prompt, 24) for prompt in prompts]


def test_prefix_hit_equals_cold(engine: Callable[..., EngineHarness]) -> None:
    harness = engine()
    shared, *tails = _prompts([90, 20, 30], seed=2)
    harness.flush_cache()
    cold = harness.generate([shared + tails[0]], GREEDY)[0]
    harness.flush_cache()
    harness.generate([shared + tails[1]], GREEDY)
    rid = harness.submit(shared + tails[0], GREEDY)
    harness.run([rid])
    assert harness.outputs[rid].cached_tokens == len(shared)
    assert harness.outputs[rid].ids == cold


def test_batch_equals_alone(engine: Callable[..., EngineHarness]) -> None:
    harness = engine()
    prompts = _prompts([5, 64, 11, 120, 40], seed=3)
    alone = []
    for prompt in prompts:
        harness.flush_cache()
        alone += harness.generate([prompt], GREEDY)
    harness.flush_cache()
    assert harness.generate(prompts, GREEDY) == alone


def test_abort_frees_its_slots(engine: Callable[..., EngineHarness]) -> None:
    harness = engine()
    harness.flush_cache()
    rid = harness.submit(_prompts([50], seed=4)[0], GREEDY | {"max_new_tokens": 1000})
    harness.step(5)
    assert harness.outputs[rid].ids
    harness.abort(rid)
    harness.run([rid])
    harness.assert_no_leak()


def test_chunked_prefill_equals_whole(engine: Callable[..., EngineHarness]) -> None:
    prompts = _prompts([200, 300, 77], seed=5)
    whole = engine().generate(prompts, GREEDY)
    harness = engine(chunked_prefill_size=64)
    assert harness.generate(prompts, GREEDY) == whole
    harness.assert_no_leak()


@pytest.mark.parametrize("overlap", [True, False])
def test_stock_dflash_equals_plain(
    engine: Callable[..., EngineHarness], pair: tuple[str, str], overlap: bool
) -> None:
    prompts = _prompts([6, 90, 41], seed=6)
    plain = engine().generate(prompts, GREEDY)
    harness = engine(
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=pair[1],
        disable_overlap_schedule=not overlap,
    )
    assert harness.generate(prompts, GREEDY) == plain
    harness.assert_no_leak()


def test_nothing_is_left_in_shared_memory(engine: Callable[..., EngineHarness]) -> None:
    """SGLang never takes the file away through which a scheduler tells its load."""
    writer = engine().scheduler.load_snapshot_writer
    assert writer is not None
    assert not Path(writer.path).exists()

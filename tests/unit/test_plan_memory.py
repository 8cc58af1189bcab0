"""Estimates against models whose sizes are known."""

import json
import struct
from pathlib import Path

import pytest

from overstory.orchestrator.memory import (
    PROCESS_BYTES,
    absorbed_elements,
    drafter_elements,
    estimate_rank,
    expert_elements,
    kv_bytes_per_token,
    other_elements,
)
from overstory.orchestrator.model_facts import TargetFacts, read_drafter, read_target
from overstory.workers.tiny.paths import resolve_model

DEEPSEEK_V3 = TargetFacts(
    path="", vocab_size=129280, hidden_size=7168, num_layers=61, num_heads=128, q_lora_rank=1536,
    kv_lora_rank=512, rope_dim=64, nope_dim=128, value_dim=128, dense_layers=3, dense_width=18432,
    routed_experts=256, shared_experts=1, expert_width=2048, tied_head=False,
    max_positions=163840, dtype="bfloat16", quantization={"quant_method": "fp8"},
)  # fmt: skip


def checkpoint_elements(folder: str) -> int:
    """Elements of all tensors, from the headers of a folder's safetensors files."""
    total = 0
    for file in Path(folder).glob("*.safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for tensor in header.values():
            count = 1
            for size in tensor["shape"]:
                count *= size
            total += count
    return total


def test_deepseek_v3_has_671_billion_parameters() -> None:
    total = expert_elements(DEEPSEEK_V3) + other_elements(DEEPSEEK_V3)
    assert total.on_rank(1) == pytest.approx(671.03e9, rel=1e-3)


def test_deepseek_v3_at_tp_8_in_fp8() -> None:
    memory = estimate_rank(DEEPSEEK_V3, None, {"tp_size": 8, "max_total_tokens": 1000}, "cuda")
    assert 80e9 < memory.target_weights < 90e9
    assert memory.kv_bytes_per_token == 576 * 61 * 2


def test_latent_is_whole_on_every_rank() -> None:
    one = kv_bytes_per_token(DEEPSEEK_V3, None, 2.0, 1)
    assert kv_bytes_per_token(DEEPSEEK_V3, None, 2.0, 8) == one == 70272


def test_kv_pool_fills_what_the_fraction_leaves() -> None:
    flags = {"tp_size": 16, "mem_fraction_static": 0.9}
    memory = estimate_rank(DEEPSEEK_V3, None, flags, "cuda", gpu_bytes=96e9)
    free = 96e9 - PROCESS_BYTES["cuda"]
    assert memory.kv_pool + memory.target_weights == pytest.approx(0.9 * free, rel=1e-5)
    assert memory.spare == pytest.approx(0.1 * free, rel=1e-5)


def test_built_in_target_element_for_element() -> None:
    facts = read_target(resolve_model("overstory-tiny"))
    counted = (expert_elements(facts) + other_elements(facts)).on_rank(1)
    assert counted == checkpoint_elements(facts.path)


def test_built_in_drafter_element_for_element() -> None:
    facts = read_drafter(resolve_model("overstory-tiny-drafter"))
    assert drafter_elements(facts, facts.hidden_size).on_rank(1) == checkpoint_elements(facts.path)


def test_ranks_share_what_can_be_cut() -> None:
    cut = absorbed_elements(DEEPSEEK_V3)
    assert cut.on_rank(8) * 8 == cut.on_rank(1)
    assert other_elements(DEEPSEEK_V3).on_rank(8) * 8 > other_elements(DEEPSEEK_V3).on_rank(1)

"""What a plan reckons with, against the functions of SGLang that will do it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from overstory.orchestrator.gpu_memory import vision_factor
from overstory.orchestrator.known_models import known_model
from overstory.orchestrator.memory import kv_reserved_per_token
from overstory.orchestrator.model_facts import (
    DrafterFacts,
    TargetFacts,
    drafter_from_config,
    target_from_config,
)


def pair() -> tuple[TargetFacts, DrafterFacts]:
    target, drafter = known_model("Kimi-K2.6"), known_model("Kimi-K2.6-DFlash")
    assert target is not None
    assert drafter is not None
    return target_from_config("", target.config), drafter_from_config("", drafter.config)


@pytest.mark.parametrize("width", [1, 2])
def test_a_token_of_the_pools(width: int) -> None:
    from sglang.srt.speculative.dflash_utils import scale_kv_cell_size_per_token_for_dflash

    target, drafter = pair()
    reckoned = scale_kv_cell_size_per_token_for_dflash(
        target_cell_size_per_token=576 * 61 * width,
        target_num_layers=target.num_layers,
        draft_num_layers=drafter.num_layers,
    )
    assert kv_reserved_per_token(target, drafter, float(width)) == reckoned
    assert kv_reserved_per_token(target, None, float(width)) == 576 * 61 * width


def test_sglang_sizes_pools_of_our_algorithm_so() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from overstory.workers.seam.plugin import register

    register()
    assert SpeculativeAlgorithm.from_string("DDTREE").is_dflash_family()


def test_what_a_vision_tower_leaves_of_the_fraction() -> None:
    from sglang.srt.configs.kimi_k25 import KimiK25VisionConfig
    from sglang.srt.server_args import ServerArgs

    target, _ = pair()
    arguments = SimpleNamespace(mem_fraction_static=1.0)
    config = SimpleNamespace(hf_config=SimpleNamespace(vision_config=KimiK25VisionConfig()))
    ServerArgs.adjust_mem_fraction_for_vlm(arguments, config)
    assert vision_factor(target) == pytest.approx(arguments.mem_fraction_static)

"""Server arguments of DDTREE engines: completed where open, refused where they cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ddtree_support import server_args

from overstory.workers.ddtree import POLICY_ENV
from overstory.workers.environment import cpu_engine_defaults


@pytest.fixture
def make(pair: tuple[str, str]) -> Any:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    def build(**changes: Any) -> Any:
        fields = cpu_engine_defaults() | {"model_path": pair[0], "skip_tokenizer_init": True}
        return ServerArgs(**(fields | server_args(pair[1]) | changes))

    return build


def test_open_arguments_are_completed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICY_ENV, raising=False)
    arguments = make(speculative_num_draft_tokens=None)
    assert arguments.speculative_num_draft_tokens == 8
    assert arguments.speculative_draft_attention_backend == "torch_native"
    monkeypatch.setenv(POLICY_ENV, "tree-31")
    assert make(speculative_num_draft_tokens=None).speculative_num_draft_tokens == 32


def test_slot_rows_hold_a_step_at_the_end_of_the_context(make: Any) -> None:
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
    from sglang.srt.mem_cache.kv_cache_configurator import (
        get_req_to_token_extra_context_len as used,
    )

    from overstory.workers.ddtree.limits import row_headroom

    arguments = make()
    assert get_req_to_token_extra_context_len(arguments) == row_headroom(64)
    assert used is get_req_to_token_extra_context_len
    assert get_req_to_token_extra_context_len(make(page_size=64)) == row_headroom(64) + 63


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 24}, "1, 2, 4, 8, ... slots, got page_size=24"),
        ({"enable_mixed_chunk": True}, "enable_mixed_chunk"),
        ({"speculative_num_draft_tokens": 65}, "between the drafter's block size 8 and 64"),
        ({"speculative_num_draft_tokens": 4}, "between the drafter's block size 8 and 64"),
        ({"speculative_draft_model_path": None}, "needs a drafter"),
        ({"speculative_draft_model_path": "/nonexistent/drafter"}, "/nonexistent/drafter"),
        ({"attention_backend": "intel_amx"}, "mask"),
        ({"speculative_draft_window_size": 128}, "speculative_draft_window_size"),
        ({"speculative_accept_threshold_single": 0.5}, "speculative_accept_threshold_single"),
        ({"speculative_accept_threshold_acc": 0.9}, "speculative_accept_threshold_acc"),
        ({"speculative_use_rejection_sampling": True}, "speculative_use_rejection_sampling"),
        ({"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}, "enable_lora"),
        ({"disaggregation_mode": "decode"}, "disaggregation_mode"),
        ({"pp_size": 2}, "pp_size"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, OSError), match=words):
        make(**changes)


def test_a_policy_larger_than_the_engine_is_refused(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POLICY_ENV, "tree-31")
    with pytest.raises(ValueError, match="leaves room for"):
        make(speculative_num_draft_tokens=16)
    monkeypatch.setenv(POLICY_ENV, "bush-3")
    with pytest.raises(ValueError, match="bush-3"):
        make()


def test_a_drafter_of_another_vocabulary_is_refused(
    make: Any, pair: tuple[str, str], tmp_path: Path
) -> None:
    config = json.loads((Path(pair[1]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 4097}))
    with pytest.raises(ValueError, match="vocab_size is 4097"):
        make(speculative_draft_model_path=str(tmp_path))


def test_embeddings_keep_their_dtype_on_every_device() -> None:
    from overstory.workers.ddtree import hooks
    from overstory.workers.seam.plugin import INSTALLERS

    assert hooks.__name__ in INSTALLERS
    assert any(patch.name.endswith("_extend_forward_kwargs") for patch in hooks.patches())


def _target(weight: torch.Tensor | None, added: int = 0) -> Any:
    """What the drafter borrows of a target: the second rank's part of a vocabulary of 12 tokens,
    five of which are its own, one row is padding."""
    shard = SimpleNamespace(num_org_elements=5, org_vocab_start_index=7, num_added_elements=added)
    return SimpleNamespace(lm_head=SimpleNamespace(weight=weight, shard_indices=shard))


def test_a_rank_s_candidates_have_the_ids_of_the_whole_vocabulary() -> None:
    from overstory.workers.ddtree.draft import HeadShard

    weight = torch.tensor([[1.0], [5.0], [2.0], [4.0], [3.0], [99.0]])
    head = HeadShard(_target(weight))
    found = head.candidates(torch.ones(1, 1), k=2)
    assert found.token_ids.tolist() == [[8, 10]]
    bias = torch.zeros(1, 12)
    bias[0, 8], bias[0, 11] = -10.0, 10.0
    assert head.candidates(torch.ones(1, 1), 2, bias).token_ids.tolist() == [[11, 10]]


def test_heads_that_cannot_be_borrowed_are_refused() -> None:
    from overstory.workers.ddtree.draft import HeadShard

    with pytest.raises(ValueError, match="3 added tokens"):
        HeadShard(_target(torch.ones(6, 1), added=3))
    for weight in (torch.ones(6, 1, dtype=torch.int8), None):
        with pytest.raises(ValueError, match="unquantised lm_head"):
            HeadShard(_target(weight))

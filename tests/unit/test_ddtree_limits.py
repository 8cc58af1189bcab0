"""Room for steps, drafter configs, and the pairs that do not fit. No SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overstory.workers.ddtree import rows_for, server_fields
from overstory.workers.ddtree.drafter_config import check_pair, read_drafter
from overstory.workers.ddtree.limits import StepLimits, row_headroom
from overstory.workers.tree_policy import policy_from_budget

TARGET = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 1, 2]},
}


PAGES = st.sampled_from([1, 2, 16, 64, 256])


@given(
    nodes=st.integers(0, 63),
    block=st.integers(2, 16),
    overlap=st.booleans(),
    page=PAGES,
    context=st.integers(100, 200),
)
def test_rows_hold_a_step_at_the_end_of_the_context(
    nodes: int, block: int, overlap: bool, page: int, context: int
) -> None:
    limits = StepLimits(block, rows_for(nodes, block), overlap, page)
    known = context - 1
    unseen = block if overlap else 0
    assert limits.max_rows >= 1 + nodes
    assert known + limits.ahead >= known + unseen + limits.max_rows
    assert known + limits.ahead <= context + row_headroom(limits.max_rows, page)
    assert limits.reserved(known, 0) <= context + row_headroom(limits.max_rows, page)


@given(
    nodes=st.integers(0, 63),
    overlap=st.booleans(),
    page=PAGES,
    steps=st.lists(st.integers(1, 8), max_size=60),
)
def test_slots_are_topped_up_in_blocks_and_never_run_short(
    nodes: int, overlap: bool, page: int, steps: list[int]
) -> None:
    limits = StepLimits(8, rows_for(nodes, 8), overlap, page)
    committed = allocated = 100
    taken = []
    for tokens in steps:
        wanted = limits.reserved(committed, allocated)
        assert committed + limits.ahead <= wanted < committed + 2 * limits.max_rows + page
        if wanted > allocated:
            assert wanted % page == 0
            assert pages(wanted, page) - pages(allocated, page) <= _sglang_keeps_free(
                committed, allocated, limits
            ), "more than SGLang has made sure of before the step"
            taken.append(wanted - allocated)
        allocated, committed = wanted, committed + tokens
    assert all(count > 2 * limits.max_rows - limits.ahead for count in taken)


def pages(tokens: int, page: int) -> int:
    """Whole pages of so many tokens."""
    return -(-tokens // page)


def _sglang_keeps_free(committed: int, allocated: int, limits: StepLimits) -> int:
    """Pages: `ScheduleBatch._new_tokens_required_next_decode_spec_v2`."""
    more = max(0, committed + 2 * limits.max_rows - allocated)
    return pages(allocated + more, limits.page_size) - pages(allocated, limits.page_size)


@pytest.mark.parametrize(("budget", "rows"), [(0, 8), (4, 8), (7, 8), (8, 9), (63, 64)])
def test_server_fields_reserve_for_the_larger_of_block_and_tree(budget: int, rows: int) -> None:
    fields = server_fields(policy_from_budget(budget, 8), 8, "/drafter")
    assert fields["speculative_num_draft_tokens"] == rows
    assert fields["speculative_algorithm"] == "DDTREE"


def _write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_fitting_pair_is_accepted(tmp_path: Path) -> None:
    drafter = read_drafter(_write(tmp_path / "d", DRAFTER))
    assert drafter.block_size == 8
    check_pair(drafter, _write(tmp_path / "t", TARGET))
    check_pair(drafter, _write(tmp_path / "nested", {"text_config": TARGET}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 5000}, "vocab_size is 5000"),
        ({"hidden_size": 128}, "hidden_size is 128"),
        ({"dflash_config": {"mask_token_id": 9999}}, "mask_token_id 9999"),
        ({"dflash_config": {"target_layer_ids": [0, 3]}}, r"layers \[3\]"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    drafter = read_drafter(_write(tmp_path / "d", DRAFTER | change))
    with pytest.raises(ValueError, match=words):
        check_pair(drafter, _write(tmp_path / "t", TARGET))


def test_not_a_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DFlash drafter"):
        read_drafter(_write(tmp_path / "t", TARGET | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match="block_size"):
        read_drafter(_write(tmp_path / "b", DRAFTER | {"block_size": 1}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="speculative_draft_model_path"):
        read_drafter(str(tmp_path / "empty"))


@pytest.mark.parametrize("overlap", [True, False])
def test_slots_are_asked_for_where_a_request_gets_more(overlap: bool) -> None:
    limits = StepLimits(8, 16, overlap, 4)
    for spare in range(2 * limits.ahead):
        committed, allocated = [100, 100 + spare], [100 + 2 * limits.ahead, 100 + 2 * spare]
        more = [limits.reserved(c, a) > a for c, a in zip(committed, allocated, strict=True)]
        assert limits.short(committed, allocated) == any(more)
    assert not limits.short([], [])

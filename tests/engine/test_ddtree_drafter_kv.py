"""The stacked projection into the drafter's KV equals SGLang's layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from ddtree_support import server_args

if TYPE_CHECKING:
    from harness import EngineHarness


@pytest.mark.parametrize("rows", [1, 7])
def test_stacked_equals_sequential(
    engine: Callable[..., EngineHarness], pair: tuple[str, str], rows: int
) -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    worker = engine(**server_args(pair[1])).scheduler.model_worker
    pool = worker.draft_model_runner.token_to_kv_pool
    assert worker._stacked_kv is not None
    hidden = torch.randn(rows, worker.draft_model.config.hidden_size)
    positions = torch.randint(0, 500, (rows,))
    ours, theirs = torch.arange(1, rows + 1), torch.arange(101, rows + 101)
    with torch.inference_mode():
        worker._append_target_hidden_sequential(hidden, positions, ours)
        DFlashWorkerV2._append_target_hidden_sequential(worker, hidden, positions, theirs)
    for layer in (*pool.k_buffer, *pool.v_buffer):
        assert layer[theirs].abs().max() > 0
        torch.testing.assert_close(layer[ours], layer[theirs], rtol=1e-4, atol=1e-5)

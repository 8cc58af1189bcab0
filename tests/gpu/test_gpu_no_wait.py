"""No op waits for the device or allocates, once its results and scratch are the caller's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import op_checks
import pytest
import torch
from attention_cases import Case, DecodeCase

from overstory.kernels import ops
from overstory.kernels.reference import Shard

BS, DEPTH, K, ROWS, VOCABULARY = 3, 8, 4, 16, 1000
BUSY_CYCLES = 200_000_000
"""The device is busy for a tenth of a second, which is longer than any call takes the host."""
NAMES = (
    "verify_attention",
    "verify_attention over e4m3",
    "decode_attention",
    "tree_build",
    "tree_mask",
    "tree_accept",
    "candidates_topk",
    "merge_candidates",
    "sample_nodes",
    "kv_relocate",
    "kv_relocate of many",
    "kv_rows",
)


def calls(device: str) -> dict[str, Callable[[], object]]:
    """Every op with all that it can be given."""
    return _attention(device) | _trees(device) | _logits(device) | _moves(device)


def _attention(device: str) -> dict[str, Callable[[], object]]:
    space = ops.attention_workspace(device, 8, 9)

    def verify(kv_scale: float | None) -> Callable[[], object]:
        case = Case([(300, 9), (20, 4)], device=device, kv_scale=kv_scale)
        mask, mask_indptr = case.mask_bytes()
        return partial(
            ops.verify_attention, case.q, case.kv, case.qo_indptr, case.kv_indptr, case.kv_indices,
            case.out_cache_loc, mask, mask_indptr, scale=0.1, kv_scale=kv_scale or 1.0, max_q=9,
            out=torch.empty_like(case.q[..., :512]).contiguous(), workspace=space,
            lse=torch.empty(case.q.shape[:2], device=device),
        )  # fmt: skip

    one = DecodeCase([300, 20], device=device)
    decode = partial(
        ops.decode_attention, one.q, one.kv, one.kv_indptr, one.kv_indices, scale=0.1,
        out=torch.empty_like(one.q[..., :512]).contiguous(), workspace=space,
    )  # fmt: skip
    return {
        "verify_attention": verify(None),
        "verify_attention over e4m3": verify(0.5),
        "decode_attention": decode,
    }


def _trees(device: str) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    drawn = op_checks.draw_candidates(generator, BS, DEPTH, K, ties=False)
    roots, logprobs, token_ids = (tensor.to(device) for tensor in drawn)
    budgets = torch.full((BS,), ROWS - 1, dtype=torch.int32, device=device)
    lengths = torch.full((BS,), 20, dtype=torch.int32, device=device)
    build = partial(ops.tree_build, roots, logprobs, token_ids, budgets, rows=ROWS)
    tree = build()
    mask = partial(ops.tree_mask, tree, lengths)
    full = torch.empty(BS * ROWS * (20 + ROWS), dtype=torch.uint8, device=device)
    accept = partial(ops.tree_accept, tree, tree.tokens.clone(), ROWS)
    return {
        "tree_build": partial(build, out=build()),
        "tree_mask": partial(mask, full=full, out=mask()),
        "tree_accept": partial(accept, out=accept()),
    }


def _logits(device: str) -> dict[str, Callable[[], object]]:
    rows = BS * ROWS
    logits = torch.randn(rows, VOCABULARY, device=device).bfloat16()
    status = torch.zeros(rows, dtype=torch.int32, device=device)
    ones = torch.ones(rows, device=device)
    ints = torch.arange(rows, device=device)
    top_k = torch.full((rows,), 50, dtype=torch.int32, device=device)
    candidates = partial(ops.candidates_topk, logits, K, status=status)
    shard = candidates()
    stacked = Shard(*(torch.stack((part, part)) for part in shard))
    merge = partial(ops.merge_candidates, stacked, K, status=status)
    sample = partial(
        ops.sample_nodes, logits, ones, top_k, ones, 0 * ones, ints, ints, status=status
    )
    return {
        "candidates_topk": partial(
            candidates, out=shard, workspace=ops.candidates_workspace(device, rows, VOCABULARY)
        ),
        "merge_candidates": partial(merge, out=merge()),
        "sample_nodes": partial(
            sample, out=sample(), workspace=ops.sample_workspace(device, rows, VOCABULARY)
        ),
    }


def _moves(device: str) -> dict[str, Callable[[], object]]:
    table = ops.LayerTable([torch.zeros(8000, 16, device=device) for _ in range(2)])
    word = torch.zeros(1, dtype=torch.int32, device=device)
    slots = torch.arange(8000, device=device)
    dense = torch.empty(2, 100, 16, device=device)
    relocate = partial(ops.kv_relocate, table, status=word, scratch=word.clone())
    return {
        "kv_relocate": partial(relocate, slots[:100], slots[100:200]),
        "kv_relocate of many": partial(relocate, slots[:4000], slots[4000:]),
        "kv_rows": partial(ops.kv_rows, table, slots[:100], dense, scatter=False, status=word),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_call_neither_waits_nor_allocates(name: str) -> None:
    made = calls("cuda")
    assert set(made) == set(NAMES)
    launch = made[name]
    launch()  # a first use builds, loads, asks the device
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(BUSY_CYCLES)
    launch()
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the call waited for the device"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

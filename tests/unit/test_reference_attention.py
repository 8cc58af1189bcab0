"""The ops against attention written out row by row and head by head in float64."""

import math

import pytest
import torch

from overstory.kernels.reference import (
    Tree,
    chain_tree,
    decode_attention,
    full_mask,
    tree_build,
    verify_attention,
)

HEADS, D, V = 3, 24, 16
SCALE = 0.3


class Case:
    """Requests of (prefix, rows) in one pool, slots shuffled; the tail mask of each."""

    def __init__(self, requests: list[tuple[int, int]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.requests = requests
        prefixes, counts = zip(*requests, strict=True)
        tokens, total = sum(counts), sum(prefixes)
        slots = torch.randperm(tokens + total + 11, generator=generator)
        self.kv = torch.randn(len(slots), 1, D, generator=generator)
        self.q = torch.randn(tokens, HEADS, D, generator=generator)
        self.qo_indptr = torch.tensor([0, *counts]).cumsum(0)
        self.kv_indptr = torch.tensor([0, *prefixes]).cumsum(0)
        self.kv_indices, self.out_cache_loc = slots[:total], slots[total : total + tokens]
        self.unused = slots[total + tokens :]

    def run(self, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(self.q.shape[:2], dtype=torch.promote_types(self.q.dtype, torch.float32))
        out = verify_attention(
            self.q,
            self.kv,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.out_cache_loc,
            scale=SCALE,
            v_head_dim=V,
            lse=lse,
            **options,
        )
        return out, lse

    def expected(self, tails: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses = [], []
        for b, (prefix, n) in enumerate(self.requests):
            first, begin = int(self.qo_indptr[b]), int(self.kv_indptr[b])
            for i in range(n):
                slots = [
                    *self.kv_indices[begin : begin + prefix].tolist(),
                    *(int(self.out_cache_loc[first + j]) for j in range(n) if tails[b][i, j]),
                ]
                keys = self.kv[slots, 0].double()
                for head in range(HEADS):
                    if not slots:
                        lses.append(-math.inf)
                        outs.append(torch.zeros(V, dtype=torch.float64))
                        continue
                    scores = keys @ self.q[first + i, head].double() * SCALE
                    weights = (scores - scores.max()).exp()
                    lses.append(float(scores.max() + weights.sum().log()))
                    outs.append((weights / weights.sum()) @ keys[:, :V])
        shape = (len(self.q), HEADS)
        lse = torch.tensor(lses, dtype=torch.float64)
        return torch.stack(outs).view(*shape, V), lse.view(shape)

    def mask_of(self, tails: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """FULL_MASK of any tails; the prefix columns are False, for nobody may read them."""
        parts = [
            torch.cat((torch.zeros(n, prefix, dtype=torch.bool), tails[b]), dim=1).flatten()
            for b, (prefix, n) in enumerate(self.requests)
        ]
        sizes = torch.tensor([0, *(part.numel() for part in parts)])
        return torch.cat(parts), sizes.cumsum(0)


def close(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=2e-6, rtol=2e-6)


def triangles(case: Case) -> list[torch.Tensor]:
    return [torch.ones(n, n).tril().bool() for _, n in case.requests]


RAGGED = [(7, 5), (0, 3), (40, 1), (0, 0), (13, 9)]


@pytest.mark.parametrize("kind", ["chain", "star", "diagonal", "random", "nothing"])
def test_masks_of_every_kind(kind: str) -> None:
    case = Case(RAGGED)
    generator = torch.Generator().manual_seed(1)
    tails = []
    for _, n in RAGGED:
        tail = torch.eye(n).bool()
        if kind == "chain":
            tail = torch.ones(n, n).tril().bool()
        elif kind == "star":
            tail[:, :1] = True
        elif kind == "random":
            tail = torch.rand(n, n, generator=generator) < 0.5
        elif kind == "nothing":
            tail[:] = False
        tails.append(tail)
    mask, indptr = case.mask_of(tails)
    out, lse = case.run(custom_mask=mask, mask_indptr=indptr)
    close((out, lse), case.expected(tails))
    if kind == "nothing":  # request 1 has no prefix either
        assert out[5:8].abs().sum() == 0
        assert bool((lse[5:8] == -torch.inf).all())


def test_masks_of_real_trees() -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs = torch.log_softmax(torch.randn(3, 4, 6, generator=generator), 2)
    top = logprobs.sort(dim=2, descending=True)
    budgets = torch.tensor([12, 3, 0])
    tree = tree_build(torch.tensor([1, 2, 3]), top.values, top.indices, budgets, rows=13)
    seq_lens = torch.tensor([20, 0, 5])
    mask, indptr = full_mask(tree, seq_lens)
    case = Case([(length, 13) for length in seq_lens.tolist()])
    tails = [ancestors(tree, b) for b in range(3)]
    close(case.run(custom_mask=mask, mask_indptr=indptr), case.expected(tails))


def ancestors(tree: Tree, b: int) -> torch.Tensor:
    seen = torch.zeros(tree.rows, tree.rows, dtype=torch.bool)
    for row in range(tree.rows):
        at = row
        while at >= 0:
            seen[row, at] = True
            at = int(tree.parents[b, at])
    return seen


def test_a_chain_mask_equals_causal() -> None:
    case = Case([(9, 6), (0, 6)])
    tree = chain_tree(torch.tensor([1, 2]), torch.zeros(2, 5, dtype=torch.int64))
    mask, indptr = full_mask(tree, torch.tensor([9, 0]))
    close(case.run(custom_mask=mask, mask_indptr=indptr), case.run())
    close(case.run(), case.expected(triangles(case)))


def test_block_without_order() -> None:
    case = Case(RAGGED)
    tails = [torch.ones(n, n).bool() for _, n in RAGGED]
    close(case.run(causal=False), case.expected(tails))


@pytest.mark.parametrize("prefix", [0, 30])
def test_prefill_longer_than_a_block(prefix: int) -> None:
    case = Case([(prefix, 150), (2, 3)])
    close(case.run(), case.expected(triangles(case)))


def test_a_mask_longer_than_a_block() -> None:
    case = Case([(3, 140)])
    tails = [torch.rand(140, 140, generator=torch.Generator().manual_seed(3)) < 0.3]
    mask, indptr = case.mask_of(tails)
    close(case.run(custom_mask=mask, mask_indptr=indptr), case.expected(tails))


def test_repeated_prefix_slots_count_twice() -> None:
    case = Case([(6, 2), (6, 2)])
    case.kv_indices = case.kv_indices[[0, 0, 0, 3, 2, 1, 0, 1, 5, 1, 2, 3]]
    close(case.run(), case.expected(triangles(case)))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_a_row_does_not_see_has_no_influence(poison: float) -> None:
    case = Case([(5, 4), (0, 3)])
    tails = [torch.eye(4).bool(), torch.ones(3, 3).tril().bool()]
    mask, indptr = case.mask_of(tails)
    expected = case.expected(tails)
    case.kv[case.unused] = poison
    close(case.run(custom_mask=mask, mask_indptr=indptr), expected)
    case.kv[case.out_cache_loc[3]] = poison  # seen by row 3 alone
    case.kv[case.out_cache_loc[6]] = poison  # last of request 1, seen by itself alone
    out, lse = case.run(custom_mask=mask, mask_indptr=indptr)
    clean = [0, 1, 2, 4, 5]
    close((out[clean], lse[clean]), (expected[0][clean], expected[1][clean]))
    assert not bool(torch.isfinite(out[[3, 6]]).any())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 2e-6), (torch.float64, 1e-14)]
)
def test_types(dtype: torch.dtype, tolerance: float) -> None:
    case = Case([(20, 4)])
    case.q, case.kv = case.q.to(dtype), case.kv.to(dtype)
    out, lse = case.run()
    assert out.dtype == dtype
    expected, expected_lse = case.expected(triangles(case))
    assert float((out.double() - expected).abs().max()) < tolerance
    assert float((lse - expected_lse).abs().max()) < min(tolerance, 1e-5)


def test_large_scores_do_not_overflow() -> None:
    case = Case([(20, 4)])
    case.q *= 300
    close(case.run(), case.expected(triangles(case)))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_decode_is_one_row_that_sees_all_slots(index: torch.dtype) -> None:
    case = Case([(9, 1), (0, 1), (30, 1)])
    slots, bounds = [], [0]
    for b, (prefix, _) in enumerate(case.requests):
        begin = int(case.kv_indptr[b])
        slots += [case.kv_indices[begin : begin + prefix], case.out_cache_loc[b : b + 1]]
        bounds.append(bounds[-1] + prefix + 1)
    lse = torch.empty(3, HEADS)
    out = decode_attention(
        case.q,
        case.kv,
        torch.tensor(bounds, dtype=index),
        torch.cat(slots).to(index),
        scale=SCALE,
        v_head_dim=V,
        lse=lse,
    )
    close((out, lse), case.run())


def test_decode_of_a_request_without_slots_gives_zeros() -> None:
    lse = torch.empty(2, HEADS)
    kv, q = torch.randn(4, 1, D), torch.randn(2, HEADS, D)
    bounds, slots = torch.tensor([0, 0, 2]), torch.tensor([3, 1])
    out = decode_attention(q, kv, bounds, slots, scale=SCALE, v_head_dim=V, lse=lse)
    assert out[0].abs().sum() == 0
    assert bool((lse[0] == -torch.inf).all())
    assert bool(torch.isfinite(out[1]).all())


def test_int32_indices_of_both_kinds() -> None:
    case = Case([(9, 4)])
    expected = case.run()
    case.kv_indices = case.kv_indices.int()  # out_cache_loc stays int64, as SGLang mixes them
    close(case.run(), expected)
    case.out_cache_loc = case.out_cache_loc.int()
    close(case.run(), expected)


def test_a_mask_that_does_not_fit() -> None:
    case = Case([(9, 4)])
    mask, indptr = case.mask_of(triangles(case))
    with pytest.raises(ValueError, match="go together"):
        case.run(custom_mask=mask)
    with pytest.raises(ValueError, match=r"has 51 elements.*needs 52"):
        case.run(custom_mask=mask[:-1], mask_indptr=indptr)

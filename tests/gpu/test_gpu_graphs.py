"""Captured once, replayed with other values: every op under a CUDA graph, as an engine runs it."""

from __future__ import annotations

import time
from collections.abc import Callable

import op_checks
import pytest
import torch

from overstory.kernels import ops, reference
from overstory.kernels.reference import Tree

MOST_ROWS, HEADS, SLOTS = 16, 8, 4000
CAPTURE_SECONDS = 2.0


def captured(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The launch as a graph, after one round that may build and load; capturing is quick."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    begun = time.perf_counter()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    assert time.perf_counter() - begun < CAPTURE_SECONDS
    return graph


class Batch:
    """Buffers of a captured verify of `bs` requests, filled anew for every replay."""

    def __init__(
        self, bs: int, seed: int, workspace: torch.Tensor, most_rows: int = MOST_ROWS
    ) -> None:
        self.bs, self.most_rows = bs, most_rows
        self.generator = torch.Generator().manual_seed(seed)
        self.most_prefix = SLOTS // bs - most_rows
        tokens = bs * most_rows
        ints = {"dtype": torch.int32, "device": "cuda"}
        self.kv = torch.randn(SLOTS, 1, 576, generator=self.generator).bfloat16().cuda()
        self.q = torch.zeros(tokens, HEADS, 576, dtype=torch.bfloat16, device="cuda")
        self.qo_indptr = torch.zeros(bs + 1, **ints)
        self.kv_indptr = torch.zeros(bs + 1, **ints)
        self.kv_indices = torch.zeros(SLOTS, dtype=torch.int64, device="cuda")
        self.out_cache_loc = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        mask_bytes = bs * most_rows * (self.most_prefix + most_rows)
        self.mask = torch.zeros(mask_bytes, dtype=torch.bool, device="cuda")
        self.mask_indptr = torch.zeros(bs + 1, dtype=torch.int64, device="cuda")
        self.out = torch.zeros(tokens, HEADS, 512, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.zeros(tokens, HEADS, device="cuda")
        self.workspace = workspace

    def launch(self) -> None:
        ops.verify_attention(
            self.q,
            self.kv,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.out_cache_loc,
            self.mask,
            self.mask_indptr,
            scale=0.07,
            lse=self.lse,
            max_q=self.most_rows,
            out=self.out,
            workspace=self.workspace,
        )

    def refill(self) -> int:
        """Other lengths, rows (fewer than captured, some requests empty), masks, slots."""
        prefixes = torch.randint(0, self.most_prefix + 1, (self.bs,), generator=self.generator)
        rows = torch.randint(0, self.most_rows + 1, (self.bs,), generator=self.generator)
        prefixes[rows == 0] = 1  # a padded request: SGLang gives it one slot
        slots = torch.randperm(SLOTS, generator=self.generator)
        total, tokens = int(prefixes.sum()), int(rows.sum())
        self.qo_indptr[1:] = rows.cumsum(0)
        self.kv_indptr[1:] = prefixes.cumsum(0)
        self.kv_indices[:total] = slots[:total].cuda()
        self.out_cache_loc[:tokens] = slots[total : total + tokens].cuda()
        self.q.copy_(torch.randn(self.q.shape, generator=self.generator))
        masks, begins = [], [0]
        for prefix, n in zip(prefixes.tolist(), rows.tolist(), strict=True):
            tail = torch.rand(n, n, generator=self.generator) < 0.5
            masks.append(torch.nn.functional.pad(tail, (prefix, 0)).flatten())
            begins.append(begins[-1] + len(masks[-1]))
        flat = torch.cat(masks)
        self.mask[: len(flat)] = flat.cuda()
        self.mask_indptr.copy_(torch.tensor(begins))
        self.out.fill_(torch.nan)
        return tokens

    def check(self, tokens: int, on: str = "cuda") -> None:
        """Against the reference, computed `on` a device."""
        lse = torch.empty(tokens, HEADS, device=on)
        want = reference.verify_attention(
            self.q[:tokens].to(on),
            self.kv.to(on),
            self.qo_indptr.to(on),
            self.kv_indptr.to(on),
            self.kv_indices.to(on),
            self.out_cache_loc[:tokens].to(on),
            self.mask.to(on),
            self.mask_indptr.to(on),
            scale=0.07,
            lse=lse,
        )
        got, got_lse = self.out.float().to(on), self.lse.to(on)
        error = (got[:tokens] - want.float()).norm() / want.float().norm().clamp(min=1e-6)
        assert float(error) < 1e-2
        torch.testing.assert_close(got_lse[:tokens], lse, rtol=2e-3, atol=2e-3)
        assert bool((got[tokens:] == 0).all()), "rows that no request owns"
        assert bool((got_lse[tokens:] == -torch.inf).all())


def workspace(most_rows: int = MOST_ROWS) -> torch.Tensor:
    return ops.attention_workspace("cuda", HEADS, most_rows)


@pytest.mark.parametrize("bs", [1, 5])
@pytest.mark.parametrize("most_rows", [MOST_ROWS, 9, 4])
def test_verify_attention_replayed_with_other_values(bs: int, most_rows: int) -> None:
    """Eight tiles twice, nine and four."""
    batch = Batch(bs, seed=bs, workspace=workspace(most_rows), most_rows=most_rows)
    batch.refill()
    graph = captured(batch.launch)
    for replay in range(100):
        tokens = batch.refill()
        graph.replay()
        if replay % 5 == 0 or replay > 95:
            batch.check(tokens)


def test_two_streams_do_not_meet() -> None:
    """Two graphs with a workspace each, replayed side by side."""
    batches = [Batch(3, seed=10 + i, workspace=workspace()) for i in range(2)]
    for batch in batches:
        batch.refill()
    graphs = [captured(batch.launch) for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    for _ in range(10):
        counts = [batch.refill() for batch in batches]
        torch.cuda.synchronize()
        for _ in range(5):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for batch, tokens in zip(batches, counts, strict=True):
            batch.check(tokens)


def test_replays_of_one_input_are_equal_bit_by_bit() -> None:
    batch = Batch(4, seed=20, workspace=workspace())
    batch.refill()
    graph = captured(batch.launch)
    graph.replay()
    first = batch.out.clone()
    for _ in range(20):
        batch.out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(batch.out.view(torch.int16), first.view(torch.int16))


def test_decode_attention_replayed_with_other_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    bs = 6
    kv = torch.randn(SLOTS, 1, 576, generator=generator).bfloat16().cuda()
    q = torch.randn(bs, HEADS, 576, generator=generator).bfloat16().cuda()
    indptr = torch.zeros(bs + 1, dtype=torch.int32, device="cuda")
    indices = torch.randperm(SLOTS, generator=generator).cuda()
    out = torch.empty(bs, HEADS, 512, dtype=torch.bfloat16, device="cuda")
    space = ops.attention_workspace("cuda", HEADS, 1)
    graph = captured(
        lambda: ops.decode_attention(q, kv, indptr, indices, scale=0.07, out=out, workspace=space)
    )
    for _ in range(100):
        lengths = torch.randint(0, SLOTS // bs, (bs,), generator=generator)
        lengths[0] = 0
        indptr[1:] = lengths.cumsum(0)
        out.fill_(torch.nan)
        graph.replay()
        want = reference.decode_attention(q, kv, indptr, indices, scale=0.07)
        assert float((out.float() - want.float()).norm() / want.float().norm()) < 1e-2
        assert bool((out[0] == 0).all())


def test_a_whole_step_of_trees_replayed() -> None:
    """Logits to candidates, tree, masks, target tokens, walk: one graph, 100 replays."""
    generator = torch.Generator().manual_seed(0)
    bs, depth, k, rows, vocabulary = 4, 8, 4, 16, 1000
    draft = torch.zeros(bs * depth, vocabulary, device="cuda")
    target = torch.zeros(bs * rows, vocabulary, device="cuda")
    roots = torch.zeros(bs, dtype=torch.int64, device="cuda")
    budgets = torch.zeros(bs, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(bs, dtype=torch.int32, device="cuda")
    full = torch.zeros(bs * rows * (50 + rows), dtype=torch.bool, device="cuda")
    zeros = torch.zeros(bs * rows, device="cuda")
    ones, ints = zeros + 1, zeros.long()
    results: list[object] = []

    def step() -> None:
        shard = ops.candidates_topk(draft, k)
        logprobs, ids = ops.merge_candidates([shard], k)
        shape = (bs, depth, k)
        tree = ops.tree_build(roots, logprobs.view(shape), ids.view(shape), budgets, rows=rows)
        masks = ops.tree_mask(tree, lengths, full=full)
        positions = masks.positions.flatten()
        chosen = ops.sample_nodes(target, zeros, ints, ones, zeros, ints, positions, filters=False)
        accepted = ops.tree_accept(tree, chosen.view(bs, rows))
        results[:] = [tree, masks, chosen, accepted, logprobs]

    graph = captured(step)
    for _ in range(100):
        draft.copy_(torch.randn(draft.shape, generator=generator) * 3)
        target.copy_(torch.randn(target.shape, generator=generator) * 3)
        roots.copy_(torch.randint(vocabulary, (bs,), generator=generator))
        budgets.copy_(torch.randint(rows, (bs,), generator=generator))
        lengths.copy_(torch.randint(50, (bs,), generator=generator))
        graph.replay()
        tree, masks, chosen, accepted, logprobs = results
        want = _step_by_reference(draft, target, roots, budgets, lengths, logprobs, k, rows)
        want_tree, want_masks, want_chosen, want_accepted = want
        assert isinstance(tree, Tree)
        for field in op_checks.FIELDS:
            assert op_checks.equal(getattr(tree, field), getattr(want_tree, field)), field
        flat, _ = want_masks
        assert op_checks.equal(full[: len(flat)], flat)
        assert op_checks.equal(chosen, want_chosen)
        for ours, theirs in zip(accepted, want_accepted, strict=True):
            assert op_checks.equal(ours, theirs)
        assert op_checks.equal(masks.packed, reference.packed_mask(want_tree))


def _step_by_reference(
    draft: torch.Tensor,
    target: torch.Tensor,
    roots: torch.Tensor,
    budgets: torch.Tensor,
    lengths: torch.Tensor,
    logprobs: torch.Tensor,
    k: int,
    rows: int,
) -> tuple[Tree, tuple[torch.Tensor, torch.Tensor], torch.Tensor, reference.Accepted]:
    """The same on the CPU; log-probabilities are the GPU's, which round in their own way."""
    bs = len(roots)
    want_logprobs, ids = reference.merge_candidates([reference.candidates_topk(draft.cpu(), k)], k)
    torch.testing.assert_close(logprobs.cpu(), want_logprobs, rtol=1e-5, atol=1e-5)
    shape = (bs, -1, k)
    tree = reference.tree_build(
        roots.cpu(), logprobs.cpu().view(shape), ids.view(shape), budgets.cpu(), rows=rows
    )
    masks = reference.full_mask(tree, lengths.cpu())
    chosen = target.cpu().argmax(dim=1)
    return tree, masks, chosen, reference.tree_accept(tree, chosen.view(bs, rows), rows)


def test_relocation_replayed_with_other_moves() -> None:
    generator = torch.Generator().manual_seed(0)
    most, slots = 64, 200
    pool = torch.randint(100, (3, slots, 1, 64), generator=generator, dtype=torch.int16)
    ours = pool.cuda()
    table = ops.LayerTable(list(ours))
    sources = torch.full((most,), -1, device="cuda")
    targets = torch.full((most,), -1, device="cuda")
    graph = captured(lambda: ops.kv_relocate(table, sources, targets))
    for _ in range(100):
        moves = op_checks.draw_int(generator, 0, most)
        source = torch.randint(slots, (moves,), generator=generator)
        target = torch.randperm(slots, generator=generator)[:moves]
        sources.fill_(-1)
        targets.fill_(-1)
        sources[:moves], targets[:moves] = source.cuda(), target.cuda()
        graph.replay()
        reference.kv_relocate(list(pool), source, target)
    assert op_checks.equal(ours, pool)

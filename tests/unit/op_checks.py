"""The ops against the reference: the same checks for the simulator and for a GPU.

Inputs are drawn on the CPU from a seed, so that both see the same; the reference runs on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from overstory.kernels import ops, reference
from overstory.kernels.reference import Tree

FIELDS = ("tokens", "parents", "depths", "ranks", "sizes", "first_child", "next_sibling")


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bitwise, shape and type included."""
    return got.dtype == want.dtype and torch.equal(got.cpu(), want)


def draw_int(generator: torch.Generator, low: int, high: int) -> int:
    """low..high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def draw_candidates(
    generator: torch.Generator, bs: int, depth: int, k: int, ties: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Roots, log-probabilities, token ids; `ties`: of few values, some of them -inf."""
    if ties:
        values = torch.tensor([0.0, -0.25, -0.5, -0.5, -1.0, -3.0, -torch.inf])
        drawn = values[torch.randint(len(values), (bs, depth, k), generator=generator)]
        logprobs = drawn.sort(dim=2, descending=True).values
        token_ids = torch.rand(bs, depth, 40, generator=generator).argsort(dim=2)[:, :, :k]
    else:
        logits = torch.randn(bs, depth, 40, generator=generator) * 3
        top = torch.log_softmax(logits, dim=2).topk(k, dim=2)
        logprobs, token_ids = top.values, top.indices
    return torch.randint(40, (bs,), generator=generator), logprobs, token_ids.contiguous()


def draw_targets(generator: torch.Generator, tree: Tree) -> torch.Tensor:
    """What a target chose: mostly the token of some child, else any."""
    rows = torch.randint(tree.rows, tree.tokens.shape, generator=generator)
    any_token = torch.randint(40, tree.tokens.shape, generator=generator)
    child = tree.first_child
    sibling = child.gather(1, child.clamp(min=0))  # sometimes a grandchild: never accepted
    sibling = torch.where(rows % 3 == 0, tree.next_sibling.gather(1, child.clamp(min=0)), sibling)
    chosen = torch.where((rows % 5 < 4) & (child >= 0), child, sibling)
    tokens = tree.tokens.gather(1, chosen.clamp(min=0))
    return torch.where((chosen >= 0) & (rows % 7 > 0), tokens, any_token)


def check_trees(device: str, seed: int, most_requests: int) -> int:
    """Build, mask and walk trees of one random shape; how many there were."""
    generator = torch.Generator().manual_seed(seed)
    bs = draw_int(generator, 0 if seed % 10 == 0 else 1, most_requests)
    depth, k = draw_int(generator, 1, 16), draw_int(generator, 1, 16)
    roots, logprobs, token_ids = draw_candidates(generator, bs, depth, k, ties=seed % 2 == 0)
    rows = draw_int(generator, 1, 64)
    budgets = torch.randint(rows, (bs,), generator=generator)
    width = draw_int(generator, 1, k + 1)
    options: dict[str, Any] = {"width": width, "spine_first": seed % 3 == 0, "rows": rows}
    want = reference.tree_build(roots, logprobs, token_ids, budgets, **options)
    inputs = [tensor.to(device) for tensor in (roots, logprobs, token_ids, budgets)]
    got = ops.tree_build(*inputs, **options)
    for field in FIELDS:
        assert equal(getattr(got, field), getattr(want, field)), (field, seed, options)
    check_masks(got, want, generator, device)
    targets = draw_targets(generator, want)
    columns = draw_int(generator, 1, rows)
    accepted = ops.tree_accept(got, targets.to(device), columns)
    wanted = reference.tree_accept(want, targets, columns)
    for name, ours, theirs in zip(wanted._fields, accepted, wanted, strict=True):
        assert equal(ours, theirs), (name, seed)
    return bs


def check_masks(got: Tree, want: Tree, generator: torch.Generator, device: str) -> None:
    """Both layouts, with the prefix and without, and positions."""
    bs, rows = want.tokens.shape
    lengths = torch.randint(0, 70, (bs,), generator=generator)
    lengths = lengths.to(torch.int32) if bs % 2 else lengths
    flat, indptr = reference.full_mask(want, lengths)
    for fill_prefix in (True, False):
        # Beyond the mask, and where nothing is filled, every byte stays.
        full = torch.full((len(flat) + 3,), 7, dtype=torch.uint8, device=device)
        masks = ops.tree_mask(got, lengths.to(device), full=full, fill_prefix=fill_prefix)
        assert equal(masks.packed, reference.packed_mask(want))
        assert equal(masks.positions, reference.positions(want, lengths))
        assert equal(masks.mask_indptr, indptr)
        expected = torch.full((len(flat) + 3,), 7, dtype=torch.uint8)
        expected[: len(flat)] = flat
        if not fill_prefix:
            for begin, length in zip(indptr.tolist(), lengths.tolist(), strict=False):
                of_request = expected[begin : begin + rows * (length + rows)]
                of_request.view(rows, length + rows)[:, :length] = 7
        assert equal(full, expected)


def check_relocation(
    device: str, seed: int, layers: int, slots: int, moves: int, overlap: bool = True
) -> None:
    """Random moves with chains, cycles, repeated sources and padding; every byte is compared.

    Without `overlap` no row is source and destination.
    """
    generator = torch.Generator().manual_seed(seed)
    width = 8 * draw_int(generator, 1, 72)
    shape = (layers, slots, 1, width)
    want = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
    pool = want.to(device)
    order = torch.randperm(slots, generator=generator)
    targets = order[:moves]
    sources = torch.randint(slots, (moves,), generator=generator)
    if not overlap:
        sources = order[moves:][sources % (slots - moves)]
    elif seed % 2:
        sources = targets.roll(1)  # one cycle
    padding = torch.rand(moves, generator=generator) < 0.2
    if seed % 3 == 0:
        targets, sources = targets.to(torch.int32), sources.to(torch.int32)
    reference.kv_relocate(list(want), sources[~padding], targets[~padding])
    sources = sources.masked_fill(padding, -1)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    ops.kv_relocate(list(pool), sources.to(device), targets.to(device), status=status)
    assert equal(pool, want), seed
    assert int(status) == 0


def check_rows(device: str, seed: int, layers: int, slots: int, rows: int) -> None:
    """Rows to a dense tensor and back into other slots; every byte is compared."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 8 * draw_int(generator, 1, 72))
    pool = torch.randint(-(2**15), 2**15, (layers, slots, *shape), generator=generator)
    pool = pool.to(torch.int16)
    order = torch.randperm(slots, generator=generator).to((torch.int32, torch.int64)[seed % 2])
    source, target = order[:rows], order.flip(0)[:rows]
    dense, want = torch.zeros(layers, rows, *shape, dtype=torch.int16), pool.clone()
    reference.kv_rows(list(pool), source, dense, scatter=False)
    reference.kv_rows(list(want), target, dense, scatter=True)
    ours, packed = pool.to(device), torch.zeros_like(dense, device=device)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    table = ops.LayerTable(list(ours))
    ops.kv_rows(table, source.to(device), packed, scatter=False, status=status)
    assert equal(packed, dense), seed
    ops.kv_rows(table, target.to(device), packed, scatter=True, status=status)
    assert equal(ours, want), seed
    assert int(status) == 0


def draw_logits(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """bfloat16, so that ties are many; some tokens forbidden."""
    logits = torch.randn(rows, columns, generator=generator) * 3
    logits[torch.rand(rows, columns, generator=generator) < 0.1] = -torch.inf
    return logits.to(torch.bfloat16)


def check_candidates(device: str, seed: int, rows: int, columns: int) -> None:
    """Shards of a vocabulary and their merge; ids and logits bitwise, sums to rounding."""
    generator = torch.Generator().manual_seed(seed)
    k = draw_int(generator, 1, 16)
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    logits = draw_logits(generator, rows, columns).to(dtype)
    cut = draw_int(generator, 0, columns)
    got_shards, want_shards = [], []
    for first, part in ((0, logits[:, :cut]), (cut, logits[:, cut:])):
        valid = part.shape[1] - draw_int(generator, 0, min(3, part.shape[1]))
        part = part.contiguous()
        want = reference.candidates_topk(part, k, first, valid)
        status = torch.full((rows,), 9, dtype=torch.int32, device=device)
        got = ops.candidates_topk(part.to(device), k, first, valid, status=status)
        assert equal(got.logits, want.logits)
        assert equal(got.token_ids, want.token_ids)
        torch.testing.assert_close(got.logsumexp.cpu(), want.logsumexp, rtol=1e-5, atol=1e-5)
        assert status.tolist() == [0] * rows
        got_shards.append(got)
        want_shards.append(want)
    logprobs, ids = ops.merge_candidates(got_shards, k)
    want_logprobs, want_ids = reference.merge_candidates(want_shards, k)
    assert equal(ids, want_ids)
    torch.testing.assert_close(logprobs.cpu(), want_logprobs, rtol=1e-5, atol=1e-5)


def draw_sampling(
    generator: torch.Generator, rows: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameters of `sample_nodes` after the logits; `kind`: greedy, plain (no filter), any."""

    def choose(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        picks = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values, dtype=dtype)[picks]

    temperature = choose([0.0] if kind == "greedy" else [0.3, 0.8, 1.0, 1.5])
    top_k = choose([-1, 0, 3, 20] if kind == "any" else [-1], torch.int64)
    top_p = choose([1.0, 0.9, 0.5] if kind == "any" else [1.0])
    min_p = choose([0.0, 0.05] if kind == "any" else [0.0])
    if kind == "any":
        temperature[0] = 0.0
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    return temperature, top_k, top_p, min_p, seeds, torch.arange(rows) * 7


def check_sampling(device: str, seed: int, rows: int, columns: int, kind: str) -> None:
    """Tokens equal the reference's in all rows but one in a hundred; greedy in all."""
    generator = torch.Generator().manual_seed(seed)
    logits = draw_logits(generator, rows, columns)
    logits[:, -1] = 0.0  # no row forbids everything
    parameters = draw_sampling(generator, rows, kind)
    status = torch.full((rows,), 9, dtype=torch.int32, device=device)
    on_device = [parameter.to(device) for parameter in parameters]
    options = {"status": status, "filters": kind == "any"}
    got = ops.sample_nodes(logits.to(device), *on_device, **options).cpu()
    assert status.tolist() == [0] * rows
    want = reference.sample_nodes(logits, *parameters)
    if kind == "greedy":
        assert torch.equal(got, want)
        return
    chosen = logits.gather(1, got.unsqueeze(1))
    assert bool((chosen > -torch.inf).all()), "a forbidden token"
    # The kernels round in their own way: noise within rounding of a bound may fall on the other
    # side of it, and top-p may keep a token more or less. How far is checked in the simulator.
    assert int((got != want).sum()) <= 1 + rows // 100

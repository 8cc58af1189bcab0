"""The CUDA tree kernels, run by the simulator, bitwise against the reference."""

import random
import shutil

import pytest
import torch
from random_trees import random_candidates, random_tree

from overstory.kernels.build import SOURCES
from overstory.kernels.cuda_library import KernelLibrary, simulator_library
from overstory.kernels.errors import LaunchError
from overstory.kernels.reference import (
    Tree,
    chain_tree,
    full_mask,
    packed_mask,
    positions,
    tree_accept,
    tree_build,
)

FIELDS = ("tokens", "parents", "depths", "ranks", "first_child", "next_sibling")
UNWRITTEN = 7


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA sources for the simulator")
    return simulator_library([SOURCES / f"tree_{op}.cu" for op in ("build", "mask", "accept")])


def build(
    library: KernelLibrary,
    roots: torch.Tensor,
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    budgets: torch.Tensor,
    width: int,
    spine_first: bool,
    rows: int,
    links: bool = True,
) -> dict[str, torch.Tensor]:
    bs, depth, k = logprobs.shape
    out = {field: torch.full((bs, rows), -99) for field in FIELDS}
    out["sizes"] = torch.full((bs,), -99)
    given = dict(out) if links else {**out, "first_child": None, "next_sibling": None}
    library.launch(
        "tree_build",
        root_tokens=roots,
        logprobs=logprobs,
        token_ids=token_ids,
        budgets=budgets.to(torch.int32),
        **given,
        bs=bs,
        depth=depth,
        k=k,
        width=width,
        rows=rows,
        spine_first=spine_first,
    )
    return out


def check_builds(library: KernelLibrary, dice: random.Random, trees: int, bs: int) -> None:
    for _ in range(trees // bs):
        depth, k = dice.randint(1, 16), dice.randint(1, 16)
        given = random_candidates(dice, bs, depth, k)
        budgets = torch.tensor([dice.randint(0, 63) for _ in range(bs)])
        if dice.random() < 0.5:
            budgets //= 2
        width = dice.choice([k, k, dice.randint(1, k + 1)])
        rows = dice.randint(int(budgets.max()) + 1, 64)
        spine_first = dice.random() < 0.5
        library.seed_simulator(dice.getrandbits(32))
        want = tree_build(*given, budgets, width, spine_first, rows)
        got = build(library, *given, budgets, width, spine_first, rows)
        for field in (*FIELDS, "sizes"):
            assert torch.equal(got[field], getattr(want, field)), (field, given, budgets, width)


def test_tree_build_equals_the_reference(library: KernelLibrary) -> None:
    check_builds(library, random.Random(1), trees=3000, bs=3)
    check_builds(library, random.Random(2), trees=128, bs=64)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10, 14))
def test_tree_build_equals_the_reference_often(library: KernelLibrary, seed: int) -> None:
    check_builds(library, random.Random(seed), trees=8000, bs=8)


def test_tree_build_without_links_writes_none(library: KernelLibrary) -> None:
    given = random_candidates(random.Random(3), 2, 7, 8)
    got = build(library, *given, torch.tensor([15, 15]), 8, True, 16, links=False)
    want = tree_build(*given, 15, 8, True)
    assert torch.equal(got["parents"], want.parents)
    assert set(got["first_child"].flatten().tolist()) == {-99}


def test_tree_build_with_a_budget_that_is_none(library: KernelLibrary) -> None:
    """A budget comes from the GPU, where nobody can refuse it: it is cut to what there is."""
    given = random_candidates(random.Random(4), 3, 7, 8)
    got = build(library, *given, torch.tensor([1000, -5, 7]), 8, False, 8)
    want = tree_build(*given, torch.tensor([7, 0, 7]), 8, False, 8)
    assert all(torch.equal(got[field], getattr(want, field)) for field in (*FIELDS, "sizes"))


def test_nan_candidates_never_enter(library: KernelLibrary) -> None:
    roots, logprobs, token_ids = random_candidates(random.Random(5), 4, 7, 8)
    missing = logprobs.clone()
    missing[:, :, 5:] = -torch.inf
    missing[0, 3] = -torch.inf
    want = tree_build(roots, missing, token_ids, 63)
    nan = logprobs.masked_fill(missing == -torch.inf, torch.nan)
    got = build(library, roots, nan, token_ids, torch.full((4,), 63), 8, False, 64)
    assert all(torch.equal(got[field], getattr(want, field)) for field in (*FIELDS, "sizes"))


@pytest.mark.parametrize(("depth", "k"), [(0, 3), (3, 0)])
def test_tree_build_of_nothing_drafted(library: KernelLibrary, depth: int, k: int) -> None:
    given = torch.tensor([4]), torch.zeros(1, depth, k), torch.zeros(1, depth, k).long()
    got = build(library, *given, torch.tensor([5]), k, True, 6)
    assert got["sizes"].tolist() == [1]
    assert got["tokens"].tolist() == [[4] * 6]


@pytest.mark.parametrize(("depth", "k", "rows"), [(17, 4, 8), (4, 17, 8), (4, 4, 65), (4, 4, 0)])
def test_tree_build_refuses_what_does_not_fit(
    library: KernelLibrary, depth: int, k: int, rows: int
) -> None:
    given = torch.tensor([4]), torch.zeros(1, depth, k), torch.zeros(1, depth, k).long()
    with pytest.raises(LaunchError, match="error 1 "):
        build(library, *given, torch.tensor([5]), k, True, rows)


def masks(
    library: KernelLibrary,
    tree: Tree,
    seq_lens: torch.Tensor,
    mask: torch.Tensor | None,
    fill_prefix: bool,
) -> dict[str, torch.Tensor]:
    bs, rows = tree.tokens.shape
    out = {
        "mask_indptr": torch.full((bs + 1,), -99),
        "packed": torch.full((bs, rows), -99),
        "positions": torch.full((bs, rows), -99),
    }
    library.launch(
        "tree_mask",
        parents=tree.parents,
        depths=tree.depths,
        seq_lens=seq_lens,
        mask=mask,
        **out,
        bs=bs,
        rows=rows,
        seq_lens_are_int64=seq_lens.dtype == torch.int64,
        fill_prefix=fill_prefix,
    )
    return out


def check_masks(library: KernelLibrary, dice: random.Random, calls: int) -> None:
    for _ in range(calls):
        bs, rows = dice.randint(1, 5), dice.choice([1, 2, 9, 32, 33, 63, 64])
        tree = random_tree(dice, bs, rows, vocabulary=9)
        lengths = torch.tensor([dice.choice([0, 1, 15, 16, 17, 300]) for _ in range(bs)])
        seq_lens = lengths.to(dice.choice([torch.int32, torch.int64]))
        library.seed_simulator(dice.getrandbits(32))
        flat, indptr = full_mask(tree, lengths)
        for fill_prefix in (False, True):
            room = torch.full((flat.numel() + 80,), UNWRITTEN, dtype=torch.uint8)
            start = dice.randint(0, 40)
            mask = room[start : start + flat.numel()]
            got = masks(library, tree, seq_lens, mask, fill_prefix)
            assert torch.equal(got["mask_indptr"], indptr)
            assert torch.equal(got["packed"], packed_mask(tree))
            assert torch.equal(got["positions"], positions(tree, lengths))
            want = flat.to(torch.uint8)
            if not fill_prefix:
                for b, length in enumerate(lengths.tolist()):
                    matrix = want[indptr[b] : indptr[b + 1]].view(rows, length + rows)
                    matrix[:, :length] = UNWRITTEN
            assert torch.equal(mask, want)
            assert set(room[:start].tolist()) <= {UNWRITTEN}
            assert set(room[start + flat.numel() :].tolist()) <= {UNWRITTEN}


def test_tree_mask_equals_the_reference(library: KernelLibrary) -> None:
    check_masks(library, random.Random(1), calls=40)


@pytest.mark.full
def test_tree_mask_equals_the_reference_often(library: KernelLibrary) -> None:
    check_masks(library, random.Random(2), calls=1000)


def test_tree_mask_of_many_requests(library: KernelLibrary) -> None:
    tree = random_tree(random.Random(6), 70, 5, vocabulary=9)
    lengths = torch.arange(70) % 13
    flat, indptr = full_mask(tree, lengths)
    mask = torch.zeros(flat.numel(), dtype=torch.uint8)
    got = masks(library, tree, lengths, mask, fill_prefix=True)
    assert torch.equal(mask.bool(), flat)
    assert torch.equal(got["mask_indptr"], indptr)


def test_tree_mask_writes_only_what_it_is_asked_for(library: KernelLibrary) -> None:
    tree = random_tree(random.Random(7), 2, 33, vocabulary=9)
    nothing = dict.fromkeys(("mask", "mask_indptr", "packed", "positions"))
    sizes = {"bs": 2, "rows": 33, "seq_lens_are_int64": True, "fill_prefix": True}
    inputs = {"parents": tree.parents, "depths": tree.depths, "seq_lens": torch.tensor([3, 4])}
    library.launch("tree_mask", **inputs, **nothing, **sizes)
    packed = torch.zeros(2, 33, dtype=torch.int64)
    library.launch("tree_mask", **inputs, **{**nothing, "packed": packed}, **sizes)
    assert torch.equal(packed, packed_mask(tree))


def test_tree_mask_offsets_beyond_2_to_the_31(library: KernelLibrary) -> None:
    """Memory that is never touched costs nothing, and only the tails are."""
    tree, length = random_tree(random.Random(8), 3, 64, vocabulary=9), 17_000_000
    mask = torch.empty(3 * 64 * (length + 64), dtype=torch.uint8)
    seq_lens = torch.full((3,), length, dtype=torch.int32)
    got = masks(library, tree, seq_lens, mask, fill_prefix=False)
    assert int(got["mask_indptr"][2]) > 1 << 31
    tails = mask.view(3, 64, length + 64)[:, :, length:].clone()
    short, _ = full_mask(tree, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(tails.flatten().bool(), short)


def accept(
    library: KernelLibrary, tree: Tree, targets: torch.Tensor, width: int
) -> dict[str, torch.Tensor]:
    bs, rows = tree.tokens.shape
    out = {
        "accepted_rows": torch.full((bs, width), -99),
        "lengths": torch.full((bs,), -99),
        "bonus": torch.full((bs,), -99),
        "emitted": torch.full((bs, width), -99),
    }
    library.launch(
        "tree_accept",
        tokens=tree.tokens,
        parents=tree.parents,
        sizes=tree.sizes,
        target_tokens=targets,
        **out,
        bs=bs,
        rows=rows,
        width=width,
    )
    return out


def check_accepts(library: KernelLibrary, dice: random.Random, calls: int, bs: int) -> None:
    for _ in range(calls):
        rows, vocabulary = dice.randint(1, 64), dice.choice([1, 2, 3, 50])
        tree = random_tree(dice, bs, rows, vocabulary)
        targets = torch.tensor(dice.choices(range(vocabulary), k=bs * rows)).view(bs, rows)
        width = dice.choice([int(tree.depths.max()) + 1, 1, 17, 64, 70])
        # What padding rows hold must not matter.
        used = torch.arange(rows) < tree.sizes.unsqueeze(1)
        garbage = torch.full_like(targets, dice.choice([-1, 0, 1 << 50]))
        parents = torch.where(used, tree.parents, dice.choice([-1, 0, 5000]))
        tokens = torch.where(used, tree.tokens, garbage)
        given = Tree(tokens, parents, tree.depths, tree.ranks, tree.sizes)
        targets = torch.where(used, targets, garbage)
        library.seed_simulator(dice.getrandbits(32))
        want = tree_accept(tree, targets, width)
        got = accept(library, given, targets, width)
        assert torch.equal(got["accepted_rows"], want.rows)
        assert torch.equal(got["emitted"], want.tokens)
        assert torch.equal(got["lengths"], want.lengths)
        assert torch.equal(got["bonus"], want.bonus)


def test_tree_accept_equals_the_reference(library: KernelLibrary) -> None:
    check_accepts(library, random.Random(1), calls=300, bs=4)
    check_accepts(library, random.Random(2), calls=2, bs=64)


@pytest.mark.full
def test_tree_accept_equals_the_reference_often(library: KernelLibrary) -> None:
    check_accepts(library, random.Random(3), calls=5000, bs=4)


def test_a_whole_chain_is_accepted(library: KernelLibrary) -> None:
    tree = chain_tree(torch.tensor([1]), torch.arange(10, 73).unsqueeze(0))
    targets = torch.cat([tree.tokens[:, 1:], torch.tensor([[99]])], dim=1)
    got = accept(library, tree, targets, 64)
    assert got["accepted_rows"].tolist() == [list(range(64))]
    assert got["emitted"].tolist() == targets.tolist()
    assert (got["lengths"].tolist(), got["bonus"].tolist()) == ([63], [99])


@pytest.mark.parametrize(("rows", "width"), [(65, 4), (4, 0)])
def test_tree_accept_refuses_what_does_not_fit(
    library: KernelLibrary, rows: int, width: int
) -> None:
    blank = torch.zeros(1, rows, dtype=torch.int64)
    tree = Tree(blank, blank, blank, blank, torch.tensor([1]))
    with pytest.raises(LaunchError, match="error 1 "):
        accept(library, tree, blank, width)


def test_no_requests(library: KernelLibrary) -> None:
    tree = chain_tree(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3))
    assert accept(library, tree, tree.tokens, 4)["bonus"].numel() == 0
    given = tree.tokens[:, 0], torch.zeros(0, 3, 4), torch.zeros(0, 3, 4).long()
    assert build(library, *given, torch.zeros(0), 4, True, 4)["sizes"].numel() == 0

"""Kinds of bugs that attention kernels had elsewhere, on a GPU; most are simulated too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_hazards as hazards
import pytest
import torch
from attention_cases import WIDTH, Case, chain, random_bits

from overstory.kernels import ops, reference
from overstory.kernels.reference import Tree


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages(page_size: int) -> None:
    hazards.check_pages("cuda", page_size)
    hazards.check_pages("cuda", page_size, scale=50)


@pytest.mark.parametrize("prefix", [40, 3000])
def test_scores_far_below_zero(prefix: int) -> None:
    hazards.check_scores_far_below_zero("cuda", prefix)


def test_parts_of_which_none_is_seen() -> None:
    hazards.check_parts_of_which_none_is_seen("cuda")


def test_what_lies_behind_the_end() -> None:
    hazards.check_what_lies_behind_the_end("cuda")


@pytest.mark.parametrize("prefix", [40, 9000])
def test_padded_requests(prefix: int) -> None:
    hazards.check_padded_requests("cuda", prefix)


@pytest.mark.parametrize("prefix", [90, 9000])
def test_halves_merge_by_their_log_sums(prefix: int) -> None:
    hazards.check_halves_merge_by_their_log_sums("cuda", prefix)


@pytest.mark.parametrize("prefix", [50, 5000])
def test_rows_of_a_chain_are_decodes(prefix: int) -> None:
    hazards.check_rows_of_a_chain_are_decodes("cuda", prefix)


def test_inputs_stay() -> None:
    hazards.check_inputs_stay("cuda")


def test_calls_share_a_workspace() -> None:
    hazards.check_calls_share_a_workspace("cuda", 20_000, 10)


@pytest.mark.parametrize("prefix", [50, 5000])
def test_repeated_slots(prefix: int) -> None:
    hazards.check_repeated_slots("cuda", prefix)


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        ([(5000, 1000)], {}),
        ([(0, 200), (20_000, 130), (300, 1)], {"heads": 16, "unowned": 40}),
        ([(3000, 300)], {"heads": 4, "kv_scale": 0.4, "page_size": 64}),
        ([(500, 700)], {"heads": 2, "index_dtype": torch.int32}),
    ],
)
def test_blocks_of_rows(requests: list[tuple[int, int]], options: dict[str, Any]) -> None:
    hazards.check_blocks_of_rows("cuda", requests, **options)


def test_queries_more_than_32_bits_apart() -> None:
    """Token * stride passes 2^31 elements."""
    case = Case([(300, 30), (10, 6)], device="cuda", tail=random_bits)
    apart = 1 << 26
    if torch.cuda.mem_get_info()[0] < case.tokens * apart * 2 + (4 << 30):
        pytest.skip("needs 9 GB of free GPU memory")
    expected, q = case.expected(), case.q
    far = torch.empty(case.tokens, apart, dtype=torch.bfloat16, device="cuda")
    case.q = far[:, : case.heads * WIDTH].view(case.tokens, case.heads, WIDTH)
    case.q.copy_(q)
    hazards.check(hazards.verify(case), expected)


def test_masks_lengths_and_slots_that_the_kernel_before_wrote() -> None:
    """Of one graph: our `tree_mask` (which lets its successor start early) makes the words, a copy
    of torch's the lengths and slots. A launch that read them too soon would use the replay's
    before."""
    generator = torch.Generator().manual_seed(0)
    bs, rows, most = 3, 16, 900
    case = Case([(most, rows)] * bs, device="cuda", tail=chain)
    next_indptr, next_indices = case.kv_indptr.clone(), case.kv_indices.clone()
    lengths = torch.zeros(bs, dtype=torch.int32, device="cuda")
    tree = _roots(bs, rows)
    out = torch.empty(case.tokens, case.heads, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(case.tokens, case.heads, device="cuda")
    space = ops.attention_workspace("cuda", case.heads, rows)

    def step() -> None:
        case.kv_indptr.copy_(next_indptr)
        case.kv_indices.copy_(next_indices)
        masks = ops.tree_mask(tree, lengths)
        ops.verify_attention(
            case.q, case.kv, case.qo_indptr, case.kv_indptr, case.kv_indices, case.out_cache_loc,
            scale=case.scale, mask_words=masks.packed.flatten(), max_q=rows, lse=lse, out=out,
            workspace=space,
        )  # fmt: skip

    graph = _captured(step)
    for _ in range(30):
        prefixes = torch.randint(1, most + 1, (bs,), generator=generator)
        next_indptr[1:] = prefixes.cumsum(0)
        next_indices.copy_(
            case.kv_indices[torch.randperm(len(next_indices), generator=generator).cuda()]
        )
        _reshape(tree, generator)
        graph.replay()
        words = reference.packed_mask(tree)
        tail = ((words.unsqueeze(-1) >> torch.arange(rows, device="cuda")) & 1).bool()
        case.requests = [(int(n), rows) for n in prefixes]
        case.tails = list(tail)
        hazards.check((out, lse), case.expected())


def _roots(bs: int, rows: int) -> Tree:
    """Each row a root of its own, until `_reshape`."""
    zeros = torch.zeros(bs, rows, dtype=torch.int64, device="cuda")
    return Tree(zeros, zeros - 1, zeros, zeros, zeros[:, 0] + rows)


def _reshape(tree: Tree, generator: torch.Generator) -> None:
    """Other parents, in place: any earlier row."""
    parents = tree.parents.cpu()
    for row in range(1, tree.rows):
        parents[:, row] = torch.randint(0, row, (len(parents),), generator=generator)
    tree.parents.copy_(parents)


def _captured(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph

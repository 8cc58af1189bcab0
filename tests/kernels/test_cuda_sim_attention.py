"""The attention kernels, run by the CPU simulator, against the reference in float64."""

from __future__ import annotations

import ctypes
import random
import shutil
from typing import Any

import pytest
import torch
from attention_cases import (
    VALUES,
    Case,
    DecodeCase,
    Tail,
    chain,
    diagonal,
    everything,
    nothing,
    random_bits,
    random_tree,
    star,
)

from overstory.kernels.build import SOURCES
from overstory.kernels.cuda_library import KernelLibrary, simulator_library

SOURCE = SOURCES / "mla_attention.cu"
POISON = 0xAB


BUILDS = [
    pytest.param((), id="sm_120"),
    pytest.param(("OVERSTORY_SIM_SM_90",), id="sm_90", marks=pytest.mark.full),
]
"""They differ at nine tiles: values by halves of a warp's columns, or all at once."""


@pytest.fixture(scope="module", params=BUILDS)
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA sources for the simulator")
    return simulator_library([SOURCE], request.param)


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.element_size()


def outputs(library: KernelLibrary, tokens: int, heads: int, max_q: int, blocks: int) -> list[Any]:
    size = library.query("attention_workspace", heads=heads, max_q=max_q, blocks=blocks)
    out = torch.full((tokens, heads, VALUES), torch.nan, dtype=torch.bfloat16)
    lse = torch.full((tokens, heads), torch.nan)
    # Bytes that no kernel wrote must have no influence: as floats they are finite and large.
    workspace = torch.full((size + 64,), POISON, dtype=torch.uint8)
    return [out, lse, workspace, size]


def verify(
    library: KernelLibrary,
    case: Case,
    *,
    mask: str = "bytes",
    dense: bool = False,
    blocks: int = 5,
    min_chunk: int = 2,
    max_q: int | None = None,
    wide_indptr: bool = False,
    parts: list[bool] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of all tokens. `parts` gets which slots for parts were written."""
    max_q = max_q or case.max_q
    out, lse, workspace, size = outputs(library, case.tokens, case.heads, max_q, blocks)
    mask_bytes, mask_indptr = case.mask_bytes() if mask == "bytes" else (None, None)
    tail = case.tail_keys() if dense else None
    pointers = [case.kv_indptr, case.qo_indptr]
    kv_indptr, qo_indptr = [p.long() if wide_indptr else p for p in pointers]
    library.launch(
        "verify_attention",
        q=case.q,
        q_token_stride=case.q.stride(0),
        q_head_stride=case.q.stride(1),
        kv=case.kv,
        kv_row_stride=case.kv.stride(0),
        tail=tail,
        tail_row_stride=0 if tail is None else tail.stride(0),
        kv_indptr=kv_indptr,
        kv_indptr_bytes=bytes_of(kv_indptr),
        kv_ends=None,
        kv_indices=case.kv_indices,
        kv_indices_bytes=bytes_of(case.kv_indices),
        qo_indptr=qo_indptr,
        qo_indptr_bytes=bytes_of(qo_indptr),
        out_cache_loc=None if dense else case.out_cache_loc,
        out_cache_loc_bytes=bytes_of(case.out_cache_loc),
        mask_bytes=mask_bytes,
        mask_indptr=mask_indptr,
        mask_words=case.mask_words() if mask == "words" else None,
        causal=int(mask == "causal"),
        out=out,
        lse=lse,
        workspace=workspace,
        workspace_bytes=size,
        bs=len(case.requests),
        tokens=case.tokens,
        heads=case.heads,
        max_q=max_q,
        scale=case.scale,
        fp8=0,
        kv_scale=1.0,
        blocks=blocks,
        min_chunk=min_chunk,
    )
    assert bool((workspace[size:] == POISON).all())
    if parts is not None:  # a slot's powers of two are the last of it
        scales = workspace[size - 2 * blocks * 32 : size].view(2 * blocks, 32)
        parts += (scales != POISON).any(dim=1).tolist()
    return out, lse


def decode(
    library: KernelLibrary,
    case: DecodeCase,
    blocks: int = 5,
    min_chunk: int = 2,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = len(case.lengths)
    out, lse, workspace, size = outputs(library, tokens, case.heads, 1, blocks)
    library.launch(
        "decode_attention",
        q=case.q,
        q_token_stride=case.q.stride(0),
        q_head_stride=case.q.stride(1),
        kv=case.kv,
        kv_row_stride=case.kv.stride(0),
        kv_indptr=case.kv_indptr,
        kv_indptr_bytes=4,
        kv_indices=case.kv_indices,
        kv_indices_bytes=bytes_of(case.kv_indices),
        out=out,
        lse=lse if with_lse else None,
        workspace=workspace,
        workspace_bytes=size,
        bs=tokens,
        heads=case.heads,
        scale=case.scale,
        fp8=0,
        kv_scale=1.0,
        blocks=blocks,
        min_chunk=min_chunk,
    )
    return out, lse


def check(
    got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """bf16 rounding of the weights and of the result are all that may differ."""
    out, lse = (part.double() for part in got)
    want, want_lse = expected
    n = want.shape[0]
    torch.testing.assert_close(out[:n], want, rtol=1e-2, atol=4e-3, equal_nan=True)
    torch.testing.assert_close(lse[:n], want_lse, rtol=1e-5, atol=4e-3, equal_nan=True)
    assert bool((out[n:] == 0).all())
    assert bool((lse[n:] == -torch.inf).all())


full = pytest.mark.full


def some(sample: list[Any], rest: list[Any]) -> list[Any]:
    """Parameters of the sample, and those that only a full run tries."""
    return [
        *sample,
        *(pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=full) for v in rest),
    ]


TAILS = [chain, star, diagonal, everything, random_tree, random_bits, nothing]


@pytest.mark.parametrize("prefix", some([0, 15, 17, 31], [1, 16, 33, 255, 256]))
def test_lengths_around_a_granule(library: KernelLibrary, prefix: int) -> None:
    case = Case([(prefix, 9)], seed=prefix)
    check(verify(library, case, min_chunk=1), case.expected())


@pytest.mark.parametrize("tail", some(TAILS[-3:], TAILS[:-3]), ids=lambda tail: tail.__name__)
@pytest.mark.parametrize("mask", ["bytes", "words"])
def test_masks(library: KernelLibrary, tail: Tail, mask: str) -> None:
    case = Case([(23, 9), (0, 5)], tail=tail)
    check(verify(library, case, mask=mask), case.expected())


@pytest.mark.parametrize(("mask", "tail"), [("causal", chain), ("none", everything)])
def test_without_a_mask(library: KernelLibrary, mask: str, tail: Tail) -> None:
    case = Case([(40, 12), (7, 3)], tail=tail)
    check(verify(library, case, mask=mask), case.expected())


@pytest.mark.parametrize("q", some([2, 5, 8, 9], [1, 3, 4, 6, 7]))
def test_every_number_of_tiles(library: KernelLibrary, q: int) -> None:
    """8 heads: one tile a row, each number of them a kernel of its own."""
    case = Case([(50, q), (18, max(1, q - 1))], seed=q)
    check(verify(library, case, blocks=3), case.expected())


@pytest.mark.parametrize("q", some([1, 9], range(2, 9)))
def test_long_enough_to_go_around(library: KernelLibrary, q: int) -> None:
    """Around the stages several times, and around the slots that a warp knows ahead; the second
    time for the pieces of a block that follow its first."""
    case = Case([(532, q), (0, 1), (180, max(1, q - 1)), (3, q)], seed=q, tail=random_bits)
    check(verify(library, case, blocks=1), case.expected())
    check(verify(library, case, blocks=3), case.expected())


@pytest.mark.parametrize("q", some([17], [33, 63, 64]))
def test_several_row_tiles(library: KernelLibrary, q: int) -> None:
    case = Case([(21, q)], seed=q, tail=random_bits)
    check(verify(library, case, blocks=7, min_chunk=1), case.expected())


@pytest.mark.parametrize(
    ("heads", "q"), some([(2, 7), (4, 5), (16, 3)], [(2, 1), (2, 64), (4, 33), (16, 9)])
)
def test_other_numbers_of_heads(library: KernelLibrary, heads: int, q: int) -> None:
    """Fewer than 8: rows of a tile are of several tokens; 16: a token's rows are of two tiles."""
    case = Case([(30, q), (5, 1), (0, q)], heads=heads, seed=q, tail=random_bits)
    check(verify(library, case), case.expected())


RAGGED = [(70, 9), (0, 0), (0, 4), (3, 1), (129, 0), (16, 9), (0, 9), (48, 2)]


@pytest.mark.parametrize("blocks", some([1, 8], [2, 3, 40]))
def test_ragged_batches_however_they_are_split(library: KernelLibrary, blocks: int) -> None:
    case = Case(RAGGED, unowned=3, tail=random_bits)
    check(verify(library, case, blocks=blocks, min_chunk=1), case.expected())


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 20), (1, 200), (200, 1)])
def test_more_parts_than_are_joined_at_once(
    library: KernelLibrary, first: float, last: float
) -> None:
    """A block reads 136 parts at once. All count alike, the later have higher scores, or the first
    or the last have scores so low that no float holds e to the difference."""
    case = Case([(16 * 300, 1), (5, 1)], seed=2)
    check(verify(library, sloped(case, first, last), blocks=302, min_chunk=1), case.expected())


def sloped(case: Case, first: float, last: float) -> Case:
    """The first request's scores times a factor that goes from one to the other along its keys."""
    keys = case.requests[0][0]
    factors = torch.linspace(first, last, keys)[:, None]
    slots = case.kv_indices[:keys]
    rope = case.kv[slots, VALUES:].float() * factors
    case.kv[slots, VALUES:] = rope.bfloat16()
    return case


@pytest.mark.parametrize(
    ("parts", "tiles"),
    [
        *[(2, 1), (5, 20), (17, 65), (18, 65), (20, 200), (34, 33), (35, 33)],
        *[(68, 20), (69, 130), (136, 50), (137, 200), (300, 130)],
    ],
)
def test_columns_and_parts_shared_out_among_warps(
    library: KernelLibrary, parts: int, tiles: int
) -> None:
    """With more tiles, rows of nobody among them, a block takes more columns; with more parts more
    of its warps take the same ones, and columns come in rounds."""
    case = Case([(16 * parts - 3, 1)], unowned=tiles - 1, seed=parts)
    written: list[bool] = []
    got = verify(library, sloped(case, 1, 3), blocks=parts, min_chunk=1, parts=written)
    check(got, case.expected())
    assert sum(written) == parts


@pytest.mark.parametrize(
    ("requests", "blocks"),
    [
        ([(150, 9), (31, 9), (401, 9)], 40),
        ([(300, 1), (0, 0), (300, 1), (0, 1), (290, 1)], 24),
        ([(200, 17), (190, 17)], 32),
        ([(64, 2), (64, 2)], 2),
    ],
)
def test_no_block_works_on_two_items(
    library: KernelLibrary, requests: list[tuple[int, int]], blocks: int
) -> None:
    case, written = Case(requests, tail=random_bits), list[bool]()
    check(verify(library, case, blocks=blocks, min_chunk=0, parts=written), case.expected())
    assert not any(a and b for a, b in zip(written[::2], written[1::2], strict=True))


def test_a_given_share_is_taken_as_it_is(library: KernelLibrary) -> None:
    """And so a block may work on two items: the third of nine granules' shares of 3 has both."""
    case, written = Case([(64, 1), (64, 1)]), list[bool]()
    check(verify(library, case, blocks=9, min_chunk=3, parts=written), case.expected())
    assert written == [
        *[False, True],
        *[True, True],
        *[True, False],
        *[True, False],
        *([False] * 10),
    ]


@pytest.mark.parametrize(("count", "blocks"), [(3, 2), (12, 7), (33, 7), (40, 7), (40, 45)])
def test_more_items_than_blocks_or_than_lanes(
    library: KernelLibrary, count: int, blocks: int
) -> None:
    """Then shares are even: no room for padding, or a warp does not see all items at once."""
    case = Case([(20 + 31 * (b % 3), 1) for b in range(count)], tail=random_bits)
    check(verify(library, case, blocks=blocks, min_chunk=0), case.expected())


@full
def test_more_requests_than_lanes(library: KernelLibrary) -> None:
    case = Case([(b % 7, b % 3) for b in range(70)], seed=4)
    check(verify(library, case, blocks=9, min_chunk=1), case.expected())


@pytest.mark.parametrize("q", [1, 9])
def test_split_chosen_on_the_device(library: KernelLibrary, q: int) -> None:
    case = Case([(150, q), (31, q)])
    check(verify(library, case, blocks=40, min_chunk=0), case.expected())


@pytest.mark.parametrize("blocks", [14_444, 14_445, 65_536])
@pytest.mark.parametrize("q", [1, 9])
def test_workspaces_beyond_32_bits(library: KernelLibrary, blocks: int, q: int) -> None:
    """Two slots a block: sums in half precision, a maximum and a sum a row, a scale a warp."""
    rows = 8 * q
    slot = rows * VALUES * 2 + rows * 2 * 4 + 8 * 4
    size = library.query("attention_workspace", heads=8, max_q=q, blocks=blocks)
    assert size == 2 * blocks * slot
    assert (size > (1 << 31) - 1) == (q == 9 and blocks > 14_444)


def test_shares_whose_begin_is_beyond_32_bits(library: KernelLibrary) -> None:
    """The blocks behind the first have nothing to do, the third's share begins at 2^31."""
    case = Case([(40, 2)])
    check(verify(library, case, blocks=3, min_chunk=1 << 30), case.expected())


# Only the pages that are written take memory of these large tensors.


def test_slots_beyond_32_bits(library: KernelLibrary) -> None:
    """Slot * 576 passes 2^31 elements, slot * 1152 passes 2^32 bytes; prefix and tail."""
    case = Case([(20, 3)])
    expected, keys, first = case.expected(), case.kv, 3_900_000
    case.kv = torch.empty(first + len(keys), keys.shape[1], dtype=torch.bfloat16)
    case.kv[first:] = keys
    case.kv[: len(keys)] = torch.nan
    case.kv_indices += first
    case.out_cache_loc += first
    check(verify(library, case, min_chunk=1), expected)


def test_mask_offsets_beyond_32_bits(library: KernelLibrary) -> None:
    case = Case([(20, 9), (7, 5)], tail=random_bits)
    expected, (flat, indptr), far = case.expected(), case.mask_bytes(), (1 << 32) + 5
    mask = torch.empty(far + len(flat), dtype=torch.uint8)
    mask[: len(flat)] = 0
    mask[far:] = flat
    case.mask_bytes = lambda: (mask, indptr + far)  # type: ignore[method-assign]
    check(verify(library, case), expected)


def test_queries_more_than_32_bits_apart(library: KernelLibrary) -> None:
    case = Case([(20, 2), (5, 1)])
    expected, rows, apart = case.expected(), case.q, (1 << 31) + 64
    room = torch.empty(2 * apart + rows[0].numel(), dtype=torch.bfloat16)
    case.q = room.as_strided(rows.shape, (apart, rows.shape[2], 1))
    case.q[:] = rows
    check(verify(library, case), expected)


def test_shorter_than_captured(library: KernelLibrary) -> None:
    """Grid and workspace of max_q = 20, requests of up to 4 rows, tokens to spare."""
    case = Case([(33, 4), (2, 1)], unowned=35)
    check(verify(library, case, max_q=20), case.expected())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dense", [False, True])
def test_index_types_and_where_the_tail_is(
    library: KernelLibrary, dtype: torch.dtype, dense: bool
) -> None:
    case = Case([(37, 9), (10, 4)], index_dtype=dtype)
    got = verify(library, case, dense=dense, wide_indptr=dtype is torch.int64)
    check(got, case.expected())


def test_a_dense_tail_is_not_read_from_the_pool(library: KernelLibrary) -> None:
    case = Case([(20, 6)])
    expected, keys = case.expected(), case.tail_keys()
    case.kv[case.out_cache_loc] = torch.nan
    case.tail_keys = lambda: keys  # type: ignore[method-assign]
    check(verify(library, case, dense=True), expected)


@pytest.mark.parametrize("broken", some([torch.nan], [torch.inf, -torch.inf]))
def test_a_broken_tail_key_harms_only_rows_that_see_it(
    library: KernelLibrary, broken: float
) -> None:
    """Row 4 of a star is seen by itself; its row of output may be anything not finite."""
    case = Case([(21, 9)], tail=star)
    keep = [i for i in range(9) if i != 4]
    expected, expected_lse = case.expected()
    case.kv[case.out_cache_loc[4], 100::7] = broken
    out, lse = verify(library, case, min_chunk=1)
    check((out[keep], lse[keep]), (expected[keep], expected_lse[keep]))
    assert not bool(torch.isfinite(out[4]).any())


def test_a_broken_prefix_key_is_seen_by_all_of_its_request(library: KernelLibrary) -> None:
    case = Case([(40, 3), (20, 2)])
    case.kv[case.kv_indices[39]] = torch.nan
    check(verify(library, case, min_chunk=1), case.expected())


def test_unit_weights_give_exact_means(library: KernelLibrary) -> None:
    """Queries of zeros: a row is the mean of what it sees, but for the rounding to bf16."""
    case = Case([(11, 5), (0, 5)], tail=random_tree)
    case.q.zero_()
    case.kv = torch.randint(-8, 9, case.kv.shape).bfloat16()
    out, lse = verify(library, case, min_chunk=1)
    want, want_lse = case.expected()
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-7)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", some([3000.0], [30.0]))
def test_extreme_logits(library: KernelLibrary, scale: float) -> None:
    """Up to +-2e5: one key wins. Float32 scores of 1e5 have steps of 1/128: a wide bound."""
    case = Case([(60, 6)], scale=scale)
    out, lse = verify(library, case, min_chunk=1)
    want, want_lse = case.expected()
    assert bool(torch.isfinite(out).all())
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0.05)
    close = (out.double() - want).abs().amax(dim=-1) < 0.1
    assert close.float().mean() > 0.9


def test_maxima_that_rise_all_the_way(library: KernelLibrary) -> None:
    """Each granule's scores are above all before: every step rescales; or none does."""
    case = Case([(200, 3)], scale=0.01)
    direction = torch.randn(576).sign()
    case.q[:] = direction.bfloat16()
    for end in (10, -10):
        steps = torch.linspace(-end, end, 200)
        case.kv[case.kv_indices] = (direction * steps[:, None]).bfloat16()
        check(verify(library, case, blocks=1), case.expected())


def test_repeated_slots(library: KernelLibrary) -> None:
    case = Case([(50, 4)])
    case.kv_indices[10:40] = case.kv_indices[3]
    check(verify(library, case, min_chunk=1), case.expected())


def test_bitwise_the_same_in_any_order_of_threads(library: KernelLibrary) -> None:
    case = Case(RAGGED[-3:], tail=random_bits)
    runs = []
    for seed in (1, 2):
        library.seed_simulator(seed)
        runs.append(verify(library, case, min_chunk=1))
    for out, lse in runs[1:]:
        assert torch.equal(out[: case.owned], runs[0][0][: case.owned])
        assert torch.equal(lse[: case.owned], runs[0][1][: case.owned])


@full
@pytest.mark.parametrize("seed", range(24))
def test_random_cases(library: KernelLibrary, seed: int) -> None:
    draw = random.Random(seed)
    most = draw.choice([1, 4, 9, 12, 20, 64])
    requests = [
        (draw.choice([0, draw.randrange(40), draw.randrange(200)]), draw.randint(0, most))
        for _ in range(draw.randint(1, 6))
    ]
    case = Case(
        requests,
        heads=draw.choice([2, 4, 8, 8, 16]),
        tail=draw.choice(TAILS),
        seed=seed,
        unowned=draw.randint(0, 3),
        index_dtype=draw.choice([torch.int32, torch.int64]),
    )
    library.seed_simulator(seed)
    got = verify(
        library,
        case,
        mask=draw.choice(["bytes", "words"]),
        dense=draw.random() < 0.3,
        blocks=draw.randint(1, 30),
        min_chunk=draw.randint(0, 4),
    )
    check(got, case.expected())


def test_without_lse(library: KernelLibrary) -> None:
    case = DecodeCase([20])
    out, lse = decode(library, case, with_lse=False)
    assert bool(lse.isnan().all())
    torch.testing.assert_close(out.double(), case.expected()[0], rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("heads", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", some([torch.int32], [torch.int64]))
def test_decode(library: KernelLibrary, heads: int, dtype: torch.dtype) -> None:
    case = DecodeCase([0, 1, 15, 16, 17, 100, 0], heads=heads, index_dtype=dtype)
    check(decode(library, case), case.expected())


def test_decode_in_one_piece(library: KernelLibrary) -> None:
    case = DecodeCase([33, 0, 64])
    check(decode(library, case, blocks=2, min_chunk=100), case.expected())


def test_matrices_are_read_without_bank_conflicts(library: KernelLibrary) -> None:
    """Even and odd numbers of tiles, keys along (scores) and across (values), and the weights."""
    conflicts = ctypes.CDLL(str(library.path)).overstory_sim_bank_conflicts
    conflicts.restype = ctypes.c_uint64
    before = conflicts()
    for q in (1, 4, 9):
        verify(library, Case([(40, q)]))
    assert conflicts() == before

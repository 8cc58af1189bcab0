"""`candidates_topk.cu` in the simulator against the reference."""

import ctypes
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.build import SOURCES
from overstory.kernels.cuda_library import KernelLibrary, simulator_library
from overstory.kernels.errors import LaunchError, NoCompilerError
from overstory.kernels.reference import PAD_TOKEN_ID, Shard, candidates_topk, merge_candidates
from overstory.kernels.signatures import launchers_of

LOGIT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
POISON = -12345


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    try:
        return simulator_library([SOURCES / "candidates_topk.cu"])
    except NoCompilerError as error:
        pytest.skip(f"no simulator: {error}")


class Simulated:
    """The launchers with the reference's signatures; outputs start as garbage."""

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library
        self.arrived = torch.zeros(64, dtype=torch.int32)

    def topk(
        self,
        logits: torch.Tensor,
        k: int,
        first_token_id: int = 0,
        num_valid: int | None = None,
        splits: int = 1,
    ) -> tuple[Shard, torch.Tensor]:
        """The shard and the rows' status."""
        rows = logits.shape[0]
        columns = logits.shape[1] if num_valid is None else num_valid
        space = self.library.query(
            "candidates_topk_workspace", rows=rows, columns=columns, splits=splits
        )
        shard = Shard(
            torch.full((rows, k), float(POISON)),
            torch.full((rows, k), POISON),
            torch.full((rows,), float(POISON)),
        )
        status = torch.full((rows,), POISON, dtype=torch.int32)
        self.library.launch(
            "candidates_topk",
            logits=logits,
            logit_type=LOGIT_TYPES[logits.dtype],
            rows=rows,
            columns=columns,
            row_stride=logits.stride(0),
            k=k,
            first_token_id=first_token_id,
            splits=splits,
            workspace=torch.full((max(space, 1),), 0xA5, dtype=torch.uint8),
            arrived=self.arrived,
            best_logits=shard.logits,
            token_ids=shard.token_ids,
            logsumexp=shard.logsumexp,
            status=status,
        )
        assert not bool(self.arrived.any()), "the counters reset themselves"
        return shard, status

    def merge(
        self, shards: Shard, k: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """What the reference returns, and the rows' status."""
        count, rows, width = shards.logits.shape
        logprobs = torch.full((rows, k), float(POISON))
        best = torch.full((rows, k), POISON)
        status = torch.full((rows,), POISON, dtype=torch.int32)
        self.library.launch(
            "merge_candidates",
            **{name: value.contiguous() for name, value in shards._asdict().items()},
            shards=count,
            rows=rows,
            width=width,
            k=k,
            logprobs=logprobs,
            best=best,
            status=status,
        )
        return (logprobs, best), status


@pytest.fixture(scope="module")
def simulated(library: KernelLibrary) -> Simulated:
    return Simulated(library)


def same(got: Shard, want: Shard) -> None:
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.token_ids, want.token_ids)
    torch.testing.assert_close(got.logsumexp, want.logsumexp, atol=2e-6, rtol=3e-7)


def normal(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return (torch.randn(rows, columns, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", LOGIT_TYPES)
@pytest.mark.parametrize("splits", [1, 3])
def test_types_and_splits(simulated: Simulated, dtype: torch.dtype, splits: int) -> None:
    """bfloat16 has many ties."""
    logits = normal(3, 4096, dtype)
    got, status = simulated.topk(logits, 16, first_token_id=7000, splits=splits)
    same(got, candidates_topk(logits, 16, first_token_id=7000))
    assert status.tolist() == [0] * 3
    assert torch.equal(got.logsumexp, simulated.topk(logits, 16)[0].logsumexp)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_small_row(simulated: Simulated, data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 40))
    values = st.sampled_from([-torch.inf, -2.0, -0.0, 0.0, 0.5, 3.0])
    row = data.draw(st.lists(values, min_size=columns, max_size=columns))
    logits = torch.tensor([row, row[::-1]], dtype=data.draw(st.sampled_from(list(LOGIT_TYPES))))
    k, valid = data.draw(st.integers(1, 16)), data.draw(st.integers(0, columns))
    logits[:, valid:] = torch.nan  # never read
    simulated.library.seed_simulator(data.draw(st.integers(0, 5)))
    got, status = simulated.topk(logits, k, 100, valid)
    same(got, candidates_topk(logits, k, 100, valid))
    assert not bool(status.any())


ROWS = {
    "all equal": lambda n: torch.zeros(n),
    "ascending": lambda n: torch.arange(n) * 0.01,
    "descending": lambda n: torch.arange(n) * -0.01,
    "all forbidden": lambda n: torch.full((n,), -torch.inf),
    "one allowed": lambda n: torch.full((n,), -torch.inf).index_fill_(0, torch.tensor(n - 2), 1.0),
    "five allowed at the end": lambda n: torch.where(torch.arange(n) < n - 5, -torch.inf, 2.0),
    "masked by the lowest number": lambda n: torch.full((n,), torch.finfo(torch.float32).min),
    "two ties": lambda n: (torch.arange(n) % 2).float(),
    "zeros of both signs": lambda n: torch.where(torch.arange(n) % 2 == 0, -0.0, 0.0),
    "neighbours, ascending": lambda n: (1 << 29) + torch.arange(n, dtype=torch.int32),
    "neighbours, descending": lambda n: (1 << 29) - torch.arange(n, dtype=torch.int32),
    "a hair above the rest, late": lambda n: (torch.arange(n) == n - 7).int() + 0x3F800000,
    "the smallest there are": lambda n: torch.arange(n, dtype=torch.int32) // 2,
    "huge": lambda n: torch.linspace(-1, 1, n) * 3e38,
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("splits", [1, 4])
def test_rows_that_are_hard_to_filter(simulated: Simulated, name: str, splits: int) -> None:
    row = ROWS[name](5000)
    logits = (row.view(torch.float32) if row.dtype == torch.int32 else row).repeat(2, 1)
    for k in (1, 11, 16):
        got, status = simulated.topk(logits, k, splits=splits)
        same(got, candidates_topk(logits, k))
        assert not bool(status.any())


@pytest.mark.parametrize("columns", [1, 8, 1023, 1024, 1025, 2047, 4097])
@pytest.mark.parametrize("offset", [0, 1])
def test_edges_of_segments_in_a_strided_row(
    simulated: Simulated, columns: int, offset: int
) -> None:
    """Aligned rows are read 16 bytes at a time, others by element: the same result."""
    wide = normal(2, columns + 16 + offset, torch.bfloat16)
    wide = wide[:, : (columns + 16) // 8 * 8].contiguous() if offset == 0 else wide
    wide[:, :offset] = torch.nan
    wide[:, columns + offset :] = torch.nan
    logits = wide[:, offset:]
    got, status = simulated.topk(logits, 8, num_valid=columns, splits=2)
    same(got, candidates_topk(logits, 8, num_valid=columns))
    assert not bool(status.any())


def test_every_split_finds_the_same_candidates(simulated: Simulated) -> None:
    logits = normal(1, 40_000)
    want = candidates_topk(logits, 16)
    for splits in (1, 2, 7, 32):
        same(simulated.topk(logits, 16, splits=splits)[0], want)


def test_a_launch_repeats_bit_for_bit(simulated: Simulated) -> None:
    logits = normal(2, 9000, torch.float32)
    first, _ = simulated.topk(logits, 16, splits=4)
    for seed in range(4):
        simulated.library.seed_simulator(seed)
        again, _ = simulated.topk(logits, 16, splits=4)
        assert all(map(torch.equal, again, first))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("splits", [1, 2])
def test_poison_is_reported_for_its_row_alone(
    simulated: Simulated, bad: float, splits: int
) -> None:
    logits = normal(4, 3000)
    logits[2, 1777] = bad
    logits[3, :] = bad
    got, status = simulated.topk(logits, 6, splits=splits)
    assert status.tolist() == [0, 0, 1, 1]
    same(Shard(*(part[:2] for part in got)), candidates_topk(logits[:2], 6))
    assert bool(got.logsumexp[2:].isnan().all())
    assert bool(((got.token_ids >= PAD_TOKEN_ID) & (got.token_ids < 3000)).all())
    (logprobs, ids), merged = simulated.merge(Shard(*(part[None] for part in got)), 6)
    assert merged.tolist() == [0, 0, 2, 2]
    assert logprobs[2:].eq(-torch.inf).all()
    assert ids[2:].eq(PAD_TOKEN_ID).all()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_merge_of_any_shards(simulated: Simulated, data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(2, 40))
    values = st.sampled_from([-torch.inf, -2.0, 0.0, 0.5, 3.0])
    row = data.draw(st.lists(values, min_size=vocabulary, max_size=vocabulary))
    logits = torch.tensor([row, row[::-1]])
    logits[:, data.draw(st.integers(0, vocabulary - 1))] = 1.0
    k, wanted = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 16))
    cuts = sorted(data.draw(st.sets(st.integers(1, vocabulary - 1), max_size=5)))
    bounds = [0, *cuts, vocabulary]
    parts = [
        candidates_topk(logits[:, a:b], k, first_token_id=a) for a, b in itertools.pairwise(bounds)
    ]
    shards = Shard(*(torch.stack(t) for t in zip(*data.draw(st.permutations(parts)), strict=True)))
    want_logprobs, want_ids = merge_candidates(shards, wanted)
    (logprobs, ids), status = simulated.merge(shards, wanted)
    # The reference keeps the ids of forbidden tokens that stand beside padding; both are -inf.
    real = want_logprobs > -torch.inf
    assert torch.equal(ids[real], want_ids[real])
    assert torch.equal(logprobs > -torch.inf, real)
    torch.testing.assert_close(logprobs, want_logprobs, atol=1e-6, rtol=1e-6)
    assert not bool(status.any())


def test_merge_of_a_row_without_any_allowed_token(simulated: Simulated) -> None:
    logits = torch.zeros(2, 40)
    logits[1] = -torch.inf
    shard = candidates_topk(logits, 3)
    (logprobs, ids), status = simulated.merge(Shard(*(part[None] for part in shard)), 5)
    assert status.tolist() == [0, 2]
    assert ids.tolist() == [[0, 1, 2, -1, -1], [-1] * 5]
    assert logprobs[1].tolist() == [-torch.inf] * 5


def test_no_rows(simulated: Simulated) -> None:
    shard, _ = simulated.topk(torch.zeros(0, 6), 2)
    assert shard.logits.shape == (0, 2)


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": 17}, {"splits": 0}, {"splits": 33}])
def test_arguments_out_of_range(simulated: Simulated, wrong: dict[str, int]) -> None:
    with pytest.raises(LaunchError, match="candidates_topk"):
        simulated.topk(torch.zeros(1, 6), **{"k": 2, **wrong})


@pytest.mark.parametrize("op", ["candidates_topk", "sample_nodes"])
@pytest.mark.parametrize(
    ("rows", "least", "most"),
    [(1, 16, 32), (16, 7, 10), (32, 7, 10), (64, 2, 4), (128, 2, 2), (256, 1, 1), (1024, 1, 2)],
)
def test_splits_that_were_fastest(op: str, rows: int, least: int, most: int) -> None:
    """Bounds are of an H200, docs/benchmarks/kernels_h200_rows_ab.csv; 1 and 1,024 are extremes."""
    library = simulator_library([SOURCES / f"{op}.cu"])
    splits = library.query(f"{op}_splits", rows=rows, columns=163_840, multiprocessors=132)
    assert least <= splits <= most


@pytest.mark.parametrize("op", ["candidates_topk", "sample_nodes"])
def test_a_short_row_is_left_to_one_block(op: str) -> None:
    """Four segments are read at once by the warps of one; a second would have to be waited for."""
    library = simulator_library([SOURCES / f"{op}.cu"])
    for rows in (1, 32, 256):
        shape = {"rows": rows, "columns": 4096, "multiprocessors": 132}
        assert library.query(f"{op}_splits", **shape) == 1


@pytest.mark.parametrize(("op", "more"), [("candidates_topk", 0), ("sample_nodes", 2 * 8)])
def test_workspaces_beyond_32_bits(op: str, more: int) -> None:
    """Four bounds and a sum of each 1,024 columns; where sampled, the best token of each block."""
    library = simulator_library([SOURCES / f"{op}.cu"])
    shape = {"rows": 1_000_000, "columns": 163_840, "splits": 2}
    assert library.query(f"{op}_workspace", **shape) == 1_000_000 * (160 * 5 * 4 + more)


def test_sizes_in_bytes_are_64_bits_wide() -> None:
    """Of every launcher that answers one, lest a new one be cut off."""
    found = {
        name: launcher.result
        for source in SOURCES.glob("*.cu")
        for name, launcher in launchers_of(source).items()
        if name.endswith("_workspace")
    }
    assert len(found) == 3
    assert set(found.values()) == {ctypes.c_int64}


@pytest.mark.full
@pytest.mark.parametrize("dtype", LOGIT_TYPES)
def test_a_whole_vocabulary(simulated: Simulated, dtype: torch.dtype) -> None:
    logits = normal(4, 163_840, dtype)
    for splits in (1, 8, 32):
        same(simulated.topk(logits, 16, splits=splits)[0], candidates_topk(logits, 16))
    eighth = 20_480
    parts = [
        simulated.topk(logits[:, a : a + eighth], 8, a, splits=2)[0]
        for a in range(0, 163_840, eighth)
    ]
    shards = Shard(*(torch.stack(t) for t in zip(*parts, strict=True)))
    (logprobs, ids), _ = simulated.merge(shards, 8)
    want = merge_candidates([candidates_topk(logits, 8)], 8)
    assert torch.equal(ids, want[1])
    torch.testing.assert_close(logprobs, want[0], atol=1e-5, rtol=0)

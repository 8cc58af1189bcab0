"""`sample_nodes.cu` in the simulator against the reference.

The kernels round probabilities in their own way, so a draw may take the neighbouring token where
the noise falls within rounding of a bound of the distribution function: `check_draws` demands that
every difference is of that kind, and that there are few.
"""

from typing import Any

import pytest
import torch
from chi_square import p_value
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.build import SOURCES
from overstory.kernels.cuda_library import KernelLibrary, simulator_library
from overstory.kernels.errors import LaunchError, NoCompilerError
from overstory.kernels.reference import filtered_probs, sample_nodes, uniforms

LOGIT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
POISON = -12345
ROUNDING = 2e-6
"""Of a distribution function in float32 exponentials."""


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    try:
        return simulator_library([SOURCES / "sample_nodes.cu"])
    except NoCompilerError as error:
        pytest.skip(f"no simulator: {error}")


class Rows:
    """Arguments of `sample_nodes`, one value or one per row."""

    def __init__(
        self,
        logits: torch.Tensor,
        temperature: Any = 1.0,
        top_k: Any = -1,
        top_p: Any = 1.0,
        min_p: Any = 0.0,
        seeds: Any = None,
        positions: Any = 0,
    ) -> None:
        def column(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype).expand(logits.shape[0]).contiguous()

        self.logits = logits
        self.temperature = column(temperature, torch.float32)
        self.top_k = column(top_k, torch.int32)
        self.top_p = column(top_p, torch.float32)
        self.min_p = column(min_p, torch.float32)
        self.seeds = column(torch.arange(logits.shape[0]) if seeds is None else seeds, torch.int64)
        self.positions = column(positions, torch.int64)

    def filters(self) -> tuple[torch.Tensor, ...]:
        return self.logits, self.temperature, self.top_k.long(), self.top_p, self.min_p

    def reference(self) -> torch.Tensor:
        return sample_nodes(*self.filters(), self.seeds, self.positions)

    def take(self, rows: torch.Tensor) -> "Rows":
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
        return Rows(self.logits[rows], *(getattr(self, name)[rows] for name in names))


class Simulated:
    """The launcher; its outputs start as garbage."""

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library
        self.arrived = torch.zeros(20_000, dtype=torch.int32)

    def __call__(
        self, rows: Rows, splits: int = 1, filters: bool = True, columns: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and status."""
        count = rows.logits.shape[0]
        columns = rows.logits.shape[1] if columns is None else columns
        space = self.library.query(
            "sample_nodes_workspace", rows=count, columns=columns, splits=splits
        )
        tokens = torch.full((count,), POISON)
        status = torch.full((count,), POISON, dtype=torch.int32)
        self.library.launch(
            "sample_nodes",
            logits=rows.logits,
            logit_type=LOGIT_TYPES[rows.logits.dtype],
            rows=count,
            columns=columns,
            row_stride=rows.logits.stride(0),
            temperature=rows.temperature,
            top_k=rows.top_k,
            top_p=rows.top_p,
            min_p=rows.min_p,
            seeds=rows.seeds,
            positions=rows.positions,
            filters=filters,
            splits=splits,
            workspace=torch.full((max(space, 1),), 0xA5, dtype=torch.uint8),
            arrived=self.arrived,
            tokens=tokens,
            status=status,
        )
        assert not bool(self.arrived.any()), "the counters reset themselves"
        return tokens, status

    def good(self, rows: Rows, splits: int = 1, **named: Any) -> torch.Tensor:
        """Tokens, where every row must have one."""
        tokens, status = self(rows, splits, **named)
        assert not bool(status.any())
        return tokens


@pytest.fixture(scope="module")
def simulated(library: KernelLibrary) -> Simulated:
    return Simulated(library)


def check_draws(got: torch.Tensor, rows: Rows, allowed: float = 0.0) -> None:
    """Differences from the reference: within rounding of the noise, and at most this share.

    Where the sum before a token is within rounding of top_p, one of the two keeps a token more:
    the distribution function moves by that token's probability, the lowest that is kept.
    """
    differ = (got != rows.reference()).nonzero().flatten()
    assert differ.numel() <= allowed * got.numel()
    if differ.numel() == 0:
        return
    chosen = rows.take(differ)
    probs = filtered_probs(*chosen.filters())
    token = got[differ].unsqueeze(1)
    u = uniforms(chosen.seeds, chosen.positions).unsqueeze(1)
    lowest = torch.where(probs > 0, probs, 1.0).amin(dim=1, keepdim=True)
    slack = ROUNDING + 1.01 * lowest * (chosen.top_p < 1).unsqueeze(1)
    upper = probs.cumsum(dim=1).gather(1, token)
    lower = upper - probs.gather(1, token)
    assert bool((lower - slack <= u).all())
    assert bool((u <= upper + slack).all())
    filtered = probs.gather(1, token).eq(0).squeeze(1)
    assert not bool((filtered & (chosen.top_p >= 1)).any()), "a token that is filtered"


def normal(rows: int, columns: int, dtype: torch.dtype, scale: float = 2.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)


FILTERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.3": {"temperature": 0.3},
    "temperature 1.7": {"temperature": 1.7},
    "top-k": {"top_k": 7},
    "top-k of many": {"top_k": 900},
    "top-p": {"top_p": 0.8},
    "top-p of nearly all": {"top_p": 0.9999},
    "top-p of one": {"top_p": 0.0},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 0.8, "top_k": 60, "top_p": 0.93, "min_p": 0.02},
    "top-p of thousands": {"temperature": 3.0, "top_p": 0.9},  # too many to list
    # min-p leaves about 600 tokens: more than are compared one by one, few enough to be listed.
    "top-k of a list": {"top_k": 400, "min_p": 0.0017},
    "top-p of a list": {"top_p": 0.97, "min_p": 0.0017},
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("dtype", LOGIT_TYPES)
def test_tokens_of_the_reference(simulated: Simulated, name: str, dtype: torch.dtype) -> None:
    """bfloat16 and float16 have many equal logits: ties at the bounds of the filters."""
    rows = Rows(normal(24, 4096, dtype), **FILTERS[name], positions=torch.arange(24) * 7)
    check_draws(simulated.good(rows), rows, allowed=0.05)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_small_vocabulary(simulated: Simulated, data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(1, 12))
    value = st.sampled_from([-torch.inf, -4.0, -1.0, -1.0, -0.0, 0.0, 0.5, 2.0])
    row = data.draw(st.lists(value, min_size=vocabulary, max_size=vocabulary))
    logits = torch.tensor([row] * 6, dtype=data.draw(st.sampled_from(list(LOGIT_TYPES))))
    logits[:, data.draw(st.integers(0, vocabulary - 1))] = 1.0
    rows = Rows(
        logits,
        temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0, 30.0])),
        top_k=data.draw(st.integers(-1, vocabulary + 1)),
        # No sum of these weights is within rounding of these bounds.
        top_p=data.draw(st.sampled_from([0.0501, 0.2503, 0.4999, 0.9003, 0.999, 1.0, 2.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.1, 0.5001, 1.0])),
        seeds=data.draw(st.integers(0, 1 << 62)),
        positions=torch.arange(6) + data.draw(st.integers(0, 1 << 40)),
    )
    simulated.library.seed_simulator(data.draw(st.integers(0, 5)))
    check_draws(simulated.good(rows), rows)


def position_of(extreme: str) -> int:
    """Where the noise of seed 7 is lowest or highest, below or above by a millionth."""
    positions = torch.arange(1 << 20)
    u = uniforms(torch.full_like(positions, 7), positions)
    at = int(u.argmin() if extreme == "lowest" else u.argmax())
    assert float(u[at]) < 1e-5 or float(u[at]) > 1 - 1e-5
    return at


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 7},
        {"top_k": 900},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"min_p": 0.03},
        {"temperature": 0.7, "top_k": 300, "top_p": 0.97},
    ],
)
@pytest.mark.parametrize("dtype", LOGIT_TYPES)
def test_the_last_token_that_is_kept(
    simulated: Simulated, filters: dict[str, Any], dtype: torch.dtype
) -> None:
    """Extreme noise over sorted logits draws the least likely token of the support itself."""
    logits = normal(4, 4096, dtype).sort(dim=1, descending=True).values
    logits = torch.cat((logits, logits.flip(1)))
    positions = torch.tensor([position_of("highest"), position_of("lowest")])
    rows = Rows(logits, **filters, seeds=7, positions=positions.repeat_interleave(4))
    got, want = simulated.good(rows), rows.reference()
    within = 1 if "top_p" in filters else 0
    assert int((got - want).abs().max()) <= within
    assert int((got == want).sum()) >= 7


def test_the_best_of_every_segment(simulated: Simulated) -> None:
    """top-k in as many segments: none of them is below the bound that the maxima give."""
    logits = torch.full((64, 4096), -3.0)
    logits[:, [5, 1030, 2500, 4000]] = torch.tensor([2.0, 1.8, 1.9, 1.7])
    for top_k in (2, 3, 4):
        rows = Rows(logits, top_k=top_k)
        tokens = simulated.good(rows)
        check_draws(tokens, rows)
        assert len(tokens.unique()) == top_k


def test_the_last_float_of_a_bin_is_in_it(simulated: Simulated) -> None:
    """The first histogram spans 8 .. 6, the third best maximum of a segment: bins of 2^-10."""
    logits = torch.full((64, 3072), -3.0)
    last = torch.nextafter(torch.tensor(8 - 201 / 1024), torch.tensor(8.0))
    logits[:, [500, 1500, 1600, 2500]] = torch.tensor([8.0, 8 - 200 / 1024, float(last), 6.0])
    rows = Rows(logits, top_k=3)
    tokens = simulated.good(rows)
    check_draws(tokens, rows)
    assert tokens.unique().tolist() == [500, 1500, 1600]


def test_min_p_cuts_where_it_says(simulated: Simulated) -> None:
    """Weights of 0.4995 and 0.5005: the bound from logarithms is too coarse to tell them apart."""
    logits = torch.tensor([[0.0, -0.69415, -0.69215]]).repeat(64, 1)
    tokens = simulated.good(Rows(logits, min_p=0.5))
    assert tokens.unique().tolist() == [0, 2]


def test_a_low_temperature_divides_as_the_reference_does(simulated: Simulated) -> None:
    """The last bit of logit / temperature changes these probabilities by percents."""
    logits = 8.0 + normal(512, 3, torch.float32, scale=1e-5)
    rows = Rows(logits, 1.1e-5)
    check_draws(simulated.good(rows), rows)


EQUALS = {
    "top-k through ties": {"top_k": 700},
    "top-p through ties": {"top_p": 0.3},
    "top-k through ties of a list": {"top_k": 700, "min_p": 0.5},
    "top-k of the first tie": {"top_k": 2},
    "all": {"top_k": 900, "top_p": 0.9},
}


@pytest.mark.parametrize("name", EQUALS)
def test_ties_are_kept_by_the_lowest_ids(simulated: Simulated, name: str) -> None:
    """Equal logits in several segments, of which the filter keeps some."""
    logits = (torch.arange(3000) % 3 == 1).float().mul(4.0).repeat(48, 1)
    rows = Rows(logits, **EQUALS[name])
    check_draws(simulated.good(rows), rows, allowed=0.05)


def test_mixed_rows_do_not_depend_on_batch_split_or_thread_order(simulated: Simulated) -> None:
    count = 36
    rows = Rows(
        normal(count, 5000, torch.bfloat16),
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.3]).repeat(9),
        top_k=torch.tensor([-1, 1, 5, 40, 5000, 300]).repeat(6),
        top_p=torch.tensor([1.0, 0.9, 0.5]).repeat_interleave(12),
        min_p=torch.tensor([0.0, 0.0, 0.1, 0.3]).repeat_interleave(9),
        positions=torch.arange(count),
    )
    together = simulated.good(rows)
    check_draws(together, rows, allowed=0.05)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    for seed, splits in enumerate((2, 5)):
        simulated.library.seed_simulator(seed)
        assert torch.equal(simulated.good(rows.take(order), splits), together[order])
    for row in range(0, count, 5):
        assert torch.equal(
            simulated.good(rows.take(torch.tensor([row])), 3), together[row : row + 1]
        )


def test_a_launch_without_filters_gives_the_same_tokens(simulated: Simulated) -> None:
    rows = Rows(normal(8, 3000, torch.float32), temperature=torch.tensor([0.0, 1.0]).repeat(4))
    assert torch.equal(simulated.good(rows, filters=False), simulated.good(rows))


@pytest.mark.parametrize(
    "inactive",
    [
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 3000},
        {"top_k": 1 << 30},
        {"top_p": 1.5},
        {"min_p": -1},
    ],
)
def test_values_that_filter_nothing(simulated: Simulated, inactive: dict[str, Any]) -> None:
    logits = normal(4, 3000, torch.float32)
    rows = Rows(logits, **inactive)
    assert torch.equal(simulated.good(rows, filters=False), simulated.good(Rows(logits)))


@pytest.mark.parametrize("columns", [1, 8, 1023, 1024, 1025, 4097])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("name", ["greedy", "temperature 1", "all"])
def test_edges_of_segments_in_a_strided_row(
    simulated: Simulated, columns: int, offset: int, name: str
) -> None:
    """What stands before and behind a row is never read; unaligned rows give the same token."""
    wide = torch.full((3, (columns + 16) // 8 * 8 + offset), torch.nan, dtype=torch.bfloat16)
    logits = normal(3, columns, torch.bfloat16)
    wide[:, offset : columns + offset] = logits
    got = simulated.good(Rows(wide[:, offset:], **FILTERS[name]), 2, columns=columns)
    check_draws(got, Rows(logits, **FILTERS[name]))


def test_greedy_takes_the_lowest_id_among_equals(simulated: Simulated) -> None:
    logits = torch.zeros(4, 4096)
    logits[0, [77, 900, 3000]] = 2.0
    logits[1, 4095] = 1.0
    logits[2] = -torch.inf
    logits[2, 2500] = -9.0
    for splits in (1, 4):
        assert simulated.good(Rows(logits, 0.0), splits).tolist() == [77, 4095, 2500, 0]


def test_forbidden_tokens_are_never_drawn(simulated: Simulated) -> None:
    logits = torch.full((64, 2100), -torch.inf)
    logits[:, [1030, 1500, 2099]] = torch.tensor([0.0, 1.0, 0.5])
    for name in ("temperature 1", "top-k", "top-p", "min-p"):
        rows = Rows(logits, **FILTERS[name])
        check_draws(simulated.good(rows), rows)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["greedy", "temperature 1", "all"])
@pytest.mark.parametrize("splits", [1, 2])
def test_poison_is_reported_for_its_row_alone(
    simulated: Simulated, value: float, name: str, splits: int
) -> None:
    logits = normal(4, 3000, torch.bfloat16)
    logits[2, 1777] = value
    logits[3] = -torch.inf
    tokens, status = simulated(Rows(logits, **FILTERS[name]), splits)
    assert status.tolist() == [0, 0, 1, 1]
    assert tokens[2:].tolist() == [-1, -1]
    check_draws(tokens[:2], Rows(logits[:2], **FILTERS[name]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": torch.nan},
        {"top_p": torch.nan},
        {"min_p": torch.nan},
        {"min_p": 1.5},
        {"temperature": 1e-5, "logit": 1e35},
    ],
)
def test_parameters_that_give_no_distribution_are_reported(
    simulated: Simulated, wrong: dict[str, float]
) -> None:
    wrong = dict(wrong)
    logits = torch.zeros(3, 50)
    logits[1, 3] = wrong.pop("logit", 0.0)
    columns = {name: torch.tensor([0.5, value, 0.5]) for name, value in wrong.items()}
    tokens, status = simulated(Rows(logits, **columns))
    assert status.tolist() == [0, 2, 0]
    assert int(tokens[1]) == -1


def test_a_filtered_row_is_refused_where_the_launch_has_no_filters(simulated: Simulated) -> None:
    rows = Rows(torch.zeros(3, 50), top_k=torch.tensor([0, 5, 1]))
    tokens, status = simulated(rows, filters=False)
    assert status.tolist() == [0, 4, 0]
    assert int(tokens[1]) == -1


def test_extreme_temperatures(simulated: Simulated) -> None:
    logits = torch.tensor([[1e30, 0.0, -1e30], [5.0, 1.0, -torch.inf], [0.0, 1.0, 2.0]]).repeat(
        8, 1
    )
    temperature = torch.tensor([1e-5, 1e38, torch.inf]).repeat(8)
    rows = Rows(logits, temperature)
    check_draws(simulated.good(rows), rows)


def test_without_parameters_every_row_is_greedy(simulated: Simulated) -> None:
    logits = normal(3, 2000, torch.float16)
    rows = Rows(logits)
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions"):
        setattr(rows, name, None)
    assert torch.equal(simulated.good(rows, filters=False), logits.argmax(dim=1))


def test_arguments_out_of_range(simulated: Simulated) -> None:
    most = simulated.library.query("sample_nodes_max_columns")
    assert most > 163_840
    with pytest.raises(LaunchError, match="sample_nodes"):
        simulated(Rows(torch.zeros(1, most + 1)))
    for splits in (0, 33):
        with pytest.raises(LaunchError, match="sample_nodes"):
            simulated(Rows(torch.zeros(1, 50)), splits)
    assert simulated(Rows(torch.zeros(0, 50)))[0].shape == (0,)


@pytest.mark.full
@pytest.mark.parametrize("name", ["temperature 1", "top-k", "top-p", "min-p", "all"])
def test_draws_follow_the_filtered_distribution(simulated: Simulated, name: str) -> None:
    """20,000 draws through the kernels, and the same tokens as the reference."""
    draws = 20_000
    logits = normal(1, 40, torch.float32, scale=2.0).expand(draws, 40).contiguous()
    rows = Rows(logits, **FILTERS[name], seeds=1234, positions=torch.arange(draws))
    tokens = simulated.good(rows)
    expected = filtered_probs(*rows.take(torch.tensor([0])).filters())[0]
    assert p_value(torch.bincount(tokens, minlength=40), expected) > 1e-4
    check_draws(tokens, rows, allowed=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("dtype", LOGIT_TYPES)
def test_a_whole_vocabulary(simulated: Simulated, dtype: torch.dtype) -> None:
    rows = Rows(
        normal(24, 163_840, dtype),
        temperature=torch.tensor([0.0, 0.6, 1.0]).repeat(8),
        top_k=torch.tensor([0, 50, 0, 2000]).repeat(6),
        top_p=torch.tensor([1.0, 0.95]).repeat_interleave(12),
        min_p=torch.tensor([0.0, 0.0, 0.05, 0.0, 0.0, 0.001]).repeat(4),
    )
    tokens = simulated.good(rows, 4)
    check_draws(tokens, rows, allowed=0.1)
    assert torch.equal(simulated.good(rows, 32), tokens)

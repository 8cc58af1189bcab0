"""Statistics have fixed seeds: a test that passes once passes always; bounds are p > 1e-4."""

import pytest
import torch
from chi_square import chance_of, p_value
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.reference import filtered_probs, sample_nodes, uniforms

DRAWS = 20_000
MASK = (1 << 64) - 1


def uniform_in_integers(seed: int, position: int) -> float:
    """The documented formula with Python's unbounded integers."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    start = mix((seed + golden) & MASK)
    return (mix((start + (position + 1) * golden) & MASK) >> 11) * 2.0**-53


def naive_support(
    probs: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], list[int]]:
    """SGLang's `top_k_top_p_min_p_sampling_from_probs_torch`, one row, with a stable sort.

    The filters are those lines of it that set `probs_sort` to zero.
    """
    ordered, ids = probs.sort(descending=True, stable=True)
    sums = torch.cumsum(ordered, dim=-1)
    ordered = ordered.clone()
    ordered[torch.arange(len(ordered)) >= top_k] = 0.0
    ordered[(sums - ordered) > top_p] = 0.0
    ordered[ordered < ordered[0] * min_p] = 0.0
    kept = ids[ordered > 0].tolist()
    return set(kept), kept


def call(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    rows = logits.shape[0]
    return (
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


def random_logits(rows: int, vocabulary: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


FILTERS = {
    "temperature 1": {},
    "temperature 0.3": {"temperature": 0.3},
    "temperature 1.7": {"temperature": 1.7},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 0.8, "top_k": 12, "top_p": 0.93, "min_p": 0.02},
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_follow_the_filtered_distribution(name: str, over: str) -> None:
    logits = random_logits(1, 40)
    arguments = call(logits, **FILTERS[name])
    expected = filtered_probs(*arguments)[0]
    counting, fixed = torch.arange(DRAWS), torch.full((DRAWS,), 1234)
    seeds, positions = (fixed, counting) if over == "positions" else (counting, fixed)
    tokens = sample_nodes(*(a.expand(DRAWS, *a.shape[1:]) for a in arguments), seeds, positions)
    assert p_value(torch.bincount(tokens, minlength=40), expected) > 1e-4


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_support_is_that_of_sglang(data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(1, 12))
    # Repeated values: ties at the bounds of all filters.
    value = st.sampled_from([-torch.inf, -4.0, -1.0, -1.0, 0.0, 0.5, 2.0])
    logits = torch.tensor([data.draw(st.lists(value, min_size=vocabulary, max_size=vocabulary))])
    if not bool(torch.isfinite(logits).any()):
        logits[0, -1] = 0.0
    top_k = data.draw(st.integers(2, vocabulary + 2))
    top_p = data.draw(st.sampled_from([0.05, 0.25, 0.5, 0.9, 0.999]))
    min_p = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    arguments = call(logits, 1.0, top_k, top_p, min_p)
    expected = filtered_probs(*arguments)[0]
    probs = torch.softmax(logits, dim=1)[0]
    support, _ = naive_support(probs, top_k, top_p, min_p)
    assert set(expected.nonzero().flatten().tolist()) == support
    kept = torch.where(expected > 0, probs.double(), 0.0)
    torch.testing.assert_close(expected, kept / kept.sum())


def test_support_on_a_real_vocabulary_with_mixed_rows() -> None:
    logits = random_logits(24, 4096, seed=5, scale=2.5)
    top_k = torch.tensor([-1, 2, 50, 500, 4095, 1 << 30]).repeat(4)
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.99]).repeat_interleave(6)
    min_p = torch.tensor([0.0, 0.01, 0.2]).repeat(8)
    temperature = torch.tensor([1.0, 0.7]).repeat(12)
    expected = filtered_probs(logits, temperature, top_k, top_p, min_p)
    probs = torch.softmax(logits / temperature.unsqueeze(1), dim=1)
    sizes = set()
    for row in range(24):
        k = int(top_k[row]) if top_k[row] > 0 else 4096
        p = float(top_p[row]) if top_p[row] < 1 else 2.0
        _, kept = naive_support(probs[row], k, p, float(min_p[row]))
        assert expected[row].nonzero().flatten().tolist() == sorted(kept)
        sizes.add(len(kept))
    assert {1, 2} < sizes or len(sizes) > 8


@pytest.mark.parametrize(
    "inactive",
    [{"top_k": 0}, {"top_k": -1}, {"top_k": 40}, {"top_k": 1 << 30}, {"top_p": 1.0}, {"min_p": 0}],
)
def test_values_that_filter_nothing(inactive: dict[str, float]) -> None:
    logits = random_logits(3, 40, seed=1, scale=8.0)
    plain = torch.softmax(logits, dim=1).double()
    expected = plain / plain.sum(dim=1, keepdim=True)
    assert torch.equal(filtered_probs(*call(logits, **inactive)), expected)


def test_a_top_p_of_one_filters_nothing_beside_a_row_that_filters() -> None:
    logits = random_logits(40, 4096, seed=8)
    ordered = torch.softmax(logits, dim=1).sort(dim=1, descending=True).values
    rounds_up = (ordered.cumsum(dim=1) - ordered > 1.0)[:, :4095].any(dim=1)
    assert bool(rounds_up.any()), "no row here would lose tokens to rounding"
    arguments = call(logits, top_k=4095, top_p=0.5)
    arguments[3][rounds_up] = 1.0
    kept = (filtered_probs(*arguments) > 0).sum(dim=1)
    assert set(kept[rounds_up].tolist()) == {4095}
    assert int(kept[~rounds_up].max()) < 4095


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-7}])
def test_greedy_takes_the_lowest_id_among_equals(greedy: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-torch.inf, -5.0, -torch.inf]])
    zeros = torch.zeros(3, dtype=torch.int64)
    assert sample_nodes(*call(logits, **greedy), zeros, zeros).tolist() == [1, 0, 1]
    assert filtered_probs(*call(logits, **greedy)).argmax(dim=1).tolist() == [1, 0, 1]


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows, vocabulary = 48, 512
    logits = random_logits(rows, vocabulary, seed=2)
    generator = torch.Generator().manual_seed(3)
    parameters = (
        torch.tensor([0.0, 0.7, 1.0, 1.3]).repeat(12),
        torch.tensor([-1, 1, 5, 40, 512, 300]).repeat(8),
        torch.tensor([1.0, 0.9, 0.5]).repeat_interleave(16),
        torch.tensor([0.0, 0.0, 0.1, 0.3]).repeat_interleave(12),
        torch.randint(0, 1 << 62, (rows,), generator=generator),
        torch.randint(0, 1 << 18, (rows,), generator=generator),
    )
    together = sample_nodes(logits, *parameters)
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(
        sample_nodes(logits[order], *(p[order] for p in parameters)), together[order]
    )
    for row in range(rows):
        alone = sample_nodes(logits[row : row + 1], *(p[row : row + 1] for p in parameters))
        assert int(alone) == int(together[row])


def test_the_token_is_the_inverse_of_the_distribution_function() -> None:
    logits = random_logits(300, 9, seed=4)
    seeds, positions = torch.arange(300), torch.arange(300) * 7
    tokens = sample_nodes(*call(logits, top_p=0.9), seeds, positions)
    probs = filtered_probs(*call(logits, top_p=0.9))
    for row, u in enumerate(uniforms(seeds, positions).tolist()):
        total, token = 0.0, -1
        while total <= u:
            token += 1
            total += float(probs[row, token])
        assert int(tokens[row]) == token


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 1 - 2.0**-53])
@pytest.mark.parametrize("vocabulary", [3, 1000])
def test_extreme_noise_never_picks_a_filtered_token(
    u: float, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and last tokens are filtered or forbidden: the ends of the cumulative sum."""
    from overstory.kernels.reference import sample

    rows = 200
    logits = random_logits(rows, vocabulary, seed=6)
    logits[:, 0] = -torch.inf
    logits[:, -1] = -30.0
    monkeypatch.setattr(
        sample, "uniforms", lambda seeds, _: torch.full((len(seeds),), u, dtype=torch.float64)
    )
    for filters in ({"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 2}, {}):
        arguments = call(logits, **filters)
        tokens = sample_nodes(*arguments, torch.zeros(rows), torch.zeros(rows))
        possible = torch.softmax(logits, dim=1).masked_fill(filtered_probs(*arguments) == 0, 0) > 0
        assert bool(possible.gather(1, tokens.unsqueeze(1)).all())
        end = possible.int().argmax(dim=1)
        if u > 0.5:
            end = vocabulary - 1 - possible.flip(1).int().argmax(dim=1)
        if filters:
            assert torch.equal(tokens, end)


@given(
    st.lists(
        st.tuples(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 40)),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=50, deadline=None)
def test_noise_is_the_documented_function(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert uniforms(seeds, positions).tolist() == [uniform_in_integers(*pair) for pair in pairs]


def grid(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[seeds, positions] uniforms."""
    return uniforms(seeds.repeat_interleave(len(positions)), positions.repeat(len(seeds))).view(
        len(seeds), len(positions)
    )


SEED_SETS = {
    "counting": torch.arange(300),
    "powers of two": 1 << torch.arange(63),
    "spaced by the hash constant": torch.arange(300) * (0x9E3779B97F4A7C15 - (1 << 64)),
}


def test_chance_of_counts_is_that_of_tables() -> None:
    """Of chi-square: 4 with one degree of freedom, 12.5 with three."""
    assert chance_of(torch.tensor([40, 60]), torch.tensor([50, 50])) == pytest.approx(0.0455, 1e-3)
    counts, alike = torch.tensor([125, 75, 100, 100]), torch.full((4,), 100)
    assert chance_of(counts, alike) == pytest.approx(0.0059, rel=1e-2)
    with pytest.raises(AssertionError, match="not all expected"):
        chance_of(counts, alike + 1)


@pytest.mark.parametrize("name", SEED_SETS)
def test_noise_is_uniform_and_without_memory(name: str) -> None:
    u = grid(SEED_SETS[name], torch.arange(1000))
    assert 0.0 <= float(u.min()) < float(u.max()) < 1.0
    low_bits = (u * 2.0**45) % 1.0
    for values in (u, low_bits):
        counts = torch.histc(values.double(), bins=256, min=0.0, max=1.0)
        assert chance_of(counts, torch.full((256,), u.numel() / 256)) > 1e-4
    pairs = {
        "next position": (u[:, :-1], u[:, 1:]),
        "two positions on": (u[:, :-2], u[:, 2:]),
        "next seed": (u[:-1], u[1:]),
        "next seed, next position": (u[:-1, :-1], u[1:, 1:]),
        "next seed, position before": (u[:-1, 1:], u[1:, :-1]),
    }
    for what, (a, b) in pairs.items():
        cells = (a.reshape(-1) * 16).long() * 16 + (b.reshape(-1) * 16).long()
        counts = torch.bincount(cells, minlength=256)
        assert chance_of(counts, torch.full((256,), a.numel() / 256)) > 1e-4, what
        correlation = float(torch.corrcoef(torch.stack((a.reshape(-1), b.reshape(-1))))[0, 1])
        assert abs(correlation) < 4.5 / a.numel() ** 0.5, what


def test_streams_of_different_seeds_differ() -> None:
    u = grid(torch.arange(2000), torch.arange(64))
    assert u.unique().numel() == u.numel()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_poisoned_row_is_named(value: float, temperature: float) -> None:
    logits = torch.zeros(4, 5)
    logits[2, 3] = value
    with pytest.raises(ValueError, match=r"row\(s\) \[2\] of 4 cannot be sampled"):
        sample_nodes(*call(logits, temperature), torch.zeros(4), torch.zeros(4))


def test_a_row_without_any_allowed_token_is_refused() -> None:
    logits = torch.full((1, 5), -torch.inf)
    with pytest.raises(ValueError, match="forbid every token"):
        sample_nodes(*call(logits), torch.zeros(1), torch.zeros(1))


def test_parameters_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="parameters"):
        sample_nodes(*call(torch.zeros(1, 5), torch.nan), torch.zeros(1), torch.zeros(1))


def test_huge_logits_at_a_low_temperature() -> None:
    logits = torch.tensor([[1e30, 0.0, -1e30]])
    assert int(sample_nodes(*call(logits, 1e-5), torch.zeros(1), torch.zeros(1))) == 0


def test_no_rows() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert sample_nodes(*call(torch.zeros(0, 5)), empty, empty).shape == (0,)

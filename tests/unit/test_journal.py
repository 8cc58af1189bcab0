import pytest

from overstory.orchestrator.journal import Journal
from overstory.orchestrator.sampling import (
    SEED_LIMIT,
    Sampling,
    choice_seeds,
    draw_seed,
    fold_seed,
)
from overstory.workers.ddtree import EARLIER_OUTPUT

SAMPLING = Sampling(seed=7, max_new_tokens=5, temperature=0.5, stop_token_ids=(3,))


def test_a_lost_sequence_goes_on_with_the_same_seed_and_what_is_left() -> None:
    journal = Journal()
    entry = journal.open("a", [1, 2], SAMPLING, now_s=0.0)
    first = entry.call()
    assert (first.input_ids, first.sampling) == ((1, 2), SAMPLING)
    entry.commit([10, 11, 12])
    again = entry.call()
    assert again.input_ids == (1, 2, 10, 11, 12)
    assert again.sampling.max_new_tokens == 2
    assert again.sampling.seed == 7
    assert entry.call(hold_s=0.5).hold_s == 0.5


def test_what_was_committed_still_counts_where_a_sequence_goes_on() -> None:
    asked = Sampling(
        seed=7, max_new_tokens=9, min_new_tokens=4, frequency_penalty=0.5, logit_bias=((5, -2.0),)
    )
    entry = Journal().open("a", [1, 2], asked, now_s=0.0)
    entry.commit([10, 11, 12])
    left = entry.call().sampling
    assert (left.max_new_tokens, left.min_new_tokens, left.earlier_output) == (6, 1, 3)
    params = left.engine_params()
    assert params["custom_params"] == {EARLIER_OUTPUT: 3}
    assert params["logit_bias"] == {"5": -2.0}
    assert params["frequency_penalty"] == 0.5
    assert left.after(2).min_new_tokens == 0
    assert left.after(2).earlier_output == 5


def test_entries_leave_the_journal_once_and_are_counted() -> None:
    journal = Journal()
    entry, other = (journal.open(name, [1], SAMPLING, 0.0) for name in "ab")
    journal.close(entry, "stop")
    journal.close(entry, "aborted")
    assert list(journal) == [other]
    assert journal.ended() == {"stop": 1, "length": 0, "aborted": 0, "failed": 0}


def test_impossible_records_are_caught() -> None:
    journal = Journal()
    entry = journal.open("a", [1], SAMPLING, 0.0)
    with pytest.raises(AssertionError, match="in flight"):
        journal.open("a", [1], SAMPLING, 0.0)
    with pytest.raises(AssertionError, match="6 tokens of 5"):
        entry.commit(range(6))
    journal.close(entry, "failed")
    with pytest.raises(AssertionError, match="ended"):
        entry.commit([1])


def test_engine_params_are_fields_of_sglang() -> None:
    params = SAMPLING.engine_params()
    assert params["sampling_seed"] == 7
    assert params["stop_token_ids"] == [3]
    bare = Sampling(seed=0, max_new_tokens=1).engine_params()
    assert not {"stop_token_ids", "logit_bias", "custom_params"} & set(bare)


def test_choices_have_distinct_seeds_that_depend_on_the_first_alone() -> None:
    seeds = choice_seeds(5, 128)
    assert seeds[0] == 5
    assert len(set(seeds)) == 128
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)
    assert choice_seeds(5, 3) == seeds[:3]
    assert choice_seeds(6, 3)[1:] != seeds[1:3]


@pytest.mark.parametrize("seed", [-1, 2**31, 2**63, -(2**63), 10**40])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= fold_seed(seed) < SEED_LIMIT
    assert fold_seed(seed) == fold_seed(seed)
    assert fold_seed(seed) != fold_seed(seed + 1)


def test_a_seed_in_range_stays() -> None:
    assert [fold_seed(0), fold_seed(2**31 - 1)] == [0, 2**31 - 1]
    assert 0 <= draw_seed() < SEED_LIMIT

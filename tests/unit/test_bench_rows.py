"""How a benchmark is asked for and summed up."""

from dataclasses import replace

import pytest

from overstory.orchestrator.bench_load import load_prompts
from overstory.orchestrator.bench_rows import (
    Answer,
    BenchError,
    BenchSettings,
    Sample,
    counted,
    parse_settings,
    render_rows,
    summarise,
)


def settings(**changes: object) -> BenchSettings:
    given: dict[str, object] = {
        "modes": "plain,chain,tree-31",
        "prompts": 2,
        "max_new_tokens": 8,
        "concurrency": "1,4",
        "temperature": "0,0.7",
        "rounds": 2,
    }
    return parse_settings(**{**given, **changes})  # type: ignore[arg-type]


def test_every_mode_in_every_cell() -> None:
    asked = settings()
    assert asked.cells() == [(1, 0.0), (4, 0.0), (1, 0.7), (4, 0.7)]


def test_no_mode_is_always_first() -> None:
    asked = settings()
    assert asked.order(0) == ("plain", "chain", "tree-31")
    assert {asked.order(turn)[0] for turn in range(3)} == set(asked.modes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modes": "plain,fast"}, "--modes: unknown tree policy 'fast'"),
        ({"modes": "plain,plain"}, "wanted each mode once"),
        ({"concurrency": "1,x"}, "--concurrency: got '1,x', wanted whole numbers of at least 1"),
        ({"concurrency": "0"}, "--concurrency: got '0'"),
        ({"temperature": "-1"}, "--temperature: got '-1', wanted numbers of at least 0"),
        ({"temperature": ""}, "--temperature: got ''"),
        ({"temperature": "nan"}, "--temperature: got 'nan'"),
    ],
)
def test_bad_options(change: dict[str, object], said: str) -> None:
    with pytest.raises(BenchError, match=said):
        settings(**change)


def snapshot(**modes: dict[str, object]) -> dict[str, object]:
    return {"verify": modes}


def test_counters_are_differences_added_over_replicas() -> None:
    before = [
        snapshot(chain={"forwards": 2, "requests": 2, "rows": 16, "tokens": 4,
                        "offered_by_depth": [2], "accepted_by_depth": [1]}),
        snapshot(),
    ]  # fmt: skip
    later = {"forwards": 5, "requests": 6, "rows": 48, "tokens": 20,
             "offered_by_depth": [6, 4], "accepted_by_depth": [5, 3]}  # fmt: skip
    total = counted(before, [snapshot(chain=later), snapshot(chain=later)], "chain")
    assert total == {
        "forwards": 8,
        "requests": 10,
        "rows": 80,
        "tokens": 36,
        "offered_by_depth": [10, 8],
        "accepted_by_depth": [9, 6],
        "choices": {"chain": 8},
    }


def sample(mode: str, seconds: float, tokens: int, forwards: int, accepted: list[int]) -> Sample:
    counters = {
        "forwards": forwards,
        "requests": forwards,
        "tokens": tokens,
        "accepted_by_depth": accepted,
    }
    return Sample(mode, 1, 0.0, seconds, (Answer(0.1, tokens),), counters)


def test_rows_are_medians_and_speed_is_over_plain() -> None:
    rows = summarise(
        [
            sample("plain", 1.0, 50, 50, []),
            sample("tree-31", 1.0, 100, 20, [18, 10]),
            sample("tree-31", 1.0, 150, 30, [27, 15]),
            sample("plain", 1.0, 70, 70, []),
            sample("tree-31", 100.0, 100, 20, [18, 10]),
            sample("plain", 1.0, 60, 60, []),
        ]
    )
    plain, tree = rows
    assert (plain["mode"], plain["tokens_per_s"], plain["speedup"]) == ("plain", 60.0, 1.0)
    assert plain["tokens_per_forward"] == 1.0
    assert plain["ms_per_step"] == pytest.approx(3000 / 180, abs=0.01)
    assert tree["tokens_per_s"] == 100.0  # One round on a busy machine does not carry the row.
    assert tree["tokens_per_s_rounds"] == [100.0, 150.0, 1.0]
    assert tree["speedup"] == pytest.approx(1.67, abs=0.005)
    assert tree["tokens_per_forward"] == 5.0
    assert tree["accepted_by_depth"] == [0.9, 0.5]
    assert tree["ttft_ms"] == 100.0


def test_what_was_chosen_is_added_up_over_the_rounds() -> None:
    rounds = [sample("auto", 1.0, 10, 5, [1]) for _ in range(3)]
    for one, chosen in zip(rounds, ({"plain": 2}, {"plain": 3, "chain": 1}, {}), strict=True):
        one.counters["choices"] = chosen  # type: ignore[index]
    (row,) = summarise(rounds)
    assert row["choices"] == {"plain": 5, "chain": 1}


@pytest.mark.parametrize(("answers", "p95_ms"), [(1, 100), (2, 200), (20, 1900), (40, 3800)])
def test_19_of_20_first_tokens_come_within_the_p95(answers: int, p95_ms: float) -> None:
    one = sample("chain", 1.0, 10, 5, [1])
    firsts = tuple(Answer(0.1 * (number + 1), 8) for number in range(answers))
    (row,) = summarise([replace(one, answers=firsts)])
    assert row["ttft_p95_ms"] == p95_ms


def test_without_plain_there_is_no_speedup() -> None:
    (row,) = summarise([sample("chain", 1.0, 10, 5, [1])])
    assert row["speedup"] is None
    assert "chain" in render_rows([row])


def test_a_mode_that_counted_nothing_has_no_ratios() -> None:
    (row,) = summarise([sample("plain", 1.0, 10, 0, [])])
    assert (row["tokens_per_forward"], row["ms_per_step"]) == (None, None)
    assert " - " in render_rows([row])


def test_table_has_a_line_for_each_row() -> None:
    rows = summarise([sample("plain", 1.0, 50, 50, []), sample("chain", 1.0, 90, 30, [20, 9])])
    head, *lines = render_rows(rows).splitlines()
    assert head.split()[:3] == ["mode", "conc", "temp"]
    assert [line.split()[0] for line in lines] == ["plain", "chain"]
    assert lines[1].endswith("0.67 0.30")


def test_prompts_as_ids_and_as_text() -> None:
    ids, texts = load_prompts(3, as_ids=True), load_prompts(3, as_ids=False)
    assert all(isinstance(token, int) for prompt in ids for token in prompt)
    assert all(isinstance(prompt, str) and prompt for prompt in texts)
    with pytest.raises(BenchError, match="there are"):
        load_prompts(10**6, as_ids=True)

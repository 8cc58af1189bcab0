"""Load profiles of the benchmark, and the files that it writes."""

import csv
import io
import itertools
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from overstory.orchestrator import bench, client
from overstory.orchestrator.bench_files import csv_text, plot_text
from overstory.orchestrator.bench_load import Load
from overstory.orchestrator.bench_profiles import (
    LEFT_EVENTS,
    PROFILES,
    SHARED_TOKENS,
    Asked,
    label,
    profile_of,
    requests,
)
from overstory.orchestrator.bench_rows import (
    Answer,
    BenchError,
    BenchSettings,
    Sample,
    render_rows,
    summarise,
)

IDS = [list(range(start, start + 40)) for start in range(0, 400, 40)]
TEXTS = ["def a():\n    return 1\n", "class B:\n    pass\n"]


def made(name: str, value: float | None, prompts: Any = IDS, cell: str = "c") -> list[Asked]:
    return requests(PROFILES[name], value, prompts, cell)


def test_a_sweep_sends_the_prompts_as_they_are() -> None:
    assert made("sweep", None) == [Asked(prompt) for prompt in IDS]


def test_rates_come_at_random_and_the_same_each_time() -> None:
    many = IDS * 40
    times = [one.at_s for one in made("rates", 2.0, many)]
    assert times == [one.at_s for one in made("rates", 2.0, many)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert 0.4 < sum(gaps) / len(gaps) < 0.6
    assert len(set(gaps)) == len(gaps)
    assert PROFILES["rates"].open


@pytest.mark.parametrize("prompts", [IDS, TEXTS])
def test_long_prompts_have_the_length_and_beginnings_of_their_own(prompts: Any) -> None:
    cells = [one.prompt for cell in ("plain", "chain") for one in made("long", 256, prompts, cell)]
    wanted = 256 if prompts is IDS else 256 * 3
    assert {len(prompt) for prompt in cells} == {wanted}
    heads = {tuple(prompt[:12]) for prompt in cells}
    assert len(heads) == len(cells)


@pytest.mark.parametrize("prompts", [IDS, TEXTS * 5])
def test_groups_share_a_beginning_and_only_groups_do(prompts: Any) -> None:
    asked = [one.prompt for one in made("shared", 4, prompts)]
    heads = [tuple(prompt[: SHARED_TOKENS // 2]) for prompt in asked]
    assert heads[0] == heads[3]
    assert heads[3] != heads[4]
    assert len(set(heads)) == 3
    assert [prompt[-len(own) :] for prompt, own in zip(asked, prompts, strict=True)] == prompts
    other = made("shared", 4, prompts, "another mode")
    assert tuple(other[0].prompt[: SHARED_TOKENS // 2]) not in heads


def test_so_many_clients_leave() -> None:
    leaving = [one for one in made("churn", 0.5) if one.leaves_after is not None]
    assert len(leaving) == len(IDS) // 2
    assert {one.leaves_after for one in leaving} == {LEFT_EVENTS}
    assert all(one.leaves_after is None for one in made("churn", 0.0))


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("fast", "", "--profile: got 'fast', wanted one of sweep, rates"),
        ("sweep", "1", "--values: sweep has no variable"),
        ("long", "0", "wanted numbers of at least 1 "),
        ("churn", "2", "at least 0 and at most 1"),
        ("rates", "x", "--values: got 'x'"),
    ],
)
def test_bad_profiles(name: str, values: str, said: str) -> None:
    with pytest.raises(BenchError, match=said):
        profile_of(name, values)


def test_values_are_the_profile_s_own_unless_given() -> None:
    assert profile_of("long", "") == (PROFILES["long"], (256, 1024, 2048))
    profile, values = profile_of("rates", "3,4.5")
    assert values == (3.0, 4.5)
    assert label(profile, 4.5) == "4.5 requests/s"
    assert label(PROFILES["sweep"], None) == ""


class _Endpoint:
    """In place of `client.stream_completion`: 5 pieces, and the usage."""

    def __init__(self) -> None:
        self.ended_early = 0

    def stream(self, _: str, body: dict[str, Any]) -> Iterator[client.Event]:
        try:
            for _number in range(5):
                yield client.Event("x")
            yield client.Event("", None, {"completion_tokens": body["max_tokens"]})
        except GeneratorExit:
            self.ended_early += 1
            raise


def test_who_leaves_closes_the_stream_and_counts_no_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = _Endpoint()
    monkeypatch.setattr(client, "stream_completion", endpoint.stream)
    record: Any = SimpleNamespace(endpoint="e", spec={"served_model_name": "m"})
    load = Load(record, IDS)
    answers = load.run(8, 2, 0.0, made("churn", 0.5))
    assert sum(answer.left for answer in answers) == endpoint.ended_early == 5
    assert sum(answer.tokens for answer in answers) == 5 * 8
    assert len(load.run(8, 2, 0.0)) == len(IDS)


def test_every_value_is_a_cell_with_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BenchSettings(("plain", "chain"), 2, 8, (1,), (0.0, 1.0), 2, "long", (64.0, 128.0))
    monkeypatch.setattr(client, "stream_completion", _Endpoint().stream)
    monkeypatch.setattr(bench, "switch_policy", lambda *_: None)
    monkeypatch.setattr(bench, "ask_controller", lambda *_: {"policy": "chain"})
    monkeypatch.setattr(bench, "_first_ranks", lambda _: [])
    record: Any = SimpleNamespace(
        name="d", endpoint="e", spec={"served_model_name": "m", "model": "overstory-tiny"}
    )
    said: list[str] = []
    samples: list[Sample] = []
    bench.measure(record, settings, said.append, samples)
    rows = summarise(samples)
    assert [(row["mode"], row["temperature"], row["load"]) for row in rows[:4]] == [
        ("plain", 0.0, "64 tokens"),
        ("chain", 0.0, "64 tokens"),
        ("plain", 1.0, "64 tokens"),
        ("chain", 1.0, "64 tokens"),
    ]
    assert (len(rows), len(said)) == (8, 16)
    assert rows[1]["speedup"] is not None
    assert "64 tokens" in render_rows(rows)


def _rows() -> list[dict[str, Any]]:
    counters = {"forwards": 4, "requests": 4, "tokens": 8, "accepted_by_depth": [3, 1]}
    return summarise(
        [
            Sample(mode, concurrency, 0.0, seconds, (Answer(0.1, 50),), counters, "2 requests/s")
            for mode, seconds in (("plain", 2.0), ("chain", 1.0))
            for concurrency in (1, 4)
        ]
    )


_HOST = {
    "gpus": ["NVIDIA H200, 580.159.04", "NVIDIA H200, 580.159.04"],
    "versions": {"python": "3.12.3", "sglang": "0.5.17"},
    "commit": "c16b465",
}


def test_csv_has_a_line_for_each_row_and_what_it_was_made_with() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(_rows(), _HOST))))
    assert [line["mode"] for line in lines] == ["plain", "plain", "chain", "chain"]
    assert lines[2]["tokens_per_s"] == "50.0"
    assert lines[2]["accepted_by_depth"] == "0.75 0.25"
    assert list(lines[0]) == [*_rows()[0], "gpu", "versions", "commit"]
    for line in lines:
        assert line["gpu"] == "NVIDIA H200, 580.159.04"
        assert line["versions"] == "python 3.12.3; sglang 0.5.17"
        assert line["commit"] == "c16b465"


def test_csv_of_a_machine_without_gpu_outside_a_checkout() -> None:
    made = csv_text(_rows(), _HOST | {"gpus": [], "commit": None})
    first = next(csv.DictReader(io.StringIO(made)))
    assert (first["gpu"], first["commit"]) == ("", "")


def test_the_picture_has_a_bar_for_each_row_and_figure() -> None:
    drawn = xml.fromstring(plot_text(_rows()))
    bars = [element for element in drawn.iter() if element.find("{*}title") is not None]
    assert len(bars) == 2 * 4
    heights = [float(bar.get("height", 0)) for bar in bars]
    assert max(heights) == 220.0
    assert "1 at a time, T=0, 2 requests/s" in [
        text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")
    ]

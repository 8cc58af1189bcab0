"""`overstory bench`: load through the endpoint, with the tree policy switched between the modes.

All modes see the same prompts in one run, turn by turn; rows are medians over the rounds. Every
prompt is sent once beforehand, so that no mode alone pays for filling the prefix cache.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from overstory.orchestrator.bench_load import Load, load_prompts
from overstory.orchestrator.bench_rows import (
    BenchSettings,
    Sample,
    counted,
    render_rows,
    summarise,
)
from overstory.orchestrator.control import (
    ask_controller,
    connected,
    steered_ranks,
    switch_policy,
)
from overstory.orchestrator.host_facts import host_facts
from overstory.orchestrator.state import DeploymentRecord

Say = Callable[[str], None]


def _first_ranks(deployment: str) -> list[dict[str, Any]]:
    """Step counters of rank 0 of each replica."""
    rows = steered_ranks(ask_controller(deployment, "status"))
    return [row["steps"] for row in rows if row["rank"] == 0]


def _measure(
    name: str, load: Load, mode: str, cell: tuple[int, float], settings: BenchSettings
) -> Sample:
    concurrency, temperature = cell
    switch_policy(name, mode)
    before = _first_ranks(name)
    begun = time.monotonic()
    answers = load.run(settings.max_new_tokens, concurrency, temperature)
    seconds = time.monotonic() - begun
    counters = counted(before, _first_ranks(name), mode)
    return Sample(mode, concurrency, temperature, seconds, tuple(answers), counters)


def _warm_up(name: str, load: Load, settings: BenchSettings) -> None:
    """Fills the prefix cache and takes every mode's first, slow steps."""
    load.run(1, max(settings.concurrency), 0.0)
    for mode in settings.modes:
        switch_policy(name, mode)
        load.answer(0, min(16, settings.max_new_tokens), 0.0)


def measure(record: DeploymentRecord, settings: BenchSettings, say: Say) -> list[Sample]:
    """All samples. Needs a connected Ray; the policy that was in force is set again at the end.

    Raises:
        BenchError, ControlError, EndpointError: it could not be carried out.
    """
    built_in = record.spec["model"] == "overstory-tiny"
    load = Load(record, load_prompts(settings.prompts, built_in))
    policy = ask_controller(record.name, "status")["policy"]
    samples = []
    try:
        _warm_up(record.name, load, settings)
        for number in range(settings.rounds):
            for cell in settings.cells():
                for mode in settings.order(number):
                    sample = _measure(record.name, load, mode, cell, settings)
                    samples.append(sample)
                    say(
                        f"round {number + 1}/{settings.rounds}  {mode:<8} concurrency {cell[0]}  "
                        f"temperature {cell[1]:g}  {sample.tokens / sample.seconds:7.1f} tokens/s"
                    )
    finally:
        switch_policy(record.name, policy)
    return samples


def report(record: DeploymentRecord, settings: BenchSettings, samples: Sequence[Sample]) -> Any:
    """What goes into the JSON file: `host`, `deployment`, `settings`, `rows`."""
    return {
        "host": host_facts(),
        "deployment": record.spec,
        "settings": settings.__dict__,
        "notes": [
            "modes interleaved in one run; plain is budget 0 in the same engine, drafter loaded",
            "load through the HTTP endpoint from this machine; prompts are in the prefix cache",
        ],
        "rows": summarise(samples),
    }


def run_bench(name: str | None, settings: BenchSettings, json_file: Path | None) -> None:
    """Measures, prints the table and writes `json_file`."""
    with connected(name) as record:
        samples = measure(record, settings, lambda line: print(line, file=sys.stderr, flush=True))
    result = report(record, settings, samples)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    print(render_rows(result["rows"]))

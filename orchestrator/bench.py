"""`overstory bench`: load through the endpoint, with the tree policy switched between the modes.

All modes see the same load in one run, turn by turn; rows are medians over the rounds. Every
held-out prompt is sent once beforehand, so that no mode alone pays for filling the prefix cache;
profiles that are about that cache (`long`, `shared`) make prompts of their own, new to each mode.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from overstory.orchestrator.bench_files import csv_text, plot_text
from overstory.orchestrator.bench_load import Load, load_prompts
from overstory.orchestrator.bench_profiles import PROFILES, label, requests
from overstory.orchestrator.bench_rows import (
    BenchSettings,
    Sample,
    counted,
    default_modes,
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
from overstory.orchestrator.output_file import check_writable, write_output
from overstory.orchestrator.state import DeploymentRecord

Say = Callable[[str], None]


def _first_ranks(deployment: str) -> list[dict[str, Any]]:
    """Step counters of rank 0 of each replica."""
    rows = steered_ranks(ask_controller(deployment, "status"))
    return [row["steps"] for row in rows if row["rank"] == 0]


@dataclass(frozen=True)
class _Cell:
    """One cell in one round."""

    concurrency: int
    temperature: float
    value: float | None
    round_number: int

    @property
    def key(self) -> str:
        """Unique to the cell and round."""
        return f"{self.concurrency} {self.temperature} {self.value} {self.round_number}"


def _measure(name: str, load: Load, mode: str, cell: _Cell, settings: BenchSettings) -> Sample:
    profile = PROFILES[settings.profile]
    asked = requests(profile, cell.value, load.prompts, f"{cell.key} {mode}")
    switch_policy(name, mode)
    before = _first_ranks(name)
    begun = time.monotonic()
    answers = load.run(
        settings.max_new_tokens, cell.concurrency, cell.temperature, asked, profile.open
    )
    seconds = time.monotonic() - begun
    counters = counted(before, _first_ranks(name), mode)
    return Sample(
        mode,
        cell.concurrency,
        cell.temperature,
        seconds,
        tuple(answers),
        counters,
        label(profile, cell.value),
    )


def _warm_up(name: str, load: Load, settings: BenchSettings) -> None:
    """Fills the prefix cache and takes every mode's first, slow steps."""
    load.run(1, max(settings.concurrency), 0.0)
    for mode in settings.modes:
        switch_policy(name, mode)
        load.answer(0, min(16, settings.max_new_tokens), 0.0)


def measure(
    record: DeploymentRecord, settings: BenchSettings, say: Say, samples: list[Sample]
) -> None:
    """Puts all samples into `samples`, each when it is measured, so that what stops it costs those
    alone that are missing. Needs a connected Ray; the policy that was in force is set again at the
    end.

    Raises:
        BenchError, ControlError, EndpointError: it could not be carried out.
    """
    built_in = record.spec["model"] == "overstory-tiny"
    load = Load(record, load_prompts(settings.prompts, built_in))
    policy = ask_controller(record.name, "status")["policy"]
    try:
        _warm_up(record.name, load, settings)
        for number in range(settings.rounds):
            for cell in _cells(settings, number):
                for mode in settings.order(number):
                    sample = _measure(record.name, load, mode, cell, settings)
                    samples.append(sample)
                    say(
                        f"round {number + 1}/{settings.rounds}  {mode:<8} "
                        f"concurrency {cell.concurrency}  temperature {cell.temperature:g}  "
                        f"{sample.load}  {sample.tokens / sample.seconds:7.1f} tokens/s"
                    )
    finally:
        switch_policy(record.name, policy)


def _cells(settings: BenchSettings, round_number: int) -> list[_Cell]:
    return [
        _Cell(concurrency, temperature, value, round_number)
        for value in settings.loads()
        for concurrency, temperature in settings.cells()
    ]


def report(record: DeploymentRecord, settings: BenchSettings, samples: Sequence[Sample]) -> Any:
    """What goes into the JSON file: `host`, `deployment`, `settings`, `notes`, `stopped` (in words;
    null for a whole one), `rows`."""
    return {
        "host": host_facts(),
        "deployment": record.spec,
        "settings": settings.__dict__,
        "notes": [
            "modes interleaved in one run; plain is budget 0 in the same engine, drafter loaded",
            "load through the HTTP endpoint from this machine",
            f"profile {settings.profile}: {PROFILES[settings.profile].help}",
        ],
        "stopped": _stopped(settings, samples),
        "rows": summarise(samples),
    }


def _stopped(settings: BenchSettings, samples: Sequence[Sample]) -> str | None:
    total = _count(settings)
    if len(samples) == total:
        return None
    return f"stopped after {len(samples)} of {total} measurements: rows have fewer rounds or none"


def _count(settings: BenchSettings) -> int:
    return settings.rounds * len(_cells(settings, 0)) * len(settings.modes)


@contextmanager
def _progress(settings: BenchSettings) -> Iterator[Say]:
    """What shows how far it is: a bar on a terminal, else a line for each measurement."""
    if not sys.stderr.isatty():
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    with Progress(*Progress.get_default_columns(), console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=_count(settings))

        def step(line: str) -> None:
            bar.update(task, advance=1, description=line.strip())

        yield step


def run_bench(
    name: str | None,
    settings: BenchSettings,
    json_file: Path | None,
    csv_file: Path | None = None,
    plot_file: Path | None = None,
) -> None:
    """Measures, prints the table and writes the files that are asked for; what there is of them
    also where it is stopped (Ctrl-C, an endpoint that is lost), before it raises.

    Raises:
        UserFault: it could not be carried out, or a file cannot be written (said before anything
            is measured, where it can be known).
        KeyboardInterrupt, SystemExit: it was told to stop (Ray turns SIGTERM into SystemExit).
    """
    files = {"--json": json_file, "--csv": csv_file, "--plot": plot_file}
    for option, path in files.items():
        check_writable(option, path)
    with connected(name) as record:
        if not settings.modes:
            tree = record.spec["tree"]
            modes = default_modes(tree["budget"], tree["policy"] == "auto", tree["spine_first"])
            settings = replace(settings, modes=modes)
        samples: list[Sample] = []
        try:
            with _progress(settings) as say:
                measure(record, settings, say, samples)
        finally:
            if samples:
                _tell(record, settings, samples, files)


def _tell(
    record: DeploymentRecord,
    settings: BenchSettings,
    samples: Sequence[Sample],
    files: Mapping[str, Path | None],
) -> None:
    """Prints the table, writes the files (by option: JSON, CSV, plot)."""
    result = report(record, settings, samples)
    rows = result["rows"]
    # First: a disk that is full costs the files alone.
    print(render_rows(rows))
    if result["stopped"]:
        print(result["stopped"])
    texts = (json.dumps(result, indent=1) + "\n", csv_text(rows, result["host"]), plot_text(rows))
    for (option, path), text in zip(files.items(), texts, strict=True):
        if path is not None:
            write_output(option, path, text)

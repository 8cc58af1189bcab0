"""Commands that look at nodes and at what runs: `doctor` and `report`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from overstory.orchestrator.cli_support import AsJson, Name, Overrides, known, seconds, told, whole


def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="Deployment file; nodes are checked for what it needs.")
    ] = None,
    overrides: Overrides = None,
    nodes: Annotated[int | None, whole("Nodes that should have joined.")] = None,
    wait: Annotated[float, seconds("Seconds to wait for them.", 0.0)] = 120.0,
    strict: Annotated[bool, typer.Option(help="Warnings end with exit code 1 too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong on each node and between them, before any weight loads."""
    with told():
        from overstory.orchestrator.doctor import diagnose
        from overstory.orchestrator.doctor_text import render_diagnosis
        from overstory.orchestrator.spec import load_spec

        spec = load_spec(file, overrides or ()) if file else None
        diagnosis = diagnose(spec, nodes, wait)
        text = json.dumps(diagnosis.to_dict(), indent=1) if as_json else render_diagnosis(diagnosis)
        print(text)
        if diagnosis.errors or (strict and diagnosis.findings):
            raise typer.Exit(1)


def report(
    name: Name = None,
    bench: Annotated[
        list[Path] | None, typer.Option(help="File of `overstory bench --json`, repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write here instead of printing.")] = None,
    as_json: AsJson = False,
) -> None:
    """Report on a running deployment: what is measured, where time goes, what limits it next."""
    with told():
        known(name)
        from overstory.orchestrator.report_command import report as run

        run(name, bench or (), as_json, out)

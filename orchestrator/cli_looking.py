"""Commands that look at nodes and at what runs: `doctor`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from overstory.orchestrator.cli_support import AsJson, Overrides, told


def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="Deployment file; nodes are checked for what it needs.")
    ] = None,
    overrides: Overrides = None,
    strict: Annotated[bool, typer.Option(help="Warnings end with exit code 1 too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong on each node and between them, before any weight loads."""
    with told():
        from overstory.orchestrator.doctor import diagnose
        from overstory.orchestrator.doctor_text import render_diagnosis
        from overstory.orchestrator.spec import load_spec

        spec = load_spec(file, overrides or ()) if file else None
        diagnosis = diagnose(spec)
        text = json.dumps(diagnosis.to_dict(), indent=1) if as_json else render_diagnosis(diagnosis)
        print(text)
        if diagnosis.errors or (strict and diagnosis.findings):
            raise typer.Exit(1)

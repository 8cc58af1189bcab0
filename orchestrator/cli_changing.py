"""The commands that change a running deployment."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from overstory.orchestrator.cli_support import Name, Overrides, known, seconds, told


def restart(
    file: Annotated[
        Path | None,
        typer.Argument(help="Deployment file with the new settings; the present ones if unset."),
    ] = None,
    overrides: Overrides = None,
    name: Name = None,
    timeout: Annotated[float, seconds("Seconds for one replica to come up.")] = 900.0,
    follow: Annotated[bool, typer.Option(help="Watch a restart that was interrupted.")] = False,
) -> None:
    """Replace every replica, one after another. No request is lost."""
    with told():
        if follow and (file is not None or overrides):
            raise typer.BadParameter("--follow takes neither a file nor --set")
        if overrides and file is None:
            raise typer.BadParameter("--set changes settings of a file; name the file too")
        known(name)
        wanted = None
        if file is not None:
            from overstory.orchestrator.spec import load_spec

            wanted = load_spec(file, overrides or ())
        from overstory.orchestrator.interrupts import end_tidily
        from overstory.orchestrator.progress import Progress
        from overstory.orchestrator.restart import follow as watch
        from overstory.orchestrator.restart import restart as run

        end_tidily()
        progress = Progress(sys.stderr)
        if follow:
            watch(name, progress, timeout)
        else:
            run(name, wanted, progress, timeout)

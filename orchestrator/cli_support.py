"""What the commands share: options of one spelling, and how a user's fault is told."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from overstory.orchestrator.errors import UserFault

File = Annotated[
    Path, typer.Argument(help="Deployment file, for example clusters/local/deployment.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the file, repeatable."),
]
Name = Annotated[str | None, typer.Option(help="Which deployment, where there are several.")]
Endpoint = Annotated[
    str | None, typer.Option(help="URL of the endpoint; that of the deployment if not given.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fail(message: str) -> NoReturn:
    """Ends the command with exit code 1 and `message` on standard error."""
    first, *rest = message.splitlines() or ["failed"]
    print(f"error: {first}", *(f"  {line}" for line in rest), sep="\n", file=sys.stderr)
    raise typer.Exit(1)


@contextmanager
def told() -> Iterator[None]:
    """Faults that are the user's to mend end the command with their message, no traceback."""
    try:
        yield
    except UserFault as fault:
        fail(str(fault))


def known(name: str | None) -> None:
    """Refuses at once, before Ray is imported, where there is no such deployment."""
    from overstory.orchestrator.state import read_state

    read_state().pick(name)

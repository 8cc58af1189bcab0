"""What the commands share: options of one spelling, and how a user's fault is told."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from overstory.orchestrator.errors import UserFault

File = Annotated[
    Path, typer.Argument(help="Deployment file, for example clusters/local/deployment.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the file, repeatable."),
]


def _deployments() -> list[str]:
    """For a shell to complete; none where the state cannot be read."""
    from overstory.orchestrator.state import read_state

    try:
        return list(read_state().deployments)
    except UserFault:
        return []


def _gpu_kinds() -> list[str]:
    from overstory.orchestrator.gpus import KNOWN

    return sorted(KNOWN)


Name = Annotated[
    str | None,
    typer.Option(help="Which deployment, where there are several.", autocompletion=_deployments),
]
GpuKind = Annotated[
    str | None,
    typer.Option(help="Kind of GPU: rtx-pro-6000, h200.", autocompletion=_gpu_kinds),
]
Endpoint = Annotated[
    str | None, typer.Option(help="URL of the endpoint; that of the deployment if not given.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

MOST = 1_000_000_000
DAYS_S = 30 * 86400.0


def _parser(kind: type, least: float, most: float, wanted: str) -> Callable[[Any], Any]:
    def parse(given: Any) -> Any:
        try:
            value = kind(given)
        except (ValueError, OverflowError):
            value = None
        if value is None or not least <= value <= most:  # Not a number compares as false.
            raise typer.BadParameter(f"got {given!r}, wanted {wanted}")
        return value

    return parse


def whole(help: str, least: int = 1, most: int = MOST) -> Any:
    """An option that takes a whole number from `least` to `most`; `help` explains it."""
    upper = f" and at most {most}" if most < MOST else ""
    parser = _parser(int, least, most, f"a whole number, at least {least}{upper}")
    return typer.Option(parser=parser, metavar="N", help=help)


def amount(help: str, least: float, most: float = float(MOST)) -> Any:
    """An option that takes a finite number from `least` to `most`; `help` explains it."""
    upper = f" and at most {most:,.15g}" if most < MOST else ""
    parser = _parser(float, least, most, f"a number, at least {least:g}{upper}")
    return typer.Option(parser=parser, metavar="NUMBER", help=help)


def seconds(help: str, least: float = 1.0) -> Any:
    """An option that takes a time in seconds."""
    return amount(help, least, DAYS_S)


def fail(message: str) -> NoReturn:
    """Ends the command with exit code 1 and `message` on standard error."""
    first, *rest = message.splitlines() or ["failed"]
    print(f"error: {first}", *(f"  {line}" for line in rest), sep="\n", file=sys.stderr)
    raise typer.Exit(1)


@contextmanager
def told() -> Iterator[None]:
    """Faults that are the user's to mend end the command with their message, no traceback. So does
    a Ray that does not answer as it should; it is known by its name, for nothing here imports it.
    """
    try:
        yield
    except UserFault as fault:
        fail(str(fault))
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "ray":
            raise
        said = str(error).strip().splitlines() or [""]
        fail(
            f"Ray: {type(error).__name__}: {said[-1]}\n`overstory doctor` looks at its nodes, "
            "`overstory down` takes away what is left of a deployment"
        )


def known(name: str | None) -> None:
    """Refuses at once, before Ray is imported, where there is no such deployment."""
    from overstory.orchestrator.state import read_state

    read_state().pick(name)

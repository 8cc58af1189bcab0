"""`overstory key`: the file of API keys, edited where it lies. A running gateway takes a change up
within a second."""

import os
from pathlib import Path
from typing import Annotated

import typer

from overstory.orchestrator.api_keys import ApiKey, ApiKeyError, draw_key, parse_keys
from overstory.orchestrator.cli_support import fail
from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.output_file import check_writable

app = typer.Typer(help="API keys of an endpoint: draw, list, revoke.", no_args_is_help=True)

KeyFile = Annotated[
    Path, typer.Option("--file", "-f", help="The key file: gateway.api_keys_file of a deployment.")
]
KeyName = Annotated[str, typer.Argument(help="Whose key it is.")]


@app.command()
def new(
    name: KeyName,
    file: KeyFile,
    admin: Annotated[
        bool, typer.Option("--admin", help="May also read metrics and use /admin.")
    ] = False,
) -> None:
    """Draw a key, print it once, and add its hash to the file."""
    text = _read(file)
    if any(key.name == name for key in _parsed(text, file)):
        fail(f"{file} has a key {name} already; revoke it first, or choose another name")
    try:
        secret, key = draw_key(name, "admin" if admin else "user")
    except ApiKeyError as error:
        fail(str(error))
    if text and not text.endswith("\n"):
        text += "\n"
    _write(file, f"{text}{key.line()}\n")
    typer.echo(secret)


@app.command("list")
def list_keys(file: KeyFile) -> None:
    """Names and scopes."""
    for key in _parsed(_read(file), file):
        typer.echo(f"{key.name}\t{key.scope}")


@app.command()
def revoke(name: KeyName, file: KeyFile) -> None:
    """Take a key's line out of the file."""
    text = _read(file)
    if all(key.name != name for key in _parsed(text, file)):
        fail(f"{file} has no key {name}; `overstory key list --file {file}` names those it has")
    kept = [line for line in text.splitlines() if line.split()[:1] != [name]]
    _write(file, "".join(f"{line}\n" for line in kept))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--file: {file} cannot be read ({error})")


def _parsed(text: str, file: Path) -> tuple[ApiKey, ...]:
    try:
        return parse_keys(text, str(file))
    except ApiKeyError as error:
        fail(str(error))


def _write(file: Path, text: str) -> None:
    """Whole or not at all, for its owner's eyes; a gateway may read at any moment."""
    try:
        check_writable("--file", file)
        _replace(file, text)
    except UserFault as fault:
        fail(str(fault))
    except OSError as error:
        fail(f"--file: {file} cannot be written ({error.strerror})")


def _replace(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    os.replace(beside, file)

"""The reference of the command line as Markdown, made from the commands themselves.

python -m overstory.orchestrator.cli_reference > docs/cli.md
"""

from collections.abc import Iterator
from typing import Any

import typer

from overstory.orchestrator.cli import app

HEADER = """\
# Commands

<!-- made by `python -m overstory.orchestrator.cli_reference > docs/cli.md`; a test compares -->

Faults that are the user's to mend end a command with exit code 1 and a line that begins with
`error:`; wrong usage with exit code 2. `--json` is for scripts. `overstory COMMAND --help` says the
same as this page.
"""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or value is False or value == () or value == "":
        return ""
    return f"`{value}`"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = ", ".join((*parameter.opts, *parameter.secondary_opts))
    return f"`{names}`" if parameter.is_flag else f"`{names} {parameter.metavar or 'VALUE'}`"


def _parameters(command: Any) -> Iterator[str]:
    shown = [each for each in command.params if each.name != "help"]
    if not shown:
        return
    yield "| | default | |"
    yield "|---|---|---|"
    for each in shown:
        yield f"| {_name(each)} | {_default(each)} | {_cell(each.help or '')} |"
    yield ""


def _command(path: str, command: Any) -> Iterator[str]:
    yield f"## {path}"
    yield ""
    yield " ".join((command.help or "").split())
    yield ""
    inner = getattr(command, "commands", None)
    if inner:
        for name, each in inner.items():
            yield from _command(f"{path} {name}", each)
    else:
        yield from _parameters(command)


def reference() -> str:
    """The page, with a trailing newline."""
    group: Any = typer.main.get_command(app)
    lines = [HEADER]
    for name, command in group.commands.items():
        lines += _command(f"overstory {name}", command)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(reference(), end="")

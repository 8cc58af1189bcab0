"""The command `policy`: which tree policy a deployment runs under, fixed or automatic."""

import sys
from typing import Annotated

import typer

from overstory.orchestrator.cli_support import Name, known, told


def policy(
    wanted: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            help="plain, chain, tree-N, spine-N, auto, or auto<=N in quotes.",
            autocompletion=lambda: ["plain", "chain", "auto", "tree-15", "tree-31"],
        ),
    ],
    name: Name = None,
) -> None:
    """Set the tree policy of all replicas, from their next step lease on; requests go on."""
    with told():
        from overstory.orchestrator.errors import UserFault
        from overstory.workers.tree_policy import parse_policy

        try:
            rule = parse_policy(wanted)
        except ValueError as error:
            raise UserFault(str(error)) from error
        known(name)
        from overstory.orchestrator.control import connected, switch_policy

        with connected(name) as record:
            switch_policy(record.name, str(rule))
        print(f"every rank runs under {rule}", file=sys.stderr)

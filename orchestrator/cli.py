"""The `overstory` command. Parses first and imports what a command needs only when it runs.

Nothing heavy may be imported at module level: `--help` answers in well under a second.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overstory.orchestrator import cli_changing, cli_keys, cli_looking, cli_planning, cli_policy
from overstory.orchestrator.cli_support import (
    AsJson,
    Endpoint,
    File,
    GpuKind,
    Name,
    Overrides,
    amount,
    seconds,
    whole,
)
from overstory.orchestrator.cli_support import known as _known
from overstory.orchestrator.cli_support import told as _told

if TYPE_CHECKING:
    from overstory.orchestrator.inventory import NodeInventory

app = typer.Typer(
    name="overstory",
    help="Serve MLA + MoE models with DDTree speculative decoding, over Ray and SGLang.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_FOR_OTHERS = (
    "that is for this machine; for nodes that are not here: `overstory plan FILE --nodes 2 "
    "--gpus 8 --gpu rtx-pro-6000 --cpus 64 --memory-gib 512`, with what yours have"
)


def _pretended_nodes(
    nodes: int | None,
    gpus: int | None,
    cpus: int | None,
    memory_gib: float | None,
    gpu: str | None,
    gpu_gib: float | None,
) -> "list[NodeInventory]":
    """The nodes to plan for: this machine, with what the options say instead."""
    from dataclasses import replace

    from overstory.orchestrator.errors import UserFault
    from overstory.orchestrator.gpus import gpu_named
    from overstory.orchestrator.inventory import local_inventory

    here = local_inventory()
    if gpu is not None:
        gpu_gib = gpu_gib or gpu_named(gpu).memory / 2**30
    if gpu_gib and not (here.gpus if gpus is None else gpus):
        raise UserFault("--gpus: this machine has no GPU; say how many a node has beside its kind")
    here = replace(
        here,
        cpus=here.cpus if cpus is None else float(cpus),
        gpus=here.gpus if gpus is None else float(gpus),
        memory=here.memory if memory_gib is None else memory_gib * 2**30,
        gpu_memory=gpu_gib * 2**30 if gpu_gib else here.gpu_memory,
    )
    if nodes is None:
        return [here]
    return [replace(here, name=f"node-{number}") for number in range(nodes)]


@app.command()
def plan(
    file: File,
    overrides: Overrides = None,
    nodes: Annotated[int | None, whole("Plan for so many equal nodes.", most=1024)] = None,
    gpus: Annotated[int | None, whole("GPUs of a node.", 0, 1024)] = None,
    cpus: Annotated[int | None, whole("CPUs of a node.")] = None,
    memory_gib: Annotated[float | None, amount("Memory of a node.", 0.001)] = None,
    gpu: GpuKind = None,
    gpu_gib: Annotated[float | None, amount("Memory of a GPU.", 0.001)] = None,
    as_json: AsJson = False,
) -> None:
    """Show what would run where: ranks, memory, ports, engine flags. Needs no Ray and no GPU."""
    import json

    with _told():
        from overstory.orchestrator.errors import UserFault
        from overstory.orchestrator.placement import NoRoom
        from overstory.orchestrator.plan import make_plan
        from overstory.orchestrator.plan_text import render_plan
        from overstory.orchestrator.spec import load_spec

        spec = load_spec(file, overrides or ())
        said = (nodes, gpus, cpus, memory_gib, gpu, gpu_gib)
        try:
            made = make_plan(spec, _pretended_nodes(*said), published=True)
        except NoRoom as error:
            if said != (None,) * len(said):
                raise
            raise UserFault(f"{error}\n{_FOR_OTHERS}") from error
        print(json.dumps(made.to_dict(), indent=1) if as_json else render_plan(made))


@app.command()
def deploy(
    file: File,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(help="Only show the plan for this machine.")] = False,
    timeout: Annotated[float, seconds("Seconds until it must be ready.")] = 600.0,
) -> None:
    """Deploy and wait until it generates. On failure nothing is left behind."""
    if dry_run:
        plan(file, overrides)
        return
    with _told():
        from overstory.orchestrator.interrupts import end_tidily
        from overstory.orchestrator.plan import check_models
        from overstory.orchestrator.spec import load_spec

        spec = load_spec(file, overrides or ())
        check_models(spec)
        end_tidily()
        # Ray is imported only after file and models have been found good.
        from overstory.orchestrator.deploy import deploy as run
        from overstory.orchestrator.progress import Progress

        record = run(spec, Progress(sys.stderr), timeout)
        print(f"{record.name} is ready at {record.endpoint}")
        print(f"  try: overstory generate 'def fibonacci(n):' --name {record.name}")


@app.command()
def down(name: Name = None) -> None:
    """Take a deployment away: its actors, placement groups, ports, and our local Ray."""
    with _told():
        from overstory.orchestrator.deploy import take_down

        take_down(name, lambda line: print(line, file=sys.stderr))


@app.command()
def status(
    name: Name = None,
    watch: Annotated[bool, typer.Option(help="Repeat every few seconds until Ctrl-C.")] = False,
    every: Annotated[float, seconds("Seconds between two looks of --watch.", 0.1)] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Replicas, ranks, steps per second, acceptance."""
    with _told():
        _known(name)
        from overstory.orchestrator.status import show_status

        show_status(name, as_json=as_json, every_s=every if watch else None)


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="Prompt; `-` reads standard input.")],
    name: Name = None,
    endpoint: Endpoint = None,
    model: Annotated[str | None, typer.Option(help="Model name; the served one if unset.")] = None,
    max_tokens: Annotated[int, whole("New tokens at most.")] = 128,
    temperature: Annotated[float, amount("0 is greedy.", 0.0)] = 0.0,
    top_p: Annotated[float, amount("Nucleus.", 1e-9, 1.0)] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string, repeatable.")] = None,
    chat: Annotated[bool, typer.Option(help="Send as a chat message.")] = False,
) -> None:
    """Stream one completion from the endpoint."""
    with _told():
        from overstory.orchestrator.generate import generate as run

        body = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            **({"seed": seed} if seed is not None else {}),
            **({"stop": stop} if stop else {}),
            **({"model": model} if model else {}),
        }
        run(sys.stdin.read() if text == "-" else text, body, name, endpoint, chat)


@app.command()
def scale(
    replicas: Annotated[int, typer.Argument(help="Replicas wanted.")],
    name: Name = None,
    timeout: Annotated[float, seconds("Seconds until they must be ready.")] = 600.0,
) -> None:
    """Change the number of replicas. Those that stay keep serving."""
    with _told():
        _known(name)
        from overstory.orchestrator.interrupts import end_tidily
        from overstory.orchestrator.progress import Progress
        from overstory.orchestrator.scale import scale as run

        end_tidily()
        run(name, replicas, Progress(sys.stderr), timeout)


@app.command()
def defrag(
    name: Name = None,
    dry_run: Annotated[bool, typer.Option(help="Only show the plan and its gain.")] = False,
    replica: Annotated[str | None, typer.Option(help="Only this one; see `status`.")] = None,
    rows: Annotated[int, whole("KV rows that the first pass may move.", 1, 4096)] = 1024,
    passes: Annotated[int, whole("Passes at most.")] = 8,
    pause_ms: Annotated[float, amount("Longest pause of the ranks per pass.", 0.001)] = 20.0,
    long_run: Annotated[int, whole("Rows worth moving to remove one break.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Bring requests' KV rows together, a few between two steps; requests go on."""
    with _told():
        from overstory.orchestrator.defrag import DefragOrder

        order = DefragOrder(dry_run, rows, passes, pause_ms, long_run)
        _known(name)
        from overstory.orchestrator.defrag_command import defrag as run

        run(name, order, replica, as_json)


def _profiles() -> list[str]:
    from overstory.orchestrator.bench_profiles import PROFILES

    return list(PROFILES)


@app.command()
def bench(
    name: Name = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    modes: Annotated[
        str, typer.Option(help="Tree policies; unset, all that the deployment was started for.")
    ] = "",
    prompts: Annotated[int, whole("Held-out prompts.")] = 16,
    max_new_tokens: Annotated[int, whole("New tokens of each.")] = 128,
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "1,4",
    temperature: Annotated[str, typer.Option(help="Temperatures.")] = "0,1",
    rounds: Annotated[int, whole("Times that each row is measured.")] = 3,
    profile: Annotated[
        str,
        typer.Option(
            help="Kind of load: sweep, rates, long, shared or churn.", autocompletion=_profiles
        ),
    ] = "sweep",
    values: Annotated[
        str, typer.Option(help="Of the profile's variable (requests/s, tokens, ...).")
    ] = "",
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", help="Write the rows here, each with GPU, versions and commit."),
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write an SVG here.")] = None,
) -> None:
    """Measure plain, chain, tree and auto through the endpoint, interleaved in one run.

    Ctrl-C keeps what is measured by then: the table and the files have it.
    """
    with _told():
        from dataclasses import replace

        from overstory.orchestrator.bench_profiles import profile_of
        from overstory.orchestrator.bench_rows import parse_settings

        settings = parse_settings(modes, prompts, max_new_tokens, concurrency, temperature, rounds)
        kind, taken = profile_of(profile, values)
        settings = replace(settings, profile=kind.name, values=taken)
        _known(name)
        from overstory.orchestrator.bench import run_bench

        run_bench(name, settings, json_file, csv_file, plot_file)


app.add_typer(cli_keys.app, name="key")
app.command()(cli_changing.restart)
app.command()(cli_looking.doctor)
app.command()(cli_looking.report)
app.command()(cli_policy.policy)
app.command()(cli_planning.manifest)
app.command()(cli_planning.capacity)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()

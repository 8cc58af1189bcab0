"""Commands about hardware that need not be there."""

import json
from typing import Annotated

import typer

from overstory.orchestrator.cli_support import AsJson, File, GpuKind, Overrides, amount, told, whole


def manifest(
    file: File,
    image: Annotated[str, typer.Option(help="Container image with Overstory in it.")],
    overrides: Overrides = None,
    gpus: Annotated[int, whole("GPUs of a node.", most=1024)] = 8,
    gpu: GpuKind = None,
    models_claim: Annotated[
        str | None, typer.Option(help="PersistentVolumeClaim with the models.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Kubernetes namespace.")] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL=VALUE", help="Nodes for ranks, repeatable."),
    ] = None,
) -> None:
    """Print a KubeRay RayService for a deployment file, for `kubectl apply -f -`."""
    with told():
        from overstory.orchestrator.gpus import gpu_named
        from overstory.orchestrator.kuberay import (
            PodSettings,
            node_labels,
            ray_service,
            render_manifest,
        )
        from overstory.orchestrator.spec import load_spec

        settings = PodSettings(
            image=image,
            gpus=gpus,
            gpu_memory=gpu_named(gpu).memory if gpu else 0.0,
            models_claim=models_claim,
            namespace=namespace,
            node_selector=node_labels(select or ()),
        )
        print(render_manifest(ray_service(load_spec(file, overrides or ()), settings)), end="")


def _numbers(text: str, option: str) -> list[int]:
    """Whole numbers out of `1,8,65k`."""
    from overstory.orchestrator.model_facts import PlanError

    found = []
    for entry in text.split(","):
        digits, thousand = entry.strip().removesuffix("k"), entry.strip().endswith("k")
        if not digits.isdigit() or int(digits) < 1:
            raise PlanError(f"{option}: got {entry!r}, wanted whole numbers such as 1,8,65k")
        found.append(int(digits) * (1000 if thousand else 1))
    return found


def capacity(
    file: File,
    overrides: Overrides = None,
    gpu: GpuKind = "rtx-pro-6000",
    nodes: Annotated[str, typer.Option(help="Numbers of nodes.")] = "1,2,4",
    gpus: Annotated[int, whole("GPUs of a node.", most=1024)] = 8,
    batch: Annotated[str, typer.Option(help="Requests at a time.")] = "1,2,4,8,16,32,64,128",
    context: Annotated[
        str, typer.Option(help="Tokens of each request.")
    ] = "1k,8k,32k,65k,131k,200k",
    chain_tokens: Annotated[
        float, amount("Tokens that a step of a drafted chain yields.", 1.0)
    ] = 4.5,
    gpu_gib: Annotated[float | None, amount("Another GPU: memory.", 0.001)] = None,
    dram_tbs: Annotated[float | None, amount("Another GPU: memory TB/s.", 0.001)] = None,
    tflops: Annotated[float | None, amount("Another GPU: bfloat16 TFLOP/s.", 0.001)] = None,
    sms: Annotated[int | None, whole("Another GPU: multiprocessors.")] = None,
    clock_ghz: Annotated[float | None, amount("Another GPU: clock.", 0.001)] = None,
    reduce_us: Annotated[
        float | None, amount("Another link: smallest all-reduce, microseconds.", 0.0)
    ] = None,
    link_gbs: Annotated[
        float | None, amount("Another link: all-reduce GB/s of each GPU.", 0.001)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate tokens/s over nodes, batches and contexts, as Markdown. Needs no GPU."""
    with told():
        from overstory.orchestrator.capacity_grid import make_grid, render_grid
        from overstory.orchestrator.gpus import another, gpu_named
        from overstory.orchestrator.spec import load_spec

        facts = another(
            gpu_named(gpu or "rtx-pro-6000"),
            memory=None if gpu_gib is None else gpu_gib * 2**30,
            dram=None if dram_tbs is None else dram_tbs * 1e12,
            flops=None if tflops is None else tflops * 1e12,
            sms=sms,
            clock=None if clock_ghz is None else clock_ghz * 1e9,
            latency_s=None if reduce_us is None else reduce_us * 1e-6,
            rate=None if link_gbs is None else link_gbs * 1e9,
        )
        grid = make_grid(
            load_spec(file, overrides or ()),
            facts,
            _numbers(nodes, "--nodes"),
            _numbers(batch, "--batch"),
            _numbers(context, "--context"),
            chain_tokens,
            gpus,
        )
        print(json.dumps(grid.to_dict(), indent=1) if as_json else render_grid(grid))

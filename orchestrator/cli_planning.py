"""Commands about hardware that need not be there."""

from typing import Annotated

import typer

from overstory.orchestrator.cli_support import File, Overrides, told


def manifest(
    file: File,
    image: Annotated[str, typer.Option(help="Container image with Overstory in it.")],
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    gpu: Annotated[str | None, typer.Option(help="Kind of GPU: rtx-pro-6000, h200.")] = None,
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

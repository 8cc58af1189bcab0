"""The application as a Serve config names it, for those who declare instead of deploying.

`import_path: overstory.orchestrator.declared_app:build` with `args` as `args_of` makes them. Serve
calls `build` in a task on the cluster, in place of what `overstory deploy` does from outside.
"""

from typing import TYPE_CHECKING, Any

from overstory.orchestrator.spec import DeploymentSpec, parse_spec

if TYPE_CHECKING:
    from ray.serve import Application

IMPORT_PATH = f"{__name__}:build"


def args_of(spec: DeploymentSpec, nodes_per_replica: int) -> dict[str, Any]:
    """`args` of the application: what differs from the defaults, and how replicas are cut."""
    return {
        "deployment": spec.model_dump(mode="json", exclude_defaults=True),
        "nodes_per_replica": nodes_per_replica,
    }


def build(args: dict[str, Any]) -> "Application":
    """The application, its controller started.

    Raises:
        SpecError: the deployment in `args` cannot be used.
    """
    from overstory.orchestrator import serving
    from overstory.orchestrator.app import build_app

    spec = parse_spec(args["deployment"], "args.deployment")
    serving.start_controller(spec)
    # A Serve config has Serve's proxies, and KubeRay looks for them on every node.
    return build_app(spec, int(args["nodes_per_replica"]), proxied=True)

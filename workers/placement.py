"""Where Ray put this process: its node and its GPU."""

from __future__ import annotations

import os

import ray


def node_id() -> str:
    """Ray's id of this node; empty outside Ray."""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def node_address() -> str:
    """The IP address under which Ray knows this node."""
    return str(ray.util.get_node_ip_address())


def actor_labels() -> dict[str, str]:
    """`deployment`, `replica` and `process` of this rank actor, by its name in Ray; empty for an
    actor of another name, or none."""
    name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
    parts = (name or "").split("/")
    if len(parts) != 4 or parts[0] != "overstory":
        return {}
    return dict(zip(("deployment", "replica", "process"), parts[1:], strict=True))


def assigned_cuda_ordinal() -> int:
    """CUDA ordinal of the GPU that Ray assigned to this actor; 0 if it assigned none.

    Raises:
        ValueError: CUDA_VISIBLE_DEVICES hides the assigned GPU.
    """
    assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not assigned:
        return 0
    return cuda_ordinal(str(assigned[0]), os.environ.get("CUDA_VISIBLE_DEVICES"))


def cuda_ordinal(assigned: str, visible: str | None) -> int:
    """CUDA ordinal, in this process, of the GPU that Ray names `assigned`.

    Ray counts the GPUs of the node. If it also set CUDA_VISIBLE_DEVICES (it does unless
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is on), CUDA counts only the visible ones, from 0.

    Raises:
        ValueError: the assigned GPU is not among the visible ones.
    """
    if not visible:
        return int(assigned)
    names = [name.strip() for name in visible.split(",")]
    if assigned not in names:
        raise ValueError(
            f"Ray assigned GPU {assigned}, but CUDA_VISIBLE_DEVICES={visible!r} hides it: leave "
            "CUDA_VISIBLE_DEVICES out of the environment of ranks, or let it name the assigned GPU"
        )
    return names.index(assigned)

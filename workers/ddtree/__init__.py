"""DDTREE: DFlash drafts turned into trees, verified in one target forward. An SGLang algorithm.

How a tree budget reaches the engine: ``speculative_num_draft_tokens`` is the number of target rows
a request may take per step, ``1 + max(nodes, block_size - 1)``. It sizes everything SGLang reserves
(KV slots, request rows, buffers) and bounds the policies that may be set at run time. The drafter
keeps its own block size. Which policy an engine starts with comes from the environment variable
``OVERSTORY_TREE_POLICY`` (a name that `TreePolicy.parse` knows); without it the engine starts with
the largest tree it has room for. `server_fields` turns a policy into both.

This module imports neither torch nor SGLang; `hooks.patches` is what the plugin installs.
"""

from __future__ import annotations

from overstory.workers.tree_policy import TreePolicy

ALGORITHM = "DDTREE"
"""Name of the speculative algorithm in SGLang's registry."""

POLICY_ENV = "OVERSTORY_TREE_POLICY"
"""Environment variable with the policy that a rank starts with."""

EARLIER_OUTPUT = "overstory_earlier_output"
"""Key of a request's ``custom_params``: that many last tokens of the prompt count as output, since
another replica generated them for the same sequence."""


def rows_for(max_nodes: int, block_size: int) -> int:
    """Target rows per request and step that an engine for trees of ``max_nodes`` reserves."""
    return 1 + max(max_nodes, block_size - 1)


def server_fields(policy: TreePolicy, block_size: int, drafter: str) -> dict[str, object]:
    """ServerArgs fields for an engine that runs ``policy`` and every smaller one.

    Args:
        policy: largest policy; its name must also be put into `POLICY_ENV` of the rank processes
            if it is smaller than the chain, since all policies up to the chain need the same room.
        block_size: positions per draft block, as the drafter was trained.
        drafter: path of the drafter's checkpoint.
    """
    return {
        "speculative_algorithm": ALGORITHM,
        "speculative_draft_model_path": drafter,
        "speculative_num_draft_tokens": rows_for(policy.drafted_nodes(block_size), block_size),
    }

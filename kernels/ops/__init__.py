"""The ops as the engine calls them: CUDA tensors to our kernels, CPU tensors to the reference.

Names and semantics are those of `overstory.kernels.reference`; what a captured launch needs beyond
them (tensors to write into, workspaces) are further keyword arguments.
"""

from .attention import attention_workspace, decode_attention, verify_attention
from .candidates import candidates_topk, candidates_workspace, merge_candidates
from .choice import prepare
from .clock import device_time
from .relocate import LayerTable, kv_relocate, kv_rows
from .sampling import sample_nodes, sample_workspace
from .schedule import Schedule
from .status import BadInputError, raise_bad_input
from .trees import TreeMask, tree_accept, tree_build, tree_mask
from .workspace import RowWorkspace

__all__ = [
    "BadInputError",
    "LayerTable",
    "RowWorkspace",
    "Schedule",
    "TreeMask",
    "attention_workspace",
    "candidates_topk",
    "candidates_workspace",
    "decode_attention",
    "device_time",
    "kv_relocate",
    "kv_rows",
    "merge_candidates",
    "prepare",
    "raise_bad_input",
    "sample_nodes",
    "sample_workspace",
    "tree_accept",
    "tree_build",
    "tree_mask",
    "verify_attention",
]

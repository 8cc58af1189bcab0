"""The ops in plain torch: the oracle of the CUDA ops and the implementation for CPUs.

Each op is a pure function of its arguments (`kv_relocate` writes in place) without SGLang or
Ray, made for CPU tensors of small batches; tensors on other devices work but synchronise.
"""

from .accept import Accepted, tree_accept
from .adjust import EarlyEnd, Penalties, adjust_nodes
from .attention import decode_attention, verify_attention
from .candidates import PAD_TOKEN_ID, Shard, candidates_topk, merge_candidates
from .kv_fp8 import FP8_MAX, dequantize_kv, quantize_kv, scale_for
from .mask import ancestor_matrix, full_mask, packed_mask, positions
from .relocate import compaction_moves, kv_relocate, kv_rows
from .sample import filtered_probs, sample_nodes, uniforms
from .tree import MAX_ROWS, Tree, chain_tree, tree_build

__all__ = [
    "FP8_MAX",
    "MAX_ROWS",
    "PAD_TOKEN_ID",
    "Accepted",
    "EarlyEnd",
    "Penalties",
    "Shard",
    "Tree",
    "adjust_nodes",
    "ancestor_matrix",
    "candidates_topk",
    "chain_tree",
    "compaction_moves",
    "decode_attention",
    "dequantize_kv",
    "filtered_probs",
    "full_mask",
    "kv_relocate",
    "kv_rows",
    "merge_candidates",
    "packed_mask",
    "positions",
    "quantize_kv",
    "sample_nodes",
    "scale_for",
    "tree_accept",
    "tree_build",
    "uniforms",
    "verify_attention",
]

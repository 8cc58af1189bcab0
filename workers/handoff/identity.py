"""Which weights a rank serves: KV and weights are handed over only between ranks of the same."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from overstory.workers.handoff.weights import fingerprint

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_OF_KV = (
    "model_path",
    "revision",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "load_format",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "speculative_draft_model_quantization",
    "tp_size",
    "ep_size",
    "dp_size",
    "attn_cp_size",
    "dcp_size",
    "json_model_override_args",
)

_NOT_OF_WEIGHTS = frozenset(
    (
        "model_path",
        "speculative_draft_model_path",
        "tokenizer_path",
        "served_model_name",
        "host",
        "port",
        "nccl_port",
        "dist_init_addr",
        "nnodes",
        "node_rank",
        "base_gpu_id",
        "random_seed",
        "engine_info_bootstrap_port",
        "forward_pass_metrics_ipc_name",
        "weight_cache_socket",
        "custom_sigquit_handler",
        "context_length",
        "mem_fraction_static",
        "max_total_tokens",
        "max_running_requests",
        "max_queued_requests",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "page_size",
        "schedule_policy",
        "schedule_conservativeness",
        "retraction_policy",
        "disable_radix_cache",
        "disable_overlap_schedule",
        "watchdog_timeout",
        "log_level",
        "log_requests",
        "enable_metrics",
        "enable_metrics_for_all_schedulers",
        "decode_log_interval",
        "speculative_num_steps",
        "speculative_num_draft_tokens",
        "speculative_dflash_block_size",
        "cuda_graph_config",
        "cuda_graph_max_bs_decode",
        "cuda_graph_bs_decode",
        "disable_cuda_graph",
    )
)
"""Arguments that leave no trace in a model's memory. All others count: several of them lay out the
same tensors in another way, of the same shape (the runners of MoE), or fill them with other numbers
(overrides of the model's configuration). One too many costs a load from disk, one too few the right
text."""


def identity_of(server_args: ServerArgs, rank: int) -> str:
    """A digest of what decides a rank's weights and the meaning of its KV rows.

    Reads samples of the checkpoints: call it before they are loaded.
    """
    hashed = _digest(server_args, rank, _OF_KV)
    for path in (server_args.model_path, server_args.speculative_draft_model_path):
        if path and Path(path).is_dir():
            hashed.update(fingerprint(Path(path)).encode())
    return hashed.hexdigest()


def weights_settings(server_args: ServerArgs, rank: int) -> str:
    """A digest of all but the checkpoints that decides what a model's memory holds."""
    names = {field.name for field in dataclasses.fields(server_args)}
    return _digest(server_args, rank, sorted(names - _NOT_OF_WEIGHTS)).hexdigest()


def weights_move(server_args: ServerArgs) -> str:
    """Why the weights in memory may be other ones than were loaded; empty if they cannot."""
    if getattr(server_args, "enable_eplb", False):
        return "experts change places while it serves (enable_eplb)"
    return ""


def _digest(server_args: ServerArgs, rank: int, names: Iterable[str]) -> hashlib.blake2b:
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(f"{rank} ".encode())
    for name in names:
        hashed.update(f"{name}={getattr(server_args, name, None)!r} ".encode())
    return hashed

"""Which weights a rank serves: KV and weights are handed over only between ranks of the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from overstory.workers.handoff.weights import fingerprint

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_ARGUMENTS = (
    "model_path",
    "speculative_draft_model_path",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "tp_size",
    "ep_size",
    "json_model_override_args",
)


def identity_of(server_args: ServerArgs, rank: int) -> str:
    """A digest of what decides a rank's weights and the meaning of its KV rows.

    Reads samples of the checkpoints: call it before they are loaded.
    """
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(f"{rank} ".encode())
    for name in _ARGUMENTS:
        hashed.update(f"{name}={getattr(server_args, name, None)} ".encode())
    for path in (server_args.model_path, server_args.speculative_draft_model_path):
        if path and Path(path).is_dir():
            hashed.update(fingerprint(Path(path)).encode())
    return hashed.hexdigest()

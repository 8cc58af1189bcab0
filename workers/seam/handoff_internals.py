"""What of SGLang's internals the hand-off of KV and weights relies on; see `internals`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overstory.workers.seam.internals import Entry

_SRT = "sglang.srt"
_CACHE = f"{_SRT}.mem_cache"


def entries() -> tuple[Entry, ...]:
    """For `internals.entries`."""
    from overstory.workers.seam.internals import Inline, Internal

    return (
        Internal(
            f"{_CACHE}.radix_cache.RadixCache",
            "KV is handed over as cached text",
            "match_prefix insert inc_lock_ref dec_lock_ref _delete_leaf",
        ),
        Internal(
            f"{_CACHE}.radix_cache.RadixKey",
            "slots that rows are on their way to are under a key of their own",
            "token_ids extra_key",
        ),
        Inline(
            f"{_CACHE}.radix_cache.RadixCache._delete_leaf",
            "a node goes and its slots stay",
            "self.evictable_size_ -= len(node.key)",
        ),
        Inline(
            f"{_CACHE}.radix_cache.RadixCache.insert",
            "says how much of it was there, and owns the rest from then on",
            "return InsertResult(prefix_len=prefix_len, last_device_node=last_node)",
        ),
        Inline(
            f"{_CACHE}.common.release_kv_cache",
            "the KV of an aborted request goes into the cache",
            'is_insert=is_insert and not getattr(req, "skip_radix_cache_insert", False)',
        ),
        Internal(f"{_CACHE}.common.evict_from_tree_cache", "room", "tree_cache num_tokens"),
        Internal(
            f"{_SRT}.managers.schedule_policy.CLIP_MAX_NEW_TOKENS",
            "room that requests under way may yet need",
        ),
        Inline(
            f"{_SRT}.managers.schedule_policy.PrefillAdder.add_chunked_req",
            "a prompt in chunks goes on whether there is room or not",
            "_rem_tokens = self.rem_chunk_tokens",
        ),
        Inline(
            f"{_SRT}.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
            "room that requests under way may yet need",
            "self.new_token_ratio_tracker.current,",
        ),
        Internal(
            f"{_SRT}.model_loader.loader.DefaultModelLoader.load_model",
            "weights from a peer come in its place",
            "model_config device_config",
        ),
        Internal(
            f"{_SRT}.model_loader.loader.DummyModelLoader.load_model",
            "a model of the same layout, to be written over",
            "model_config device_config",
        ),
        Internal(f"{_SRT}.configs.load_config.LoadFormat", "random weights", "DUMMY"),
    )

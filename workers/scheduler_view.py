"""SGLang's Scheduler of one rank, as the gate, the digests and reports see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zmq

from overstory.workers.digest import DigestChain
from overstory.workers.step_notes import CHOICE, StepNotes

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

_PROCESSED = "_overstory_processed"
"""Attribute on a batch result that a drain has taken in before its turn."""


_PREFILL_MODES = ("EXTEND", "MIXED")
"""Names in SGLang's ForwardMode of batches that compute prompts."""


class SglangScheduler:
    """Reads and drains one Scheduler. The loop's thread only, but for `load`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._poller: zmq.Poller | None = None
        # A view of the same memory: slicing a tensor costs ten times as much as slicing an array.
        table = scheduler.req_to_token_pool.req_to_token
        self._slot_table = table.numpy() if scheduler.device == "cpu" else None

    @property
    def raw(self) -> Scheduler:
        """The Scheduler itself, for boundary commands."""
        return self._scheduler

    def launched(self) -> int:
        """Batches launched so far."""
        return int(self._scheduler.forward_ct)

    def running_at(self) -> int:
        """`launched` while requests run for certain, else -1: then ask `idle`."""
        scheduler = self._scheduler
        if scheduler.running_batch.reqs and not scheduler._engine_paused:
            return scheduler.forward_ct
        return -1

    def idle(self) -> bool:
        """Whether nothing is running, queued or in flight (or SGLang was told to pause)."""
        scheduler = self._scheduler
        if scheduler._engine_paused:
            return True
        # Asked at every step, and SGLang looks at a dozen things: one of them mostly says it.
        return not scheduler.running_batch.reqs and bool(scheduler.is_fully_idle())

    def input_waits(self, timeout_s: float, wake_line: int) -> bool:
        """Sleeps until a request can be read: True. False: the wake line rang, or time is up."""
        if self._poller is None:
            channels = self._scheduler.ipc_channels
            self._poller = zmq.Poller()
            self._poller.register(channels.recv_from_tokenizer, zmq.POLLIN)
            self._poller.register(channels.recv_from_rpc, zmq.POLLIN)
            self._poller.register(wake_line, zmq.POLLIN)
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        return any(source != wake_line for source in ready)

    def drain(self) -> None:
        """Takes in the results of a launched batch that the overlapped loop has not taken in yet.

        The pair stays in SGLang's queue, marked: the loop pops it in its turn and
        `already_processed`
        makes it a no-op, so that the loop's own count of what is in flight stays right.
        """
        scheduler = self._scheduler
        if not scheduler.enable_overlap:
            return
        if scheduler.device != "cpu":  # torch.cpu's Stream has no synchronize.
            scheduler.forward_stream.synchronize()
        for batch, result in list(scheduler.result_queue):
            if not already_processed(result):
                scheduler.process_batch_result(batch, result)
                setattr(result, _PROCESSED, True)

    def notes(self, chain: DigestChain) -> StepNotes:
        """Notes of this scheduler's batches, for a chain of digests."""
        return StepNotes(chain, self._slots, self._free_slots)

    def automatic_policy(self) -> dict[str, Any] | None:
        """See `StepChooser.report`; None without DDTREE or a cost table. From any thread."""
        chooser = getattr(self._scheduler.draft_worker, "chooser", None)
        return None if chooser is None else chooser.report()

    def candidate_shares(self) -> dict[str, Any] | None:
        """See `DDTreeWorker.candidate_shares`; None without DDTREE. From any thread."""
        worker = self._scheduler.draft_worker
        return worker.candidate_shares() if hasattr(worker, "candidate_shares") else None

    def load(self) -> dict[str, int]:
        """Running and queued requests; KV slots that are free and that only the prefix cache holds
        (the rest belong to requests). From any thread; may be one step old."""
        scheduler = self._scheduler
        return {
            "running": len(scheduler.running_batch.reqs),
            "waiting": len(scheduler.waiting_queue),
            "free_slots": self._free_slots(),
            "cached_slots": self._cached_slots(),
            "max_slots": int(scheduler.max_total_num_tokens),
        }

    def prefilling(self) -> bool:
        """Whether the batch under way is (also) a prefill: it may take long. From any thread."""
        batch = self._scheduler.cur_batch_for_debug
        return batch is not None and batch.forward_mode.name in _PREFILL_MODES

    def _cached_slots(self) -> int:
        cache = self._scheduler.tree_cache
        try:
            return int(cache.evictable_size())
        except NotImplementedError:  # Hybrid models' caches count each kind of layer apart.
            return int(cache.full_evictable_size())

    def _free_slots(self) -> int:
        return int(self._scheduler.token_to_kv_pool_allocator.available_size())

    def _slots(self, req: Req, start: int, end: int) -> tuple[int, ...]:
        if self._slot_table is None or req.req_pool_idx is None or start >= end:
            return ()
        return tuple(self._slot_table[req.req_pool_idx, start:end].tolist())


def note_choice(result: Any, choice: str) -> None:
    """Keeps with a decode step's result what its tree policy was and was chosen by."""
    setattr(result, CHOICE, choice)


def already_processed(result: Any) -> bool:
    """Whether a drain has taken in this batch result before its turn."""
    return bool(getattr(result, _PROCESSED, False))

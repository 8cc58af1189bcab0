"""One tensor-parallel rank: SGLang's Scheduler with a control side that answers while it runs.

A plain class, made a Ray actor at the edge (`overstory.orchestrator.rank_group`). Its constructor
is light, so that the actor can be asked at once what it is doing; SGLang is imported by `preload`.

```
thread "loop" (one)        preload -> start -> run_loop            blocks until the loop ends
threads "control" (some)   identity, phase, health, report, end    answer meanwhile
                           attach, exchange, detach                rank 0: leases
```
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overstory.orchestrator.lease import Lease
from overstory.workers import memory_watch, placement, tree_policy
from overstory.workers.commands import EXTENSIONS_VARIABLE, CommandContext, CommandTable
from overstory.workers.death_note import (
    EXIT_DIVERGED,
    EXIT_LOOP_FAILED,
    EXIT_ORDERED,
    LastWill,
    wants_memory,
)
from overstory.workers.defrag import handlers
from overstory.workers.defrag.handlers import SHELF
from overstory.workers.digest import DigestChain, LinkFacts
from overstory.workers.digest_gather import COMPARE_VARIABLE, DigestGather
from overstory.workers.environment import prepare_process
from overstory.workers.gate import RanksDiverged, StepGate
from overstory.workers.handoff.rank_side import RankSide
from overstory.workers.interfaces import is_loopback, meet_over_network
from overstory.workers.log_context import label_process
from overstory.workers.prefix_report import PrefixReader, PrefixReport, Version
from overstory.workers.process_ids import kernel_memory_kills, process_start_ticks
from overstory.workers.scheduler_view import SglangScheduler
from overstory.workers.settled_heap import settle_heap
from overstory.workers.sglang_metrics import pass_on
from overstory.workers.shared_names import take_names_off
from overstory.workers.step_notes import StepNotes
from overstory.workers.step_stats import STATS
from overstory.workers.tree_policy import parse_policy

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs, ServerArgs

    from overstory.orchestrator.defrag_plan import SlotPicture

logger = logging.getLogger(__name__)

PHASES = (
    "created",
    "importing",
    "imported",
    "weights",
    "memory",
    "ready",
    "serving",
    "ended",
    "failed",
)

COMMAND_RESULTS_KEPT = 16


class RankFailed(RuntimeError):
    """SGLang raised in this rank; the message holds its traceback."""


@dataclasses.dataclass(frozen=True)
class RankIdentity:
    """Where a rank lives.

    `started` is the process's start in clock ticks since boot: with the pid it names a process
    beyond doubt.
    """

    rank: int
    pid: int
    started: int
    host: str
    node_id: str
    note_path: str
    log_path: str | None
    memory_kills: int = 0
    """Processes that the kernel had killed for want of memory on this host when the rank began."""


class RankHost:
    """Hosts SGLang's Scheduler of one rank.

    Args:
        rank: tensor-parallel rank.
        device: "cpu" or "cuda".
        threads: compute threads (CPU only).
        lease_timeout_s: how long rank 0, with work to do, waits for a late lease.
        note_folder: where the death note goes; the folder of the process's log if not given.
    """

    def __init__(
        self,
        rank: int,
        device: str,
        threads: int = 1,
        lease_timeout_s: float = 5.0,
        note_folder: str | None = None,
    ) -> None:
        self._rank = rank
        self._labels = placement.actor_labels()
        label_process(repr(self))
        self._device = device
        self._threads = threads
        self._phase = "created"
        self._phase_since = time.monotonic()
        self._view: SglangScheduler | None = None
        log_path = stderr_path()
        folder = Path(note_folder) if note_folder else (log_path.parent if log_path else Path.cwd())
        self._will = LastWill(folder, rank, lambda: (self._phase, self._forwards()))
        self._log_path = log_path
        self._memory_kills = kernel_memory_kills()
        self._commands = CommandTable()
        self._handoff = RankSide(device, placement.assigned_cuda_ordinal, placement.node_address)
        handlers.register(self._commands, self._handoff.holding)
        self._handoff.register(self._commands)
        self._command_results: dict[str, Any] = {}
        self._prefixes = PrefixReader()
        self._digests = DigestChain()
        self._notes: StepNotes | None = None
        self._answered_at = 0  # batches when `exchange` answered last
        self._gate = StepGate(rank, lease_timeout_s, self._begin_lease)
        self._gather: DigestGather | None = None
        if os.environ.get(COMPARE_VARIABLE) == "gather":
            self._gather = self._handoff.digest_gather(rank, self._digests)

    def __repr__(self) -> str:
        """Ray puts it before the process's lines and into its dashboard."""
        return f"replica {self._labels.get('replica', '?')} rank {self._rank}"

    # ------------------------------------------------------------------ the loop's thread

    def preload(self) -> float:
        """Imports SGLang with our plugin and checks that the plugin took. Returns seconds taken."""
        begun = time.monotonic()
        self._enter("importing")
        prepare_process(self._device, self._threads)
        from sglang.srt.managers import scheduler as _scheduler  # noqa: F401
        from sglang.srt.plugins import load_plugins

        from overstory.workers import rank_hooks
        from overstory.workers.seam.plugin import verify_installed

        self._hooked = rank_hooks.HookedRank(self._rank, self._gate, self._will, self._enter)
        rank_hooks.install(self._hooked)
        load_plugins()
        verify_installed()
        rank_hooks.verify()
        self._commands.load_extensions(os.environ.get(EXTENSIONS_VARIABLE, ""))
        self._enter("imported")
        return time.monotonic() - begun

    def start(
        self, server_args: ServerArgs, port_args: PortArgs, weights_from: str = ""
    ) -> dict[str, Any]:
        """Builds the Scheduler: weights, memory pools, process groups.

        Args:
            server_args: with `dist_init_addr` set; the same on every rank.
            port_args: IPC names of the front half.
            weights_from: open communicator with the same rank of a live replica, whose weights to
                take; disk if it fails, or is empty.

        Returns:
            SGLang's `get_init_info`: max_total_num_tokens, max_req_input_len, ...
        """
        from sglang.srt.entrypoints.engine import _compute_parallelism_ranks
        from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
        from sglang.srt.runtime_context import publish

        from overstory.workers.seam.slot_rehearsal import rehearse_slots

        self._enter("weights")
        memory_watch.begin(self._without_memory)
        rank = self._rank
        gpu_id = 0 if self._device == "cpu" else placement.assigned_cuda_ordinal()
        attn_cp_rank, moe_dp_rank, moe_ep_rank = _compute_parallelism_ranks(server_args, rank)
        try:
            if server_args.dist_init_addr and not is_loopback(server_args.dist_init_addr):
                meet_over_network(placement.node_address())
            dp_rank = configure_scheduler_process(
                server_args, gpu_id, rank, attn_cp_rank, moe_dp_rank, moe_ep_rank, 0, None
            )
            publish(server_args, role="scheduler")
            if not weights_from:  # Else it has met another rank already.
                self._handoff.rehearse_meeting()
            with self._handoff.loading(server_args, rank, weights_from):
                scheduler = Scheduler(
                    server_args=server_args,
                    port_args=port_args,
                    gpu_id=gpu_id,
                    tp_rank=rank,
                    moe_ep_rank=moe_ep_rank,
                    pp_rank=0,
                    attn_cp_rank=attn_cp_rank,
                    moe_dp_rank=moe_dp_rank,
                    dp_rank=dp_rank,
                )
        except BaseException as error:  # SystemExit too: Ray would end the process without a word.
            raise self._failed("building its scheduler", error) from error
        take_names_off()
        self._view = self._hooked.view = SglangScheduler(scheduler)
        self._notes = self._hooked.notes = self._view.notes(self._digests)
        if server_args.enable_metrics and (
            rank == 0 or server_args.enable_metrics_for_all_schedulers
        ):
            pass_on(self._labels)
        self._handoff.rehearse_rows(scheduler)
        rehearse_slots(scheduler)
        settle_heap()
        self._enter("ready")
        return dict(scheduler.get_init_info())

    def run_loop(self) -> None:
        """Runs SGLang's event loop until a shutdown request ends it.

        Raises:
            RankFailed: the loop raised; a death note holds the cause too.
        """
        assert self._view is not None, "start() comes before run_loop()"
        self._enter("serving")
        try:
            self._view.raw.run_event_loop()
        except BaseException as error:  # As in `start`. Ends of our own use os._exit.
            raise self._failed("running its event loop", error) from error
        self._enter("ended")

    # ------------------------------------------------------------------ control threads

    def identity(self) -> RankIdentity:
        """Where this rank lives; answers at once after creation."""
        return RankIdentity(
            rank=self._rank,
            pid=os.getpid(),
            started=process_start_ticks(os.getpid()),
            host=socket.gethostname(),
            node_id=placement.node_id(),
            note_path=str(self._will.path),
            log_path=str(self._log_path) if self._log_path else None,
            memory_kills=self._memory_kills,
        )

    def phase(self) -> dict[str, Any]:
        """What the rank is doing and since how many seconds."""
        return {
            "rank": self._rank,
            "phase": self._phase,
            "seconds": round(time.monotonic() - self._phase_since, 3),
        }

    def health(self) -> dict[str, Any]:
        """Cheap sign of life: phase, launched batches, whether the one under way is a prefill.
        Never waits for the loop."""
        return {
            **self.phase(),
            "forwards": self._forwards(),
            "prefilling": self._view is not None and self._view.prefilling(),
            "pid": os.getpid(),
        }

    def report(self, after_forward: int = 0) -> dict[str, Any]:
        """This rank's counters, and the links of its digest chain above `after_forward`.

        Keys: rank, pid, phase, seconds (in the phase), iterations, forwards, epoch, seq, policy (in
        force), idle_s, lease_wait_s, lease (rank 0: the ledger), load, steps (by policy, see
        `overstory.workers.step_stats`), auto (`StepChooser.report`, None without a cost table),
        candidates (`DDTreeWorker.candidate_shares`; None on other ranks than the first),
        weights and meetings (`RankSide.loaded`, `meetings`), digests (`LinksKept`), digest_us (mean
        cost), commands (results by ticket).
        """
        report = {
            **self.health(),
            **self._gate.counters(),
            "forwards": self._forwards(),
            "policy": str(tree_policy.current()),
            "lease": dict(vars(self._gate.view())) if self._rank == 0 else None,
            "load": self._view.load() if self._view else None,
            "steps": STATS.snapshot(),
            "auto": self._view.automatic_policy() if self._view else None,
            "candidates": self._view.candidate_shares() if self._view else None,
            "weights": self._handoff.loaded(),
            "meetings": self._handoff.meetings(),
            "digests": self._digests.after(after_forward),
            "digest_us": self._notes.mean_us() if self._notes else 0.0,
            "commands": dict(self._command_results),
        }
        return report

    def step_facts(self, forward: int) -> LinkFacts | None:
        """The facts behind a recent link of the digests, to say what differs."""
        return self._digests.facts(forward)

    def attach(self, owner: str = "", held: int = 0) -> int:
        """Rank 0: a controller takes over; returns its epoch. See `LeaseLedger.attach`."""
        return self._gate.attach(owner, held)

    def detach(self, epoch: int) -> None:
        """Rank 0: the controller of `epoch` lets go; the replica runs on without leases."""
        self._gate.detach(epoch)

    def check_policy(self, policy: str) -> None:
        """Refuses (ValueError) what is no policy, one for which the engine has no room, and the
        automatic one without a cost table."""
        tree_policy.check(parse_policy(policy))

    def check_command(self, name: str) -> None:
        """Refuses (ValueError) a boundary command that has no handler."""
        self._commands.check(name)

    def grant(self, lease: Lease) -> None:
        """Rank 0: queues a lease.

        Raises:
            StaleEpoch: a newer controller has attached.
            LeaseRefused: not the next lease.
            ValueError: its policy or a command of it is refused as by `check_...`.
        """
        self.check_policy(lease.policy)
        for command in lease.commands:
            self.check_command(command.name)
        self._gate.offer(lease)

    def slot_picture(self, key: str) -> SlotPicture:
        """Rank 0: hands out, once, what the boundary command `slot_picture` took under `key`."""
        return SHELF.take(key)

    def prefixes(self, known: Version | None = None) -> PrefixReport | None:
        """What this rank's prefix cache holds; None if nothing has changed since version `known`,
        or before there is a cache."""
        if self._view is None:
            return None
        cache = self._view.raw.tree_cache
        return self._prefixes.report(cache, self._forwards(), known)

    def peer(self, method: str, *arguments: Any) -> Any:
        """`kind`, `offer`, `open`, `close`, `arrived` or `outgoing` of `RankSide`."""
        assert method in ("kind", "offer", "open", "close", "arrived", "outgoing"), method
        return getattr(self._handoff, method)(*arguments)

    def exchange(self, after_forward: int, every: int, wait_s: float) -> dict[str, Any]:
        """Rank 0: answers with a report as soon as there is a reason to.

        Reasons: the next lease is due, `every` batches were launched beyond `after_forward` and
        since the last answer, a lease was granted meanwhile, or `wait_s` seconds passed.
        """
        self._gate.await_due(wait_s, max(after_forward, self._answered_at), every)
        report = self.report(after_forward)
        self._answered_at = report["forwards"]
        return report

    def end(self, cause: str, exit_code: int = EXIT_ORDERED) -> None:
        """Ends this process with `cause` in its death note. The call itself never returns."""
        self._will.execute(cause, exit_code)

    # ------------------------------------------------------------------ inside

    def _begin_lease(self, lease: Lease) -> None:
        """On every rank, at the boundary where `lease` begins; errors end the rank."""
        assert self._notes is not None
        self._notes.lease(lease.steps)  # What commands change must not mix with what steps did.
        if self._gather is not None:
            assert self._view is not None
            self._gather.compare(self._view.raw.tp_group)
        tree_policy.set_current(parse_policy(lease.policy))
        assert self._view is not None
        context = CommandContext(self._rank, self._view, lease.epoch)
        self._handoff.led_by(context)
        for command in lease.commands:
            if command.ticket in self._command_results:
                continue  # Granted again, since the first grant's answer did not arrive.
            result = self._commands.carry_out(command.name, context, command.arguments)
            if command.ticket:
                self._command_results[command.ticket] = result
        while len(self._command_results) > COMMAND_RESULTS_KEPT:
            del self._command_results[next(iter(self._command_results))]

    def _enter(self, phase: str) -> None:
        assert phase in PHASES, phase
        self._phase, self._phase_since = phase, time.monotonic()

    def _forwards(self) -> int:
        return 0 if self._view is None else self._view.launched()

    def _failed(self, doing: str, error: BaseException) -> RankFailed:
        """Leaves a note. For want of memory the process ends: to raise would take memory too, and
        who waits for this rank in a collective waits until it is gone."""
        diverged = isinstance(error, RanksDiverged)
        code = EXIT_DIVERGED if diverged else EXIT_LOOP_FAILED
        cause, text = f"rank {self._rank} failed while {doing}: {type(error).__name__}", ""
        self._will.release_memory()
        try:
            cause = f"{cause}: {error}"
            text = "".join(traceback.format_exception(error))
        except MemoryError:
            self._will.execute(cause, code)
        if wants_memory(cause):
            self._will.execute(cause, code, text)
        self._will.write(cause, code, text)
        self._enter("failed")
        return RankFailed(f"{cause}\n{text}")

    def _without_memory(self) -> None:
        self._will.execute(
            f"rank {self._rank} gets no memory any more: out of memory while {self._phase}",
            EXIT_LOOP_FAILED,
        )


def stderr_path() -> Path | None:
    """The file that this process's stderr goes to, if it goes to one (Ray redirects workers so)."""
    try:
        path = Path(os.readlink("/proc/self/fd/2"))
    except OSError:
        return None
    return path if path.is_file() else None

"""One tensor-parallel rank: SGLang's Scheduler with a control side that answers while it runs.

A plain class, made a Ray actor at the edge (`overstory.orchestrator.rank_group`). Its constructor
is
light, so that the actor can be asked at once what it is doing; SGLang is imported by `preload`.

```
thread "loop" (one)        preload -> start -> run_loop            blocks until the loop ends
threads "control" (some)   identity, phase, health, stats          answer meanwhile
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

from overstory.workers import placement
from overstory.workers.death_note import EXIT_LOOP_FAILED, EXIT_ORDERED, LastWill
from overstory.workers.environment import prepare_process

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

logger = logging.getLogger(__name__)

PHASES = ("created", "importing", "imported", "loading", "ready", "serving", "ended", "failed")


class RankFailed(RuntimeError):
    """SGLang raised in this rank; the message holds its traceback."""


@dataclasses.dataclass(frozen=True)
class RankIdentity:
    """Where a rank lives.

    `started` is the process's start in clock ticks since boot: with the pid it names a process
    beyond
    doubt.
    """

    rank: int
    pid: int
    started: int
    host: str
    node_id: str
    note_path: str
    log_path: str | None


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
        self._device = device
        self._threads = threads
        self._phase = "created"
        self._phase_since = time.monotonic()
        self._scheduler: Scheduler | None = None
        log_path = stderr_path()
        folder = Path(note_folder) if note_folder else (log_path.parent if log_path else Path.cwd())
        self._will = LastWill(folder, rank, lambda: (self._phase, self._forwards()))
        self._log_path = log_path

    # ------------------------------------------------------------------ the loop's thread

    def preload(self) -> float:
        """Imports SGLang with our plugin and checks that the plugin took. Returns seconds taken."""
        begun = time.monotonic()
        self._enter("importing")
        prepare_process(self._device, self._threads)
        from sglang.srt.managers import scheduler as _scheduler  # noqa: F401
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from overstory.workers.seam.plugin import verify_installed

        verify_installed()
        self._enter("imported")
        return time.monotonic() - begun

    def start(self, server_args: ServerArgs, port_args: PortArgs) -> dict[str, Any]:
        """Builds the Scheduler: weights, memory pools, process groups.

        Args:
            server_args: with `dist_init_addr` set; the same on every rank.
            port_args: IPC names of the front half.

        Returns:
            SGLang's `get_init_info`: max_total_num_tokens, max_req_input_len, ...
        """
        from sglang.srt.entrypoints.engine import _compute_parallelism_ranks
        from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
        from sglang.srt.runtime_context import publish

        self._enter("loading")
        rank = self._rank
        gpu_id = 0 if self._device == "cpu" else placement.assigned_cuda_ordinal()
        attn_cp_rank, moe_dp_rank, moe_ep_rank = _compute_parallelism_ranks(server_args, rank)
        try:
            dp_rank = configure_scheduler_process(
                server_args, gpu_id, rank, attn_cp_rank, moe_dp_rank, moe_ep_rank, 0, None
            )
            publish(server_args, role="scheduler")
            self._scheduler = Scheduler(
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
        except Exception as error:
            raise self._failed("building its scheduler", error) from error
        self._enter("ready")
        return dict(self._scheduler.get_init_info())

    def run_loop(self) -> None:
        """Runs SGLang's event loop until a shutdown request ends it.

        Raises:
            RankFailed: the loop raised; a death note holds the cause too.
        """
        assert self._scheduler is not None, "start() comes before run_loop()"
        self._enter("serving")
        try:
            self._scheduler.run_event_loop()
        except Exception as error:
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
        )

    def phase(self) -> dict[str, Any]:
        """What the rank is doing and since how many seconds."""
        return {
            "rank": self._rank,
            "phase": self._phase,
            "seconds": round(time.monotonic() - self._phase_since, 3),
        }

    def health(self) -> dict[str, Any]:
        """Cheap sign of life: phase and launched batches. Never waits for the loop."""
        return {**self.phase(), "forwards": self._forwards(), "pid": os.getpid()}

    def end(self, cause: str, exit_code: int = EXIT_ORDERED) -> None:
        """Ends this process with `cause` in its death note. The call itself never returns."""
        self._will.execute(cause, exit_code)

    # ------------------------------------------------------------------ inside

    def _enter(self, phase: str) -> None:
        assert phase in PHASES, phase
        self._phase, self._phase_since = phase, time.monotonic()

    def _forwards(self) -> int:
        return 0 if self._scheduler is None else int(self._scheduler.forward_ct)

    def _failed(self, doing: str, error: Exception) -> RankFailed:
        text = "".join(traceback.format_exception(error))
        cause = f"rank {self._rank} failed while {doing}: {type(error).__name__}: {error}"
        self._will.write(cause, EXIT_LOOP_FAILED, text)
        self._enter("failed")
        return RankFailed(f"{cause}\n{text}")


def stderr_path() -> Path | None:
    """The file that this process's stderr goes to, if it goes to one (Ray redirects workers so)."""
    try:
        path = Path(os.readlink("/proc/self/fd/2"))
    except OSError:
        return None
    return path if path.is_file() else None


def process_start_ticks(pid: int) -> int:
    """Start of process `pid` in clock ticks since boot; 0 if there is none (or no /proc)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])

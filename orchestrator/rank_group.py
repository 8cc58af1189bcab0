"""The rank actors of one replica: launching, awaiting, watching and ending them over Ray.

```
launch   actors created; each imports SGLang while the front half imports it too
start    schedulers built, all ranks at once (they meet in the process group)
run      event loops started; a watcher thread awaits them and asks for signs of life
            first loss -> autopsy (note, log, the others' state) -> on_death(RankDeath) ->
            others ended
end      everything away, processes proved gone
```

Actors are named `overstory/<deployment>/<replica>/rank-<i>` in namespace `overstory`, so that a
restarted controller finds them. They are not detached: Ray ends them with the process that
launched them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from overstory.orchestrator.autopsy import examine
from overstory.orchestrator.engine_errors import EngineDead, RankDeath
from overstory.orchestrator.local_process import LocalProcess
from overstory.workers.environment import rank_environment
from overstory.workers.rank import RankHost, RankIdentity

logger = logging.getLogger(__name__)

NAMESPACE = "overstory"
LOOP, CONTROL = "loop", "control"
CONTROL_THREADS = 8
PROBE_PERIOD_S = 5.0
KILL_GRACE_S = 1.0
GONE_S = 5.0
ECHO_S = 1.0
"""After the first loss: how long to listen for the loss that caused it."""


class WeightSource(Protocol):
    """A replica that gives its weights; see `weight_donor.Donor`."""

    def meet(self, takers: Sequence[Any]) -> str:
        """Name of the ranks' communicators; empty if disk it is."""

    def part(self) -> None:
        """All is taken."""


RankActor = ray.remote(concurrency_groups={LOOP: 1, CONTROL: CONTROL_THREADS})(RankHost)

Progress = Callable[[Sequence[Mapping[str, Any]]], None]


def rank_name(deployment: str, replica: str, rank: int) -> str:
    """Ray actor name of a rank, within `NAMESPACE`."""
    return f"overstory/{deployment}/{replica}/rank-{rank}"


def call(actor: Any, group: str, method: str, *arguments: Any) -> Any:
    """Calls `method` of a rank actor in a concurrency group; returns Ray's object reference."""
    return getattr(actor, method).options(concurrency_group=group).remote(*arguments)


@dataclass(frozen=True)
class RankPlan:
    """How the ranks of one replica are launched.

    Attributes:
        deployment: its name; part of actor names.
        replica: unique per incarnation, so that a new one never meets the old one's names.
        tp_size: number of ranks.
        device: "cpu" or "cuda".
        cpus_per_rank: Ray CPUs that each rank reserves.
        gpus_per_rank: Ray GPUs, 1 or a fraction; 0 on a CPU.
        threads: compute threads per rank (CPU only).
        bundles: bundle of the current placement group for each rank; Ray's choice if not given.
        environment: more environment variables for the rank processes.
        lease_timeout_s: how long rank 0, with work to do, waits for a late lease.
        start_timeout_s: for imports, weights and process groups together.
        unresponsive_s: a rank whose control side does not answer for so long is ended, unless
            tokens come: ranks step together, so then none hangs.
    """

    deployment: str
    replica: str
    tp_size: int
    device: str = "cpu"
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
    threads: int = 1
    bundles: tuple[int, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    lease_timeout_s: float = 5.0
    start_timeout_s: float = 600.0
    unresponsive_s: float = 60.0

    def __post_init__(self) -> None:
        if self.tp_size < 1:
            raise ValueError(f"tp_size must be at least 1, got {self.tp_size}")
        if self.bundles is not None and len(self.bundles) != self.tp_size:
            raise ValueError(
                f"bundles must name one bundle for each of {self.tp_size} ranks, "
                f"got {len(self.bundles)}: {self.bundles}"
            )


class RankGroup:
    """The rank actors of one replica. Made by `RankGroup.launch`; thread-safe to `end`."""

    def __init__(self, plan: RankPlan, actors: Sequence[Any]) -> None:
        self.plan = plan
        self.actors = list(actors)
        self.identities: list[RankIdentity] = []
        self._preloads = [call(actor, LOOP, "preload") for actor in self.actors]
        self._loops: list[Any] = []
        self._watcher: threading.Thread | None = None
        self._ending = threading.Event()
        self._last_seen: dict[int, Mapping[str, Any]] = {}
        self._moved_s = time.monotonic()
        self.donor: WeightSource | None = None
        """Where the weights come from, if not from disk; set before `start`."""

    @classmethod
    def launch(cls, plan: RankPlan, placement_group: PlacementGroup | None = None) -> RankGroup:
        """Creates the actors and lets them import SGLang; returns without waiting.

        Args:
            plan: what to launch.
            placement_group: where; the current process's own if not given, none if it has none.
        """
        group = placement_group or ray.util.get_current_placement_group()
        environment = {**rank_environment(plan.device, plan.threads), **plan.environment}
        actors = []
        for rank in range(plan.tp_size):
            options: dict[str, Any] = {}
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    group, plan.bundles[rank] if plan.bundles else -1
                )
            actors.append(
                RankActor.options(
                    name=rank_name(plan.deployment, plan.replica, rank),
                    namespace=NAMESPACE,
                    num_cpus=plan.cpus_per_rank,
                    num_gpus=plan.gpus_per_rank,
                    max_restarts=0,
                    max_task_retries=0,
                    runtime_env={"env_vars": environment},
                    **options,
                ).remote(rank, plan.device, plan.threads, plan.lease_timeout_s)
            )
        return cls(plan, actors)

    def await_imports(self, on_progress: Progress | None = None) -> None:
        """Waits until every rank has imported SGLang.

        Raises:
            EngineDead: a rank died or failed; the others are ended.
            TimeoutError: not within `start_timeout_s`; names what each rank is doing.
        """
        identities = [call(actor, CONTROL, "identity") for actor in self.actors]
        self.identities = self._await_all(identities, on_progress)
        self._await_all(self._preloads, on_progress)

    def start(
        self, server_args: Any, port_args: Any, on_progress: Progress | None = None
    ) -> list[dict[str, Any]]:
        """Builds all schedulers; returns each rank's init info. Raises as `await_imports`."""
        source = self.donor.meet(self.actors) if self.donor is not None else ""
        try:
            infos = [
                call(actor, LOOP, "start", server_args, port_args, source) for actor in self.actors
            ]
            return self._await_all(infos, on_progress)
        finally:
            if self.donor is not None:
                self.donor.part()

    def run(self, on_death: Callable[[RankDeath], None]) -> None:
        """Starts the event loops and the watcher. `on_death` is called once, from its thread."""
        self._loops = [call(actor, LOOP, "run_loop") for actor in self.actors]
        self._watcher = threading.Thread(
            target=self._watch, args=(on_death,), name="rank-watcher", daemon=True
        )
        self._watcher.start()

    def one_node(self) -> bool:
        """Whether all ranks run on one Ray node (known after `await_imports`).

        Not judged by host name: nodes in network namespaces of one machine share it, but have no
        loopback in common.
        """
        return len({identity.node_id for identity in self.identities}) == 1

    def check_beside(self) -> None:
        """Refuses (ValueError) a rank 0 on another node than this process: they meet in files."""
        first, here = self.identities[0], ray.get_runtime_context().get_node_id()
        if first.node_id != here:
            raise ValueError(
                f"rank 0 was placed on {first.host} (Ray node {first.node_id}), its front half "
                f"runs on Ray node {here}: bundle 0 of the placement group must hold both "
                "(RankPlan.bundles)"
            )

    def phases(self, timeout_s: float = 2.0) -> list[dict[str, Any]]:
        """What each rank is doing; "starting" for one whose process does not answer yet."""
        refs = [call(actor, CONTROL, "phase") for actor in self.actors]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        phases = []
        for rank, ref in enumerate(refs):
            entry = {"rank": rank, "phase": "starting", "seconds": 0.0}
            if ref in ready:
                with contextlib.suppress(ray.exceptions.RayError):
                    entry = ray.get(ref)
            phases.append(entry)
        return phases

    def moved(self) -> None:
        """Tokens have come: all ranks go on, whether or not they find time to answer. From any
        thread."""
        self._moved_s = time.monotonic()

    def end(self) -> None:
        """Ends all ranks and waits until their processes on this host are gone."""
        self._ending.set()
        self._kill_all()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(timeout=GONE_S)

    # ------------------------------------------------------------------ inside

    def _await_all(self, refs: Sequence[Any], on_progress: Progress | None) -> list[Any]:
        deadline = time.monotonic() + self.plan.start_timeout_s
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.5)
            for ref in done:
                self._raise_if_failed(refs.index(ref), ref)
            if on_progress is not None:
                on_progress(self.phases())
            if pending and time.monotonic() > deadline:
                phases = self.phases()
                self.end()
                raise TimeoutError(
                    f"ranks not up within {self.plan.start_timeout_s:.0f} s: "
                    + ", ".join(f"rank {p['rank']} {p['phase']} {p['seconds']} s" for p in phases)
                )
        return list(ray.get(list(refs)))

    def _raise_if_failed(self, rank: int, ref: Any) -> None:
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            death = self._examine(rank, error)
            self.end()
            raise EngineDead(death) from error

    def _watch(self, on_death: Callable[[RankDeath], None]) -> None:
        """Runs until a rank is lost or `end` is called. Never ends in silence."""
        try:
            death = self._await_loss()
        except BaseException as error:  # SystemExit would end this thread without a word.
            logger.exception("watching the ranks of %s failed", self.plan.replica)
            cause = f"watching the ranks failed: {type(error).__name__}: {error}"
            detail = "".join(traceback.format_exception(error))
            death = RankDeath(rank=None, cause=cause, phase="watching", detail=detail)
        if death is None or self._ending.is_set():
            return
        self._ending.set()
        try:
            on_death(death)  # First: those who wait for tokens go on elsewhere meanwhile.
        finally:
            try:
                self._kill_all()
            except Exception:  # Who heard it ends the ranks again.
                logger.exception("ending the ranks of %s failed", self.plan.replica)

    def _await_loss(self) -> RankDeath | None:
        """The first loss; None if `end` was called before."""
        last_answer = [time.monotonic()] * len(self.actors)
        probes: dict[Any, int] = {}
        while not self._ending.is_set():
            done, _ = ray.wait(self._loops, num_returns=1, timeout=PROBE_PERIOD_S)
            if self._ending.is_set():
                break
            death = self._first_loss(done)
            if death is None:
                self._probe(probes, last_answer)
                death = self._unresponsive(last_answer)
            if death is not None:
                return death
        return None

    def _first_loss(self, done: Sequence[Any]) -> RankDeath | None:
        """The loss to blame. A process that vanished goes before a rank that raised: the others
        raise because their peer is gone, and may be heard first."""
        if not done:
            return None
        ray.wait(self._loops, num_returns=len(self._loops), timeout=ECHO_S)
        done, _ = ray.wait(self._loops, num_returns=len(self._loops), timeout=0)
        losses = [(self._loops.index(ref), _error_of(ref)) for ref in done]
        vanished = [loss for loss in losses if isinstance(loss[1], ray.exceptions.RayActorError)]
        rank, error = (vanished or losses)[0]
        return self._examine(rank, error)

    def _probe(self, probes: dict[Any, int], last_answer: list[float]) -> None:
        """Notes who answered since the last probe and asks those who did."""
        answered, _ = (
            ray.wait(list(probes), num_returns=len(probes), timeout=0) if probes else ([], [])
        )
        for ref in answered:
            rank = probes.pop(ref)
            with contextlib.suppress(ray.exceptions.RayError):  # An error is no sign of life.
                self._last_seen[rank] = ray.get(ref)
                last_answer[rank] = time.monotonic()
        for rank in set(range(len(self.actors))) - set(probes.values()):
            probes[call(self.actors[rank], CONTROL, "health")] = rank

    def _unresponsive(self, last_answer: Sequence[float]) -> RankDeath | None:
        for rank, seen in enumerate(last_answer):
            silent_s = time.monotonic() - max(seen, self._moved_s)
            if silent_s > self.plan.unresponsive_s:
                return self._examine(rank, None, f"no sign of life for {silent_s:.0f} s")
        return None

    def _examine(
        self, rank: int, error: Exception | None, observed: str | None = None
    ) -> RankDeath:
        others = {
            other: call(actor, CONTROL, "health")
            for other, actor in enumerate(self.actors)
            if other != rank
        }
        seen = self._last_seen.get(rank, {})
        return examine(rank, self.identities, error, observed, others, seen)

    def _kill_all(self) -> None:
        for actor in self.actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=True)
        processes = [LocalProcess(i.host, i.pid, i.started) for i in self.identities]
        deadline = time.monotonic() + KILL_GRACE_S
        for process in processes:
            if not process.wait_gone(deadline - time.monotonic()):
                process.kill()  # A stopped one cannot take Ray's message.
        for process in processes:
            if not process.wait_gone(GONE_S):
                logger.error("rank process %d on %s would not end", process.pid, process.host)


def _error_of(ref: Any) -> Exception | None:
    try:
        ray.get(ref)
    except ray.exceptions.RayError as error:
        return error
    return None

"""What the controller knows and decides, without Ray: events in, leases and verdicts out.

Per replica:

```
        attached                reported*                 divergence
found ----------> leased ----------------------> leased ------------> condemned
  ^                 |  replaced: another controller attached           |
  |                 +--------------> replaced                          v
  | taken back: this is the one in charge |                           lost
  +<----------------|---------------------+
  |                 |  lost: a rank gone
  |                 +--------------> lost
  |  unreachable    |                 |  all its ranks found again
  +-----------------+ <---------------+
```

A replica that comes back is another one, with another name. But a loss may be an error of this
controller or of Ray, so one whose ranks are all found again is taken up again. There is no way back
from `condemned`. From `replaced` only the controller in charge comes back: two would take the
replica from each other for ever, but a dead one's attach may arrive late and would leave it to
nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overstory.orchestrator.digest_compare import Difference, DigestComparison
from overstory.orchestrator.health import ProgressJudge
from overstory.orchestrator.lease import Command, Lease
from overstory.orchestrator.rates import rates
from overstory.orchestrator.spec import ControlSpec

Phase = Literal["found", "leased", "condemned", "replaced", "lost"]

STALL_S = 60.0
SILENCE_S = 30.0
LOST_KEPT = 20
"""Lost replicas that stay in the status, to say why they went."""
RATES_S = 0.1
"""Shortest time that rates are taken over. Two reads may cross, a step and less than a millisecond
apart: of such a pace a replica of slow steps would get a lease of most of a minute."""
LONGEST = 16
"""Times `lease_steps`, the longest lease: ranks keep what 2048 steps did, to tell where they
differ."""


@dataclass
class ReplicaRecord:
    """One replica as the controller follows it."""

    name: str
    ranks: int
    phase: Phase = "found"
    epoch: int = 0
    seq: int = 0
    granted_policy: str | None = None
    own_policy: str | None = None
    wants_lease: bool = False
    commands: list[Command] = field(default_factory=list)
    digests: DigestComparison = field(default_factory=lambda: DigestComparison(1))
    judges: list[ProgressJudge] = field(default_factory=list)
    reports: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    reported_at: dict[int, float] = field(default_factory=dict)
    rates: dict[int, dict[str, float]] = field(default_factory=dict)
    rated: dict[int, tuple[float, Mapping[str, Any]]] = field(default_factory=dict)
    """When, and of which report, by rank: what the next rates begin with."""
    reason: str = ""
    condemned: bool = False
    fragmentation: Mapping[str, Any] | None = None
    pictured_at: float = 0.0
    pictured_forwards: int = 0


@dataclass(frozen=True)
class Verdict:
    """A replica must end: its ranks differ."""

    replica: str
    difference: Difference


class ControllerState:
    """Everything one controller knows. Not thread-safe.

    Args:
        deployment: its name.
        control: the deployment's settings of it.
        clock: monotonic seconds.
    """

    def __init__(self, deployment: str, control: ControlSpec, clock: Callable[[], float]) -> None:
        self._deployment = deployment
        self._lease_steps = control.lease_steps
        self._lease_s = control.lease_s
        self._clock = clock
        self._policy: str | None = None
        self._replicas: dict[str, ReplicaRecord] = {}
        self._started = clock()
        self._condemned = 0

    # ------------------------------------------------------------------ events

    def found(self, name: str, ranks: int) -> bool:
        """A replica exists, by registration or by its ranks' names.

        Returns:
            whether it is to be followed from now on: it is new, or was taken for lost though all
            its ranks are there.
        """
        known = self._replicas.get(name)
        if known is not None:
            if known.phase != "lost" or known.condemned or known.ranks != ranks:
                return False
            del self._replicas[name]
        now = self._clock()
        self._replicas[name] = ReplicaRecord(
            name,
            ranks,
            epoch=known.epoch if known is not None else 0,
            digests=DigestComparison(ranks),
            judges=[ProgressJudge(STALL_S, SILENCE_S, now) for _ in range(ranks)],
        )
        return True

    def attached(self, name: str, epoch: int, policy: str) -> None:
        """Rank 0 gave `epoch`; it runs under `policy`.

        A controller that has no policy of its own (it was just started, or restarted) takes over
        the one it finds.
        """
        replica = self._replicas[name]
        if replica.phase != "found":  # Condemned while the call was under way.
            return
        replica.phase, replica.epoch, replica.seq = "leased", epoch, 0
        replica.granted_policy, replica.reason = None, ""
        if self._policy is None:
            self._policy = policy

    def unanswered(self, name: str, lease: Lease) -> None:
        """Whether rank 0 took `lease` is unknown, or it certainly did not: its commands go again.

        Ranks carry a ticket out once, so a command that did arrive does no harm.
        """
        replica = self._replicas[name]
        replica.commands = [*lease.commands, *replica.commands]

    def unreachable(self, name: str, reason: str) -> None:
        """A control call to rank 0 went unanswered: it must be attached to again."""
        replica = self._replicas[name]
        if replica.phase in ("leased", "found"):
            replica.phase, replica.reason = "found", reason

    def reported(self, name: str, reports: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
        """Reports of some ranks came in; a verdict if their digests differ."""
        replica, now = self._replicas[name], self._clock()
        for rank, report in reports.items():
            then, earlier = replica.rated.setdefault(rank, (now, report))
            if now - then >= RATES_S:
                replica.rates[rank] = rates(earlier, report, now - then)
                replica.rated[rank] = now, report
            replica.reports[rank], replica.reported_at[rank] = report, now
            replica.judges[rank].report(now, report)
            replica.digests.add(rank, report["digests"])
        if 0 in reports:
            lease = reports[0]["lease"]
            replica.wants_lease = bool(lease and lease["wants_next"])
        difference = replica.digests.compare()
        if difference is None or replica.phase == "condemned":
            return None
        replica.phase, replica.condemned = "condemned", True
        self._condemned += 1
        replica.reason = (
            f"ranks {difference.other} and {difference.rank} differ in the steps up to forward "
            f"{difference.forward}"
        )
        return Verdict(name, difference)

    def explained(self, name: str, reason: str) -> None:
        """What differs between the ranks of a condemned replica, and where."""
        self._replicas[name].reason = reason

    def moved_apart(self, name: str, reason: str) -> None:
        """Its ranks differ after an act of all of them: as with steps that differ, it is lost."""
        self._replicas[name].condemned, self._replicas[name].reason = True, reason
        self._condemned += 1
        self.lost(name, reason)

    def replaced(self, name: str, reason: str) -> None:
        """Another controller has attached to the replica: this one stops granting to it."""
        self._leave(name, "replaced", reason)

    def taken_from_us(self) -> list[str]:
        """Replicas that another controller has attached to."""
        return [name for name, record in self._replicas.items() if record.phase == "replaced"]

    def take_back(self, name: str) -> None:
        """This controller is the one in charge: a replaced replica is as one never seen."""
        assert self._replicas[name].phase == "replaced", "only what was taken comes back"
        del self._replicas[name]

    def lost(self, name: str, reason: str) -> None:
        """A rank of the replica is gone. A condemned replica keeps its reason."""
        replica = self._replicas[name]
        self._leave(name, "lost", replica.reason if replica.condemned else reason)

    def set_policy(self, policy: str) -> None:
        """Each replica's next lease supersedes the present one and carries `policy`."""
        self._policy = policy
        for replica in self._replicas.values():
            replica.own_policy = None

    def add_command(self, name: str, command: Command) -> None:
        """The replica's next lease supersedes the present one and carries `command`."""
        self._replicas[name].commands.append(command)

    def pictured(self, name: str, fragmentation: Mapping[str, Any]) -> None:
        """A picture of the replica's slots was taken: its figures stay in the status."""
        replica = self._replicas[name]
        replica.fragmentation, replica.pictured_at = fragmentation, self._clock()
        replica.pictured_forwards = int(replica.reports.get(0, {}).get("forwards", 0))

    # ------------------------------------------------------------------ decisions

    def next_lease(self, name: str) -> Lease | None:
        """The lease to grant now, or None if there is no reason to."""
        replica = self._replicas[name]
        if replica.phase != "leased" or self._policy is None:
            return None
        policy = replica.own_policy or self._policy
        urgent = bool(replica.commands) or replica.granted_policy != policy
        if not urgent and not replica.wants_lease:
            return None
        replica.seq += 1
        lease = Lease(
            replica.epoch,
            replica.seq,
            self._steps_of_lease(replica),
            policy,
            tuple(replica.commands),
            supersede=urgent,
        )
        replica.commands, replica.wants_lease = [], False
        replica.granted_policy = policy
        return lease

    def _steps_of_lease(self, replica: ReplicaRecord) -> int:
        """A control call takes rank 0's interpreter from its loop for a moment: at a millisecond a
        step, leases of few steps would cost several per cent."""
        pace = replica.rates.get(0, {}).get("steps_per_s", 0.0)
        return min(LONGEST * self._lease_steps, max(self._lease_steps, int(pace * self._lease_s)))

    def refused(self, name: str, lease: Lease, reason: str) -> None:
        """Rank 0 did not take `lease`: its number is free again and its commands are dropped.

        Policies and commands are checked before they are set, so this is a replica that came later
        and has less room: it stays under the policy that it runs, and the status says why.
        """
        replica = self._replicas[name]
        replica.seq -= 1
        replica.granted_policy = None
        replica.own_policy = replica.reports[0]["policy"] if 0 in replica.reports else "plain"
        replica.reason = f"policy {lease.policy} refused: {reason}"

    def digests_after(self, name: str, rank: int) -> int:
        """Number of the last digest that the rank has reported: ask for those above."""
        return self._replicas[name].digests.heard(rank)

    def report_every(self, name: str) -> int:
        """Launched batches between two reports, at most: half a lease, so that a difference shows
        within one. The other reports come where leases begin."""
        return max(1, self._steps_of_lease(self._replicas[name]) // 2)

    def leased(self) -> list[str]:
        """Names of the replicas that this controller steers."""
        return [r.name for r in self._replicas.values() if r.phase == "leased"]

    def worked(self) -> list[str]:
        """Steered replicas that have stepped since their last picture, as far as reported."""
        return [
            r.name
            for r in self._replicas.values()
            if r.phase == "leased" and r.reports.get(0, {}).get("forwards", 0) > r.pictured_forwards
        ]

    def standing(self, name: str) -> str:
        """Phase of a replica and the reason for it, in words; empty if it is unknown."""
        replica = self._replicas.get(name)
        if replica is None:
            return ""
        return f"{replica.phase} ({replica.reason})" if replica.reason else replica.phase

    def awaited(self) -> list[str]:
        """Names of the replicas that are up but not steered yet, or not at the moment."""
        return [r.name for r in self._replicas.values() if r.phase == "found"]

    def command_results(self, name: str, ticket: str) -> dict[int, Any] | None:
        """Results of a command by rank, or None while some rank has not reported it."""
        replica = self._replicas[name]
        results = {
            rank: report["commands"][ticket]
            for rank, report in replica.reports.items()
            if ticket in report["commands"]
        }
        return results if len(results) == replica.ranks else None

    def epoch(self, name: str) -> int:
        """Epoch that this controller has at the replica."""
        return self._replicas[name].epoch

    def phase(self, name: str) -> Phase:
        """Where the replica stands."""
        return self._replicas[name].phase

    def ranks(self, name: str) -> int:
        """Number of the replica's ranks."""
        return self._replicas[name].ranks

    # ------------------------------------------------------------------ status

    def status(self) -> dict[str, Any]:
        """JSON-able picture for `overstory status`.

        `deployment`, `policy`, `lease_steps`, `uptime_s`, `condemned` (how many replicas' ranks
        have differed), `replicas`: list of `name`, `phase`,
        `reason`,
        `epoch`, `lease` (rank 0's ledger), `digests_equal_up_to`, `fragmentation` (of the last
        picture, with its `age_s`; None before the first), `ranks`: list of `rank`, `pid`,
        `health`,
        `health_reason`, `forwards`, `load`, `steps`, `age_s` of the report, and `steps_per_s`,
        `tokens_per_s`, `tokens_per_forward` between two reports `RATES_S` apart or more.
        """
        now = self._clock()
        return {
            "deployment": self._deployment,
            "policy": self._policy,
            "lease_steps": self._lease_steps,
            "uptime_s": round(now - self._started, 1),
            "condemned": self._condemned,
            "replicas": [self._replica_status(r, now) for r in self._replicas.values()],
        }

    def _replica_status(self, replica: ReplicaRecord, now: float) -> dict[str, Any]:
        first = replica.reports.get(0, {})
        return {
            "name": replica.name,
            "phase": replica.phase,
            "reason": replica.reason,
            "epoch": replica.epoch,
            "lease": first.get("lease"),
            "digests_equal_up_to": replica.digests.compared,
            "fragmentation": None
            if replica.fragmentation is None
            else {**replica.fragmentation, "age_s": round(now - replica.pictured_at, 1)},
            "ranks": [
                self._rank_status(replica, rank, report, now)
                for rank, report in sorted(replica.reports.items())
            ],
        }

    @staticmethod
    def _rank_status(
        replica: ReplicaRecord, rank: int, report: Mapping[str, Any], now: float
    ) -> dict[str, Any]:
        health = replica.judges[rank].judge(now)
        kept = (
            *("pid", "forwards", "iterations", "policy", "auto", "candidates", "load", "steps"),
            *("weights", "stood_s", "stands", "meetings"),
        )
        return {
            "rank": rank,
            "health": health.state,
            "health_reason": health.reason,
            "age_s": round(now - replica.reported_at[rank], 1),
            **{name: report.get(name) for name in kept},
            **replica.rates.get(rank, {}),
        }

    def _leave(self, name: str, phase: Phase, reason: str) -> None:
        replica = self._replicas[name]
        replica.phase, replica.reason = phase, reason
        gone = [r.name for r in self._replicas.values() if r.phase in ("lost", "replaced")]
        for old in gone[:-LOST_KEPT]:
            del self._replicas[old]

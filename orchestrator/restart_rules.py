"""What a rolling restart may change, and how far one has come. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.spec import DeploymentSpec

_FIXED = {
    "name": "it names what runs",
    "model": "the gateway's tokenizer and the text that stands come from the old one",
    "served_model_name": "clients ask for the old one",
    "gateway": "the gateway goes on through the restart, it holds the clients' connections",
    "control": "the controller goes on through the restart",
}
_NO_LESS = ("context_length", "max_total_tokens")
"""Engine settings that may not shrink: a sequence in flight could fit no more."""


class RestartError(UserFault):
    """A restart that is refused, or that has stopped; what serves goes on serving."""


def refuse_changes(old: DeploymentSpec, new: DeploymentSpec) -> None:
    """Refuses what cannot change while the deployment serves.

    Raises:
        RestartError: one line for each such setting.
    """
    faults = []
    before, after = old.model_dump(), new.model_dump()
    for section, why in _FIXED.items():
        faults += [
            f"{key}: {was!r} -> {now!r} cannot change in a restart ({why})"
            for key, was, now in _differences(section, before[section], after[section])
        ]
    if old.replicas != new.replicas:
        faults.append(
            f"replicas: {old.replicas} -> {new.replicas}; use `overstory scale {new.replicas}`, "
            "before or after the restart"
        )
    for key in _NO_LESS:
        was, now = old.engine.get(key), new.engine.get(key)
        if was != now and now is not None and (was is None or now < was):
            faults.append(
                f"engine.{key}: {was if was is not None else 'unset'} -> {now} cannot shrink in a "
                "restart: sequences in flight may be longer"
            )
    if faults:
        raise RestartError(
            "\n".join([*faults, "to change that: `overstory down`, then `overstory deploy`"])
        )


def change_under_way(app: str, replicas: str, states: Mapping[str, int]) -> str:
    """What Serve is at work on, for the user; empty where another change may begin.

    By the replicas' own status, not by the application's alone: that one is UNHEALTHY whenever the
    gateway is, whatever the replicas are in the middle of. Where the replicas' own is DEPLOY_FAILED
    or UNHEALTHY, Serve has stopped, or fills the places of lost ones, perhaps in vain for ever: a
    change may be what mends it.

    Args:
        app: Serve's status of the application; DEPLOYING from the moment that it is handed over.
        replicas: Serve's status of the replicas; empty where it has none yet.
        states: how many of them are in which state.
    """
    if app == "DEPLOYING" or replicas == "UPDATING":
        return "a restart or its deploy"
    if replicas in ("DEPLOY_FAILED", "UNHEALTHY"):
        return ""
    # Serve calls HEALTHY what `set_replicas` has given another number to reach.
    if any(count and state != "RUNNING" for state, count in states.items()):
        return "another number of replicas"
    return ""


def _differences(key: str, was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Dotted keys that differ, with both values."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        every = dict.fromkeys([*was, *now])
        return [
            difference
            for name in every
            for difference in _differences(f"{key}.{name}", was.get(name), now.get(name))
        ]
    return [] if was == now else [(key, was, now)]


def changed_settings(old: DeploymentSpec, new: DeploymentSpec) -> list[str]:
    """One line for each setting that differs."""
    before, after = old.model_dump(), new.model_dump()
    return [
        f"{name}: {was!r} -> {now!r}"
        for key in before
        for name, was, now in _differences(key, before[key], after[key])
    ]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A replica that has taken over: seconds since the one before had, or since the beginning."""

    name: str
    seconds: float


class RestartProgress:
    """Follows the states of replicas through one restart. Those that are new at the first look
    were replaced before it, nobody knows how quickly: they are not among `replaced`.

    Args:
        old: names of the replicas that are to go.
        replicas: how many there are to be.
        now_s: when it began.
    """

    def __init__(self, old: frozenset[str], replicas: int, now_s: float) -> None:
        self._old = old
        self._replicas = replicas
        self._moved_s = self._stepped_s = now_s
        self._last: tuple[frozenset[str], frozenset[str]] = (old, frozenset())
        self.kept: frozenset[str] | None = None
        """Those that were new at the first look; None before it."""
        self.replaced: list[Replaced] = []
        self.done = False

    def look(self, states: Mapping[str, str], now_s: float) -> None:
        """Takes in `serving.replica_states`."""
        left = frozenset(states) & self._old
        fresh = frozenset(name for name, state in states.items() if state == "RUNNING") - self._old
        if (left, fresh) != self._last:
            self._last, self._moved_s = (left, fresh), now_s
        if self.kept is None:
            self.kept = fresh
        for name in sorted(fresh - self.kept - {one.name for one in self.replaced}):
            self.replaced.append(Replaced(name, now_s - self._stepped_s))
            self._stepped_s = now_s
        self.done = not left and len(fresh) == self._replicas and len(states) == self._replicas

    def still_s(self, now_s: float) -> float:
        """Seconds since something changed."""
        return now_s - self._moved_s

    def describe(self) -> str:
        """For the user."""
        left, fresh = self._last
        old = f", {len(left)} old there" if left else ""
        return f"{len(fresh)} of {self._replicas} replicas are new{old}"

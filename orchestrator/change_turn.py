"""Only one command at a time changes a deployment, from whichever machine it is given.

Serve shows that it is at work only once it has been told, and a command looks around for seconds
before it tells. The turn is a named Ray actor: of two that make it in the same millisecond, the
cluster's own store lets one have the name. It is no detached actor, so a command that is killed
gives its turn back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from overstory.orchestrator.rank_group import NAMESPACE
from overstory.orchestrator.restart_rules import RestartError


class _Turn:
    """Does nothing but exist."""


def turn_name(deployment: str) -> str:
    """Ray actor name of the turn, within `NAMESPACE`; not among those of the deployment's parts,
    which `overstory down` ends."""
    return f"overstory-turn/{deployment}"


@contextmanager
def turn_to_change(deployment: str) -> Iterator[None]:
    """Keeps other commands from changing the deployment while the block runs.

    Raises:
        RestartError: another command is at it. Nothing is waited for: what it leaves may be
            another deployment than the one that this command was given for.
    """
    actor = ray.remote(_Turn).options(
        name=turn_name(deployment), namespace=NAMESPACE, num_cpus=0, max_restarts=0
    )
    taken = RestartError(
        f"{deployment} is being changed already by another command (`deploy`, `restart` or "
        "`scale`). Wait for it; `overstory restart --follow` watches a restart that was begun from "
        "here"
    )
    try:
        turn = actor.remote()
        # Ray looks for the name before it takes it: two may have got so far.
        holder = ray.get_actor(turn_name(deployment), namespace=NAMESPACE)
    except (ValueError, RayError) as error:
        raise taken from error
    if holder._actor_id != turn._actor_id:
        raise taken
    try:
        yield
    finally:
        ray.kill(turn, no_restart=True)

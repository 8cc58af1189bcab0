"""What `overstory defrag` and `overstory status` say about fragmentation. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

SHOWN_MOVES = 8


def fragmentation_line(seen: Mapping[str, Any]) -> str:
    """One line of a replica's figures, as `Fragmentation` gives them."""
    per_request = seen["runs"] / seen["requests"] if seen["requests"] else 0.0
    return (
        f"{seen['requests']} requests, {seen['rows']} rows in {seen['runs']} runs "
        f"({per_request:.1f} a request, worst {seen['worst_runs']}), "
        f"{100 * seen['contiguous_share']:.1f}% contiguous; "
        f"free {seen['free']} in {seen['free_runs']} runs, largest {seen['largest_free_run']}"
    )


def render_defrag(replicas: Mapping[str, Mapping[str, Any]], dry_run: bool) -> str:
    """The controller's answer as text."""
    lines = []
    for name, done in replicas.items():
        lines += [f"replica {name}", *(f"  {line}" for line in _replica_lines(done, dry_run))]
    return "\n".join(lines)


def _replica_lines(done: Mapping[str, Any], dry_run: bool) -> Iterator[str]:
    yield f"{'now' if dry_run else 'before'}: {fragmentation_line(done['before'])}"
    for number, one in enumerate(done["passes"], 1):
        yield (
            f"pass {number}: {one['rows']} rows copied of {one['planned']} planned, ranks paused "
            f"{one['pause_ms']:.1f} ms ({one['copy_ms']:.1f} ms copying), plan {one['plan']}"
        )
    if done["passes"]:
        yield f"after: {fragmentation_line(done['after'])}"
    following = done["next"]
    if following is None:
        yield "nothing worth moving"
        return
    gain = done["after"]["runs"] - following["after"]["runs"]
    cached = done["after"]["cached_breaks"] - following["after"]["cached_breaks"]
    yield (
        f"{'plan' if dry_run else 'left for another time'}: {following['rows']} rows "
        f"({following['bytes'] / 2**20:.1f} MiB), expected gain {gain} runs of requests and "
        f"{cached} breaks in the prefix cache, plan {following['plan']}"
    )
    moves = following.get("moves", [])
    if moves:
        shown = ", ".join(f"{source} -> {target}" for source, target in moves[:SHOWN_MOVES])
        more = len(moves) - SHOWN_MOVES
        yield f"moves: {shown}{f' and {more} more' if more > 0 else ''}"

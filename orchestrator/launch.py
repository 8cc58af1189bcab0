"""Brings up an engine over rank actors, importing SGLang here and there at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray.util.placement_group import PlacementGroup

from overstory.orchestrator.rank_group import Progress, RankGroup, RankPlan, WeightSource
from overstory.workers.environment import cpu_engine_defaults, prepare_process

if TYPE_CHECKING:
    from overstory.orchestrator.engine_front import OverstoryEngine


def launch_engine(
    plan: RankPlan,
    fields: Mapping[str, Any],
    on_progress: Progress | None = None,
    placement_group: PlacementGroup | None = None,
    donor: WeightSource | None = None,
) -> OverstoryEngine:
    """Launches the ranks, then SGLang's front half in this process; blocks until both are up.

    Args:
        plan: how many ranks, where, with what.
        fields: ServerArgs by name; on a CPU they go over `cpu_engine_defaults()`.
        on_progress: told what each rank is doing, about twice a second.
        placement_group: for the ranks; this process's own if not given.
        donor: who gives the weights; disk if it cannot, or there is none.

    Raises:
        EngineDead: a rank died or failed while starting; its cause is in the message.
        TimeoutError: the ranks did not come up in time.
        ValueError: SGLang refuses the fields.
    """
    group = RankGroup.launch(plan, placement_group)
    group.donor = donor
    try:
        prepare_process(plan.device, plan.threads)
        from overstory.orchestrator.engine_front import OverstoryEngine

        defaults = cpu_engine_defaults() if plan.device == "cpu" else {}
        return OverstoryEngine(group, {**defaults, **fields}, on_progress)
    except BaseException:
        group.end()
        raise

"""CUDA graphs of the verify forward, one set for each of a few numbers of rows.

SGLang's graph runner knows one number of rows per request. There is one runner for each tier here,
and the model runner is shown that of the step at hand. A step of another number of rows takes the
next larger tier; a tree is grown until it fills it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overstory.workers.ddtree.limits import StepLimits

logger = logging.getLogger(__name__)

TREE_TIERS = (16, 24, 32, 48, 64)
"""Rows per request that trees are captured with, as far as the engine has room."""


def tier_rows(max_rows: int, block_size: int) -> tuple[int, ...]:
    """Numbers of rows that an engine captures, ascending: plain, chain, trees, the most it takes.

    Args:
        max_rows: rows per request that the engine has room for.
        block_size: of the drafter; rows of a chain.
    """
    trees = [rows for rows in TREE_TIERS if block_size < rows < max_rows]
    return tuple(sorted({1, block_size, *trees, max_rows}))


class GraphTiers:
    """The graph runners of one engine's target.

    Args:
        model_runner: of the target.
        runners: by rows per request.
    """

    def __init__(self, model_runner: Any, runners: Mapping[int, Any]) -> None:
        self._model_runner = model_runner
        self._runners = dict(sorted(runners.items()))

    @classmethod
    def capture(cls, model_runner: Any, limits: StepLimits) -> GraphTiers | None:
        """Captures all tiers but the largest, which SGLang has captured; None if it captured none.

        The largest comes first, so that the others fit into its memory.
        """
        largest = model_runner.decode_cuda_graph_runner
        if not hasattr(largest, "captured_req_width"):  # SGLang's runner without graphs, or none
            return None
        from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

        assert largest.captured_req_width == limits.max_rows, largest.captured_req_width
        runners = {limits.max_rows: largest}
        for rows in reversed(tier_rows(limits.max_rows, limits.block_size)[:-1]):
            logger.info("capturing verify forwards of %d rows per request", rows)
            runners[rows] = DecodeCudaGraphRunner(model_runner, speculative_num_draft_tokens=rows)
        return cls(model_runner, runners)

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows, ascending."""
        return tuple(self._runners)

    def tier(self, rows: int) -> int:
        """Rows of the smallest tier of at least ``rows`` rows."""
        return next(tier for tier in self._runners if tier >= rows)

    def runner(self, rows: int) -> Any:
        """SGLang's graph runner of a tier."""
        return self._runners[rows]

    def select(self, rows: int) -> int:
        """Makes the smallest tier of at least ``rows`` rows that of the next forward.

        Returns:
            its number of rows.
        """
        tier = self.tier(rows)
        self._model_runner.decode_cuda_graph_runner = self._runners[tier]
        return tier


def captured_batches() -> list[int]:
    """Numbers of requests of this process's captured forwards."""
    from sglang.srt.runtime_context import get_exec

    return sorted(get_exec().graph.cuda_graph_config.decode.bs)


def largest_captured_batch() -> int:
    """Most requests of a captured forward in this process."""
    return captured_batches()[-1]

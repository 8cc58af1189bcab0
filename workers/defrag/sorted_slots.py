"""Free slots handed out in order: SGLang's own switch, which it sets only for disaggregation.

With `need_sort`, what is freed waits in a list of its own, and is sorted in with the rest when the
first list no longer suffices. Requests then get ascending slots, in runs where there are some.
"""

from __future__ import annotations

from typing import Any

from overstory.workers.seam.patches import Patch, hook


def sort_lazily(_result: Any, allocator: Any, *_arguments: Any, **_named: Any) -> None:
    """AFTER hook on the allocator's constructor."""
    allocator.need_sort = True


def patches() -> list[Patch]:
    """The one change, for `overstory.workers.seam.plugin` to install."""
    return [
        hook(
            "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator.__init__",
            "after",
            sort_lazily,
            "freed slots would be handed out in the order in which they were freed",
        )
    ]

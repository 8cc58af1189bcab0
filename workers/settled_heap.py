"""Python's collector kept from what a process holds for good.

After an engine has started, half a million objects of torch, SGLang and Ray stay to the end. A full
collection looks at each of them: 0.2 to 0.5 s in which nothing else of the process runs, once
requests have left enough behind. With several ranks each pauses at a moment of its own and all
others wait for it.
"""

from __future__ import annotations

import gc


def settle_heap() -> None:
    """Takes all that is alive now out of the collector's sight. Call it when a start is done.

    What is garbage now goes first: out of sight it would stay for ever, and with it what it holds
    of a device's memory. The second collection, of next to nothing, makes the collector forget the
    size of the heap, by which it would put off the next full one until that is large too.
    """
    gc.collect()
    gc.freeze()
    gc.collect()

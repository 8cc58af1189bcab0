"""The automatic budget policy: which of plain, chain and tree budgets a step uses.

```
start-up   measure, table_cache   cost of a step by (option, batch, context)      CostTable
rank 0     evidence, steering     what drafts were worth lately; floats, local
sync       chooser                every SYNC_STEPS decode steps, as integers      Beliefs
all ranks  choice                 pure: (table, beliefs, batch shape) -> option, alike everywhere
```

Only `measure` and `chooser` know torch or SGLang. Why the rule is right: docs/ddtree.md.
"""

from __future__ import annotations

MEASURE_SECONDS_ENV = "OVERSTORY_COST_TABLE_S"
"""Environment variable: seconds that measuring a cost table may take at the start of an engine."""

FLOOR_ENV = "OVERSTORY_ACCEPTANCE_FLOOR"
"""Environment variable: share of first drafted tokens that must be accepted, in [0, 1)."""

CACHE_ENV = "OVERSTORY_CACHE"
"""Environment variable: folder of cached cost tables; `~/.cache/overstory` without it."""

MEASURE_SECONDS = 20.0
FLOOR = 0.05

OPT_OUT = "overstory_speculate"
"""Key of a request's ``custom_params``: false has nothing drafted for it."""

"""Width of SGLang's slot rows for engines that verify trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overstory.workers.ddtree import ALGORITHM
from overstory.workers.ddtree.limits import row_headroom

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def widen_rows(original: Callable[[ServerArgs], int], server_args: ServerArgs) -> int:
    """AROUND hook on ``get_req_to_token_extra_context_len``: columns beyond the context."""
    if server_args.speculative_algorithm != ALGORITHM:
        return original(server_args)
    rows, page_size = server_args.speculative_num_draft_tokens, server_args.page_size
    return row_headroom(int(rows), int(page_size))

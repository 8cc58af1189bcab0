"""Where a request ends inside the tokens that one step handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def finish_within_limit(
    original: Callable[..., None], self: Req, new_accepted_len: int = 1
) -> None:
    """AROUND hook on SGLang's ``Req.update_finish_state``.

    SGLang looks at the length before it looks for stop tokens. When one step passes both a stop
    token and ``max_new_tokens``, it would report the length and hand out text beyond the stop
    token, which plain decoding never does. Here the stop that comes first wins.
    """
    limit = self.sampling_params.max_new_tokens
    beyond = len(self.output_ids) - limit
    before_limit = new_accepted_len - beyond - 1
    if beyond < 0 or before_limit < 1 or self.finished() or self.to_finish:
        original(self, new_accepted_len)
        return
    everything: Any = self.output_ids
    self.output_ids = everything[: limit - 1]
    try:
        window = self.output_ids[-before_limit:]
        stopped = self._check_str_based_finish(before_limit) or self._check_token_based_finish(
            window
        )
    finally:
        self.output_ids = everything
    if not stopped:
        original(self, new_accepted_len)

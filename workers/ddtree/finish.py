"""Where a request ends inside the tokens that one step handed out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_ENDS = "overstory_ends"
"""Attribute on SGLang's Req: tokens that end it, where it ends at nothing else within its limit."""


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
    if beyond < 0 and _goes_on(self, self.output_ids[-new_accepted_len:]):
        return
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


def _goes_on(req: Req, tokens: Sequence[int]) -> bool:
    """Whether nothing ends ``req``, which is within its limit, at its newest ``tokens``. Mostly so,
    and told by fewer calls than SGLang makes; False where it is not told here."""
    if req.finished_reason is not None or req.to_finish or req.grammar is not None or not tokens:
        return False
    ends: frozenset[int] | None = req.__dict__.get(_ENDS)
    if ends is None:
        params = req.sampling_params
        if params.stop_strs or params.stop_regex_strs or req.tokenizer is not None:
            return False
        ended_by = () if params.ignore_eos else (params.stop_token_ids, req.eos_token_ids)
        ends = frozenset(token for tokens in ended_by for token in tokens or ())
        req.__dict__[_ENDS] = ends
    return min(tokens) >= 0 and max(tokens) < req.vocab_size and ends.isdisjoint(tokens)

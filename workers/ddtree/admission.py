"""What a request may ask of an engine that decodes with DDTREE.

Whatever would have to differ from node to node of a tree and does not yet is refused when the
request arrives. Nothing is relaxed silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overstory.workers.ddtree import ALGORITHM, EARLIER_OUTPUT
from overstory.workers.ddtree.grammar import BACKEND, constrained
from overstory.workers.policy import OPT_OUT

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_MAX_BIAS = 1e6
"""Beyond any use, and far from the infinities that no sampler can draw from."""


def refusal(req: Req, grammar_backend: str = BACKEND) -> str | None:
    """Why DDTREE cannot serve this request exactly, or None if it can.

    Args:
        req: SGLang's request.
        grammar_backend: the engine's.
    """
    params = req.sampling_params
    for token, bias in (params.logit_bias or {}).items():
        if not abs(bias) <= _MAX_BIAS:
            return f"logit_bias of token {token} is {bias}; it must be within ±{_MAX_BIAS:g}"
    earlier = (params.custom_params or {}).get(EARLIER_OUTPUT, 0)
    if type(earlier) is not int or not 0 <= earlier <= len(req.origin_input_ids):
        return (
            f"custom_params.{EARLIER_OUTPUT} is {earlier!r}; it must be a number of prompt tokens, "
            f"here 0 to {len(req.origin_input_ids)}"
        )
    wish = (params.custom_params or {}).get(OPT_OUT, True)
    if type(wish) is not bool:
        return f"custom_params.{OPT_OUT} is {wish!r}; it must be true or false"
    if constrained(req) and grammar_backend != BACKEND:
        return (
            f"{constrained(req)} with {ALGORITHM} needs the engine's grammar_backend to be "
            f"{BACKEND}, got {grammar_backend}: each node of a draft tree has a grammar state of "
            "its own, which must be taken back"
        )
    if constrained(req) and req.require_reasoning:
        return f"grammars gated by a reasoning parser are not supported with {ALGORITHM}"
    if req.return_hidden_states:
        return f"return_hidden_states is not supported with {ALGORITHM}"
    if req.custom_logit_processor is not None:
        return f"custom_logit_processor is not supported with {ALGORITHM}"
    if req.input_embeds is not None:
        return f"input_embeds are not supported with {ALGORITHM}: send token ids"
    return None


def check_request(
    original: Callable[[Req, bool], str | None], req: Req, enable_overlap: bool
) -> str | None:
    """AROUND hook on SGLang's ``validate_dflash_request``: error text for the client, or None."""
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    if arguments.speculative_algorithm != ALGORITHM:
        return original(req, enable_overlap)
    return refusal(req, str(arguments.grammar_backend))


_KEPT_BACK = 4
"""Positions below the longest request that SGLang takes no prompt of (``max_req_input_len`` is 5
less than its longest request; a prompt must be below it)."""


def allow_earlier_output(
    original: Callable[[Req, int, bool], str | None],
    req: Req,
    max_req_input_len: int,
    allow_auto_truncate: bool,
) -> str | None:
    """AROUND hook on SGLang's ``validate_input_length``: output of an earlier replica may reach
    into the positions that are kept back from prompts, as output does."""
    earlier = (req.sampling_params.custom_params or {}).get(EARLIER_OUTPUT, 0)
    more = min(earlier, _KEPT_BACK) if type(earlier) is int else 0
    return original(req, max_req_input_len + more, allow_auto_truncate)

"""Log-probabilities of the tokens that a request is given, from the logits they were drawn from.

They are those of SGLang: of the adjusted logits (penalties, bias), divided by the request's
temperature unless ``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set, before top-k, top-p and min-p. First
tokens, plain decoding and all rows of a tree use the same formula, so that they differ by the
rounding of the forward only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor, compute_spec_v2_logprobs

from overstory.kernels.reference import Accepted


def put_logprobs(
    logits_output: Any,
    info: Any,
    top_logprobs_nums: list[int],
    token_ids_logprobs: Sequence[list[int] | None],
    tokens: torch.Tensor,
) -> None:
    """Into ``logits_output``: of ``tokens`` [bs], one row of adjusted logits per request."""
    logits = logits_output.next_token_logits
    unscaled = info.is_all_greedy or envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get()
    scaled = logits if unscaled else logits / info.temperatures
    OutputLogprobProcessor().compute_logprobs(
        torch.log_softmax(scaled, dim=-1), top_logprobs_nums, token_ids_logprobs, tokens
    ).write_output_to(logits_output)


def put_path_logprobs(
    batch: Any, logits_output: Any, targets: torch.Tensor, accepted: Accepted
) -> None:
    """Into ``logits_output``: of the tokens that each accepted path hands out.

    Args:
        batch: the running batch of bs requests.
        logits_output: adjusted logits [bs * n, V] of all rows.
        targets: [bs * n], the token drawn after each row.
        accepted: the walk, width columns; what is put for columns beyond a path is not read.
    """
    bs, width = accepted.rows.shape
    n = targets.shape[0] // bs
    first_row = torch.arange(bs, device=targets.device).unsqueeze(1) * n
    compute_spec_v2_logprobs(
        batch, logits_output, targets, accepted.rows.clamp(min=0) + first_row, width - 1
    )

"""What each request of a batch asks of its logits, with what it has put out so far.

The output is counted here, in the order of the forwards, and not read from SGLang's requests: under
overlap scheduling those learn a step's tokens only after the next step was launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from overstory.kernels.reference import EarlyEnd, Penalties, Tree, adjust_nodes
from overstory.workers.ddtree import EARLIER_OUTPUT

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RequestRules:
    """The rules of one request that asks for any, and its output.

    Made when SGLang builds the request's prefill batch, again for each chunk and after each
    retraction: then, and only then, its ``output_ids`` are complete. From there on `append` keeps
    count, and runs where the forwards run.
    """

    def __init__(
        self,
        frequency: float,
        presence: float,
        repetition: float,
        output: Sequence[int],
        ends: Sequence[int],
        first_end: int,
        biased: bool,
    ) -> None:
        """``first_end`` is the first absolute position whose row may draw one of ``ends``."""
        self.penalties = (frequency, presence, repetition)
        self.ends = list(ends)
        self.first_end = first_end
        self._biased = biased
        self._output = list(output)
        self._counts: torch.Tensor | None = None

    @classmethod
    def of(cls, req: Req) -> RequestRules | None:
        """The rules of a request; None if it asks for none."""
        params = req.sampling_params
        rules = cls(
            float(params.frequency_penalty),
            float(params.presence_penalty),
            float(params.repetition_penalty),
            _output_of(req),
            _ends_of(req) if params.min_new_tokens else (),
            len(req.origin_input_ids) - 1 + params.min_new_tokens,
            bool(params.logit_bias),
        )
        return rules if rules.penalised or rules.ends or rules._biased else None

    @property
    def penalised(self) -> bool:
        """Whether the output matters."""
        return self.penalties != (0.0, 0.0, 1.0)

    def counts(self, vocabulary: int, device: torch.device) -> torch.Tensor:
        """[V] int32, how often each token is in the output."""
        if self._counts is None:
            output = torch.tensor(self._output, dtype=torch.int64, device=device)
            self._counts = torch.bincount(output, minlength=vocabulary).to(torch.int32)
        return self._counts

    def append(self, tokens: torch.Tensor) -> None:
        """Tokens [width] that a forward has added to the output; -1 is none."""
        if self._counts is not None:
            self._counts.scatter_add_(0, tokens.clamp(min=0), (tokens >= 0).to(torch.int32))


def adjust(
    logits: torch.Tensor,
    rules: Sequence[RequestRules | None],
    bias: torch.Tensor | None,
    tree: Tree,
    positions: torch.Tensor,
) -> None:
    """Apply the rules to ``logits`` [bs * n, V] in place.

    Args:
        rules: of the bs requests.
        bias: [bs, V] logit bias, if any request has one.
        tree: n rows per request.
        positions: [bs * n] int64, absolute positions of the rows.
    """
    ruled = [i for i, of_request in enumerate(rules) if of_request is not None]
    if not ruled:
        return
    bs, n = tree.tokens.shape
    some = torch.tensor(ruled, device=logits.device)
    every = [of_request for of_request in rules if of_request is not None]
    by_request = logits.view(bs, n, -1)
    shape = (len(ruled) * n, logits.shape[1])
    adjusted = adjust_nodes(
        by_request[some].view(shape),
        _of_requests(tree, some),
        positions.view(bs, n)[some].view(-1),
        _penalties(every, logits),
        _early_end(every, logits),
        None if bias is None else bias[some],
    )
    by_request[some] = adjusted.view(len(ruled), n, -1).to(logits.dtype)


def _of_requests(tree: Tree, some: torch.Tensor) -> Tree:
    return Tree(
        tree.tokens[some],
        tree.parents[some],
        tree.depths[some],
        tree.ranks[some],
        tree.sizes[some],
    )


def _penalties(rules: Sequence[RequestRules], logits: torch.Tensor) -> Penalties | None:
    if not any(of_request.penalised for of_request in rules):
        return None
    device, vocabulary = logits.device, logits.shape[1]
    none = torch.zeros(vocabulary, dtype=torch.int32, device=device)
    counts = [
        of_request.counts(vocabulary, device) if of_request.penalised else none
        for of_request in rules
    ]
    values = torch.tensor([of_request.penalties for of_request in rules], device=device)
    frequency, presence, repetition = values.unbind(dim=1)
    return Penalties(frequency, presence, repetition, torch.stack(counts))


def _early_end(rules: Sequence[RequestRules], logits: torch.Tensor) -> EarlyEnd | None:
    if not any(of_request.ends for of_request in rules):
        return None
    tokens = torch.zeros(len(rules), logits.shape[1], dtype=torch.bool)
    for i, of_request in enumerate(rules):
        tokens[i, of_request.ends] = True
    first = torch.tensor([of_request.first_end for of_request in rules])
    return EarlyEnd(tokens.to(logits.device), first.to(logits.device))


def _output_of(req: Req) -> list[int]:
    prompt = req.origin_input_ids
    earlier = (req.sampling_params.custom_params or {}).get(EARLIER_OUTPUT, 0)
    return [*prompt[len(prompt) - earlier :], *req.output_ids]


def _ends_of(req: Req) -> list[int]:
    """The tokens that SGLang ends the request at (`Req._check_token_based_finish`)."""
    ends = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ends |= {req.tokenizer.eos_token_id} - {None}
        ends |= set(req.tokenizer.additional_stop_token_ids or ())
    return sorted(token for token in ends if 0 <= token < req.vocab_size)

"""Structured output: each node of a tree is masked in its own grammar state.

A request's matcher stands behind its last token handed out, the tree's root: SGLang lets no step
of a batch with grammars start before the last one's tokens are known. From there a walk over the
tree accepts each node's token, takes down what the grammar allows next, and takes the token back.
Where a node's token is not allowed, its parent's mask forbids it, so that acceptance never gets
there.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch

from overstory.workers.ddtree import EARLIER_OUTPUT

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from overstory.kernels.reference import Tree

CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Sampling parameters that make a grammar."""

BACKEND = "xgrammar"
"""SGLang's grammar backend whose matchers can be taken back along a tree, as tested here."""


def constrained(req: Req) -> str | None:
    """Which of `CONSTRAINTS` a request asks for."""
    for name in CONSTRAINTS:
        if getattr(req.sampling_params, name, None) is not None:
            return name
    return None


def mask_nodes(batch: ScheduleBatch, tree: Tree, logits: torch.Tensor) -> None:
    """Set to -inf, in place, what the grammars forbid after each row of ``logits`` [bs * n, V]."""
    if not batch.has_grammar:
        return
    from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

    mask = build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=GrammarTree.from_device(tree.first_child, tree.next_sibling, tree.tokens),
        sampling_info=batch.sampling_info,
        device=logits.device,
        barrier=None,
    )
    if mask is not None:
        apply_mask(mask, logits)


def apply_mask(mask: Any, logits: torch.Tensor) -> None:
    """SGLang's grammar mask onto ``logits`` [rows, V], in place.

    Where a grammar has come to a dead end (no token of this vocabulary goes on), nothing is
    forbidden: what is drawn there does not fit, and SGLang aborts that request alone. A row
    without any token could not be drawn from, which would end the engine.
    """
    mask.apply(logits)
    logits[torch.isneginf(logits).all(dim=1)] = 0.0


def catch_up(req: Req) -> None:
    """Take a request's matcher past the output of an earlier replica, before its first forward."""
    earlier = _earlier(req)
    grammar: Any = req.grammar
    if not earlier or grammar is None or req.output_ids or grammar.accepted_tokens:
        return
    for token in req.origin_input_ids[-earlier:]:
        if not grammar.matcher.accept_token(token):
            from sglang.srt.managers.schedule_batch import FINISH_ABORT

            req.to_finish = FINISH_ABORT(
                f"the last {earlier} tokens of the prompt do not fit the {constrained(req)}",
                HTTPStatus.BAD_REQUEST,
                "BadRequestError",
            )
            return
        grammar.accepted_tokens.append(token)


def with_backend(original: Callable[[Any, Req], bool], self: Any, req: Req) -> bool:
    """AROUND hook on SGLang's ``GrammarManager.process_req_with_grammar``: an engine without a
    tokenizer gets its grammar backend with the first request that needs one.

    The backend reads the tokenizer of the model's folder, which takes a moment, alike on all ranks.

    Returns:
        whether the request waits for its grammar.
    """
    arguments = self.server_args
    if constrained(req) and req.sampling_params.min_new_tokens:
        req.set_finish_with_abort(
            f"min_new_tokens is not supported with {constrained(req)}: where the text is complete, "
            "only an end token is left"
        )
        return False
    if constrained(req) and _earlier(req) and arguments.grammar_backend != BACKEND:
        req.set_finish_with_abort(
            f"{EARLIER_OUTPUT} with {constrained(req)} needs grammar_backend {BACKEND}, "
            f"got {arguments.grammar_backend}"
        )
        return False
    missing = self.grammar_backend is None and arguments.skip_tokenizer_init
    if constrained(req) and missing and arguments.grammar_backend != "none":
        try:
            self.grammar_backend = _make_backend(self.scheduler, arguments)
        except (OSError, ValueError) as error:
            req.set_finish_with_abort(
                f"{constrained(req)} needs the model's tokenizer, which cannot be read: {error}"
            )
            return False
    return original(self, req)


def _earlier(req: Req) -> int:
    return int((req.sampling_params.custom_params or {}).get(EARLIER_OUTPUT, 0))


def _make_backend(scheduler: Any, arguments: Any) -> Any:
    from sglang.srt.constrained.base_grammar_backend import create_grammar_backend
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    tokenizer = get_tokenizer(
        arguments.tokenizer_path,
        tokenizer_mode=arguments.tokenizer_mode,
        trust_remote_code=arguments.trust_remote_code,
        revision=arguments.revision,
        tokenizer_backend=arguments.tokenizer_backend,
    )
    model = scheduler.model_config
    return create_grammar_backend(
        arguments,
        tokenizer,
        model.vocab_size,
        model.hf_eos_token_id,
        think_end_ids=model.think_end_ids,
    )

"""The one sampler: every token of a request comes from here, whatever path it was computed on.

The first token after prefill, plain decoding, chain and tree all draw with `sample_nodes`, whose
noise depends on the request's seed and the row's absolute position alone. So the same seed gives
the same text under every tree policy, in every batch, and when a request is computed anew from its
middle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from overstory.kernels.ops import sample_nodes
from overstory.kernels.reference import Tree
from overstory.workers.ddtree import ALGORITHM
from overstory.workers.ddtree.device_trees import chain_rows
from overstory.workers.ddtree.grammar import catch_up
from overstory.workers.ddtree.rules import adjust

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs

    from overstory.workers.ddtree.sampling_info import RuledSamplingInfo

SEED_BITS = 31
"""Drawn seeds fit every integer type on their way through clients and engines."""

_INT64_MAX = (1 << 63) - 1


def request_seed(given: int | None, rid: str, engine_seed: int) -> int:
    """Seed of a request: the one it came with, else one derived from its id.

    SGLang gives each request (and each of n samples) an id of its own and broadcasts it with the
    request, so all ranks of a replica derive the same seed without talking.

    Args:
        given: ``sampling_seed`` of the request, if any; taken modulo 2**63.
        rid: the request's id.
        engine_seed: ``random_seed`` of the engine, alike on its ranks and new at every start.
    """
    if given is not None:
        return int(given) & _INT64_MAX
    digest = hashlib.blake2b(f"{engine_seed}:{rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def seeds_of(batch: ScheduleBatch, engine_seed: int) -> torch.Tensor:
    """[bs] int64 seeds, kept with each request from its first batch on."""
    seeds = []
    for req in batch.reqs:
        params = req.sampling_params
        params.sampling_seed = request_seed(params.sampling_seed, req.rid, engine_seed)
        seeds.append(params.sampling_seed)
    return torch.tensor(seeds, dtype=torch.int64)


def draw(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor, rows: int = 1
) -> torch.Tensor:
    """The target's token after each row.

    Args:
        logits: [bs * rows, V]; the requests' rules and masks have been applied.
        info: parameters of the bs requests, with ``sampling_seed`` set.
        positions: [bs * rows] int64, absolute positions of the rows.
        rows: rows per request.

    Returns:
        [bs * rows] int64.
    """
    if info.is_all_greedy:
        return torch.argmax(logits, dim=-1)
    parameters = (
        info.temperatures.view(-1),
        info.top_ks,
        info.top_ps,
        info.min_ps,
        info.sampling_seed,
    )
    if rows > 1:
        parameters = tuple(values.repeat_interleave(rows) for values in parameters)
    filters = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    return sample_nodes(logits, *parameters, positions.to(torch.int64), filters=filters)


def serves(arguments: ServerArgs) -> bool:
    """Whether an engine samples here: with DDTREE, and without speculation unless it asks for more.

    Under DP attention the ranks of a tensor-parallel group hold different requests; deterministic
    inference has a sampler of its own.
    """
    if arguments.speculative_algorithm is not None:
        return bool(arguments.speculative_algorithm == ALGORITHM)
    return not (arguments.enable_dp_attention or arguments.enable_deterministic_inference)


def keep_requests(result: Any, cls: type, batch: ScheduleBatch, vocab_size: int) -> Any:
    """AFTER hook on ``SamplingBatchInfo.from_schedule_batch``: seeds, which SGLang drops there, and
    rules.

    SGLang's own filter and merge of batches carry both along from here on.
    """
    del cls, vocab_size
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    if not serves(arguments):
        return result
    from overstory.workers.ddtree.sampling_info import RuledSamplingInfo

    for req in batch.reqs:
        catch_up(req)
    seeds = seeds_of(batch, arguments.random_seed)
    result.sampling_seed = seeds.to(batch.device, non_blocking=True)
    return RuledSamplingInfo.around(result, batch.reqs)


def without_penalizers(original: Callable[[Any], bool], self: Any) -> bool:
    """AROUND hook on SGLang's ``_BatchedPenalizer.prepare_if_required``: none is where the one
    sampler applies penalties.

    SGLang's take what they count from the requests, which under overlap scheduling are a step
    behind; they forget the output at a retraction; in a tree they are the same for every node.
    """
    from sglang.srt.runtime_context import get_server_args

    return not serves(get_server_args()) and original(self)


def allow_min_tokens(
    original: Callable[..., None],
    tokenizer: Any,
    stop_strs: Any,
    stop_regex_strs: Any,
    min_new_tokens: int = 0,
) -> None:
    """AROUND hook on SGLang's ``raise_if_tokenizer_required``: `RequestRules` knows the end tokens
    without a tokenizer, where the engine samples here."""
    from sglang.srt.runtime_context import get_server_args

    ours = serves(get_server_args())
    original(tokenizer, stop_strs, stop_regex_strs, 0 if ours else min_new_tokens)


def apply_rules(
    logits: torch.Tensor, info: RuledSamplingInfo, tree: Tree, positions: torch.Tensor
) -> None:
    """Adjust ``logits`` [bs * n, V] in place for what each request asks at each row of its tree."""
    if any(rules is not None for rules in info.rules):
        adjust(logits, info.rules, info.logit_bias, tree, positions)


def note_output(info: RuledSamplingInfo, tokens: torch.Tensor) -> None:
    """Tokens [bs, width] that the requests have put out by this forward; -1 is none."""
    for i, rules in enumerate(info.rules):
        if rules is not None:
            rules.append(tokens[i])


def sample_last_rows(
    original: Callable[..., torch.Tensor],
    self: Any,
    logits_output: Any,
    sampling_info: RuledSamplingInfo,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int]],
    positions: torch.Tensor,
) -> torch.Tensor:
    """AROUND hook on SGLang's ``Sampler.forward``: one row per request, prefill or plain decode.

    Returns:
        [bs] int64 tokens, decided on rank 0 of the tensor-parallel group. With ``return_logprob``
        the log-probabilities are put into ``logits_output``.
    """
    from sglang.srt.runtime_context import get_server_args

    ours = serves(get_server_args())
    if ours:
        logits = logits_output.next_token_logits
        apply_rules(logits, sampling_info, _lone_rows(positions), positions)
    if not ours or any(sampling_info.return_sampling_masks or []):
        return original(
            self,
            logits_output,
            sampling_info,
            return_logprob,
            top_logprobs_nums,
            token_ids_logprobs,
            positions,
        )
    from overstory.workers.ddtree.decisions import DecisionGroup
    from overstory.workers.ddtree.logprobs import put_logprobs

    logits = self._preprocess_logits(logits, sampling_info)
    tokens = DecisionGroup().ints(
        lambda: draw(logits, sampling_info, positions), (logits.shape[0],), logits.device
    )
    note_output(sampling_info, tokens.unsqueeze(1))
    if return_logprob:
        put_logprobs(logits_output, sampling_info, top_logprobs_nums, token_ids_logprobs, tokens)
    return tokens


def bias_scores(
    self: Any, logits_output: Any, sampling_info: SamplingBatchInfo, *_more: Any, **_named: Any
) -> None:
    """BEFORE hook on SGLang's ``Sampler.compute_logprobs_only``: scores of a prompt, without a draw
    and thus without output, for which `RuledSamplingInfo` has kept SGLang from adding the bias."""
    from sglang.srt.runtime_context import get_server_args

    del self
    if serves(get_server_args()) and sampling_info.logit_bias is not None:
        logits_output.next_token_logits.add_(sampling_info.logit_bias)


def _lone_rows(positions: torch.Tensor) -> Tree:
    """One row per request; which token it holds does not matter, for it is no drafted one."""
    none = positions.new_empty((len(positions), 0), dtype=torch.int64)
    return chain_rows(positions.new_zeros(len(positions), dtype=torch.int64), none)

"""What a step's tokens are sent off with, put together field by field, not request by request.

SGLang appends some thirty values for each request at each step. Requests in the middle of their
text, which ask for nothing but tokens, are all alike: here each list is made at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.runtime_context import get_serving

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_TOKENS_ALONE = "overstory_tokens_alone"
"""Attribute on SGLang's Req: whether it asks for nothing but its tokens, at each step."""


def stream(
    original: Callable[..., None],
    streamer: Any,
    reqs: list[Req],
    return_logprob: bool,
    skip_req: Req | None = None,
    is_idle_batch: bool = False,
) -> None:
    """AROUND hook on SGLang's ``SchedulerOutputStreamer._stream_output_generation``."""
    more = return_logprob or skip_req is not None or is_idle_batch or streamer.rust_server
    # An engine without speculation says nothing of drafts.
    plain = not (more or streamer.spec_algorithm.is_none())
    if not plain or not reqs or not all(map(_in_the_middle, reqs)):
        original(streamer, reqs, return_logprob, skip_req, is_idle_batch)
        return
    gathered = output_streamer._GenerationStreamAccumulator(
        return_logprob=False,
        return_hidden_states=False,
        return_routed_experts=False,
        return_indexer_topk=False,
        spec_algorithm=streamer.spec_algorithm,
        disaggregation_mode=streamer.disaggregation_mode,
        default_stream_interval=1,
        default_force_stream_interval=output_streamer.DEFAULT_FORCE_STREAM_INTERVAL,
        get_cached_tokens_details=streamer.get_cached_tokens_details,
    )
    _gather_new(gathered, reqs)
    _gather_known(gathered, reqs)
    payload = gathered.to_payload(dp_rank=streamer.ps.dp_rank, is_idle_batch=False)
    streamer.send_to_detokenizer.send_output(payload)


def _in_the_middle(req: Req) -> bool:
    """Whether all that a step has to say of ``req`` is its tokens: it has had its first ones."""
    if (
        req.finished_reason is not None
        or req.surr_offset is None
        or req.customized_info is not None
    ):
        return False
    alone: bool | None = req.__dict__.get(_TOKENS_ALONE)
    if alone is None:
        params = req.sampling_params
        interval = params.stream_interval or get_serving().stream_interval
        more = (
            params.stop_strs,  # a step's tokens may be held back for them
            req.return_hidden_states,
            req.return_routed_experts,
            req.return_indexer_topk,
            req.return_sampling_mask,
            req.mm_image_tokens,
            req.mm_audio_tokens,
            req.mm_video_tokens,
            req.multimodal_inputs,
        )
        alone = req.stream and interval == 1 and not any(more)
        req.__dict__[_TOKENS_ALONE] = alone
    return alone and req.read_offset is not None


def _gather_new(gathered: Any, reqs: list[Req]) -> None:
    """The tokens, once for the engine's front and once for who makes text of them."""
    output_ids, decode_ids, lengths = [], [], []
    for req in reqs:
        tokens = req.output_ids
        count = len(tokens)
        output_ids.append(tokens[req.send_token_offset :])
        req.send_token_offset = count
        decoded = req.surr_and_decode_ids
        decoded.extend(tokens[req.cur_decode_ids_len :])
        req.cur_decode_ids_len = count
        decode_ids.append(decoded[req.send_decode_id_offset :])
        req.send_decode_id_offset = len(decoded)
        lengths.append(count)
    gathered.output_ids, gathered.decode_ids_list = output_ids, decode_ids
    gathered.completion_tokens = lengths


def _gather_known(gathered: Any, reqs: list[Req]) -> None:
    """All else that is said of each request."""
    params = [req.sampling_params for req in reqs]
    none = [0] * len(reqs)
    gathered.rids = [req.rid for req in reqs]
    gathered.finished_reasons = [None] * len(reqs)
    gathered.http_worker_ipcs = [req.http_worker_ipc for req in reqs]
    gathered.decoded_texts = [req.decoded_text for req in reqs]
    gathered.read_offsets = [req.read_offset - req.surr_offset for req in reqs]
    gathered.skip_special_tokens = [one.skip_special_tokens for one in params]
    gathered.spaces_between_special_tokens = [one.spaces_between_special_tokens for one in params]
    gathered.no_stop_trim = [one.no_stop_trim for one in params]
    gathered.prompt_tokens = [len(req.origin_input_ids) for req in reqs]
    gathered.reasoning_tokens = [req.reasoning_tokens for req in reqs]
    gathered.cached_tokens = [req.cached_tokens for req in reqs]
    gathered.cached_tokens_details = list(map(gathered.get_cached_tokens_details, reqs))
    gathered.image_tokens, gathered.audio_tokens, gathered.video_tokens = none, none[:], none[:]
    gathered.retraction_counts = [req.retraction_count for req in reqs]
    gathered.time_stats = [req.time_stats for req in reqs]
    gathered.spec_verify_ct = [req.spec_verify_ct for req in reqs]
    gathered.spec_num_correct_drafts = [req.spec_num_correct_drafts for req in reqs]
    gathered.spec_num_block_accept_tokens = [req.spec_num_block_accept_tokens for req in reqs]
    gathered.spec_num_cap_tokens = [req.spec_num_cap_tokens for req in reqs]
    gathered.spec_correct_drafts_histogram = [req.spec_correct_drafts_histogram for req in reqs]
    gathered.spec_cap_lens_histogram = [req.spec_cap_lens_histogram for req in reqs]

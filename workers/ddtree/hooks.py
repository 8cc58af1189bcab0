"""Every change that DDTREE makes to SGLang, as patches with their proof."""

from __future__ import annotations

from overstory.workers.ddtree import algorithm
from overstory.workers.ddtree.admission import allow_earlier_output, check_request
from overstory.workers.ddtree.finish import finish_within_limit
from overstory.workers.ddtree.grammar import with_backend
from overstory.workers.ddtree.headroom import widen_rows
from overstory.workers.ddtree.lean_loop import copy_results, enough_slots, isolate, setting
from overstory.workers.ddtree.lean_stream import stream
from overstory.workers.ddtree.model_dtype import embeddings_in_model_dtype
from overstory.workers.ddtree.sampler import (
    allow_min_tokens,
    bias_scores,
    keep_requests,
    sample_last_rows,
    without_penalizers,
)
from overstory.workers.ddtree.step_record import count_step
from overstory.workers.policy.start import prepare
from overstory.workers.seam.patches import Patch, hook


def patches() -> list[Patch]:
    """The algorithm and its hooks, for `overstory.workers.seam.plugin` to install."""
    return [
        Patch(
            f"speculative algorithm {algorithm.ALGORITHM}",
            "SGLang does not know the algorithm",
            algorithm.register,
            algorithm.registered,
        ),
        hook(
            "sglang.srt.layers.sampler.Sampler.forward",
            "around",
            sample_last_rows,
            "first tokens would be drawn without the request's seed, and apart on each rank",
        ),
        hook(
            "sglang.srt.layers.sampler.Sampler.compute_logprobs_only",
            "before",
            bias_scores,
            "scores of prompts would lack the logit bias",
        ),
        hook(
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
            "after",
            keep_requests,
            "per-request seeds are dropped unless the whole engine is deterministic",
        ),
        hook(
            "sglang.srt.sampling.penaltylib.orchestrator._BatchedPenalizer.prepare_if_required",
            "around",
            without_penalizers,
            "penalties would be applied twice, and crash without a tokenizer",
        ),
        hook(
            "sglang.srt.sampling.sampling_params.raise_if_tokenizer_required",
            "around",
            allow_min_tokens,
            "min_new_tokens would need a tokenizer in the engine",
        ),
        hook(
            "sglang.srt.constrained.grammar_manager.GrammarManager.process_req_with_grammar",
            "around",
            with_backend,
            "engines without a tokenizer have no grammars",
        ),
        hook(
            "sglang.srt.speculative.dflash_utils.validate_dflash_request",
            "around",
            check_request,
            "requests that a tree cannot serve exactly would be served inexactly",
        ),
        hook(
            "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
            "after",
            embeddings_in_model_dtype,
            "a drafter of another dtype than bfloat16 would get bfloat16 embeddings",
        ),
        hook(
            "sglang.srt.managers.utils.validate_input_length",
            "around",
            allow_earlier_output,
            "sequences near the end of the context could not go on on another replica",
        ),
        hook(
            "sglang.srt.managers.scheduler.Scheduler.init_model_worker",
            "after",
            prepare,
            "the automatic policy would have no cost table",
        ),
        hook(
            "sglang.srt.managers.schedule_batch.Req.update_finish_state",
            "around",
            finish_within_limit,
            "text beyond a stop token when a step passes it and max_new_tokens together",
        ),
        hook(
            "sglang.srt.managers.scheduler_components.output_streamer"
            ".SchedulerOutputStreamer.stream_output",
            "before",
            count_step,
            "steps would never be counted",
        ),
        hook(
            "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
            "around",
            widen_rows,
            "slot rows are narrower than what a step reserves near the end of the context",
        ),
        hook(
            "sglang.srt.managers.scheduler.Scheduler._forward_isolation",
            "around",
            isolate,
            "each step would take the host some 30 us more",
        ),
        hook(
            "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
            "around",
            copy_results,
            "each step would take the host some 10 us more",
        ),
        hook(
            "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
            "around",
            enough_slots,
            "each step would take the host 5 us more, 20 us with 32 requests",
        ),
        hook(
            "sglang.srt.managers.scheduler_components.output_streamer"
            ".SchedulerOutputStreamer._stream_output_generation",
            "around",
            stream,
            "each step would take the host 2 us more for each request",
        ),
        hook(
            "sglang.srt.environ.EnvField.get",
            "around",
            setting,
            "each step would take the host some 10 us more",
        ),
    ]

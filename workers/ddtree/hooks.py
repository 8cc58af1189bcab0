"""Every change that DDTREE makes to SGLang, as patches with their proof."""

from __future__ import annotations

from overstory.workers.ddtree import algorithm
from overstory.workers.ddtree.admission import check_request
from overstory.workers.ddtree.finish import finish_within_limit
from overstory.workers.ddtree.headroom import widen_rows
from overstory.workers.ddtree.sampler import keep_seeds, sample_last_rows
from overstory.workers.ddtree.step_record import count_step
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
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
            "after",
            keep_seeds,
            "per-request seeds are dropped unless the whole engine is deterministic",
        ),
        hook(
            "sglang.srt.speculative.dflash_utils.validate_dflash_request",
            "around",
            check_request,
            "requests that a tree cannot serve exactly would be served inexactly",
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
    ]

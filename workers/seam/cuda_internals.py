"""Names inside SGLang that only CUDA engines rely on; part of `internals.entries`."""

from __future__ import annotations

from overstory.workers.seam.internals import Entry, Inline, Internal, NameList

_SRT = "sglang.srt"
_RUNNER = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_ATTENTION = f"{_SRT}.layers.attention"
_ALLOCATION = f"{_SRT}.mem_cache.allocation"
_WORKER = f"{_SRT}.speculative.dflash_worker_v2.DFlashWorkerV2"

#: The attention backend behind the name `overstory`.
BACKEND: tuple[Entry, ...] = (
    Internal(
        f"{_ATTENTION}.base_attn_backend.AttentionBackend",
        "how a backend plans forwards, captured ones too",
        "init_forward_metadata_out_graph init_forward_metadata_in_graph init_cuda_graph_state "
        "get_cuda_graph_seq_len_fill_value needs_cpu_seq_lens",
    ),
    Internal(
        f"{_ATTENTION}.triton_backend.TritonAttnBackend",
        "prefill of our backend where no request has a prefix",
        "init_forward_metadata forward_extend",
    ),
    Internal(
        f"{_ATTENTION}.triton_backend.TritonAttnBackend.__init__", "made by us", "model_runner"
    ),
    NameList(
        f"{_ATTENTION}.attention_registry.ATTENTION_BACKENDS",
        "the drafter's backend, and ours for prefill",
        holds="triton",
    ),
    Internal(f"{_SRT}.server_args.add_attention_backend_choices", "lets the name in", "choices"),
    Inline(
        f"{_SRT}.models.deepseek_common.attention_backend_handler"
        ".AttentionBackendRegistry.get_handler",
        "an unknown name takes Triton's MLA path: absorbed but for prefill without a prefix",
        'cls._handlers.get("triton")',
    ),
    Inline(
        f"{_SRT}.models.deepseek_common.attention_backend_handler.handle_attention_triton",
        "extends of which one has a prefix are absorbed, so that our kernel can take them",
        "and sum(forward_batch.extend_prefix_lens_cpu) == 0",
    ),
    Internal(
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch",
        "extends are cut by lengths that the host knows",
        "extend_prefix_lens_cpu extend_seq_lens_cpu req_pool_indices",
    ),
    NameList(
        f"{_SRT}.models.deepseek_common.utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",
        "backends on it get queries and keys in two parts",
        lacks="overstory",
    ),
    NameList(
        f"{_SRT}.speculative.draft_worker_common._SUPPORTED_DRAFT_BACKENDS",
        "others are replaced by FlashInfer",
        holds="triton",
    ),
    Inline(
        f"{_SRT}.managers.overlap_utils.decide_needs_cpu_seq_lens",
        "lengths stay on the device in every step",
        'getattr(b, "needs_cpu_seq_lens", True)',
    ),
)

#: CUDA graphs: one of SGLang's runners for each number of rows, shown to the model runner in turn.
GRAPHS: tuple[Entry, ...] = (
    Internal(
        f"{_RUNNER}.__init__", "made for each tier", "model_runner speculative_num_draft_tokens"
    ),
    Inline(
        f"{_RUNNER}.__init__",
        "rows of a runner",
        "self.captured_req_width = model_runner.decode_num_tokens_per_req(",
    ),
    Inline(
        f"{_RUNNER}.can_run_graph",
        "other rows than the runner's run without a graph",
        "and spec_info.num_tokens_per_req != self.captured_req_width",
    ),
    Inline(
        f"{_RUNNER}.load_batch",
        "the backend plans a padded batch before each replay",
        "attn_backend.init_forward_metadata_out_graph(fb_view)",
    ),
    Inline(
        f"{_RUNNER}.capture_one_shape",
        "the drafter's candidates are part of its graph",
        "for capture_hook in self.model_runner.capture_tail_hooks:",
    ),
    Inline(
        f"{_SRT}.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify",
        "looks the runner up in every step",
        "target_worker.model_runner.decode_cuda_graph_runner.load_batch(",
    ),
    Inline(
        f"{_SRT}.model_executor.model_runner.ModelRunner._forward_raw",
        "looks the runner up in every step",
        "ret = self.decode_cuda_graph_runner.execute(",
    ),
    Internal(
        f"{_SRT}.speculative.spec_registry.CustomSpecAlgo.get_num_tokens_per_req_for_target_verify",
        "overridden: the drafter's rows are its block's",
        "num_draft_tokens is_draft_worker",
    ),
    Inline(
        f"{_WORKER}.init_cuda_graphs",
        "what the overridden builder returns goes into the drafter's graph",
        "self._draft_sampler = self._maybe_build_draft_sampler()",
    ),
    Internal(
        f"{_SRT}.speculative.draft_worker_common.make_draft_sampler_capture_hook",
        "calls it with the drafter's output",
        "draft_sampler",
    ),
    Inline(
        f"{_SRT}.model_executor.input_buffers.share_input_buffer",
        "runners of other sizes never move each other's buffers",
        "key: _PoolKey = (name, new_buffer.numel(), new_buffer.dtype, new_buffer.device)",
    ),
)

#: Whole steps in one graph: the forwards as SGLang captures them, on tensors of ours.
STEPS: tuple[Entry, ...] = (
    Internal(
        f"{_RUNNER}.capture_prepare",
        "made-up batches to capture with",
        "size stream_idx num_tokens",
    ),
    Inline(
        f"{_RUNNER}.capture_one_shape",
        "what a captured forward does besides the model's",
        "attn_backend.init_forward_metadata_in_graph(forward_batch)",
    ),
    Inline(
        "sglang.kernels.ops.speculative.fused_kv_materialize"
        ".FusedKVMaterializeHelper._ensure_workspace",
        "workspaces that are replaced on demand, and kept for the graphs",
        "self._k_workspace = torch.empty(",
    ),
    Inline(
        f"{_SRT}.managers.scheduler.Scheduler._apply_war_barrier",
        "a step that names no event is waited for as a whole",
        "self.schedule_stream.wait_stream(self.forward_stream)",
    ),
)

#: Bookkeeping of slots, by kernels that Triton compiles for sizes: see `slot_rehearsal`.
SLOTS: tuple[Entry, ...] = (
    Inline(
        f"{_ALLOCATION}.assign_req_to_token_pool_func",
        "a kernel for each power of two of requests",
        "next_power_of_2(batch_size),",
    ),
    Internal(
        f"{_ALLOCATION}.write_cache_indices",
        "rehearsed with a prompt of no tokens",
        "out_cache_loc req_pool_indices_tensor req_pool_indices_cpu prefix_lens_tensor "
        "prefix_lens_cpu seq_lens_tensor seq_lens_cpu extend_lens_tensor extend_lens_cpu "
        "prefix_tensors req_to_token_pool",
    ),
    Inline(
        f"{_ALLOCATION}.alloc_for_spec_decode",
        "slots of a step, rehearsed with none",
        "last_loc = get_last_loc(",
    ),
    Inline(
        f"{_SRT}.mem_cache.allocator.token.TokenToKVPoolAllocator.alloc",
        "slots that are handed out begin anywhere",
        "select_index = self.free_pages[:need_size]",
    ),
    Internal(
        f"{_SRT}.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend",
        "rehearsed with no pages",
        "prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens "
        "num_new_pages",
    ),
)


def entries() -> tuple[Entry, ...]:
    """All of the above."""
    return BACKEND + GRAPHS + STEPS + SLOTS

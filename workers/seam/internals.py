"""Every name inside SGLang that Overstory relies on, why, and what shape it must have.

The one place to look at when SGLang moves: `check` resolves each entry and compares. To rely on
something new, add one line with its reason to the list it belongs to.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from overstory.workers.seam.errors import SeamError


@dataclass(frozen=True)
class Internal:
    """A function, class, method or value of SGLang.

    Attributes:
        path: dotted path.
        reason: what we use it for.
        needs: blank-separated parameters of a function, or attributes and fields of a class.
    """

    path: str
    reason: str
    needs: str = ""

    def problems(self) -> Iterator[str]:
        """What is not as we rely on it."""
        found = _resolve(self.path)
        if found is None:
            yield f"{self.path} is gone ({self.reason})"
            return
        missing = [name for name in self.needs.split() if name not in _names_of(found)]
        if missing:
            yield f"{self.path} has no {', '.join(missing)} ({self.reason})"


@dataclass(frozen=True)
class NameList:
    """One of SGLang's own lists of backend names, which decide things by name.

    Attributes:
        path: dotted path of a container of strings.
        reason: what being on the list means.
        holds: blank-separated names that must be on it.
        lacks: blank-separated names that must not be.
    """

    path: str
    reason: str
    holds: str = ""
    lacks: str = ""

    def problems(self) -> Iterator[str]:
        """What is not as we rely on it."""
        found = _resolve(self.path)
        if not isinstance(found, Container):
            yield f"{self.path} is gone or no list ({self.reason})"
            return
        for name in self.holds.split():
            if name not in found:
                yield f"{self.path} must have {name!r} ({self.reason})"
        for name in self.lacks.split():
            if name in found:
                yield f"{self.path} must not have {name!r} ({self.reason})"


@dataclass(frozen=True)
class Inline:
    """A decision written out inside a function of SGLang, such as a list of names in its body.

    Attributes:
        path: dotted path of the function or class.
        reason: what the decision means for us.
        text: a line of its source, spaces collapsed.
    """

    path: str
    reason: str
    text: str

    def problems(self) -> Iterator[str]:
        """What is not as we rely on it."""
        found = _resolve(self.path)
        source = "" if found is None else inspect.getsource(inspect.unwrap(found))
        if " ".join(self.text.split()) not in " ".join(source.split()):
            yield f"{self.path} no longer says {self.text!r} ({self.reason})"


Entry = Internal | NameList | Inline

_SRT = "sglang.srt"
_SCHED = f"{_SRT}.managers.scheduler.Scheduler"
_SPEC = f"{_SRT}.speculative"
_PARTS = f"{_SRT}.managers.scheduler_components"

#: The plugin system itself.
PLUGINS: tuple[Entry, ...] = (
    Internal(f"{_SRT}.plugins.load_plugins", "loads the plugin, applies the hooks"),
    Inline(f"{_SRT}.plugins.load_plugins", "hooks apply last", "HookRegistry.apply_hooks()"),
    Internal(
        f"{_SRT}.plugins.hook_registry.HookRegistry.register",
        "hooks",
        "target hook hook_type",
    ),
    Internal(f"{_SRT}.plugins.hook_registry.HookType", "hooks", "BEFORE AFTER AROUND REPLACE"),
    Inline(
        f"{_SRT}.plugins.hook_registry._wrap_fn",
        "`hook_taken` walks __wrapped__ and finds our function in a closure",
        "wrapper.__wrapped__ = original_fn",
    ),
    Inline(
        f"{_SRT}.managers.scheduler.run_scheduler_process",
        "spawned schedulers load the plugin",
        "load_plugins()",
    ),
)

#: The compiled kernel package and what decides whether SGLang uses it.
KERNELS: tuple[Entry, ...] = (
    Internal(
        f"{_SRT}.utils.common.is_intel_amx_backend_available",
        "False with the stand-in, so that SGLang takes its torch paths even on CPUs with AMX",
    ),
    Internal(f"{_SRT}.utils.common.is_cpu", "SGLANG_USE_CPU_ENGINE makes it True"),
    Internal(
        f"{_SRT}.mem_cache.allocation.assign_req_to_token_pool_func",
        "writes slots by the portable op of the same name",
        "req_pool_indices req_to_token start_offset end_offset out_cache_loc batch_size",
    ),
    Internal(
        "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func",
        "reads slots by the portable op of the same name",
        "req_pool_indices req_to_token start_offset end_offset batch_size draft_token_num device",
    ),
    Internal(
        f"{_SRT}.constrained.xgrammar_backend._allocate_token_bitmask",
        "replaced: pins memory",
        "vocab_size batch_size",
    ),
    Internal(
        f"{_SRT}.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        "replaced: refuses CPU tensors",
        "logits vocab_mask",
    ),
    Internal(
        f"{_SRT}.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        "replaced: calls a compiled op",
        "self",
    ),
    Inline(
        f"{_SRT}.mem_cache.memory_pool.MHATokenToKVPool._move_kv_cache_impl",
        "rows move by plain torch once we have set the flag",
        "if self.use_native_move_kv_cache:",
    ),
    Internal(
        f"{_SRT}.mem_cache.memory_pool.MLATokenToKVPool.move_kv_cache",
        "plain torch already",
        "tgt_loc src_loc",
    ),
    Internal(
        f"{_SRT}.layers.moe.fused_moe_native.moe_forward_native",
        "replaced: slow",
        "layer x topk_output moe_runner_config",
    ),
    Internal(
        f"{_SRT}.layers.layernorm.RMSNorm.forward_native",
        "hooked: slow",
        "self x residual post_residual_addition",
    ),
    Inline(
        f"{_SRT}.layers.layernorm.RMSNorm.__init__",
        "what the hook reads of a layer",
        "self.variance_epsilon = eps",
    ),
    Inline(
        f"{_SRT}.layers.quantization.unquant.UnquantizedFusedMoEMethod.forward_cpu",
        "the replaced function is what a CPU calls, and only for SiLU",
        "output = moe_forward_native(",
    ),
    Internal(
        f"{_SRT}.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
        "replaced: custom op without a CPU implementation",
        "self output input",
    ),
    Internal(
        f"{_SRT}.distributed.parallel_state.GroupCoordinator._all_gather_into_tensor",
        "what it is replaced by",
        "self output input",
    ),
    Internal(
        f"{_SRT}.utils.numa_utils.init_threads_binding",
        "hooked: refuses more ranks than NUMA nodes",
        "tp_rank tp_size",
    ),
    Internal(
        f"{_SRT}.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        "hooked: casts embeddings to bfloat16",
        "self forward_batch pp_proxy_tensors",
    ),
    Internal(f"{_SRT}.models.registry.import_model_classes", "skips disabled model modules"),
)

#: Attention: what our backend implements and reads.
ATTENTION: tuple[Entry, ...] = (
    Internal(
        f"{_SRT}.layers.attention.base_attn_backend.AttentionBackend",
        "our backend's base",
        "forward forward_extend forward_decode init_forward_metadata support_triton",
    ),
    Internal(
        f"{_SRT}.layers.attention.attention_registry.register_attention_backend",
        "puts our class behind a name",
        "name",
    ),
    Internal(
        f"{_SRT}.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry",
        "chooses absorbed MLA for our backend",
        "register get_handler",
    ),
    Internal(
        f"{_SRT}.models.deepseek_common.attention_forward_methods.forward_methods.AttnForwardMethod",
        "chooses absorbed MLA for our backend",
        "MLA",
    ),
    Internal(
        f"{_SRT}.layers.radix_attention.AttentionType",
        "a drafter's block attention is without order",
        "ENCODER_ONLY DECODER",
    ),
    Internal(
        f"{_SRT}.layers.radix_attention.RadixAttention.__init__",
        "layer fields that attention reads",
        "num_heads head_dim scaling num_kv_heads layer_id logit_cap v_head_dim attn_type "
        "sliding_window_size is_cross_attention",
    ),
    Internal(
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch",
        "what a forward is planned from",
        "forward_mode seq_lens req_pool_indices out_cache_loc spec_info extend_seq_lens "
        "extend_prefix_lens",
    ),
    Internal(
        f"{_SRT}.model_executor.forward_batch_info.ForwardMode",
        "what a forward is planned from",
        "is_idle is_decode is_target_verify",
    ),
    Internal(
        f"{_SRT}.speculative.dflash_info.DFlashVerifyInput",
        "a verify forward's rows and mask",
        "draft_token positions draft_token_num custom_mask",
    ),
    Internal(f"{_SRT}.mem_cache.memory_pool.KVWriteLoc", "writes KV rows"),
    Internal(
        f"{_SRT}.mem_cache.memory_pool.MLATokenToKVPool",
        "the target's KV",
        "set_kv_buffer get_key_buffer get_value_buffer",
    ),
    Internal(
        f"{_SRT}.mem_cache.memory_pool.MHATokenToKVPool",
        "the drafter's KV",
        "set_kv_buffer get_key_buffer get_value_buffer",
    ),
    Internal(
        f"{_SRT}.mem_cache.memory_pool.ReqToTokenPool",
        "each request's slots",
        "alloc free",
    ),
)

#: SGLang decides by backend NAME in these places; on a CPU ours has the name `torch_native`.
NAME_LISTS: tuple[Entry, ...] = (
    NameList(
        f"{_SRT}.server_args.ATTENTION_BACKEND_CHOICES",
        "names that the command line takes",
        holds="torch_native",
    ),
    NameList(
        f"{_SRT}.layers.attention.attention_registry.ATTENTION_BACKENDS",
        "names that a model runner can make",
        holds="torch_native",
    ),
    NameList(
        f"{_SRT}.speculative.draft_worker_common._SUPPORTED_DRAFT_BACKENDS",
        "others are replaced by FlashInfer; the plugin puts ours in on a CPU",
        holds="torch_native",
    ),
    NameList(
        f"{_SRT}.server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS",
        "prefix chunks by MHA; ours is absorbed MLA throughout",
        lacks="torch_native",
    ),
    NameList(
        f"{_SRT}.models.deepseek_common.attention_backend_handler.MHA_ONE_SHOT_SUPPORTED_BACKENDS",
        "prefill by MHA in one shot; ours is absorbed MLA throughout",
        lacks="torch_native",
    ),
    NameList(
        f"{_SRT}.speculative.dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS",
        "class names whose verify mask is dropped: a tree would be verified as a chain",
        lacks="OverstoryCpuAttention OverstoryAttention",
    ),
    NameList(
        f"{_SRT}.server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "names allowed with enable_deterministic_inference, which we do not use",
        lacks="torch_native",
    ),
    Inline(
        f"{_SRT}.utils.common.support_triton",
        "every other name launches Triton kernels",
        'return backend not in ["torch_native", "intel_amx"]',
    ),
    Inline(
        f"{_SRT}.mem_cache.allocation.get_last_loc",
        "every other name launches Triton kernels (on ROCm)",
        'uses_triton_dispatch = attn_backend not in ("ascend", "torch_native")',
    ),
    Inline(
        f"{_SRT}.arg_groups.speculative_hook._resolve_dflash_draft_attention_backend",
        "a second list of drafter backends, inside a function that we replace on a CPU",
        "supported_draft_backends = (",
    ),
    Inline(
        f"{_SRT}.arg_groups.speculative_hook._handle_dflash",
        "refuses a CPU; hooked",
        'if not (server_args.device.startswith("cuda") or server_args.device == "npu"):',
    ),
)

#: What the test harness and a rank use of the scheduler.
SCHEDULER: tuple[Entry, ...] = (
    Internal(
        f"{_SCHED}.__init__",
        "built directly",
        "server_args port_args gpu_id tp_rank moe_ep_rank pp_rank attn_cp_rank moe_dp_rank dp_rank",
    ),
    Internal(_SCHED, "run and inspected", "run_event_loop get_init_info flush_cache"),
    Inline(
        f"{_SCHED}.event_loop_normal",
        "one call per iteration",
        "recv_reqs = self.request_receiver.recv_requests()",
    ),
    Inline(
        f"{_SCHED}.event_loop_overlap",
        "one call per iteration",
        "recv_reqs = self.request_receiver.recv_requests()",
    ),
    Internal(
        f"{_PARTS}.request_receiver.SchedulerRequestReceiver",
        "where requests, leases and tests enter",
        "recv_requests _pull_raw_reqs",
    ),
    Internal(f"{_PARTS}.output_streamer.SchedulerOutputStreamer", "outputs", "send_to_detokenizer"),
    Internal(
        f"{_SRT}.managers.io_struct.TokenizedGenerateReqInput",
        "requests without a tokenizer",
        "rid input_ids sampling_params return_logprob logprob_start_len stream",
    ),
    Internal(
        f"{_SRT}.managers.io_struct.BatchTokenIDOutput",
        "new token ids, when skip_tokenizer_init is set",
        "rids output_ids finished_reasons cached_tokens",
    ),
    Internal(f"{_SRT}.runtime_context.publish", "before a Scheduler is built", "server_args role"),
)

#: Used by `overstory.workers.ddtree`.
DDTREE: tuple[Entry, ...] = (
    Internal(
        f"{_SPEC}.spec_info.SpeculativeAlgorithm",
        "registers the algorithm; its future map is borrowed",
        "register from_string create_future_map DFLASH",
    ),
    Internal(
        f"{_SPEC}.spec_registry.CustomSpecAlgo",
        "base of the registry entry; lacks three names that the scheduler calls",
        "is_dflash_family supports_target_verify_for_draft handle_server_args",
    ),
    Internal(f"{_SPEC}.spec_registry.get_spec", "sees that the name is ours", "name"),
    Internal(
        f"{_SPEC}.dflash_worker_v2.DFlashWorkerV2.__init__",
        "the worker's base: loads the drafter, keeps its KV",
        "server_args gpu_id ps nccl_port target_worker",
    ),
    Internal(
        f"{_SPEC}.dflash_worker_v2.DFlashWorkerV2",
        "the worker's base: loads the drafter, keeps its KV",
        "forward_batch_generation on_verify_complete_cpu _make_next_draft_input_decode",
    ),
    Internal(
        f"{_SPEC}.dflash_worker_v2.DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
        "writes the accepted rows' drafter KV",
        "target_hidden cache_loc cache_loc_2d positions commit_lens",
    ),
    Internal(
        f"{_SRT}.model_executor.forward_batch_info.compute_position",
        "positions of a prefill's tokens",
        "attn_backend extend_prefix_lens extend_seq_lens extend_seq_lens_sum",
    ),
    Internal(
        f"{_SRT}.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
        "log-probabilities of one row per request",
        "logprobs top_logprobs_nums token_ids_logprobs batch_next_token_ids",
    ),
    Internal(
        f"{_SRT}.layers.logprob_processor.compute_spec_v2_logprobs",
        "log-probabilities of accepted paths",
        "batch logits_output predict accept_index speculative_num_steps",
    ),
    Internal(
        f"{_SPEC}.dflash_info.DFlashVerifyInput.prepare_for_verify",
        "packages the verify forward",
        "batch target_worker",
    ),
    Internal(
        f"{_SPEC}.dflash_info_v2.DFlashDraftInputV2",
        "what a running batch carries",
        "bonus_tokens new_seq_lens prepare_for_decode filter_batch merge_batch future_indices",
    ),
    Internal(
        f"{_SRT}.mem_cache.allocation.alloc_for_spec_decode",
        "reserves a step's slots",
        "tree_cache req_to_token_pool reqs req_pool_indices cur_kv_lens cur_kv_lens_cpu "
        "nxt_kv_lens nxt_kv_lens_cpu num_needed_tokens batch",
    ),
    Inline(
        f"{_SRT}.mem_cache.allocation.alloc_for_spec_decode",
        "lengths may come as a list where slots are not handed out by pages",
        "req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, int(nxt_kv_lens_cpu[i]))",
    ),
    Internal(
        f"{_SRT}.managers.utils.GenerationBatchResult",
        "a step's result",
        "logits_output next_token_ids accept_lens can_run_cuda_graph next_draft_input "
        "speculative_num_draft_tokens new_seq_lens",
    ),
    Inline(
        f"{_SCHED}._forward_isolation",
        "done shorter: which fields come back",
        "{f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}",
    ),
    Inline(
        f"{_SCHED}.record_batch_in_overlap",
        "done shorter: what two forwards keep alive",
        "self.batch_record_buf[self.batch_record_ct] = [batch, attr_snapshot]",
    ),
    Internal(
        f"{_SRT}.managers.utils.GenerationBatchResult.copy_to_cpu",
        "hooked: leaves alone what is on the host already",
        "return_logprob return_hidden_states",
    ),
    Inline(
        f"{_SRT}.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        "not asked where there is room for all",
        "return self.token_to_kv_pool_allocator.available_size() >= num_tokens",
    ),
    Inline(
        f"{_SRT}.managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2",
        "the most that a request may want",
        "x = max(0, r.kv_committed_len + reserve - r.kv.kv_allocated_len)",
    ),
    Internal(
        f"{_SRT}.mem_cache.allocation_sizing.get_alloc_reserve_per_decode",
        "the most that a request may want",
    ),
    Internal(
        f"{_PARTS}.output_streamer.SchedulerOutputStreamer._stream_output_generation",
        "hooked: lists of a batch made at once",
        "reqs return_logprob skip_req is_idle_batch",
    ),
    Internal(
        f"{_PARTS}.output_streamer._GenerationStreamAccumulator",
        "what is said of each request",
        "rids http_worker_ipcs finished_reasons decoded_texts decode_ids_list read_offsets "
        "output_ids skip_special_tokens spaces_between_special_tokens no_stop_trim prompt_tokens "
        "reasoning_tokens completion_tokens cached_tokens cached_tokens_details image_tokens "
        "audio_tokens video_tokens spec_verify_ct spec_num_correct_drafts "
        "spec_num_block_accept_tokens spec_num_cap_tokens spec_correct_drafts_histogram "
        "spec_cap_lens_histogram retraction_counts time_stats to_payload",
    ),
    Inline(
        f"{_SRT}.environ.EnvField.get",
        "not asked again until the variable is set again",
        "value = os.getenv(self.name)",
    ),
    Inline(
        f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward",
        "done shorter",
        "return dataclasses.replace(self, penalizer_orchestrator=None)",
    ),
    Internal(
        f"{_SRT}.constrained.grammar_manager.GrammarManager.process_req_with_grammar",
        "hooked: a grammar backend without the engine's tokenizer",
        "req",
    ),
    Internal(
        f"{_SRT}.constrained.base_grammar_backend.create_grammar_backend",
        "the backend of such an engine",
        "server_args tokenizer vocab_size eos_token_ids think_end_ids",
    ),
    Internal(
        f"{_SPEC}.spec_utils.build_grammar_vocab_mask",
        "masks every node in its own grammar state",
        "reqs tree sampling_info device barrier",
    ),
    Internal(
        f"{_SPEC}.spec_utils.GrammarTree.from_device",
        "the tree's links, on the host",
        "retrieve_next_token retrieve_next_sibling draft_token",
    ),
    Inline(
        f"{_SRT}.managers.schedule_batch.ScheduleBatch.grammar_needs_sync",
        "matchers stand at the root when a step starts",
        "return self.has_grammar and not self.spec_algorithm.supports_grammar_overlap()",
    ),
    Internal(f"{_SRT}.layers.sampler.Sampler.forward", "hooked: seeds of first tokens"),
    Internal(
        f"{_SRT}.layers.sampler.Sampler.compute_logprobs_only",
        "hooked: logit bias of scores",
        "logits_output sampling_info",
    ),
    Internal(
        f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        "hooked: keeps per-request seeds and rules",
        "batch vocab_size",
    ),
    Internal(
        f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo",
        "carries the rules through filters, merges and the copy of a forward",
        "adjusted_filter_batch adjusted_merge_batch apply_logits_bias copy_for_forward "
        "grammar_mask logit_bias",
    ),
    Inline(
        f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward",
        "keeps our subclass and its rules",
        "return dataclasses.replace(self, penalizer_orchestrator=None)",
    ),
    Internal(
        f"{_SRT}.sampling.penaltylib.orchestrator._BatchedPenalizer.prepare_if_required",
        "hooked: SGLang's penalizers stay out",
    ),
    Internal(
        f"{_SRT}.sampling.sampling_params.raise_if_tokenizer_required",
        "hooked: min_new_tokens without a tokenizer",
        "tokenizer stop_strs stop_regex_strs min_new_tokens",
    ),
    Internal(
        f"{_SPEC}.dflash_utils.validate_dflash_request",
        "hooked: refuses what a tree cannot serve exactly",
    ),
    Internal(
        f"{_SRT}.managers.utils.validate_input_length",
        "hooked: output of an earlier replica is no prompt",
        "req max_req_input_len allow_auto_truncate",
    ),
    Internal(f"{_SCHED}.init_model_worker", "hooked: the cost table is measured", "self"),
    Internal(
        f"{_SRT}.managers.schedule_batch.ScheduleBatch.init_new",
        "made-up requests, to measure what steps cost",
        "reqs req_to_token_pool token_to_kv_pool_allocator tree_cache model_config enable_overlap "
        "spec_algorithm",
    ),
    Internal(
        f"{_SRT}.managers.schedule_batch.Req.update_finish_state",
        "hooked: nothing after a stop token",
    ),
    Internal(
        f"{_PARTS}.output_streamer.SchedulerOutputStreamer.stream_output",
        "hooked: counts a step before its tokens are sent",
    ),
    Inline(
        f"{_PARTS}.batch_result_processor.SchedulerBatchResultProcessor"
        ".process_batch_result_decode",
        "a step's tokens are appended between its acceptance and their sending",
        "req.output_ids.extend(next_token_id)",
    ),
    Internal(
        f"{_SRT}.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        "hooked: width of the slot rows",
        "server_args",
    ),
)

#: Used by rank actors: gate, digests, watchdogs.
RANK: tuple[Entry, ...] = (
    Internal(
        f"{_SRT}.entrypoints.engine._compute_parallelism_ranks",
        "ranks of an actor's scheduler",
        "server_args tp_rank",
    ),
    Internal(
        f"{_SRT}.managers.scheduler.configure_scheduler_process",
        "process set-up that a spawned scheduler gets",
        "server_args gpu_id tp_rank attn_cp_rank moe_dp_rank moe_ep_rank pp_rank dp_rank",
    ),
    Internal(
        f"{_PARTS}.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
        "hooked: leases enter in front of rank 0's requests",
        "self",
    ),
    Internal(
        f"{_PARTS}.request_receiver.SchedulerRequestReceiver.recv_requests",
        "hooked: leases are taken out again on every rank",
        "self",
    ),
    Inline(
        f"{_PARTS}.request_receiver.SchedulerRequestReceiver.recv_requests",
        "what rank 0 pulls is what all ranks get",
        "recv_reqs = self._broadcast_reqs_across_ranks(recv_reqs)",
    ),
    Internal(f"{_SCHED}.process_batch_result", "hooked: digests, drains", "batch result"),
    Internal(f"{_SCHED}.init_memory_pools", "hooked: phases", "self"),
    Internal(f"{_SCHED}.is_fully_idle", "an idle rank sleeps"),
    Inline(
        f"{_SCHED}.event_loop_normal",
        "says whether a prefill is under way",
        "self.cur_batch_for_debug = batch",
    ),
    Inline(f"{_SCHED}.event_loop_overlap", "as above", "self.cur_batch_for_debug = batch"),
    Inline(f"{_SCHED}.run_batch", "numbers forwards", "self.forward_ct += 1"),
    Inline(f"{_SCHED}.run_batch", "numbers forwards", "batch.forward_iter = self.forward_ct"),
    Inline(
        f"{_SCHED}.event_loop_overlap",
        "a drained result stays in the queue, marked, and is popped in its turn",
        "tmp_batch, tmp_result = self.result_queue.popleft()",
    ),
    Inline(f"{_SCHED}.event_loop_overlap", "as above", "if self.last_batch:"),
    Internal(
        f"{_PARTS}.ipc_channels.SchedulerIpcChannels",
        "sockets that an idle rank 0 sleeps on",
        "recv_from_tokenizer recv_from_rpc",
    ),
    Internal(f"{_SRT}.managers.schedule_batch.ScheduleBatch", "digests", "reqs forward_iter copy"),
    Inline(f"{_SRT}.managers.schedule_batch.Req.__init__", "digests", "self.kv_committed_len = 0"),
    Internal(
        f"{_SRT}.utils.watchdog.WatchdogRaw._watchdog_once",
        "replaced: would send SIGQUIT to the raylet",
        "self",
    ),
    Inline(
        f"{_SRT}.utils.stale_shm_cleanup.make_shm_name",
        "finds this process's shared memory by name, to take the name off",
        'return f"{_SGL_SHM_PREFIX}_{kind}_{os.getpid()}_{uuid.uuid4().hex[:8]}"',
    ),
    Internal(
        f"{_SRT}.utils.watchdog.WatchdogRaw.__init__",
        "what our watchdog reads",
        "get_counter is_active watchdog_timeout soft dump_info",
    ),
)

#: Used by relocation passes: every holder of slot numbers that `workers.defrag.holders` lists.
DEFRAG: tuple[Entry, ...] = (
    Internal(
        f"{_SRT}.mem_cache.allocator.token.TokenToKVPoolAllocator.__init__",
        "hooked: free slots are handed out in order",
        "size",
    ),
    Inline(
        f"{_SRT}.mem_cache.allocator.token.TokenToKVPoolAllocator.alloc",
        "sorts lazily where `need_sort` is set",
        "if self.need_sort and need_size > len(self.free_pages):",
    ),
    Inline(
        f"{_SRT}.mem_cache.allocator.token.TokenToKVPoolAllocator.free",
        "freed slots wait to be sorted in",
        "self.release_pages = torch.cat((self.release_pages, free_index))",
    ),
    Inline(
        f"{_SRT}.mem_cache.allocator.token.TokenToKVPoolAllocator.clear",
        "slots are 1..size",
        "1, self.size + 1, dtype=torch.int64, device=self.device",
    ),
    Inline(
        f"{_SRT}.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.free_group_end",
        "no group is open at a boundary",
        "self.is_not_in_free_group = True",
    ),
    Internal(
        f"{_SRT}.mem_cache.radix_cache.RadixCache",
        "root and nodes of the prefix cache",
        "match_prefix insert evict cache_finished_req cache_unfinished_req",
    ),
    Inline(
        f"{_SRT}.mem_cache.radix_cache.TreeNode.__init__",
        "slots of a cached text",
        "self.value: Optional[torch.Tensor] = None",
    ),
    Inline(
        f"{_SRT}.mem_cache.radix_cache.RadixCache.cache_unfinished_req",
        "a request's row begins with its cached prefix",
        "req.cache_protected_len = len(new_indices)",
    ),
    Internal(f"{_SRT}.mem_cache.chunk_cache.ChunkCache", "no prefix cache"),
    Inline(
        f"{_SRT}.managers.schedule_batch.Req.__init__",
        "a request's cached prefix",
        "self.prefix_indices: torch.Tensor = torch.empty((0,), dtype=torch.int64)",
    ),
    Inline(
        f"{_SRT}.mem_cache.memory_pool.ReqToTokenPool.__init__",
        "slot rows; how many are used",
        "self.free_slots = list(range(1, self._alloc_size))",
    ),
    Inline(
        f"{_SRT}.speculative.dflash_worker_v2.DFlashWorkerV2.alloc_memory_pool",
        "the drafter shares the target's slot rows unless it has a window",
        "None if self.use_compact_draft_cache else req_to_token_pool",
    ),
    Internal(f"{_SRT}.disaggregation.utils.DisaggregationMode", "no slots on the way", "NULL"),
    Inline(
        f"{_SRT}.constrained.grammar_manager.GrammarManager.__init__",
        "requests that wait for a grammar",
        "self.grammar_queue",
    ),
)

#: Used by the front half in the replica's process.
FRONT: tuple[Entry, ...] = (
    Internal(
        f"{_SRT}.entrypoints.engine.Engine._launch_subprocesses",
        "overridden: ranks are Ray actors; no detokenizer, no signal handlers",
        "server_args init_tokenizer_manager_func run_scheduler_process_func "
        "run_detokenizer_process_func",
    ),
    Inline(
        f"{_SRT}.entrypoints.engine.Engine.__init__",
        "called on the instance, with six results",
        ") = self._launch_subprocesses(",
    ),
    Internal(
        f"{_SRT}.entrypoints.engine.Engine.shutdown",
        "overridden: would kill every child of the process",
        "self",
    ),
    Internal(f"{_SRT}.entrypoints.engine.SchedulerInitResult", "ranks' infos", "scheduler_infos"),
    Internal(
        f"{_SRT}.entrypoints.engine.init_tokenizer_manager",
        "builds our subclass",
        "server_args port_args TokenizerManagerClass",
    ),
    Internal(
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager",
        "requests in, token ids out",
        "auto_create_handle_loop handle_loop generate_request abort_request",
    ),
    Inline(
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager",
        "holds the file through which rank 0 tells its load, whose name we take off",
        "self.load_snapshot_reader = create_load_snapshot_reader(",
    ),
    Internal(
        f"{_SRT}.managers.load_snapshot.ShmLoadSnapshotReader",
        "that file, mapped by the first reading",
        "read_all",
    ),
    Inline(
        f"{_SRT}.managers.load_snapshot.ShmLoadSnapshotReader.__init__",
        "where that file is",
        "self.path = path",
    ),
    Inline(
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager.generate_request",
        "a closed stream aborts its request",
        "self._discard_pending_req_states(obj, request_lifecycles)",
    ),
    Inline(
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager._handle_abort_req",
        "an echoed abort repeats the last token and has no prompt_tokens",
        "output_ids = [output_ids[-1]] if len(output_ids) > 0 else []",
    ),
    Internal(
        f"{_SRT}.server_args.PortArgs",
        "IPC names of one engine",
        "init_new tokenizer_ipc_name scheduler_input_ipc_name detokenizer_ipc_name rpc_ipc_name "
        "metrics_ipc_name nccl_port",
    ),
)


def entries() -> tuple[Entry, ...]:
    """All of the above, those of CUDA engines and of the hand-off."""
    from overstory.workers.seam import cuda_internals, handoff_internals

    here = PLUGINS + KERNELS + ATTENTION + NAME_LISTS + SCHEDULER + DDTREE + RANK + DEFRAG + FRONT
    return here + cuda_internals.entries() + handoff_internals.entries()


def problems() -> list[str]:
    """Everything that is not as we rely on it. Imports SGLang."""
    return [problem for entry in entries() for problem in entry.problems()]


def check() -> None:
    """Compares the installed SGLang with what we rely on. Call it with the plugin loaded.

    Raises:
        SeamError: names every difference.
    """
    found = problems()
    if found:
        raise SeamError(
            "the installed SGLang differs from what Overstory relies on:\n  " + "\n  ".join(found)
        )


def _resolve(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def _names_of(found: Any) -> set[str]:
    """Parameters of a function; attributes, annotations and fields of a class."""
    if not isinstance(found, type):
        return set(inspect.signature(inspect.unwrap(found)).parameters)
    names = {name for base in found.__mro__ for name in vars(base)}
    for base in found.__mro__:
        names |= set(inspect.get_annotations(base)) | set(_slots(base))
    if dataclasses.is_dataclass(found):
        names |= {field.name for field in dataclasses.fields(found)}
    return names


def _slots(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)

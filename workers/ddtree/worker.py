"""The DDTREE worker: one step is draft, verify, accept, commit. SGLang's scheduler drives it."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, compute_position
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from overstory.kernels.ops import device_time, tree_accept
from overstory.kernels.reference import Accepted, Tree
from overstory.workers import tree_policy
from overstory.workers.ddtree.algorithm import (
    CAPTURED_BACKEND,
    own_algorithm,
    starting_policy,
    wants_table,
)
from overstory.workers.ddtree.candidate_shares import CandidateShares, Shares, shares_of
from overstory.workers.ddtree.commit import TargetKv, extend_drafter
from overstory.workers.ddtree.decisions import DecisionGroup
from overstory.workers.ddtree.draft import Drafter, root_tree
from overstory.workers.ddtree.draft_input import DDTreeDraftInput
from overstory.workers.ddtree.drafter_config import read_drafter
from overstory.workers.ddtree.drafter_kv import StackedDrafterKv
from overstory.workers.ddtree.grammar import mask_nodes
from overstory.workers.ddtree.graph_tiers import (
    GraphTiers,
    captured_batches,
    largest_captured_batch,
)
from overstory.workers.ddtree.limits import StepLimits
from overstory.workers.ddtree.logprobs import put_path_logprobs
from overstory.workers.ddtree.sampler import apply_rules, draw, note_output
from overstory.workers.ddtree.step_graph import CudaRecorder, StepGraphs, StepShape, whole_steps
from overstory.workers.ddtree.step_record import (
    PENDING,
    Outcome,
    StageClock,
    StepRecord,
    clocks_captured_steps,
    on_host,
    times_steps,
)
from overstory.workers.ddtree.verify import RowLayout, row_layout, verify
from overstory.workers.policy.chooser import StepChooser, Told, spare_opted_out
from overstory.workers.policy.options import Options
from overstory.workers.scheduler_view import note_choice
from overstory.workers.seam.cuda_block_attention import BlockAttention
from overstory.workers.step_stats import STATS
from overstory.workers.tree_policy import AutoPolicy, TreePolicy

logger = logging.getLogger(__name__)

Publish = Callable[[torch.Tensor], None] | None


class DDTreeWorker(DFlashWorkerV2):
    """Target and drafter of one rank.

    SGLang's DFLASH worker supplies model loading, memory pools and the projection of hidden states
    into the drafter's KV (prefill included). The decode step is ours.
    """

    def __init__(
        self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any
    ) -> None:
        block_size = read_drafter(server_args.speculative_draft_model_path).block_size
        # The base class takes the row budget for the drafter's block size: show it the latter.
        drafter_args = copy.copy(server_args)
        drafter_args.override("ddtree.drafter", speculative_num_draft_tokens=block_size)
        own_algorithm().drafter_rows = block_size
        super().__init__(drafter_args, gpu_id, ps, nccl_port, target_worker)
        self.server_args = server_args
        self.limits = StepLimits(
            block_size=block_size,
            max_rows=int(server_args.speculative_num_draft_tokens),
            overlap=not server_args.disable_overlap_schedule,
            page_size=int(server_args.page_size),
        )
        self._group = DecisionGroup()
        self.last_position = int(self.model_runner.model_config.context_len) - 1
        self._drafter = Drafter(
            self.draft_model_runner,
            self.model_runner.model,
            self._group,
            block_size,
            int(self._mask_token_id),
            self.last_position,
        )
        PENDING.start()
        self.timed = times_steps(self.device)
        self.clocked = clocks_captured_steps(self.device)
        self._stacked_kv: StackedDrafterKv | None = None
        if self.device == "cpu" and StackedDrafterKv.fits(self.draft_model):
            self._stacked_kv = StackedDrafterKv(self.draft_model)
        self._target_kv: TargetKv | None = None
        self._tiers: GraphTiers | None = None
        self._step_graphs: StepGraphs | None = None
        self._window_offsets = torch.arange(self.limits.max_rows, device=self.device)
        self.chooser = StepChooser(
            Options.of(block_size, self.limits.max_nodes),
            self._group,
            self.device == "cpu",
            self._asks_for_parts,
        )
        self._shares = CandidateShares(self.chooser.options, self._group.decides)
        tree_policy.HOLDER.start(
            starting_policy(self.limits.max_rows, block_size),
            block_size,
            self.limits.max_nodes,
            automatic=wants_table(),
        )

    def init_attention_backends(self) -> None:
        """The drafter's: with the target on our kernels its blocks are split over their keys."""
        super().init_attention_backends()
        if self.server_args.attention_backend == CAPTURED_BACKEND:
            served = BlockAttention.install(self.draft_model_runner, self.limits.block_size)
            if not served:
                logger.warning(
                    "the drafter's attention stays SGLang's, which is slow at long contexts: it "
                    "has sliding windows, a type of other than 16 bits or large groups of heads"
                )

    def init_cuda_graphs(self) -> None:
        """Captures the drafter, and the target for each number of rows that policies may ask for.

        SGLang has captured the target for the most rows by now, if it captures at all.
        """
        super().init_cuda_graphs()
        self._tiers = GraphTiers.capture(self.model_runner, self.limits)
        if self._tiers is not None:
            self.chooser.captured(self._tiers.tier)
        if self._tiers is not None and whole_steps() and self._group.size == 1:
            self._step_graphs = StepGraphs(self, captured_batches(), CudaRecorder())

    def _maybe_build_draft_sampler(self) -> Any:
        """What SGLang runs at the end of the captured drafter: candidates, not a greedy token."""
        return self._drafter.candidates_in_graph(largest_captured_batch())

    def forward_batch_generation(
        self, batch: Any, on_publish: Publish = None, grammar_barrier: Any = None
    ) -> GenerationBatchResult:
        """One prefill forward or one decode step of ``batch``."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self.chooser.interrupted()
            PENDING.interrupted()
            return self._prefill(batch, on_publish)
        if batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        # The scheduler made seq_lens on another stream, and keeps it until two steps later.
        with torch.inference_mode():
            return self._step(batch, on_publish)

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """SGLang's DFLASH would sample greedily on a CPU, and warns; here the one sampler draws."""

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """The scheduler has read a step's acceptance and appends its tokens next."""
        PENDING.read(num_correct_drafts_per_req)

    def _append_target_hidden_sequential(
        self,
        ctx_hidden: torch.Tensor,
        ctx_positions: torch.Tensor,
        ctx_cache_loc: torch.Tensor,
    ) -> None:
        """Drafter KV of projected target states [rows, hidden] at their slots."""
        if self._stacked_kv is None:
            super()._append_target_hidden_sequential(ctx_hidden, ctx_positions, ctx_cache_loc)
            return
        keys, values = self._stacked_kv.project(ctx_hidden, ctx_positions)
        pool = self.draft_model_runner.token_to_kv_pool
        for i, layer in enumerate(self.draft_model.layers):
            pool.set_kv_buffer(layer.self_attn.attn, ctx_cache_loc, keys[i], values[i])

    def _prefill(self, batch: Any, on_publish: Publish) -> GenerationBatchResult:
        """One prefill forward; the drafter's KV of the prompt before the prefix cache can have it.

        Not the base class's: that one refuses to return log-probabilities.
        """
        started = time.perf_counter_ns()
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        starts, lengths = (
            torch.tensor(values, dtype=torch.int32, device=self.device)
            for values in (batch.prefix_lens, batch.extend_lens)
        )
        positions, _ = compute_position(
            self.model_runner.server_args.attention_backend, starts, lengths, sum(batch.extend_lens)
        )
        hidden, result.logits_output.hidden_states = result.logits_output.hidden_states, None
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden, cache_loc=batch.out_cache_loc, positions=positions
        )
        result.next_draft_input = self._draft_input(result.next_token_ids, batch.seq_lens)
        STATS.record_prefill(
            len(batch.reqs), sum(batch.extend_lens), time.perf_counter_ns() - started
        )
        return result

    def _step(self, batch: Any, on_publish: Publish) -> GenerationBatchResult:
        fixed = not isinstance(tree_policy.current(), AutoPolicy)
        policy, chosen_by = self.chooser.next(batch)
        self._shares.begin(policy, fixed)
        result = self.run_step(policy, batch, on_publish)
        note_choice(result, chosen_by)
        self.chooser.ended(batch)
        return result

    def run_step(
        self, policy: TreePolicy, batch: Any, on_publish: Publish = None
    ) -> GenerationBatchResult:
        """One decode step of ``batch`` under ``policy``: in one graph, or in parts."""
        shape = self._shape_of(policy, batch)
        if shape is None or self._step_graphs is None:
            return self.run_in_parts(policy, batch, on_publish)
        return self._run_captured(self._step_graphs, shape, policy, batch, on_publish)

    def runs_whole(self, policy: TreePolicy, batch: Any) -> bool:
        """Whether `run_step` of these is one graph."""
        return self._shape_of(policy, batch) is not None

    def captured_requests(self) -> list[int]:
        """Numbers of requests of the captured forwards; none without graphs."""
        return [] if self._tiers is None else captured_batches()

    def whole_step_requests(self) -> list[int]:
        """Numbers of requests of the captured whole steps; none without them."""
        return [] if self._step_graphs is None else self._step_graphs.sizes

    def _shape_of(self, policy: TreePolicy, batch: Any) -> StepShape | None:
        if self._step_graphs is None or self._tiers is None:
            return None
        rows = self._tiers.tier(1 + policy.drafted_nodes(self.limits.block_size))
        return self._step_graphs.shape_of(batch, policy, rows)

    def _asks_for_parts(self, batch: Any) -> bool:
        return self._step_graphs is not None and self._step_graphs.asks_for_parts(batch)

    def _run_captured(
        self,
        graphs: StepGraphs,
        shape: StepShape,
        policy: TreePolicy,
        batch: Any,
        on_publish: Publish,
    ) -> GenerationBatchResult:
        clock = StageClock()
        done = graphs.run(shape, batch, batch.spec_info.bonus_tokens)
        roots, seq_lens = done.roots, done.seq_lens
        if on_publish is not None:
            on_publish(seq_lens)
        else:  # the scheduler keeps them for the next step instead of publishing them now
            roots, seq_lens = roots.clone(), seq_lens.clone()
        clock.mark("step")
        outcome = self._outcome(batch, policy, done.tree, done.accepted, done.told)
        requests, times = tuple(batch.reqs), done.times if self.timed else None
        PENDING.add(
            StepRecord(str(policy), done.tree, requests, clock.stages, done.deepest, outcome, times)
        )
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=done.tokens,
            accept_lens=done.accept_lens,
            can_run_cuda_graph=True,
            next_draft_input=self._draft_input(roots, seq_lens),
            speculative_num_draft_tokens=done.width,
            new_seq_lens=seq_lens,
        )

    def run_in_parts(
        self, policy: TreePolicy, batch: Any, on_publish: Publish = None
    ) -> GenerationBatchResult:
        """As `run_step`, with a launch or more for each stage."""
        clock = StageClock()
        times = torch.empty(2, dtype=torch.int64, device=self.device) if self.timed else None
        if times is not None:
            device_time(times[:1])
        roots = batch.spec_info.bonus_tokens
        prefix = batch.seq_lens
        window = self.window_slots(prefix, batch.req_pool_indices)
        nodes = self._nodes(policy)
        tree = self._draft(policy, nodes, batch, roots, window, clock)
        tree = spare_opted_out(tree, batch.reqs)
        slots = window[:, : tree.rows]
        layout = self._layout(tree, prefix)
        verified = verify(
            self.target_worker, batch, tree, slots, layout, branches=policy.mode == "tree"
        )
        clock.mark("verify")
        accepted = self._accept(batch, tree, verified.logits_output, layout.positions)
        new_seq_lens = prefix + accepted.lengths + 1
        if on_publish is not None:
            on_publish(new_seq_lens)
        clock.mark("accept")
        if policy.mode == "tree":
            self._compact(slots, accepted)
        hidden = verified.logits_output.hidden_states
        extend_drafter(self, hidden, accepted, slots, prefix, self.last_position)
        clock.mark("commit")
        if times is not None:
            device_time(times[1:])
            times = on_host(times)
        deepest = on_host(tree.depths.amax(dim=1)) if tree.depths.is_cuda else None
        outcome = self._outcome(batch, policy, tree, accepted)
        requests = tuple(batch.reqs)
        PENDING.add(StepRecord(str(policy), tree, requests, clock.stages, deepest, outcome, times))
        return self._result(verified, accepted, new_seq_lens)

    def _outcome(
        self,
        batch: Any,
        policy: TreePolicy,
        tree: Tree,
        accepted: Accepted,
        told: Told | None = None,
    ) -> Outcome | None:
        """What is to be made of the step's walks, where somebody counts them."""
        of_rule = self.chooser.outcome(batch, policy, tree, accepted, told)
        return of_rule or self._shares.outcome(batch, policy, tree, accepted, told)

    def candidate_shares(self) -> Shares | None:
        """How often the drafter's candidates were right lately, under the kind of policy in force;
        None on ranks that do not count. From any thread."""
        if isinstance(tree_policy.current(), AutoPolicy):
            return shares_of(self.chooser.report())
        return self._shares.report()

    def _nodes(self, policy: TreePolicy) -> int:
        """Rows to draft for each request: with graphs as many as the next of them has room for."""
        nodes = policy.drafted_nodes(self.limits.block_size)
        if self._tiers is None:
            return nodes
        room = self._tiers.select(1 + nodes) - 1
        return room if policy.mode == "tree" else nodes

    def _layout(self, tree: Tree, prefix: torch.Tensor) -> RowLayout:
        with_words = getattr(self.model_runner.attn_backend, "takes_mask_words", False)
        return row_layout(tree, prefix, self.last_position, with_words)

    def _draft(
        self,
        policy: TreePolicy,
        nodes: int,
        batch: Any,
        roots: torch.Tensor,
        window: torch.Tensor,
        clock: StageClock,
    ) -> Tree:
        if policy.mode == "plain":
            return root_tree(roots)
        hidden = self._drafter.hidden(batch, roots, window)
        clock.mark("draft")
        bias, replayed = batch.sampling_info.logit_bias, self._drafter.replayed
        tree = self._drafter.grow(policy, nodes, roots, hidden, bias, replayed)
        clock.mark("build")
        return tree

    def window_slots(self, lengths: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        """[bs, max_rows] int64: the KV slots that were reserved from each committed length on.

        Args:
            lengths, pool: [bs], committed lengths and rows of the table of slots.
        """
        table = self.model_runner.req_to_token_pool.req_to_token
        columns = lengths.unsqueeze(1) + self._window_offsets
        return table[pool.unsqueeze(1), columns].to(torch.int64)

    def _accept(
        self, batch: Any, tree: Tree, logits_output: Any, rows_at: torch.Tensor
    ) -> Accepted:
        """Walk of each tree by the target's own tokens, which rank 0 draws."""
        info, logits = batch.sampling_info, logits_output.next_token_logits
        mask_nodes(batch, tree, logits)
        apply_rules(logits, info, tree, rows_at)
        targets = self._group.ints(
            lambda: draw(logits, info, rows_at, tree.rows), (logits.shape[0],), logits.device
        )
        # No path is longer than a block, whatever the tree holds: the width is known unread.
        width = min(tree.rows, self.limits.block_size)
        accepted = tree_accept(tree, targets.view_as(tree.tokens), width)
        note_output(info, accepted.tokens)
        if batch.return_logprob:
            put_path_logprobs(batch, logits_output, targets, accepted)
        return accepted

    def _compact(self, slots: torch.Tensor, accepted: Accepted) -> None:
        if self._target_kv is None:
            self._target_kv = TargetKv(self.model_runner.token_to_kv_pool)
        self._target_kv.compact(slots, accepted)

    def _result(
        self, verified: GenerationBatchResult, accepted: Accepted, new_seq_lens: torch.Tensor
    ) -> GenerationBatchResult:
        verified.logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=verified.logits_output,
            next_token_ids=accepted.tokens.reshape(-1),
            accept_lens=(accepted.lengths + 1).to(torch.int32),
            can_run_cuda_graph=verified.can_run_cuda_graph,
            next_draft_input=self._draft_input(accepted.bonus, new_seq_lens),
            # The stride of next_token_ids: tokens per request, not rows.
            speculative_num_draft_tokens=accepted.tokens.shape[1],
            new_seq_lens=new_seq_lens,
        )

    def _draft_input(self, roots: torch.Tensor, seq_lens: torch.Tensor) -> DDTreeDraftInput:
        return DDTreeDraftInput(roots.to(torch.int64), seq_lens.to(torch.int64), self.limits)

    def _make_next_draft_input_decode(
        self, *, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> DDTreeDraftInput:
        return self._draft_input(bonus_tokens, new_seq_lens)

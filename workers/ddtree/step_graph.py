"""A whole decode step in one CUDA graph: draft, tree, verify, accept and commit.

SGLang's graphs hold a forward each; what lies between them is some fifty small launches, which take
the host longer than the device needs for all of a step. Here a step is one launch, with a copy of
its inputs before it and of its outputs after it. It runs the same functions as a step in parts, on
tensors that never move, with a made-up request in each place that the batch leaves empty.

Steps that ask for more are run in parts: rules, grammars, log-probabilities, `spine` policies,
requests that want nothing drafted, batches larger than the captured ones, several ranks.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from sglang.srt.layers.dp_attention import set_dp_buffer_len, set_is_extend_in_batch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from overstory.kernels.ops import device_time, sample_nodes, tree_accept
from overstory.kernels.reference import Accepted, Tree
from overstory.workers.ddtree.commit import TargetKv, extend_drafter
from overstory.workers.ddtree.draft import root_tree
from overstory.workers.ddtree.verify import TreeVerifyInput, row_layout
from overstory.workers.policy.chooser import Told, Walks, speculates
from overstory.workers.tree_policy import Mode, TreePolicy

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from overstory.workers.ddtree.worker import DDTreeWorker

logger = logging.getLogger(__name__)

WHOLE_STEPS_ENV = "OVERSTORY_WHOLE_STEP_GRAPHS"
"""0 leaves whole steps uncaptured: SGLang's graphs of the forwards alone."""

LANDINGS = 4
"""Steps of a shape whose results are kept on the host; the scheduler has read those of one before
it launches the second after it."""

DRAWS = ("greedy", "sampled", "filtered")
"""How a batch draws: all greedy; without top-k, top-p and min-p; with any of them."""


class StepShape(NamedTuple):
    """What one captured step is for."""

    bs: int
    mode: Mode
    rows: int
    draw: str


class StepOutput(NamedTuple):
    """Of one step.

    What is on the host is complete by the time the scheduler has the step's tokens, and stays for
    `LANDINGS` steps; all else the next step may write over.
    """

    tokens: torch.Tensor
    """[bs * width] int64 on the host, tokens to emit; -1 is none."""
    width: int
    accept_lens: torch.Tensor
    """[bs] int64 on the host, tokens to emit per request."""
    deepest: torch.Tensor
    """[bs] int64 on the host, depths of the trees."""
    times: torch.Tensor
    """[2] int64 on the host, the device's clock before and after the step's work; [0] if steps are
    not timed."""
    told: Told
    """Complete as `tokens`: every step hands it out, since one launch and one copy take all."""
    roots: torch.Tensor
    """[bs] int64, the next step's."""
    seq_lens: torch.Tensor
    """[bs] int64, committed lengths after the step."""
    tree: Tree
    accepted: Accepted


class _Raw(NamedTuple):
    """What a captured step leaves in its tensors."""

    packed: torch.Tensor
    tree: Tree
    accepted: Accepted


class _Landing:
    """Where the results of a captured step of ``live`` requests land, in turn.

    All views of what it gives are made here, once: at each step they would cost the host more than
    the one copy that is left.

    Args:
        raw: what the step gives, at the same place each time.
        live: requests of the batch, which come first.
        bs: places of the step.
    """

    def __init__(self, raw: _Raw, live: int, bs: int) -> None:
        self.raw, self.live, self._turn = raw, live, 0
        packed, pinned = raw.packed, raw.packed.is_cuda
        self._hosts = [
            packed.new_empty(packed.shape, device="cpu", pin_memory=pinned) for _ in range(LANDINGS)
        ]
        self._outputs = [_unpacked(raw, host, live, bs) for host in self._hosts]

    def land(self) -> StepOutput:
        """The step at hand, by the step's stream."""
        self._turn = (self._turn + 1) % LANDINGS
        self._hosts[self._turn].copy_(self.raw.packed, non_blocking=True)
        return self._outputs[self._turn]


class Recorder(Protocol):
    """Keeps a sequence of launches."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """All recordings lie within one."""

    def record(self, act: Callable[[], _Raw]) -> Callable[[], _Raw]:
        """Runs ``act`` and returns what runs its launches again."""


class CudaRecorder:
    """Records CUDA graphs, which share the memory of SGLang's."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: Any = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """On SGLang's stream for captures, with its flags set as for a capture."""
        from sglang.srt.distributed.parallel_state import graph_capture
        from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
        from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
        from sglang.srt.model_executor.runner_utils.pool import (
            get_or_create_global_graph_memory_pool,
        )

        with model_capture_mode(), freeze_gc(False), graph_capture() as context:
            self._stream = context.stream
            self._pool = get_or_create_global_graph_memory_pool(torch.cuda)
            yield

    def record(self, act: Callable[[], _Raw]) -> Callable[[], _Raw]:
        """See `Recorder`; ``act`` runs once before, so that nothing is built during the capture."""
        act()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            kept = act()

        def again() -> _Raw:
            graph.replay()
            return kept

        return again


class StepInputs:
    """Inputs of captured steps of up to ``requests`` requests.

    A request beyond the batch has length 1, the first row of slots and writes to slot 0, which
    SGLang keeps for that.
    """

    def __init__(self, requests: int, device: torch.device | str) -> None:
        def made(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((requests,), value, dtype=dtype, device=device)

        int64 = torch.int64
        self.ids = torch.stack([made(1, int64), made(0, int64), made(0, int64)])
        """[3, requests] int64: committed lengths, rows of the table of slots, roots."""
        self.live = made(0, int64)
        """[requests] int64, 1 for those of the batch."""
        self.sampling = (
            made(1.0, torch.float32),
            made(1, torch.int32),
            made(1.0, torch.float32),
            made(0.0, torch.float32),
            made(0, int64),
        )
        """Temperature, top_k, top_p, min_p, seed."""
        self._live = 0
        self._ids_of_batch: list[torch.Tensor] = []  # views: to make them at each step costs it
        self._sampling_of: tuple[torch.Tensor, ...] = ()

    def load(self, batch: ScheduleBatch, roots: torch.Tensor, draw: str) -> None:
        """Puts a batch in; what has not changed since the last one is left."""
        bs = roots.shape[0]
        if bs != self._live:
            self.live[:bs], self.live[bs:] = 1, 0
            self.ids[0, bs:], self.ids[1:, bs:] = 1, 0
            self._live, self._ids_of_batch = bs, [row[:bs] for row in self.ids]
        given = [batch.seq_lens, batch.req_pool_indices, roots]
        torch._foreach_copy_(self._ids_of_batch, given)
        if draw == "greedy":
            return
        info = batch.sampling_info
        wanted = (info.temperatures, info.top_ks, info.top_ps, info.min_ps, info.sampling_seed)
        kept = self._sampling_of
        if len(kept) == len(wanted) and all(a is b for a, b in zip(kept, wanted, strict=True)):
            return
        for place, values in zip(self.sampling, wanted, strict=True):
            place[:bs].copy_(values.view(-1))
        self._sampling_of = wanted


class StepGraphs:
    """The captured steps of one engine.

    Args:
        worker: drafter, target and their pools.
        sizes: numbers of requests to capture.
        recorder: keeps the launches.
    """

    def __init__(self, worker: DDTreeWorker, sizes: Sequence[int], recorder: Recorder) -> None:
        self._worker = worker
        self._sizes = sorted(sizes)
        self._inputs = StepInputs(self._sizes[-1], worker.device)
        self._target_kv = TargetKv(worker.model_runner.token_to_kv_pool)
        self._steps: dict[StepShape, Callable[[], _Raw]] = {}
        self._landings: dict[StepShape, _Landing] = {}
        self._speculate: list[Req] = []  # the last batch of which all do
        self._held: list[tuple[torch.Tensor, ...]] = []
        assert worker._tiers is not None
        shapes = [
            StepShape(bs, mode, rows, draw)
            for bs in reversed(self._sizes)
            for mode, rows in _modes(worker._tiers.rows, worker.limits.block_size)
            for draw in DRAWS
        ]
        with torch.inference_mode(), recorder.session():
            for shape in shapes:
                self._steps[shape] = recorder.record(self._captured_step(shape))
                # SGLang replaces these when a prefill needs larger ones; the graphs go on writing
                # to those of their capture.
                self._held.append(_drafter_workspaces(worker))
        logger.info("captured %d whole steps", len(shapes))

    @property
    def sizes(self) -> list[int]:
        """Numbers of requests that were captured, ascending."""
        return self._sizes

    def asks_for_parts(self, batch: ScheduleBatch) -> bool:
        """Whether ``batch`` asks for what no captured step gives, whatever its policy."""
        info = batch.sampling_info
        if len(batch.reqs) > self._sizes[-1] or batch.return_logprob or batch.has_grammar:
            return True
        return info.logit_bias is not None or info.rules.count(None) < len(info.rules)

    def shape_of(self, batch: ScheduleBatch, policy: TreePolicy, rows: int) -> StepShape | None:
        """The captured step that ``batch`` can take; None if it must run in parts.

        Args:
            rows: of a tier.
        """
        bs, info = len(batch.reqs), batch.sampling_info
        if policy.spine_first or self.asks_for_parts(batch):
            return None
        if policy.mode != "plain" and not self._all_speculate(batch.reqs):
            return None
        size = next(size for size in self._sizes if size >= bs)
        return StepShape(size, policy.mode, rows, _draw_of(info))

    def _all_speculate(self, reqs: list[Req]) -> bool:
        if reqs != self._speculate:  # Mostly they are those of the step before.
            if not all(map(speculates, reqs)):
                return False
            self._speculate = list(reqs)
        return True

    def run(self, shape: StepShape, batch: ScheduleBatch, roots: torch.Tensor) -> StepOutput:
        """One step of ``batch``, whose next tokens to be computed are ``roots`` [bs]."""
        live = roots.shape[0]
        self._inputs.load(batch, roots, shape.draw)
        raw = self._steps[shape]()
        landing = self._landings.get(shape)
        if landing is None or landing.live != live or landing.raw is not raw:
            landing = self._landings[shape] = _Landing(raw, live, shape.bs)
        return landing.land()

    def _captured_step(self, shape: StepShape) -> Callable[[], _Raw]:
        """The launches of a step, as a function of the inputs' tensors alone."""
        worker, bs = self._worker, shape.bs
        assert worker._tiers is not None
        target = _Forward(worker._tiers.runner(shape.rows), bs)
        drafter = None
        if shape.mode != "plain":
            drafter = _Forward(worker.draft_model_runner.decode_cuda_graph_runner, bs)

        def step() -> _Raw:
            times = torch.empty(2 * worker.clocked, 1, dtype=torch.int64, device=worker.device)
            for begun in times[:1]:
                device_time(begun)
            lengths, pool, roots = (row[:bs] for row in self._inputs.ids)
            live = self._inputs.live[:bs].unsqueeze(1)
            window = worker.window_slots(lengths, pool) * live
            tree = root_tree(roots)
            if drafter is not None:
                tree = self._draft(shape, drafter, lengths, pool, roots, window)
            slots = window[:, : tree.rows].contiguous()
            layout = row_layout(tree, lengths, worker.last_position, with_words=True)
            spec = TreeVerifyInput(
                draft_token=tree.tokens.view(-1),
                positions=layout.positions,
                draft_token_num=tree.rows,
                custom_mask=None,
                capture_hidden_mode=target.batch.capture_hidden_mode,
            )
            spec.mask_words = layout.words
            output = target.run(
                tree.tokens.view(-1),
                layout.positions,
                lengths,
                pool,
                slots.view(-1),
                spec_info=spec,
            )
            tokens = self._draw(shape, output.next_token_logits, layout.positions)
            width = min(tree.rows, worker.limits.block_size)
            accepted = tree_accept(tree, tokens.view_as(tree.tokens), width)
            kept = _of_batch(accepted, live)
            if shape.mode == "tree":
                self._target_kv.compact(slots, kept)
            extend_drafter(worker, output.hidden_states, kept, slots, lengths, worker.last_position)
            for ended in times[1:]:
                device_time(ended)
            return _Raw(_packed(tree, accepted, lengths, times), tree, accepted)

        return step

    def _draft(
        self,
        shape: StepShape,
        forward: _Forward,
        lengths: torch.Tensor,
        pool: torch.Tensor,
        roots: torch.Tensor,
        window: torch.Tensor,
    ) -> Tree:
        drafter = self._worker._drafter
        block = drafter.block(lengths, roots, window)
        output = forward.run(
            block.ids, block.positions, lengths, pool, block.slots, input_embeds=block.embeds
        )
        policy = TreePolicy(shape.mode, 0 if shape.mode == "chain" else shape.rows - 1)
        hidden = drafter.drafted(output.hidden_states, shape.bs)
        return drafter.grow(policy, shape.rows - 1, roots, hidden, None, replayed=False)

    def _draw(
        self, shape: StepShape, logits: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        if shape.draw == "greedy":
            return torch.argmax(logits, dim=-1)
        temperature, top_k, top_p, min_p, seeds = (
            values[: shape.bs].unsqueeze(1).expand(-1, shape.rows).reshape(-1)
            for values in self._inputs.sampling
        )
        filters = shape.draw == "filtered"
        return sample_nodes(
            logits, temperature, top_k, top_p, min_p, seeds, positions, filters=filters
        )


class _Forward:
    """A model's forward as SGLang's graph runner captures it, on tensors of the caller's.

    Args:
        runner: SGLang's runner, which has captured forwards of ``bs`` requests.
    """

    def __init__(self, runner: Any, bs: int) -> None:
        self._runner = runner
        self._rows = bs * int(runner.captured_req_width)
        self.batch, self._attention, _ = runner.capture_prepare(bs, num_tokens=self._rows)

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        pool: torch.Tensor,
        slots: torch.Tensor,
        spec_info: Any = None,
        input_embeds: torch.Tensor | None = None,
    ) -> Any:
        """SGLang's ``LogitsProcessorOutput`` of rows [rows] of requests [bs]."""
        batch = copy.copy(self.batch)
        batch.input_ids, batch.positions, batch.out_cache_loc = ids, positions, slots
        batch.seq_lens = batch.orig_seq_lens = lengths
        batch.req_pool_indices = pool
        if spec_info is not None:
            batch.spec_info = spec_info
        batch.num_token_non_padded.fill_(self._rows)
        model = self._runner.model_runner.model
        given = {} if input_embeds is None else {"input_embeds": input_embeds}
        with forward_context(ForwardContext(attn_backend=self._attention)):
            self._attention.init_forward_metadata_out_graph(batch, in_capture=True)
            self._attention.init_forward_metadata_in_graph(batch)
            set_dp_buffer_len(
                batch.global_dp_buffer_len,
                self._rows,
                batch.dp_padding_mode.is_max_len(),
                batch.global_num_tokens_cpu,
            )
            set_is_extend_in_batch(False)
            return model.forward(ids, positions, batch, **given)


def _modes(tiers: Sequence[int], block_size: int) -> list[tuple[Mode, int]]:
    """(mode, rows) of the steps to capture."""
    modes: list[tuple[Mode, int]] = [("plain", 1), ("chain", block_size)]
    return [*modes, *(("tree", rows) for rows in tiers if rows > 1)]


def _drafter_workspaces(worker: DDTreeWorker) -> tuple[torch.Tensor, ...]:
    """What SGLang's fused projection into the drafter's KV writes to and reads, made on demand."""
    helper = getattr(worker, "_fused_kv_helper", None)
    if helper is None:
        return ()
    return (
        helper._proj_workspace,
        helper._k_workspace,
        helper._v_workspace,
        helper.rotary_emb.cos_sin_cache,
    )


def _draw_of(info: Any) -> str:
    if info.is_all_greedy:
        return "greedy"
    filters = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    return "filtered" if filters else "sampled"


def _of_batch(accepted: Accepted, live: torch.Tensor) -> Accepted:
    """``accepted`` with nothing to commit where ``live`` [bs, 1] is 0: no row, and one less than
    the root alone."""
    rows = torch.where(live > 0, accepted.rows, -1)
    lengths = torch.where(live.squeeze(1) > 0, accepted.lengths, -1)
    return accepted._replace(rows=rows, lengths=lengths)


def _packed(
    tree: Tree, accepted: Accepted, lengths: torch.Tensor, times: torch.Tensor
) -> torch.Tensor:
    """All that a step hands out, in one tensor: `_unpacked`."""
    given = accepted.lengths + 1
    parts = (given, accepted.bonus, lengths + given, tree.depths.amax(dim=1), *times)
    walks = (tree.parents, tree.ranks, tree.sizes, accepted.rows)
    flat = (part.reshape(-1) for part in (accepted.tokens, *parts, *walks))
    return torch.cat(list(flat))  # one launch, and one copy to the host


def _unpacked(raw: _Raw, host: torch.Tensor, live: int, bs: int) -> StepOutput:
    """What a step of ``bs`` places gives its ``live`` requests.

    Args:
        host: a copy of what it has packed.
    """
    tree, accepted = raw.tree, raw.accepted
    width = accepted.tokens.shape[1]
    sizes = _sizes(bs, width, tree.rows, host.shape[0])
    tokens, given, _, _, deepest, times, *trees = host.split_with_sizes(sizes)
    _, _, roots, lengths, *_ = raw.packed.split_with_sizes(sizes)
    parents, ranks, used, rows = trees
    walks = Walks.viewed(parents.view(bs, -1), ranks.view(bs, -1), used, rows.view(bs, -1))
    if live < bs:
        tokens = tokens[: live * width]
        given, deepest, roots, lengths = (part[:live] for part in (given, deepest, roots, lengths))
        tree, accepted = _first(tree, live), Accepted(*(field[:live] for field in accepted))
        walks = Walks(*(field[:live] for field in walks))
    told = Told(walks, times.numpy() if len(times) else None)
    return StepOutput(tokens, width, given, deepest, times, told, roots, lengths, tree, accepted)


def _sizes(bs: int, width: int, rows: int, packed: int) -> list[int]:
    """Of the parts of `_packed`: tokens, how many are given, roots, lengths, depths, times, and of
    the trees parents, ranks, sizes and accepted rows."""
    walks = [bs * rows, bs * rows, bs, bs * width]
    return [bs * width, bs, bs, bs, bs, packed - bs * (width + 4) - sum(walks), *walks]


def _first(tree: Tree, live: int) -> Tree:
    fields = (tree.tokens, tree.parents, tree.depths, tree.ranks, tree.sizes)
    return Tree(*(field[:live] for field in fields))


def whole_steps() -> bool:
    """Whether engines of this process capture whole steps (`WHOLE_STEPS_ENV`)."""
    return os.environ.get(WHOLE_STEPS_ENV, "1") != "0"

"""The draft of a step: one forward of the drafter, its candidates per depth, their tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from overstory.kernels.ops import candidates_topk, merge_candidates, tree_build
from overstory.kernels.reference import Shard, Tree
from overstory.workers.ddtree.device_trees import chain_rows
from overstory.workers.ddtree.draft_graph import GraphedCandidates

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from overstory.workers.ddtree.decisions import DecisionGroup
    from overstory.workers.tree_policy import TreePolicy

MAX_WIDTH = 8
"""Candidates per depth that may enter a tree; later ones are hardly ever among the best paths."""


class Block(NamedTuple):
    """Rows of a drafter's forward, block_size per request."""

    ids: torch.Tensor
    """[bs * block_size] int64."""
    positions: torch.Tensor
    """[bs * block_size] int64, absolute."""
    slots: torch.Tensor
    """[bs * block_size] int64, KV slots."""
    embeds: torch.Tensor
    """[bs * block_size, hidden], of the target's embedding."""


class Drafter:
    """Runs the DFlash drafter over one block per request.

    The drafter has neither embedding nor head: the target's are used. It reads the committed prefix
    from its own KV pool and writes the block's KV into the request's window slots, where nothing
    keeps it.
    """

    def __init__(
        self,
        draft_runner: Any,
        target_model: Any,
        group: DecisionGroup,
        block_size: int,
        mask_token_id: int,
        last_position: int,
    ) -> None:
        self._runner = draft_runner
        self._embed = target_model.get_input_embeddings()
        self._head = HeadShard(target_model)
        self._graphed: GraphedCandidates | None = None
        self.replayed = False
        """Whether the last forward of `hidden` came from a graph."""
        self._group = group
        self._block_size = block_size
        self._mask_token_id = mask_token_id
        self._last_position = last_position
        device = draft_runner.device
        self._offsets = torch.arange(block_size, dtype=torch.int64, device=device)
        self._block_info = DFlashVerifyInput(
            draft_token=torch.empty(0, dtype=torch.int64, device=device),
            positions=torch.empty(0, dtype=torch.int64, device=device),
            draft_token_num=block_size,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )

    def candidates_in_graph(self, requests: int) -> GraphedCandidates:
        """What SGLang is to run at the end of the captured drafter, for so many requests."""
        self._graphed = GraphedCandidates(self._head, self._block_size, requests, MAX_WIDTH)
        return self._graphed

    def hidden(
        self, batch: ScheduleBatch, roots: torch.Tensor, window: torch.Tensor
    ) -> torch.Tensor:
        """Drafter output at the masked positions of each request's block.

        Args:
            batch: the running batch; ``seq_lens`` are the committed lengths.
            roots: [bs] int64, last tokens handed out; they fill the first position of the blocks.
            window: [bs, >= block_size] int64 KV slots from ``seq_lens`` on.

        Returns:
            [bs, block_size - 1, hidden], a view.
        """
        bs = roots.shape[0]
        block = self.block(batch.seq_lens, roots, window)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=block.ids,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=block.slots,
            seq_lens_sum=batch.seq_lens_sum,
            seq_lens_cpu=batch.seq_lens_cpu,
            positions=block.positions,
            input_embeds=block.embeds,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._block_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        output = self._runner.forward(forward_batch)
        self.replayed = bool(output.can_run_graph)
        return self.drafted(output.logits_output.hidden_states, bs)

    def block(self, lengths: torch.Tensor, roots: torch.Tensor, window: torch.Tensor) -> Block:
        """Rows of the drafter's forward for requests of committed ``lengths`` [bs]; others as
        `hidden`."""
        ids = roots.new_full((roots.shape[0], self._block_size), self._mask_token_id)
        ids[:, 0] = roots
        positions = lengths.unsqueeze(1) + self._offsets
        return Block(
            ids.view(-1),
            positions.clamp_(max=self._last_position).view(-1),
            window[:, : self._block_size].reshape(-1),
            self._embed(ids.view(-1)),
        )

    def drafted(self, hidden: torch.Tensor | None, bs: int) -> torch.Tensor:
        """[bs, block_size - 1, hidden], a view: the masked positions of a forward's output."""
        assert hidden is not None, "the drafter returned no hidden states"
        return hidden.view(bs, self._block_size, -1)[:, 1:]

    def grow(
        self,
        policy: TreePolicy,
        nodes: int,
        roots: torch.Tensor,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        replayed: bool,
    ) -> Tree:
        """Trees under ``policy`` from what `hidden` returned; the same on all ranks.

        Args:
            policy: chain or tree.
            nodes: drafted rows per request, at least those of the policy.
            roots: [bs] int64.
            hidden: of the last forward.
            bias: [bs, V] logit bias of the requests, if any has one.
            replayed: the forward came from SGLang's graph, which has found the candidates.
        """
        bs, depth = roots.shape[0], self._block_size - 1
        width = 1 if policy.mode == "chain" else min(nodes, MAX_WIDTH)
        shards = self._group.gather_shards(self._candidates(hidden, width, bias, replayed))

        def build() -> Tree:
            logprobs, ids = merge_candidates(shards, width)
            if policy.mode == "chain":
                return chain_rows(roots, ids.view(bs, depth))
            return tree_build(
                roots,
                logprobs.view(bs, depth, width),
                ids.view(bs, depth, width),
                nodes,
                spine_first=policy.spine_first,
            )

        return self._group.tree(build, bs, 1 + nodes, roots.device)

    def _candidates(
        self, hidden: torch.Tensor, width: int, bias: torch.Tensor | None, replayed: bool
    ) -> Shard:
        """This rank's candidates: those of the graph if it ran, which knows no bias."""
        rows = hidden.shape[0] * hidden.shape[1]
        if replayed and self._graphed is not None and bias is None:
            return self._graphed.shard(rows)
        return self._head.candidates(hidden.reshape(rows, -1), width, bias)


class HeadShard:
    """This rank's part of the target's vocabulary head.

    Attributes:
        weight: [tokens, H].
        first_token_id: of the part.
    """

    def __init__(self, target_model: Any) -> None:
        head = getattr(target_model, "lm_head", None)
        weight = getattr(head, "weight", None)
        if weight is None or not torch.is_floating_point(weight):
            raise ValueError(
                "DDTREE needs a target with an unquantised lm_head: the drafter borrows it"
            )
        self.weight, self.first_token_id = weight, 0
        shard = getattr(head, "shard_indices", None)
        if shard is not None:
            if int(shard.num_added_elements):
                raise ValueError(
                    f"the target's head has {int(shard.num_added_elements)} added tokens; DDTREE "
                    "drafts from the trained vocabulary only"
                )
            self.weight = weight[: int(shard.num_org_elements)]
            self.first_token_id = int(shard.org_vocab_start_index)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, this rank's tokens] of ``hidden`` [rows, H]."""
        return torch.matmul(hidden.to(self.weight.dtype), self.weight.T)

    def candidates(self, hidden: torch.Tensor, k: int, bias: torch.Tensor | None = None) -> Shard:
        """Best ``k`` of this rank's tokens for each row of ``hidden`` [bs * rows, H].

        ``bias`` [bs, V] is added, so that the draft is of what the target may say; what the head
        holds beyond the vocabulary has none.
        """
        logits, first = self.logits(hidden), self.first_token_id
        if bias is not None:
            mine = bias[:, first : first + logits.shape[1]]
            of_requests = logits.view(bias.shape[0], -1, logits.shape[1])
            of_requests[:, :, : mine.shape[1]] += mine.unsqueeze(1)
        return candidates_topk(logits, k, first)


def root_tree(roots: torch.Tensor) -> Tree:
    """The tree of a plain step: the root [bs] alone."""
    return chain_rows(roots, roots.new_empty((roots.shape[0], 0)))

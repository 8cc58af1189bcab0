"""The drafter's candidates as the last part of its captured forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from overstory.kernels import ops
from overstory.kernels.reference import Shard

if TYPE_CHECKING:
    from overstory.workers.ddtree.draft import HeadShard


class GraphedCandidates:
    """Head and top k of a drafted block, run inside SGLang's graph of the drafter.

    SGLang calls it once per captured forward; after a replay `shard` has the candidates. It writes
    to the same tensors in every forward.

    Args:
        head: this rank's part of the target's head.
        block_size: positions per block, root included.
        requests: most requests of a captured forward.
        width: candidates per position.
    """

    def __init__(self, head: HeadShard, block_size: int, requests: int, width: int) -> None:
        rows, device = requests * (block_size - 1), head.weight.device
        self._head, self._block_size = head, block_size
        self._all = Shard(
            torch.empty(rows, width, dtype=torch.float32, device=device),
            torch.empty(rows, width, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )
        self._status = torch.empty(rows, dtype=torch.int32, device=device)
        self._workspace = ops.candidates_workspace(device, rows, int(head.weight.shape[0]))

    def __call__(self, hidden: torch.Tensor, input_ids: torch.Tensor | None = None) -> None:
        """Candidates of ``hidden`` [bs * block_size, H], the drafter's output at all positions."""
        del input_ids
        drafted = hidden.view(-1, self._block_size, hidden.shape[-1])[:, 1:]
        rows = drafted.shape[0] * drafted.shape[1]
        ops.candidates_topk(
            self._head.logits(drafted.reshape(rows, -1)),
            self._all.logits.shape[1],
            self._head.first_token_id,
            out=self.shard(rows),
            status=self._status[:rows],
            workspace=self._workspace,
        )

    def shard(self, rows: int) -> Shard:
        """Candidates of the last forward's first ``rows`` drafted positions."""
        return Shard(*(part[:rows] for part in self._all))

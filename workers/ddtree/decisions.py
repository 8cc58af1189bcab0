"""Tensor-parallel agreement: rank 0 of a replica decides, the others receive.

Nothing that shapes the KV cache is recomputed per rank from floating-point numbers: ties and
reduction orders may differ between ranks, and ranks that disagree deadlock or corrupt the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.distributed import get_tp_group

from overstory.kernels.reference import Shard, Tree


class DecisionGroup:
    """The tensor-parallel ranks of this replica."""

    def __init__(self) -> None:
        self._group = get_tp_group()
        self.size = int(self._group.world_size)
        self.decides = int(self._group.rank_in_group) == 0

    def ints(
        self, decide: Callable[[], torch.Tensor], shape: tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        """int64 tensor of ``shape`` that rank 0 computes; ``decide`` does not run elsewhere."""
        if self.size == 1:
            return decide()
        if self.decides:
            values = decide().to(torch.int64).contiguous()
        else:
            values = torch.empty(shape, dtype=torch.int64, device=device)
        assert values.shape == shape, (values.shape, shape)
        return self._group.broadcast(values, src=0)

    def host_ints(self, values: list[int]) -> list[int]:
        """Rank 0's ``values``, by the host's own process group: no device is waited for.

        All ranks give as many; what the others give does not matter.
        """
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        torch.distributed.broadcast(tensor, src=self._group.ranks[0], group=self._group.cpu_group)
        agreed: list[int] = tensor.tolist()
        return agreed

    def tree(self, build: Callable[[], Tree], bs: int, rows: int, device: torch.device) -> Tree:
        """Trees of ``rows`` rows per request that rank 0 builds; one broadcast."""
        if self.size == 1:
            return build()

        def packed() -> torch.Tensor:
            tree = build()
            fields = (tree.tokens, tree.parents, tree.depths, tree.ranks)
            return torch.cat([*fields, tree.sizes.unsqueeze(1)], dim=1)

        values = self.ints(packed, (bs, 4 * rows + 1), device)
        tokens, parents, depths, ranks = (
            values[:, i * rows : (i + 1) * rows].contiguous() for i in range(4)
        )
        return Tree(tokens, parents, depths, ranks, values[:, -1].contiguous())

    def gather_shards(self, shard: Shard) -> Shard:
        """Candidates of all ranks, stacked along a leading dimension of ranks.

        One gather: scores, ids and normaliser travel as float32, in which ids below 2**24 are
        exact.
        """
        if self.size == 1:
            return Shard(*(field.unsqueeze(0) for field in shard))
        rows, k = shard.logits.shape
        packed = torch.cat(
            [shard.logits, shard.token_ids.to(torch.float32), shard.logsumexp.unsqueeze(1)], dim=1
        ).contiguous()
        gathered = packed.new_empty((self.size * rows, 2 * k + 1))
        self._group.all_gather_into_tensor(gathered, packed)
        gathered = gathered.view(self.size, rows, 2 * k + 1)
        return Shard(
            gathered[..., :k], gathered[..., k : 2 * k].to(torch.int64), gathered[..., 2 * k]
        )

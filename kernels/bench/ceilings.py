"""What this GPU can do at most: the rate of a big copying kernel and of a big matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cases import AttentionCase
from .timing import Timing, time_launches

_COPY_BYTES = 1 << 30
_SIDE = 8192


@dataclass(frozen=True)
class Ceilings:
    """Measured once per run."""

    copy: Timing
    """Of an elementwise kernel that reads and writes 1 GiB."""
    product: Timing
    """Of an 8192 x 8192 x 8192 bf16 product on random numbers."""

    @property
    def bytes_per_us(self) -> float:
        """Read plus written."""
        return 2 * _COPY_BYTES / self.copy.median

    @property
    def flops_per_us(self) -> float:
        """Multiplications plus additions."""
        return 2 * _SIDE**3 / self.product.median

    def floor_us(self, case: AttentionCase) -> float:
        """The larger of the times for the cache bytes and for the arithmetic."""
        return max(case.kv_bytes / self.bytes_per_us, case.flops / self.flops_per_us)


def measure_ceilings() -> Ceilings:
    """Takes a second and 6 GB."""
    ceilings = Ceilings(_time_copy(), _time_product())
    torch.cuda.empty_cache()
    return ceilings


def _time_copy() -> Timing:
    # Not `copy_`: captured, it becomes a copy node, which an H200 ran at two thirds of this rate.
    source = torch.empty(_COPY_BYTES // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    return time_launches([lambda: torch.add(source, 1.0, out=target)], 0.1)


def _time_product() -> Timing:
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    return time_launches([lambda: torch.mm(a, b, out=c)], 0.1)

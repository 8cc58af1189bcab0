"""The Triton kernel behind `SlotLists.fill`. Imports Triton: load it on CUDA only."""

import triton
import triton.language as tl


@triton.jit
def list_slots(  # type: ignore[no-untyped-def]  # annotations would be types to Triton
    table,
    rows,
    lengths,
    bounds,
    slots,
    bs,
    table_stride,
    blocks,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Block (b, part) writes bound b + 1 (part 0) and every `blocks`-th piece of request b."""
    b = tl.program_id(0)
    part = tl.program_id(1)
    every = tl.arange(0, REQUESTS)
    sizes = tl.load(lengths + every, mask=every < bs, other=0).to(tl.int32)
    begin = tl.sum(tl.where(every < b, sizes, 0))
    size = tl.load(lengths + b).to(tl.int32)
    if part == 0:
        tl.store(bounds + b + 1, begin + size)
    row = table + tl.load(rows + b).to(tl.int64) * table_stride
    for first in range(part * BLOCK, size, blocks * BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < size
        found = tl.load(row + columns, mask=inside, other=0)
        tl.store(slots + begin + columns, found.to(tl.int32), mask=inside)

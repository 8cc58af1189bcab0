"""The Triton kernels behind `block_attention`. Imports Triton: load it on CUDA only.

`block_parts` takes one request, one head of the keys and one part of the keys; all rows of the
block that share this head are the lines of its matrices, so a key is read once for all of them.
`join_parts` adds the parts of one row and head up.
"""

import triton
import triton.language as tl


@triton.jit
def block_parts(  # type: ignore[no-untyped-def]  # annotations would be types to Triton
    q,
    keys,
    values,
    bounds,
    slots,
    partial,
    weights,
    scale,
    q_row,
    q_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_ROOM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_ROOM: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (request, head of the keys, part): its keys' weighted values, and log2 of the weight.

    A part without keys has a weight of minus infinity and writes no values.
    """
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    begin = tl.load(bounds + request)
    size = tl.load(bounds + request + 1) - begin
    share = tl.cdiv(tl.cdiv(size, PARTS), KEYS) * KEYS
    first = part * share
    last = tl.minimum(first + share, size)

    lines = tl.arange(0, LINES)
    used = lines < ROWS * GROUP
    row = request * ROWS + lines // GROUP
    query_head = head * GROUP + lines % GROUP
    across = tl.arange(0, DIM_ROOM)
    inside = across < DIM
    down = tl.arange(0, VALUE_ROOM)
    out_inside = down < VALUE_DIM

    highest = tl.full([LINES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([LINES], dtype=tl.float32)
    sums = tl.zeros([LINES, VALUE_ROOM], dtype=tl.float32)
    query = tl.load(
        q + (row * q_row + query_head * q_head)[:, None] + across[None, :],
        mask=used[:, None] & inside[None, :],
        other=0.0,
    )
    for at in range(first, last, KEYS):
        place = at + tl.arange(0, KEYS)
        there = place < last
        slot = tl.load(slots + begin + place, mask=there, other=0).to(tl.int64)
        key = tl.load(
            keys + (slot * key_slot)[None, :] + head * key_head + across[:, None],
            mask=there[None, :] & inside[:, None],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision=PRECISION) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - now)
        weight = tl.exp2(scores - now[:, None])
        value = tl.load(
            values + (slot * value_slot)[:, None] + head * value_head + down[None, :],
            mask=there[:, None] & out_inside[None, :],
            other=0.0,
        )
        sums = sums * shrink[:, None] + tl.dot(
            weight.to(value.dtype), value, input_precision=PRECISION
        )
        total = total * shrink + tl.sum(weight, 1)
        highest = now

    head_total = tl.num_programs(1) * GROUP
    place = (row * head_total + query_head) * PARTS + part
    if last > first:
        tl.store(weights + place, highest + tl.log2(total), mask=used)
        tl.store(
            partial + (place * VALUE_DIM)[:, None] + down[None, :],
            sums / total[:, None],
            mask=used[:, None] & out_inside[None, :],
        )
    else:
        tl.store(weights + place, tl.full([LINES], float("-inf"), dtype=tl.float32), mask=used)


@triton.jit
def join_parts(  # type: ignore[no-untyped-def]
    partial,
    weights,
    out,
    out_row,
    out_head,
    PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_ROOM: tl.constexpr,
):
    """Program (row, head): the mean of its parts by their weights."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = (row * tl.num_programs(1) + head) * PARTS
    parts = tl.arange(0, PARTS)
    down = tl.arange(0, VALUE_ROOM)
    logs = tl.load(weights + place + parts)
    share = tl.exp2(logs - tl.max(logs, 0))
    # Parts without keys have written no values.
    found = tl.load(
        partial + ((place + parts) * VALUE_DIM)[:, None] + down[None, :],
        mask=(logs > float("-inf"))[:, None] & (down < VALUE_DIM)[None, :],
        other=0.0,
    )
    mean = tl.sum(found * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + row * out_row + head * out_head + down, mean, mask=down < VALUE_DIM)

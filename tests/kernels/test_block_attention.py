"""The drafter's split attention: its Triton kernels in Triton's interpreter, and what they compile
to. In processes of their own: the interpreter is chosen when a kernel is defined."""

import os
import subprocess
import sys

import pytest

INTERPRETED = """
import torch
from overstory.workers.seam.block_attention import block_attention, split_attention

torch.manual_seed(0)
NAN, POOL, MARGIN = float("nan"), 700, 300


def pool(heads, dim):
    # Whatever lies outside of the pool shows in the result.
    room = torch.full((POOL + 2 * MARGIN, heads, dim), NAN)
    room[MARGIN : MARGIN + POOL] = torch.randn(POOL, heads, dim)
    return room[MARGIN : MARGIN + POOL]


for lengths, rows, heads, key_heads, dim, value_dim, parts in (
    ([9], 8, 4, 4, 64, 64, 4),
    ([300, 9, 64, 65], 8, 4, 2, 64, 64, 8),
    ([130, 70], 5, 6, 2, 48, 40, 16),
    ([1, 200], 3, 2, 1, 16, 16, 64),
):
    keys, values = pool(key_heads, dim), pool(key_heads, value_dim)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    slots = torch.full((int(bounds[-1]) + 200,), POOL + 100, dtype=torch.int32)
    slots[: int(bounds[-1])] = torch.randint(0, POOL, (int(bounds[-1]),))
    q = torch.randn(len(lengths) * rows, heads, dim)
    wanted = block_attention(q, keys, values, bounds, slots, scale=0.2)
    found = split_attention(q, keys, values, bounds, slots, 0.2, parts)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    try:  # one request's values for all rows by a stride of 0
        split_attention(q, keys, values, bounds[:1].expand(2), slots, 0.2, parts)
    except AssertionError:
        continue
    raise SystemExit("a stride of 0 was taken")
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton

from overstory.workers.seam import cuda_block_kernel as kernels

PARTS = {"q keys values": "*bf16", "bounds slots": "*i32", "partial weights": "*fp32",
         "scale": "fp32", "q_row q_head key_slot key_head value_slot value_head": "i32"}
JOIN = {"partial weights": "*fp32", "out": "*bf16", "out_row out_head": "i32"}


def compiled(kernel, types, capability, **constants):
    signature = {name: kind for names, kind in types.items() for name in names.split()}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), places)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).metadata.shared


for capability, room in ((90, 227 << 10), (120, 99 << 10)):
    for rows, group, dim in ((8, 1, 64), (16, 8, 128)):
        sizes = dict(ROWS=rows, GROUP=group, LINES=max(rows * group, 16), KEYS=64, PARTS=64,
                     DIM=dim, DIM_ROOM=dim, VALUE_DIM=dim, VALUE_ROOM=dim, PRECISION="ieee")
        assert compiled(kernels.block_parts, PARTS, capability, **sizes) <= room
    compiled(kernels.join_parts, JOIN, capability, PARTS=64, VALUE_DIM=64, VALUE_ROOM=64)
"""


def _run(program: str, **environment: str) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_split_attention_reads_its_keys_and_no_others() -> None:
    _run(INTERPRETED, TRITON_INTERPRET="1")


@pytest.mark.full
def test_split_attention_compiles_for_both_gpus() -> None:
    """Without a GPU: shared memory within that of sm_90 and of sm_120."""
    _run(COMPILED)

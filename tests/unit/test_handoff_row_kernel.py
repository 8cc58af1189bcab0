"""Which KV tensors the kernel of the hand-off takes, and that what it does is what the layers'
copies do. The kernel itself runs in tests/gpu; here its source is compiled for the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from overstory.workers.handoff import row_kernel
from overstory.workers.handoff.rows import RowTable

LAYERS, SLOTS = 3, 20

# One thread after the other, blocks of one thread.
HOST = """
struct uint4 { unsigned x, y, z, w; };
struct dim3 { unsigned x, y; };
static dim3 blockIdx, threadIdx, blockDim, gridDim;
#define __global__
%s
extern "C" void run(const unsigned long long *tensors, const long long *slots, void *staging,
                    unsigned count, unsigned words, int taking_out, unsigned layers) {
    blockDim = {4, 1}; gridDim = {2, layers};
    for (blockIdx.y = 0; blockIdx.y < layers; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
                overstory_move_rows(tensors, slots, (uint4 *)staging, count, words, taking_out);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder: Path = tmp_path_factory.mktemp("rows")
    (folder / "rows.cpp").write_text(HOST % row_kernel.SOURCE)
    subprocess.run(
        [compiler, "-O0", "-shared", "-fPIC", "-o", folder / "rows.so", folder / "rows.cpp"],
        check=True,
    )
    return ctypes.CDLL(str(folder / "rows.so"))


def _pool() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [
        torch.randint(-9999, 9999, (SLOTS, 1, 48), generator=draw, dtype=torch.int16)
        for _ in range(LAYERS)
    ]


def _run(
    library: ctypes.CDLL,
    pool: list[torch.Tensor],
    slots: torch.Tensor,
    staging: torch.Tensor,
    taking_out: int,
) -> None:
    tensors = torch.tensor([one.data_ptr() for one in pool])
    words = 48 * 2 // row_kernel.WORD
    library.run(
        *(ctypes.c_void_p(one.data_ptr()) for one in (tensors, slots, staging)),
        ctypes.c_uint(len(slots)),
        ctypes.c_uint(words),
        ctypes.c_int(taking_out),
        ctypes.c_uint(LAYERS),
    )


def test_it_fills_and_empties_a_staging_as_the_layers_copies_do(library: ctypes.CDLL) -> None:
    pool, slots = _pool(), torch.tensor([7, 0, 19, 3, 4])
    (piece,) = RowTable(pool).gather(slots, 1 << 12)
    wanted = torch.empty(piece.size, dtype=torch.uint8)
    piece.move(wanted)
    staging = torch.zeros_like(wanted)
    _run(library, pool, slots, staging, 0)
    assert torch.equal(staging, wanted)

    other = [torch.zeros_like(one) for one in pool]
    _run(library, other, slots, staging, 1)
    for mine, theirs in zip(pool, other, strict=True):
        want = torch.zeros_like(mine)
        want[slots] = mine[slots]
        assert torch.equal(theirs, want)


def test_only_gpu_tensors_of_whole_words_suit() -> None:
    assert not row_kernel.suits(_pool()), "on a CPU the layers' copies do it"
    meta = [torch.empty(4, 8, dtype=torch.int16, device="meta")]
    assert not row_kernel.suits(meta)
    assert row_kernel.RowKernel.of(_pool()) is None

"""A small run of every op, for compute-sanitizer (docs/kernels.md has the command).

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_matrix.py

Results are compared with the reference, so it is a short check by itself too. A tool makes every
launch many times slower, so this stays at a few launches of each kernel.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OVERSTORY_KERNELS", "cuda")
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]

import op_checks
import test_gpu_graphs as graphs
import torch
from attention_cases import Case
from attention_hazards import verify

from overstory.kernels import ops


def main() -> None:
    for seed in range(3):
        op_checks.check_trees("cuda", seed, 3)
    for seed in range(2):
        op_checks.check_candidates("cuda", seed, 2, 5000)
        op_checks.check_relocation("cuda", seed, layers=2, slots=60, moves=40)
        op_checks.check_rows("cuda", seed, layers=2, slots=60, rows=40)
    for kind in ("greedy", "plain", "any"):
        op_checks.check_sampling("cuda", 1, 3, 5000, kind)
    graphs.SLOTS = 400
    for bs in (1, 3):
        workspace = ops.attention_workspace("cuda", graphs.HEADS, graphs.MOST_ROWS)
        batch = graphs.Batch(bs, bs, workspace)
        for _ in range(2):
            tokens = batch.refill()
            batch.launch()
            batch.check(tokens, on="cpu")  # torch's own kernels would take the tool's time
    for q in (1, 9):  # an even and an odd number of tiles copy and widen keys in other ways
        out, _ = verify(Case([(70, q), (5, 2)], device="cuda", kv_scale=0.5))
        assert bool(out.isfinite().all())
    torch.cuda.synchronize()
    print("every op gave what the reference gives")


if __name__ == "__main__":
    main()

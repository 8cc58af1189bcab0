"""Our other ops, at the shapes that have goals.

Columns of the results: `bs` is requests (or rows of logits, or moves), `q` rows per tree (or
candidates per row), `heads` 1 (or layers), `context` the committed length (or the vocabulary, or
bytes of a row).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from overstory.kernels import ops
from overstory.kernels.reference import Tree

from .baselines.empty import empty
from .timing import Launch

SETS = 4
_DEPTH, _WIDTH = 16, 8


@dataclass(frozen=True)
class SmallCase:
    """One op at one shape."""

    op: str
    bs: int
    q: int
    context: int
    launches: Callable[[], list[Launch]]
    heads: int = 1
    dtype: str = "int64"
    moved_bytes: int = 0
    """Bytes that the op must read and write; 0 where latency is all there is."""
    goal_us: float | None = None
    goal_of_copy: float | None = None
    """Least part of the copy bandwidth."""
    impl: str = "ours"

    @property
    def name(self) -> str:
        """For people."""
        shape = f"bs {self.bs} q {self.q} context {self.context:,} heads {self.heads}"
        return f"{self.op} {shape} {self.dtype}"


def small_cases() -> list[SmallCase]:
    """All of them."""
    return [
        *(_build(bs, 31, goal) for bs, goal in ((1, 15.0), (64, 40.0))),
        *(_mask(bs, 32, 5.0) for bs in (1, 64)),
        *(_accept(bs, 32, goal) for bs, goal in ((1, 8.0), (64, 15.0))),
        *(_topk(rows, 8, columns) for rows in (16, 256) for columns in (4096, 163_840)),
        *(
            _sample(rows, columns, kind)
            for kind in ("greedy", "sampled")
            for rows in (32, 256)
            for columns in (4096, 163_840)
        ),
        *(_sample(rows, 163_840, "top-p") for rows in (32, 256)),
        _relocate(61, 4096),
        _copy_as_relocate(61, 4096),
        *(_rows(61, 4096, scatter) for scatter in (False, True)),
        *(_empty(blocks, dependent) for blocks in (1, 256) for dependent in (False, True)),
    ]


def _empty(blocks: int, dependent: bool) -> SmallCase:
    """What every op of these pays for being launched."""
    impl = "dependent_launch" if dependent else "launch"
    return SmallCase("empty", blocks, 1, 0, lambda: [empty(blocks, dependent)], impl=impl)


def _candidates(bs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.randn(bs, _DEPTH, 1000, device="cuda") * 3
    best = torch.log_softmax(logits, dim=2).topk(_WIDTH, dim=2)
    return torch.randint(1000, (bs,), device="cuda"), best.values, best.indices


def _trees(bs: int, rows: int) -> list[Tree]:
    return [ops.tree_build(*_candidates(bs), rows - 1) for _ in range(SETS)]


def _build(bs: int, nodes: int, goal: float) -> SmallCase:
    def launches() -> list[Launch]:
        budgets = torch.full((bs,), nodes, dtype=torch.int32, device="cuda")
        return [
            partial(ops.tree_build, *_candidates(bs), budgets, out=tree)
            for tree in _trees(bs, nodes + 1)
        ]

    return SmallCase("tree_build", bs, nodes + 1, 0, launches, goal_us=goal)


def _mask(bs: int, rows: int, goal: float) -> SmallCase:
    context = 8192

    def launches() -> list[Launch]:
        lengths = torch.full((bs,), context, dtype=torch.int32, device="cuda")
        full = torch.empty(bs * rows * (context + rows), dtype=torch.bool, device="cuda")
        into = {"full": full, "fill_prefix": False}
        return [
            partial(ops.tree_mask, tree, lengths, out=ops.tree_mask(tree, lengths), **into)
            for tree in _trees(bs, rows)
        ]

    return SmallCase("tree_mask", bs, rows, context, launches, goal_us=goal)


def _accept(bs: int, rows: int, goal: float) -> SmallCase:
    def launch(tree: Tree) -> Launch:
        # The target goes down the first child of every row: the longest walk there is.
        targets = tree.tokens.gather(1, tree.first_child.clamp(min=0))
        out = ops.tree_accept(tree, targets, rows)
        return partial(ops.tree_accept, tree, targets, rows, out=out)

    def launches() -> list[Launch]:
        return [launch(tree) for tree in _trees(bs, rows)]

    return SmallCase("tree_accept", bs, rows, 0, launches, goal_us=goal)


def draw_logits(rows: int, columns: int) -> list[torch.Tensor]:
    """Sets of more than twice the L2, so that each is read from memory."""
    wanted = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    count = max(SETS, min(64, -(-wanted // (rows * columns * 2))))
    return [
        torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 3 for _ in range(count)
    ]


def _topk(rows: int, k: int, columns: int) -> SmallCase:
    def launches() -> list[Launch]:
        workspace = ops.candidates_workspace("cuda", rows, columns)
        status = torch.empty(rows, dtype=torch.int32, device="cuda")
        into = {"status": status, "workspace": workspace}
        return [
            partial(ops.candidates_topk, logits, k, out=ops.candidates_topk(logits, k), **into)
            for logits in draw_logits(rows, columns)
        ]

    moved = rows * columns * 2
    return SmallCase(
        "candidates_topk", rows, k, columns, launches, 1, "bf16", moved, goal_of_copy=0.6
    )


_SAMPLING = {
    "greedy": (0.0, -1, 1.0, 0.0),
    "sampled": (0.8, 50, 0.95, 0.02),
    "top-p": (0.8, -1, 0.95, 0.0),  # of flat logits: hundreds of tokens are kept
}
"""Temperature, top_k, top_p, min_p."""


def _sample(rows: int, columns: int, kind: str) -> SmallCase:
    def launches() -> list[Launch]:
        def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device="cuda")

        temperature, top_k, top_p, min_p = _SAMPLING[kind]
        seeds, positions = (torch.arange(rows, device="cuda") for _ in range(2))
        arguments = (column(temperature), column(top_k, torch.int32), column(top_p), column(min_p))
        into = {
            "status": torch.empty(rows, dtype=torch.int32, device="cuda"),
            "workspace": ops.sample_workspace("cuda", rows, columns),
            "out": torch.empty(rows, dtype=torch.int64, device="cuda"),
        }
        return [
            partial(ops.sample_nodes, logits, *arguments, seeds, positions, **into)
            for logits in draw_logits(rows, columns)
        ]

    moved = rows * columns * 2
    goal = None if kind == "top-p" else 0.6
    return SmallCase(
        "sample_nodes", rows, 1, columns, launches, 1, f"bf16 {kind}", moved, goal_of_copy=goal
    )


_ROW_BYTES = 1152


def _pool(layers: int, slots: int) -> list[torch.Tensor]:
    shape = (slots, 1, _ROW_BYTES // 2)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]


def _relocate(layers: int, moves: int) -> SmallCase:
    def launches() -> list[Launch]:
        table = ops.LayerTable(_pool(layers, 8 * moves))
        slots = torch.randperm(8 * moves, device="cuda")
        parts = [part.contiguous() for part in slots.split(moves)]
        return [
            partial(ops.kv_relocate, table, a, b)
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]

    moved = 2 * layers * moves * _ROW_BYTES
    return SmallCase(
        "kv_relocate", moves, 1, _ROW_BYTES, launches, layers, "bf16", moved, goal_of_copy=0.6
    )


def _rows(layers: int, rows: int, scatter: bool) -> SmallCase:
    """What a hand-off of KV gathers at one side and scatters at the other."""

    def launches() -> list[Launch]:
        pool = _pool(layers, 8 * rows)
        table = ops.LayerTable(pool)
        dense = torch.empty((layers, rows, *pool[0].shape[1:]), dtype=pool[0].dtype, device="cuda")
        slots = torch.randperm(8 * rows, device="cuda")
        return [
            partial(ops.kv_rows, table, part.contiguous(), dense, scatter=scatter)
            for part in slots.split(rows)
        ]

    moved = 2 * layers * rows * _ROW_BYTES
    variant = "scatter" if scatter else "gather"
    return SmallCase(
        f"kv_rows {variant}", rows, 1, _ROW_BYTES, launches, layers, "bf16", moved, goal_of_copy=0.6
    )


def _copy_as_relocate(layers: int, moves: int) -> SmallCase:
    """A plain device copy of the same bytes, which the goal of `kv_relocate` is a part of."""

    def launches() -> list[Launch]:
        sources = _pool(SETS, layers * moves)
        pairs = [(source, torch.empty_like(source)) for source in sources]
        return [partial(target.copy_, source) for source, target in pairs]

    moved = 2 * layers * moves * _ROW_BYTES
    return SmallCase(
        "kv_relocate", moves, 1, _ROW_BYTES, launches, layers, "bf16", moved, impl="torch_copy"
    )

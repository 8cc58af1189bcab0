"""Our ops over rows of logits by blocks per row: what `choose_splits` ought to choose."""

from __future__ import annotations

from functools import partial

import torch

from overstory.kernels.cuda_library import cuda_library

from .small_cases import SmallCase, draw_logits
from .timing import Launch

SPLITS = (1, 2, 3, 5, 8, 10, 16, 20, 32)
_SHAPES = ((16, 163_840), (32, 163_840), (256, 163_840), (32, 4096))
_MOST_BLOCKS = 4096


def split_cases() -> list[SmallCase]:
    """Each op at each shape, every number of blocks per row; the row's `impl` names it."""
    return [
        make(rows, columns, splits)
        for make in (_sampled, _greedy, _topk)
        for rows, columns in _SHAPES
        for splits in SPLITS
        if splits <= columns // 1024 and rows * splits <= _MOST_BLOCKS
    ]


def _sampled(rows: int, columns: int, splits: int) -> SmallCase:
    return _sample(rows, columns, splits, 0.8, "bf16 sampled")


def _greedy(rows: int, columns: int, splits: int) -> SmallCase:
    return _sample(rows, columns, splits, 0.0, "bf16 greedy")


def _case(
    op: str,
    rows: int,
    q: int,
    columns: int,
    splits: int,
    kind: str,
    launches: partial[list[Launch]],
) -> SmallCase:
    moved = rows * columns * 2
    impl = f"ours_splits{splits}"
    return SmallCase(op, rows, q, columns, launches, 1, kind, moved, impl=impl)


def _sample(rows: int, columns: int, splits: int, temperature: float, kind: str) -> SmallCase:
    launches = partial(_sample_launches, rows, columns, splits, temperature)
    return _case("sample_nodes", rows, 1, columns, splits, kind, launches)


def _topk(rows: int, columns: int, splits: int) -> SmallCase:
    launches = partial(_topk_launches, rows, columns, splits)
    return _case("candidates_topk", rows, 8, columns, splits, "bf16", launches)


def _sample_launches(rows: int, columns: int, splits: int, temperature: float) -> list[Launch]:
    library, shape = cuda_library(), {"rows": rows, "columns": columns, "splits": splits}

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    size = library.query("sample_nodes_workspace", **shape)
    shared = {
        "logit_type": 0,
        "row_stride": columns,
        "temperature": column(temperature),
        "top_k": column(50, torch.int32),
        "top_p": column(0.95),
        "min_p": column(0.02),
        "seeds": torch.arange(rows, device="cuda"),
        "positions": torch.arange(rows, device="cuda"),
        "filters": True,
        "workspace": torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"),
        "arrived": column(0, torch.int32),
        "tokens": column(0, torch.int64),
        "status": column(0, torch.int32),
    }
    return [
        partial(library.launch, "sample_nodes", logits=logits, **shape, **shared)
        for logits in draw_logits(rows, columns)
    ]


def _topk_launches(rows: int, columns: int, splits: int, k: int = 8) -> list[Launch]:
    library = cuda_library()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    size = library.query("candidates_topk_workspace", rows=rows, columns=columns, splits=splits)
    shared = {
        "logit_type": 0,
        "rows": rows,
        "columns": columns,
        "row_stride": columns,
        "k": k,
        "first_token_id": 0,
        "splits": splits,
        "workspace": empty(max(size, 1), dtype=torch.uint8),
        "arrived": empty(rows, dtype=torch.int32),
        "best_logits": empty(rows, k),
        "token_ids": empty(rows, k, dtype=torch.int64),
        "logsumexp": empty(rows),
        "status": empty(rows, dtype=torch.int32),
    }
    return [
        partial(library.launch, "candidates_topk", logits=logits, **shared)
        for logits in draw_logits(rows, columns)
    ]

"""`candidates_topk` and `merge_candidates`; contracts in reference/candidates.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overstory.kernels import reference
from overstory.kernels.cuda_library import KernelLibrary
from overstory.kernels.reference import Shard

from .checks import check_range, check_tensor
from .choice import launch, library_for
from .logits import check_logits, logit_type, row_splits
from .registry import register
from .workspace import RowWorkspace

MAX_CANDIDATES = 16
"""Candidates per row that the kernels take."""


def candidates_topk(
    logits: torch.Tensor,
    k: int,
    first_token_id: int = 0,
    num_valid: int | None = None,
    *,
    out: Shard | None = None,
    status: torch.Tensor | None = None,
    workspace: RowWorkspace | None = None,
) -> Shard:
    """`reference.candidates_topk`, without reading a value on the host.

    On CUDA: k up to 16, logits bfloat16, float16 or float32. The logsumexp may differ from the
    reference's in the last bits, logits and ids do not.

    Args:
        logits, k, first_token_id, num_valid: as there.
        out: an earlier result of the same shape, whose tensors receive this one.
        status: [rows] int32, receives 1 for a row that holds NaN or +inf (its logsumexp is NaN
            then, and it has no candidates) and 0 for others; the reference raises instead.
        workspace: from `candidates_workspace`; default taken from torch's allocator.

    Raises:
        ValueError: shapes, types or numbers do not fit.
        KernelError: as `library_for`.
    """
    check_logits(logits)
    rows, columns = logits.shape
    valid = columns if num_valid is None else num_valid
    check_range("num_valid", valid, 0, columns)
    if k < 1:
        raise ValueError(f"k is {k}; at least one candidate per row is needed")
    device = logits.device
    library = library_for("candidates_topk", device)
    if out is None:
        out = Shard(
            torch.empty(rows, k, dtype=torch.float32, device=device),
            torch.empty(rows, k, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )
    if status is None:
        status = torch.empty(rows, dtype=torch.int32, device=device)
    if workspace is None:
        size = 0 if library is None else _bytes(library, device, rows, valid)
        workspace = RowWorkspace.empty(device, size, rows)
    _topk(logits, k, first_token_id, valid, workspace.scratch, workspace.arrived, *out, status)
    return out


def candidates_workspace(device: torch.device | str, rows: int, columns: int) -> RowWorkspace:
    """For `candidates_topk` of up to `rows` rows of up to `columns` valid columns.

    Calls that may run at the same time need one each.
    """
    device = torch.device(device)
    library = library_for("candidates_topk", device)
    if library is None:
        return RowWorkspace.empty(device, 0, 0)
    return RowWorkspace.up_to(device, rows, lambda some: _bytes(library, device, some, columns))


def merge_candidates(
    shards: Sequence[Shard] | Shard,
    k: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    status: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.merge_candidates`, without reading a value on the host.

    Args:
        shards, k: as there; on CUDA up to 16 candidates, and one `Shard` of stacked tensors saves
            the copies of a sequence.
        out: an earlier result of the same shape, whose tensors receive this one.
        status: [rows] int32, receives 2 for a row in which every token is forbidden or whose
            normaliser is NaN or +inf (it has no candidates then); the reference raises instead.

    Raises:
        ValueError: shapes, types or numbers do not fit.
        KernelError: as `library_for`.
    """
    if not isinstance(shards, Shard):
        if not shards:
            raise ValueError("no shard to merge")
        shards = Shard(*(torch.stack(parts) for parts in zip(*shards, strict=True)))
    device, rows = shards.logits.device, shards.logits.shape[1]
    if out is None:
        out = (
            torch.empty(rows, k, dtype=torch.float32, device=device),
            torch.empty(rows, k, dtype=torch.int64, device=device),
        )
    if status is None:
        status = torch.empty(rows, dtype=torch.int32, device=device)
    _merge(*(part.contiguous() for part in shards), *out, status)
    return out


def _bytes(library: KernelLibrary, device: torch.device, rows: int, columns: int) -> int:
    splits = row_splits(library, "candidates_topk", device, rows, columns)
    return library.query("candidates_topk_workspace", rows=rows, columns=columns, splits=splits)


def _check_topk(
    logits: torch.Tensor,
    k: int,
    first_token_id: int,
    num_valid: int,
    scratch: torch.Tensor,
    arrived: torch.Tensor,
    best_logits: torch.Tensor,
    token_ids: torch.Tensor,
    logsumexp: torch.Tensor,
    status: torch.Tensor,
) -> None:
    rows, device = logits.shape[0], logits.device
    check_tensor("best logits", best_logits, [rows, k], (torch.float32,), device)
    check_tensor("token_ids", token_ids, [rows, k], (torch.int64,), device)
    check_tensor("logsumexp", logsumexp, [rows], (torch.float32,), device)
    check_tensor("status", status, [rows], (torch.int32,), device)
    check_tensor("workspace.scratch", scratch, [None], (torch.uint8,), device)
    check_tensor("workspace.arrived", arrived, [None], (torch.int32,), device)


@register(
    "candidates_topk(Tensor logits, int k, int first_token_id, int num_valid, "
    "Tensor(a!) scratch, Tensor(b!) arrived, Tensor(c!) best_logits, Tensor(d!) token_ids, "
    "Tensor(e!) logsumexp, Tensor(f!) status) -> ()",
    _check_topk,
)
def _topk(
    logits: torch.Tensor,
    k: int,
    first_token_id: int,
    num_valid: int,
    scratch: torch.Tensor,
    arrived: torch.Tensor,
    best_logits: torch.Tensor,
    token_ids: torch.Tensor,
    logsumexp: torch.Tensor,
    status: torch.Tensor,
) -> None:
    library = library_for("candidates_topk", logits.device)
    if library is None:
        shard = reference.candidates_topk(logits, k, first_token_id, num_valid)
        for target, result in zip((best_logits, token_ids, logsumexp), shard, strict=True):
            target.copy_(result)
        status.zero_()
        return
    check_range("k", k, 1, MAX_CANDIDATES)
    check_range("num_valid", num_valid, 0, library.query("candidates_topk_max_columns"))
    rows = logits.shape[0]
    splits = row_splits(library, "candidates_topk", logits.device, rows, num_valid)
    needed = _bytes(library, logits.device, rows, num_valid)
    RowWorkspace(scratch, arrived).check_room(needed, rows, num_valid)
    launch(
        library,
        "candidates_topk",
        logits.device,
        logits=logits,
        logit_type=logit_type(logits),
        rows=rows,
        columns=num_valid,
        row_stride=logits.stride(0),
        k=k,
        first_token_id=first_token_id,
        splits=splits,
        workspace=scratch,
        arrived=arrived,
        best_logits=best_logits,
        token_ids=token_ids,
        logsumexp=logsumexp,
        status=status,
    )


def _check_merge(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    logsumexp: torch.Tensor,
    logprobs: torch.Tensor,
    best: torch.Tensor,
    status: torch.Tensor,
) -> None:
    if logits.dim() != 3:
        raise ValueError(
            f"shards hold logits of shape {list(logits.shape)}; want [shards, rows, k]"
        )
    (shards, rows, width), device = logits.shape, logits.device
    check_tensor("shards.logits", logits, [shards, rows, width], (torch.float32,), device)
    check_tensor("shards.token_ids", token_ids, [shards, rows, width], (torch.int64,), device)
    check_tensor("shards.logsumexp", logsumexp, [shards, rows], (torch.float32,), device)
    k = logprobs.shape[1]
    check_tensor("logprobs", logprobs, [rows, k], (torch.float32,), device)
    check_tensor("best token_ids", best, [rows, k], (torch.int64,), device)
    check_tensor("status", status, [rows], (torch.int32,), device)


@register(
    "merge_candidates(Tensor logits, Tensor token_ids, Tensor logsumexp, Tensor(a!) logprobs, "
    "Tensor(b!) best, Tensor(c!) status) -> ()",
    _check_merge,
)
def _merge(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    logsumexp: torch.Tensor,
    logprobs: torch.Tensor,
    best: torch.Tensor,
    status: torch.Tensor,
) -> None:
    library = library_for("merge_candidates", logits.device)
    (shards, rows, width), k = logits.shape, logprobs.shape[1]
    if library is None:
        results = reference.merge_candidates(Shard(logits, token_ids, logsumexp), k)
        for target, result in zip((logprobs, best), results, strict=True):
            target.copy_(result)
        status.zero_()
        return
    check_range("candidates of a shard", width, 1, MAX_CANDIDATES)
    check_range("k", k, 1, MAX_CANDIDATES)
    launch(
        library,
        "merge_candidates",
        logits.device,
        logits=logits,
        token_ids=token_ids,
        logsumexp=logsumexp,
        shards=shards,
        rows=rows,
        width=width,
        k=k,
        logprobs=logprobs,
        best=best,
        status=status,
    )

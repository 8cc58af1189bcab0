"""`sample_nodes`; contract in reference/sample.py."""

from __future__ import annotations

import torch

from overstory.kernels import reference
from overstory.kernels.cuda_library import KernelLibrary

from .checks import check_range, check_tensor
from .choice import launch, library_for
from .logits import check_logits, logit_type, row_splits
from .registry import register
from .workspace import RowWorkspace


def sample_nodes(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    filters: bool = True,
    out: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
    workspace: RowWorkspace | None = None,
) -> torch.Tensor:
    """`reference.sample_nodes`, without reading a value on the host.

    Args:
        logits, temperature, top_k, top_p, min_p, seeds, positions: as there; on CUDA logits
            bfloat16, float16 or float32.
        filters: False promises that no row filters (top_k, top_p and min_p at values that keep
            everything, or greedy), which saves a kernel; a row that breaks it gets no token.
            Rows without filters get the same token either way. The reference needs no promise.
        out: [rows] int64, receives the tokens; -1 where `status` is not 0.
        status: [rows] int32, receives 0, or: 1 the highest logit is NaN or infinite; 2 a
            parameter is NaN or out of range; 4 the row filters without `filters`. The reference
            raises instead.
        workspace: from `sample_workspace`; default taken from torch's allocator.

    Raises:
        ValueError: shapes, types or numbers do not fit.
        KernelError: as `library_for`.
    """
    check_logits(logits)
    (rows, columns), device = logits.shape, logits.device
    library = library_for("sample_nodes", device)
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=device)
    if status is None:
        status = torch.empty(rows, dtype=torch.int32, device=device)
    if workspace is None:
        size = 0 if library is None else _bytes(library, device, rows, columns)
        workspace = RowWorkspace.empty(device, size, rows)
    _sample(
        logits,
        temperature.to(torch.float32).contiguous(),
        top_k.to(torch.int32).contiguous(),
        top_p.to(torch.float32).contiguous(),
        min_p.to(torch.float32).contiguous(),
        seeds.to(torch.int64).contiguous(),
        positions.to(torch.int64).contiguous(),
        filters,
        *workspace,
        out,
        status,
    )
    return out


def sample_workspace(device: torch.device | str, rows: int, columns: int) -> RowWorkspace:
    """For `sample_nodes` of up to `rows` rows of `columns` columns.

    Calls that may run at the same time need one each.
    """
    device = torch.device(device)
    library = library_for("sample_nodes", device)
    if library is None:
        return RowWorkspace.empty(device, 0, 0)
    return RowWorkspace.up_to(device, rows, lambda some: _bytes(library, device, some, columns))


def _bytes(library: KernelLibrary, device: torch.device, rows: int, columns: int) -> int:
    splits = row_splits(library, "sample_nodes", device, rows, columns)
    return library.query("sample_nodes_workspace", rows=rows, columns=columns, splits=splits)


def _check(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    filters: bool,
    scratch: torch.Tensor,
    arrived: torch.Tensor,
    out: torch.Tensor,
    status: torch.Tensor,
) -> None:
    rows, device = logits.shape[0], logits.device
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    for name, tensor in floats.items():
        check_tensor(name, tensor, [rows], (torch.float32,), device)
    check_tensor("top_k", top_k, [rows], (torch.int32,), device)
    for name, tensor in {"seeds": seeds, "positions": positions, "out": out}.items():
        check_tensor(name, tensor, [rows], (torch.int64,), device)
    check_tensor("status", status, [rows], (torch.int32,), device)
    check_tensor("workspace.scratch", scratch, [None], (torch.uint8,), device)
    check_tensor("workspace.arrived", arrived, [None], (torch.int32,), device)


@register(
    "sample_nodes(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seeds, Tensor positions, bool filters, Tensor(a!) scratch, Tensor(b!) arrived, "
    "Tensor(c!) out, Tensor(d!) status) -> ()",
    _check,
)
def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    filters: bool,
    scratch: torch.Tensor,
    arrived: torch.Tensor,
    out: torch.Tensor,
    status: torch.Tensor,
) -> None:
    library = library_for("sample_nodes", logits.device)
    if library is None:
        drawn = reference.sample_nodes(logits, temperature, top_k, top_p, min_p, seeds, positions)
        out.copy_(drawn)
        status.zero_()
        return
    rows, columns = logits.shape
    check_range("columns", columns, 1, library.query("sample_nodes_max_columns"))
    needed = _bytes(library, logits.device, rows, columns)
    RowWorkspace(scratch, arrived).check_room(needed, rows, columns)
    launch(
        library,
        "sample_nodes",
        logits.device,
        logits=logits,
        logit_type=logit_type(logits),
        rows=rows,
        columns=columns,
        row_stride=logits.stride(0),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
        filters=filters,
        splits=row_splits(library, "sample_nodes", logits.device, rows, columns),
        workspace=scratch,
        arrived=arrived,
        tokens=out,
        status=status,
    )

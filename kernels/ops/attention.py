"""`verify_attention` and `decode_attention`; contracts in reference/attention.py."""

from __future__ import annotations

import itertools

import torch

from overstory.kernels import reference
from overstory.kernels.reference.kv_fp8 import is_fp8

from .attention_checks import check_decode, check_kernel_limits, check_numbers, check_verify
from .choice import launch, library_for
from .registry import register
from .schedule import Schedule, default_schedule, workspace_bytes, workspace_for

MAX_ROWS = 64
"""Rows of a request, at most."""


def verify_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    *,
    scale: float,
    v_head_dim: int = 512,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    kv_scale: float = 1.0,
    mask_words: torch.Tensor | None = None,
    tail: torch.Tensor | None = None,
    kv_ends: torch.Tensor | None = None,
    max_q: int | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    schedule: Schedule | None = None,
) -> torch.Tensor:
    """`reference.verify_attention`, with what a captured launch wants beyond it.

    On CUDA: q bfloat16, kv that or e4m3, D = 576, v_head_dim = 512, heads 2, 4, 8 or 16, up to 64
    rows per request. Nothing is read on the host: the launch holds for any lengths, and for fewer
    requests' rows than it was captured with. Rows of q that no request owns give 0 (lse -inf).

    Args:
        q, kv, qo_indptr, kv_indptr, kv_indices, out_cache_loc, custom_mask, mask_indptr, scale,
            v_head_dim, causal, lse, kv_scale, kv_ends: as there; `mask_indptr` int64, `lse`
            float32, the mask bool or uint8; `kv_ends` of the type of `kv_indptr`, which is [bs]
            with it.
        mask_words: [tokens] int64 instead of a mask: bit j of a row is set if it sees row j of its
            request (`reference.packed_mask`, flattened).
        tail: [tokens, D] keys of the rows themselves, instead of those in `kv` at `out_cache_loc`,
            of the type of `kv`.
        max_q: no request has more rows; default all rows of q, at most 64. A tight bound is faster.
        out: [tokens, heads, v_head_dim] like q, receives the result; default a new tensor.
        workspace: bytes from `attention_workspace`; default taken from torch's allocator.
        schedule: how the keys are shared out; default for this device.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, types, devices or the numbers do not fit.
        KernelError: as `library_for`.
    """
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v_head_dim)
    rows = min(q.shape[0], MAX_ROWS) if max_q is None else max_q
    blocks, min_chunk = _numbers(schedule)
    _verify(
        q, kv, qo_indptr, kv_indptr, kv_ends, kv_indices, out_cache_loc, custom_mask, mask_indptr,
        mask_words, tail, scale, kv_scale, v_head_dim, causal, max(rows, 1), blocks, min_chunk, out,
        lse, workspace,
    )  # fmt: skip
    return out


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    scale: float,
    v_head_dim: int = 512,
    lse: torch.Tensor | None = None,
    kv_scale: float = 1.0,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    schedule: Schedule | None = None,
) -> torch.Tensor:
    """`reference.decode_attention`; limits, further arguments and errors as `verify_attention`."""
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v_head_dim)
    blocks, min_chunk = _numbers(schedule)
    _decode(
        q, kv, kv_indptr, kv_indices, scale, kv_scale, v_head_dim, blocks, min_chunk, out, lse,
        workspace,
    )  # fmt: skip
    return out


def attention_workspace(
    device: torch.device | str, heads: int, max_q: int, schedule: Schedule | None = None
) -> torch.Tensor:
    """Bytes that serve every call of either op with these numbers, of any batch, lengths and cache.

    Calls that may run at the same time (on two streams) need one each.

    Raises:
        ValueError: heads or max_q that no kernel is made for.
        KernelError: as `library_for`.
    """
    device = torch.device(device)
    library = library_for("attention_workspace", device)
    if library is None:
        return torch.empty(0, dtype=torch.uint8, device=device)
    check_numbers(heads, max_q)
    if schedule is None:
        both = (default_schedule(library, device, heads, max_q, fp8) for fp8 in (False, True))
        schedule = max(both, key=lambda s: s.blocks)
    size = workspace_bytes(library, heads, max_q, schedule)
    return torch.empty(size, dtype=torch.uint8, device=device)


def _numbers(schedule: Schedule | None) -> tuple[int, int]:
    if schedule is None:
        return 0, 0
    return schedule.blocks, schedule.min_chunk


@register(
    "verify_attention(Tensor q, Tensor kv, Tensor qo_indptr, Tensor kv_indptr, Tensor? kv_ends, "
    "Tensor kv_indices, Tensor out_cache_loc, Tensor? custom_mask, Tensor? mask_indptr, "
    "Tensor? mask_words, Tensor? tail, float scale, float kv_scale, int v_head_dim, bool causal, "
    "int max_q, int blocks, int min_chunk, Tensor(a!) out, Tensor(b!)? lse, "
    "Tensor(c!)? workspace) -> ()",
    check_verify,
)
def _verify(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_ends: torch.Tensor | None,
    kv_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    mask_words: torch.Tensor | None,
    tail: torch.Tensor | None,
    scale: float,
    kv_scale: float,
    v_head_dim: int,
    causal: bool,
    max_q: int,
    blocks: int,
    min_chunk: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    library = library_for("verify_attention", q.device)
    if library is None:
        if lse is not None:
            lse.fill_(-torch.inf)
        if mask_words is not None:
            custom_mask, mask_indptr = _full_mask_of(mask_words, qo_indptr, kv_indptr, kv_ends)
        if tail is not None:
            cache = kv.view(kv.shape[0], kv.shape[-1])
            out_cache_loc = torch.arange(len(tail), device=kv.device) + len(cache)
            kv = torch.cat((cache, tail.view(len(tail), -1)))
        result = reference.verify_attention(
            q, kv, qo_indptr, kv_indptr, kv_indices, out_cache_loc, custom_mask, mask_indptr,
            scale=scale, v_head_dim=v_head_dim, causal=causal, lse=lse, kv_scale=kv_scale,
            kv_ends=kv_ends,
        )  # fmt: skip
        owned = slice(int(qo_indptr[0]), int(qo_indptr[-1]))
        out.zero_()
        out[owned] = result[owned]
        return
    check_kernel_limits(q, {"kv": kv, "tail": tail}, scale, v_head_dim)
    heads, fp8 = q.shape[1], is_fp8(kv)
    schedule = _schedule(blocks, min_chunk) or default_schedule(
        library, q.device, heads, max_q, fp8
    )
    workspace = workspace_for(library, q.device, heads, max_q, schedule, workspace)
    launch(
        library,
        "verify_attention",
        q.device,
        q=q,
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        kv=kv,
        kv_row_stride=kv.stride(0),
        tail=tail,
        tail_row_stride=0 if tail is None else tail.stride(0),
        kv_indptr=kv_indptr,
        kv_indptr_bytes=kv_indptr.element_size(),
        kv_ends=kv_ends,
        kv_indices=kv_indices,
        kv_indices_bytes=kv_indices.element_size(),
        qo_indptr=qo_indptr,
        qo_indptr_bytes=qo_indptr.element_size(),
        out_cache_loc=out_cache_loc,
        out_cache_loc_bytes=out_cache_loc.element_size(),
        mask_bytes=custom_mask,
        mask_indptr=mask_indptr,
        mask_words=mask_words,
        causal=int(causal),
        out=out,
        lse=lse,
        workspace=workspace,
        workspace_bytes=workspace.numel(),
        bs=qo_indptr.numel() - 1,
        tokens=q.shape[0],
        heads=heads,
        max_q=max_q,
        scale=scale,
        fp8=int(fp8),
        kv_scale=kv_scale,
        blocks=schedule.blocks,
        min_chunk=schedule.min_chunk,
    )


@register(
    "decode_attention(Tensor q, Tensor kv, Tensor kv_indptr, Tensor kv_indices, float scale, "
    "float kv_scale, int v_head_dim, int blocks, int min_chunk, Tensor(a!) out, Tensor(b!)? lse, "
    "Tensor(c!)? workspace) -> ()",
    check_decode,
)
def _decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    scale: float,
    kv_scale: float,
    v_head_dim: int,
    blocks: int,
    min_chunk: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    library = library_for("decode_attention", q.device)
    if library is None:
        result = reference.decode_attention(
            q, kv, kv_indptr, kv_indices, scale=scale, v_head_dim=v_head_dim, lse=lse,
            kv_scale=kv_scale,
        )  # fmt: skip
        out.copy_(result)
        return
    check_kernel_limits(q, {"kv": kv}, scale, v_head_dim)
    heads, fp8 = q.shape[1], is_fp8(kv)
    schedule = _schedule(blocks, min_chunk) or default_schedule(library, q.device, heads, 1, fp8)
    workspace = workspace_for(library, q.device, heads, 1, schedule, workspace)
    launch(
        library,
        "decode_attention",
        q.device,
        q=q,
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        kv=kv,
        kv_row_stride=kv.stride(0),
        kv_indptr=kv_indptr,
        kv_indptr_bytes=kv_indptr.element_size(),
        kv_indices=kv_indices,
        kv_indices_bytes=kv_indices.element_size(),
        out=out,
        lse=lse,
        workspace=workspace,
        workspace_bytes=workspace.numel(),
        bs=q.shape[0],
        heads=heads,
        scale=scale,
        fp8=int(fp8),
        kv_scale=kv_scale,
        blocks=schedule.blocks,
        min_chunk=schedule.min_chunk,
    )


def _schedule(blocks: int, min_chunk: int) -> Schedule | None:
    return Schedule(blocks, min_chunk) if blocks else None


def _full_mask_of(
    words: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_ends: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same mask in FULL_MASK layout; its prefix columns are never read."""
    rows_of, kv_begins = qo_indptr.tolist(), kv_indptr.tolist()
    ends = kv_begins[1:] if kv_ends is None else kv_ends.tolist()
    parts, begins = [], [0]
    for b, (first, end) in enumerate(itertools.pairwise(rows_of)):
        n, prefix = end - first, ends[b] - kv_begins[b]
        bits = torch.arange(n, device=words.device)
        tail = ((words[first:end].unsqueeze(1) >> bits) & 1).bool()
        parts.append(torch.nn.functional.pad(tail, (prefix, 0)).flatten())
        begins.append(begins[-1] + n * (prefix + n))
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.bool)
    return flat, torch.tensor(begins)

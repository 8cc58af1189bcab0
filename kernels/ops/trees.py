"""`tree_build`, `tree_mask` and `tree_accept`; contracts in the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overstory.kernels import reference
from overstory.kernels.reference import MAX_ROWS, Accepted, Tree

from .checks import check_range, check_tensor
from .choice import launch, library_for
from .registry import register

MAX_DEPTH = 16
"""Depths that the kernel takes, and candidates of each."""


class TreeMask(NamedTuple):
    """What a verify forward needs to know of trees."""

    packed: torch.Tensor
    """[bs, n] int64, as `reference.packed_mask`."""
    positions: torch.Tensor
    """[bs, n] int64, as `reference.positions`."""
    mask_indptr: torch.Tensor
    """[bs + 1] int64, where each request begins in FULL_MASK layout."""


def tree_build(
    root_tokens: torch.Tensor,
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    budgets: torch.Tensor | int,
    width: int | None = None,
    spine_first: bool = False,
    rows: int | None = None,
    *,
    out: Tree | None = None,
) -> Tree:
    """`reference.tree_build`, without reading a value on the host.

    On CUDA: depth and width up to 16. Values that the reference refuses are not seen: a candidate
    of NaN never enters, of an undescending list the tree is unspecified, a budget above rows - 1
    counts as that.

    Args:
        root_tokens, logprobs, token_ids, budgets, width, spine_first, rows: as there; `rows` has
            to be given with `budgets` on a GPU, whose maximum nobody knows without waiting.
        out: a tree from an earlier call, whose tensors receive this one.

    Raises:
        ValueError: shapes, types or numbers do not fit.
        KernelError: as `library_for`.
    """
    if logprobs.dim() != 3:
        raise ValueError(f"logprobs has shape {list(logprobs.shape)}; want [bs, depth, k]")
    bs, _, k = logprobs.shape
    device = root_tokens.device
    if library_for("tree_build", device) is None and out is None:
        return reference.tree_build(
            root_tokens, logprobs, token_ids, budgets, width, spine_first, rows
        )
    if out is None:
        out = _empty_tree(bs, _rows(budgets, rows), device)
    if isinstance(budgets, int):
        check_range("budgets", budgets, 0, out.rows - 1)
        budgets = torch.full((bs,), budgets, dtype=torch.int32, device=device)
    _build(
        root_tokens.to(torch.int64).contiguous(),
        logprobs.to(torch.float32).contiguous(),
        token_ids.to(torch.int64).contiguous(),
        budgets.to(torch.int32).contiguous(),
        k if width is None else width,
        spine_first,
        out.tokens,
        out.parents,
        out.depths,
        out.ranks,
        out.sizes,
        out.first_child,
        out.next_sibling,
    )
    return out


def tree_mask(
    tree: Tree,
    seq_lens: torch.Tensor,
    *,
    full: torch.Tensor | None = None,
    fill_prefix: bool = True,
    out: TreeMask | None = None,
) -> TreeMask:
    """Masks and positions of trees in one launch: `reference.packed_mask`, `positions` and, into
    `full`, `full_mask`.

    Args:
        tree: n rows per request.
        seq_lens: [bs] int32 or int64, committed tokens without the root.
        full: bool or uint8, at least sum(n * (seq_len + n)) elements (a shorter one is written
            past its end on CUDA: its size cannot be checked without waiting), receives the mask in
            FULL_MASK layout; what lies beyond that stays.
        fill_prefix: without it only the last n columns of each row of `full` are written, which
            is all that `verify_attention` reads.
        out: an earlier result, whose tensors receive this one.

    Raises:
        ValueError: shapes or types do not fit.
        KernelError: as `library_for`.
    """
    bs, device = tree.tokens.shape[0], tree.tokens.device
    if out is None:
        out = TreeMask(
            torch.empty_like(tree.parents),
            torch.empty_like(tree.parents),
            torch.empty(bs + 1, dtype=torch.int64, device=device),
        )
    _mask(tree.parents, tree.depths, seq_lens, fill_prefix, *out, full)
    return out


def tree_accept(
    tree: Tree,
    target_tokens: torch.Tensor,
    width: int | None = None,
    *,
    out: Accepted | None = None,
) -> Accepted:
    """`reference.tree_accept`, without reading a value on the host.

    Args:
        tree, target_tokens: as there.
        width: columns of the result. On CUDA by default as many as the tree has rows: the
            deepest row is not known without waiting.
        out: an earlier result of the same width, whose tensors receive this one.

    Raises:
        ValueError: shapes, types or the width do not fit.
        KernelError: as `library_for`.
    """
    bs, device = tree.tokens.shape[0], tree.tokens.device
    if library_for("tree_accept", device) is None and out is None:
        return reference.tree_accept(tree, target_tokens, width)
    if out is None:
        columns = tree.rows if width is None else width
        check_range("width", columns, 1, MAX_ROWS)
        ints = {"dtype": torch.int64, "device": device}
        out = Accepted(
            torch.empty(bs, columns, **ints),
            torch.empty(bs, **ints),
            torch.empty(bs, **ints),
            torch.empty(bs, columns, **ints),
        )
    targets = target_tokens.to(torch.int64).contiguous()
    _accept(tree.tokens, tree.parents, tree.sizes, targets, *out)
    return out


def _rows(budgets: torch.Tensor | int, rows: int | None) -> int:
    if rows is None:
        if isinstance(budgets, torch.Tensor):
            raise ValueError("rows must be given with budgets in a tensor on this device")
        rows = budgets + 1
    check_range("rows", rows, 1, MAX_ROWS)
    return rows


def _empty_tree(bs: int, rows: int, device: torch.device) -> Tree:
    ints = {"dtype": torch.int64, "device": device}
    tokens, parents, depths, ranks, first, next_ = (torch.empty(bs, rows, **ints) for _ in range(6))
    tree = Tree(tokens, parents, depths, ranks, torch.empty(bs, **ints))
    # Cached properties: the kernel writes them, nobody need compute them.
    tree.__dict__.update(first_child=first, next_sibling=next_)
    return tree


def _check_build(
    root_tokens: torch.Tensor,
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    budgets: torch.Tensor,
    width: int,
    spine_first: bool,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ranks: torch.Tensor,
    sizes: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
) -> None:
    (bs, depth, k), device, int64 = logprobs.shape, logprobs.device, (torch.int64,)
    check_range("depth", depth, 0, MAX_DEPTH)
    if width < 1:
        raise ValueError(f"width is {width}; at least 1 candidate per depth is needed")
    check_range("width", min(width, k), 0, MAX_DEPTH)
    check_tensor("root_tokens", root_tokens, [bs], int64, device)
    check_tensor("logprobs", logprobs, [bs, depth, k], (torch.float32,), device)
    check_tensor("token_ids", token_ids, [bs, depth, k], int64, device)
    check_tensor("budgets", budgets, [bs], (torch.int32,), device)
    rows = tokens.shape[1]
    check_range("rows", rows, 1, MAX_ROWS)
    check_tensor("tokens", tokens, [bs, rows], int64, device)
    check_tensor("parents", parents, [bs, rows], int64, device)
    check_tensor("depths", depths, [bs, rows], int64, device)
    check_tensor("ranks", ranks, [bs, rows], int64, device)
    check_tensor("sizes", sizes, [bs], int64, device)
    check_tensor("first_child", first_child, [bs, rows], int64, device)
    check_tensor("next_sibling", next_sibling, [bs, rows], int64, device)


@register(
    "tree_build(Tensor root_tokens, Tensor logprobs, Tensor token_ids, Tensor budgets, int width, "
    "bool spine_first, Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) depths, "
    "Tensor(d!) ranks, Tensor(e!) sizes, Tensor(f!) first_child, Tensor(g!) next_sibling) -> ()",
    _check_build,
)
def _build(
    root_tokens: torch.Tensor,
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    budgets: torch.Tensor,
    width: int,
    spine_first: bool,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ranks: torch.Tensor,
    sizes: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
) -> None:
    (bs, depth, k), rows = logprobs.shape, tokens.shape[1]
    library = library_for("tree_build", logprobs.device)
    if library is None:
        built = reference.tree_build(
            root_tokens, logprobs, token_ids, budgets, width, spine_first, rows
        )
        wanted = (built.tokens, built.parents, built.depths, built.ranks, built.sizes)
        results = (*wanted, built.first_child, built.next_sibling)
        targets = (tokens, parents, depths, ranks, sizes, first_child, next_sibling)
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)
        return
    launch(
        library,
        "tree_build",
        logprobs.device,
        root_tokens=root_tokens,
        logprobs=logprobs,
        token_ids=token_ids,
        budgets=budgets,
        tokens=tokens,
        parents=parents,
        depths=depths,
        ranks=ranks,
        sizes=sizes,
        first_child=first_child,
        next_sibling=next_sibling,
        bs=bs,
        depth=depth,
        k=k,
        width=min(width, k),
        rows=rows,
        spine_first=int(spine_first),
    )


def _check_mask(
    parents: torch.Tensor,
    depths: torch.Tensor,
    seq_lens: torch.Tensor,
    fill_prefix: bool,
    packed: torch.Tensor,
    positions: torch.Tensor,
    mask_indptr: torch.Tensor,
    full: torch.Tensor | None,
) -> None:
    (bs, rows), device, int64 = parents.shape, parents.device, (torch.int64,)
    check_range("rows", rows, 1, MAX_ROWS)
    check_range("bs", bs, 0, 65_535)
    check_tensor("parents", parents, [bs, rows], int64, device)
    check_tensor("depths", depths, [bs, rows], int64, device)
    check_tensor("seq_lens", seq_lens, [bs], (torch.int32, torch.int64), device)
    check_tensor("packed", packed, [bs, rows], int64, device)
    check_tensor("positions", positions, [bs, rows], int64, device)
    check_tensor("mask_indptr", mask_indptr, [bs + 1], int64, device)
    if full is not None:
        check_tensor("full", full, [None], (torch.bool, torch.uint8), device)


@register(
    "tree_mask(Tensor parents, Tensor depths, Tensor seq_lens, bool fill_prefix, "
    "Tensor(a!) packed, Tensor(b!) positions, Tensor(c!) mask_indptr, Tensor(d!)? full) -> ()",
    _check_mask,
)
def _mask(
    parents: torch.Tensor,
    depths: torch.Tensor,
    seq_lens: torch.Tensor,
    fill_prefix: bool,
    packed: torch.Tensor,
    positions: torch.Tensor,
    mask_indptr: torch.Tensor,
    full: torch.Tensor | None,
) -> None:
    library = library_for("tree_mask", parents.device)
    bs, rows = parents.shape
    if library is None:
        sizes = torch.full((bs,), rows, device=parents.device)
        tree = Tree(parents, parents, depths, parents, sizes)  # masks look at two fields alone
        packed.copy_(reference.packed_mask(tree))
        positions.copy_(reference.positions(tree, seq_lens))
        flat, indptr = reference.full_mask(tree, seq_lens)
        mask_indptr.copy_(indptr)
        if full is not None:
            _copy_mask(flat, indptr.tolist(), seq_lens.tolist(), rows, fill_prefix, full)
        return
    if bs == 0:
        mask_indptr.zero_()  # no block would
        return
    launch(
        library,
        "tree_mask",
        parents.device,
        parents=parents,
        depths=depths,
        seq_lens=seq_lens,
        mask=full,
        mask_indptr=mask_indptr,
        packed=packed,
        positions=positions,
        bs=bs,
        rows=rows,
        seq_lens_are_int64=int(seq_lens.dtype == torch.int64),
        fill_prefix=int(fill_prefix),
    )


def _copy_mask(
    flat: torch.Tensor,
    begins: list[int],
    lengths: list[int],
    rows: int,
    fill_prefix: bool,
    full: torch.Tensor,
) -> None:
    if full.numel() < flat.numel():
        raise ValueError(f"full has {full.numel()} elements; the mask needs {flat.numel()}")
    if fill_prefix:
        full[: flat.numel()] = flat
        return
    for begin, length in zip(begins, lengths, strict=False):
        request = slice(begin, begin + rows * (length + rows))
        columns = (rows, length + rows)
        full[request].view(columns)[:, length:] = flat[request].view(columns)[:, length:]


def _check_accept(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    sizes: torch.Tensor,
    target_tokens: torch.Tensor,
    accepted_rows: torch.Tensor,
    lengths: torch.Tensor,
    bonus: torch.Tensor,
    emitted: torch.Tensor,
) -> None:
    (bs, rows), device, int64 = tokens.shape, tokens.device, (torch.int64,)
    check_range("rows", rows, 1, MAX_ROWS)
    check_tensor("tokens", tokens, [bs, rows], int64, device)
    check_tensor("parents", parents, [bs, rows], int64, device)
    check_tensor("sizes", sizes, [bs], int64, device)
    check_tensor("target_tokens", target_tokens, [bs, rows], int64, device)
    width = emitted.shape[1]
    check_range("width", width, 1, MAX_ROWS)
    check_tensor("accepted_rows", accepted_rows, [bs, width], int64, device)
    check_tensor("lengths", lengths, [bs], int64, device)
    check_tensor("bonus", bonus, [bs], int64, device)
    check_tensor("emitted", emitted, [bs, width], int64, device)


@register(
    "tree_accept(Tensor tokens, Tensor parents, Tensor sizes, Tensor target_tokens, "
    "Tensor(a!) accepted_rows, Tensor(b!) lengths, Tensor(c!) bonus, Tensor(d!) emitted) -> ()",
    _check_accept,
)
def _accept(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    sizes: torch.Tensor,
    target_tokens: torch.Tensor,
    accepted_rows: torch.Tensor,
    lengths: torch.Tensor,
    bonus: torch.Tensor,
    emitted: torch.Tensor,
) -> None:
    width = emitted.shape[1]
    library = library_for("tree_accept", tokens.device)
    if library is None:
        tree = Tree(tokens, parents, parents, parents, sizes)  # the walk looks at three fields
        results = reference.tree_accept(tree, target_tokens, width)
        targets = (accepted_rows, lengths, bonus, emitted)
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)
        return
    launch(
        library,
        "tree_accept",
        tokens.device,
        tokens=tokens,
        parents=parents,
        sizes=sizes,
        target_tokens=target_tokens,
        accepted_rows=accepted_rows,
        lengths=lengths,
        bonus=bonus,
        emitted=emitted,
        bs=tokens.shape[0],
        rows=tokens.shape[1],
        width=width,
    )

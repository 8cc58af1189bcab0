"""What went wrong in attention kernels elsewhere, asked of ours: in the simulator or on a GPU.

Each check goes through the public ops on a device and compares with the reference in float64.
docs/kernels.md says which reports each is for.
"""

from __future__ import annotations

from typing import Any

import torch
from attention_cases import VALUES, Case, chain, nothing, random_bits, star

from overstory.kernels import ops

FINE = ops.Schedule(7, 1)
"""A granule a block where there are few: every request in several parts."""
_GARBAGE_SLOT = (1 << 30) + 7
Outputs = tuple[torch.Tensor, torch.Tensor]


def verify(case: Case, mask: str = "bytes", dense: bool = False, **options: Any) -> Outputs:
    """Output and log-sum-exp of all tokens; both begin as NaN."""
    out = torch.full((case.tokens, case.heads, VALUES), torch.nan, device=case.device).bfloat16()
    lse = torch.full((case.tokens, case.heads), torch.nan, device=case.device)
    if mask == "bytes":
        options["custom_mask"], options["mask_indptr"] = case.mask_bytes()
    elif mask == "words":
        options["mask_words"] = case.mask_words()
    if dense:
        options["tail"] = case.tail_keys()
    options.setdefault("max_q", case.max_q)
    ops.verify_attention(
        case.q,
        case.kv,
        options.pop("qo_indptr", case.qo_indptr),
        options.pop("kv_indptr", case.kv_indptr),
        options.pop("kv_indices", case.kv_indices),
        case.out_cache_loc,
        scale=case.scale,
        kv_scale=case.kv_scale or 1.0,
        causal=mask == "causal",
        lse=lse,
        out=out,
        **options,
    )
    return out, lse


def check(got: Outputs, expected: Outputs) -> None:
    """Only roundings to bf16, of the weights and of the result, may differ."""
    out, lse = (part.double() for part in got)
    want, want_lse = expected
    n = want.shape[0]
    torch.testing.assert_close(out[:n], want, rtol=1e-2, atol=4e-3, equal_nan=True)
    torch.testing.assert_close(lse[:n], want_lse, rtol=1e-5, atol=4e-3, equal_nan=True)
    assert bool((out[n:] == 0).all())
    assert bool((lse[n:] == -torch.inf).all())


def check_pages(device: str, page_size: int, scale: int = 1) -> None:
    """Slots of whole pages, a last page that is part prefix, part rows, part nobody's."""
    requests = [(page_size * 2 * scale, 9), (page_size - 3, 9), (page_size + 5, 1), (0, 9)]
    case = Case(requests, device=device, page_size=page_size, unowned=3, seed=page_size)
    check(verify(case, schedule=FINE), case.expected())


def check_scores_far_below_zero(device: str, prefix: int = 40) -> None:
    """All scores of some rows are near -1e5, of others near 1e5: no constant stands for -inf."""
    case = Case([(prefix, 9), (0, 9)], device=device, tail=star, scale=100.0)
    case.kv.fill_(1.0)
    case.kv += (torch.arange(len(case.kv), device=device) % 3).bfloat16().unsqueeze(1) / 64
    signs = torch.where(torch.arange(case.tokens, device=device) % 2 == 0, -1.0, 1.0)
    case.q[:] = (signs * 1.75).bfloat16().view(-1, 1, 1)
    out, lse = verify(case, schedule=FINE)
    want, want_lse = case.expected()
    assert float(want_lse.min()) < -1e5
    assert float(want_lse.max()) > 1e5
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0.05)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=4e-3)


def check_parts_of_which_none_is_seen(device: str) -> None:
    """Rows that see no key, in several parts: the merge has only sums of nothing."""
    case = Case([(0, 33), (0, 20)], device=device, tail=nothing)
    out, lse = verify(case, schedule=ops.Schedule(20, 1))
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


def check_what_lies_behind_the_end(device: str) -> None:
    """Padded index arrays, masks and rows of a captured batch hold anything at all."""
    case = Case([(37, 5), (8, 2)], device=device, unowned=30, tail=random_bits)
    expected = case.expected()
    behind = torch.full((100,), _GARBAGE_SLOT, dtype=case.index_dtype, device=device)
    behind[::3] = -1
    case.kv_indices = torch.cat((case.kv_indices, behind))
    case.out_cache_loc[case.owned :] = -1
    case.q[case.owned :] = torch.nan
    for mask in ("bytes", "words"):
        check(verify(case, mask, schedule=FINE, max_q=20), expected)


def check_padded_requests(device: str, prefix: int = 40) -> None:
    """A batch padded to its graph, by requests that have rows: all their keys are one slot, filled
    with NaN by padding before. They give NaN, and no other request does."""
    requests = [(1, 9), (prefix, 9), (1, 9), (0, 5), (1, 4)]
    case = Case(requests, device=device, unowned=3)
    padded = [0, 2, 4]
    bad = case.kv_indices[0].clone()
    case.kv[bad] = torch.nan
    for request in padded:
        rows = slice(case.qo_indptr[request], case.qo_indptr[request + 1])
        case.kv_indices[case.kv_indptr[request]] = bad
        case.out_cache_loc[rows] = bad
        case.q[rows] = torch.nan
    expected = case.expected()
    seen = expected[1].isfinite().all(dim=1)
    assert int(seen.sum()) == 9 + 5
    for schedule in (FINE, None):
        check(verify(case, schedule=schedule), expected)


def check_halves_merge_by_their_log_sums(device: str, prefix: int = 90) -> None:
    """Attention over two halves of the keys, put together by their log-sum-exps, is that over all:
    they are natural logarithms of scaled scores, also where a request is split."""
    case = Case([(prefix, 1)], device=device, tail=chain)
    whole, whole_lse = verify(case, schedule=FINE)
    middle = prefix // 2 + 3
    slots = torch.cat((case.kv_indices, case.out_cache_loc))
    parts = []
    for own in (slots[:middle], slots[middle:]):
        indptr = torch.tensor([0, len(own)], dtype=torch.int32, device=device)
        lse = torch.empty(1, case.heads, device=device)
        out = ops.decode_attention(
            case.q, case.kv, indptr, own, scale=case.scale, lse=lse, schedule=FINE
        )
        parts.append((out.float(), lse))
    merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * (lse - merged_lse).exp().unsqueeze(2) for out, lse in parts)
    torch.testing.assert_close(merged_lse, whole_lse, rtol=1e-5, atol=4e-3)
    torch.testing.assert_close(merged, whole.float(), rtol=1e-2, atol=4e-3)


def check_rows_of_a_chain_are_decodes(device: str, prefix: int = 50) -> None:
    """A row of a chain and a decode over the same keys give the same, whatever rows are beside it:
    a later row has no influence, an earlier one is seen."""
    case = Case([(prefix, 9)], device=device, tail=chain)
    out, lse = verify(case, schedule=FINE)
    for row in range(9):
        own = torch.cat((case.kv_indices, case.out_cache_loc[: row + 1]))
        indptr = torch.tensor([0, len(own)], dtype=torch.int32, device=device)
        own_lse = torch.empty(1, case.heads, device=device)
        alone = ops.decode_attention(
            case.q[row : row + 1], case.kv, indptr, own, scale=case.scale, lse=own_lse
        )
        torch.testing.assert_close(out[row : row + 1], alone, rtol=1e-2, atol=2e-3)
        torch.testing.assert_close(lse[row : row + 1], own_lse, rtol=1e-5, atol=4e-3)


def check_inputs_stay(device: str) -> None:
    """No launch writes to the cache, the queries, the lists or the masks."""
    case = Case([(37, 9), (0, 3)], device=device, unowned=4)
    mask = case.mask_bytes()
    inputs = (case.q, case.kv, case.qo_indptr, case.kv_indptr, case.kv_indices, case.out_cache_loc)
    before = [tensor.clone() for tensor in (*inputs, *mask)]
    verify(case, "given", custom_mask=mask[0], mask_indptr=mask[1], schedule=FINE)
    for tensor, old in zip((*inputs, *mask), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))


def check_calls_share_a_workspace(device: str, prefix: int, rounds: int) -> None:
    """As the layers of a model do: each call's parts are read before the next writes its own, and
    no call sees the masks, lengths or maxima of the one before."""
    cases = [
        Case([(prefix, 9), (3, 2)], device=device, seed=1, tail=star),
        Case([(prefix // 2, 9), (prefix, 9)], device=device, seed=2, scale=0.3),
        Case([(17, 4)], device=device, seed=3, tail=nothing),
    ]
    schedule = None if device == "cuda" else FINE
    space = ops.attention_workspace(device, 8, 9, schedule)
    expected = [case.expected() for case in cases]
    masks = [case.mask_bytes() for case in cases]
    got = [
        verify(
            case,
            "given",
            custom_mask=mask[0],
            mask_indptr=mask[1],
            max_q=9,
            workspace=space,
            schedule=schedule,
        )
        for _ in range(rounds)
        for case, mask in zip(cases, masks, strict=True)
    ]
    for i, result in enumerate(got):
        check(result, expected[i % len(cases)])


def check_repeated_slots(device: str, prefix: int = 50) -> None:
    """A slot that stands in a list many times counts as often; two requests may share slots."""
    case = Case([(prefix, 4), (prefix, 9)], device=device)
    case.kv_indices[10 : prefix - 10] = case.kv_indices[3]
    case.kv_indices[prefix : 2 * prefix] = case.kv_indices[:prefix]
    check(verify(case, schedule=FINE), case.expected())


def in_blocks(case: Case, size: int = 64) -> dict[str, Any]:
    """Arguments by which the requests of a case are cut in blocks of `size` rows, each behind all
    keys before it in one list of slots."""
    begins, ends, rows, indices = [], [], [0], []
    prefixes = case.kv_indices.split([prefix for prefix, _ in case.requests])
    own = case.out_cache_loc[: case.owned].split([n for _, n in case.requests])
    begin = 0
    for prefix, mine, (length, n) in zip(prefixes, own, case.requests, strict=True):
        indices += [prefix, mine]
        for first in range(0, n, size):
            begins.append(begin)
            ends.append(begin + length + first)
            rows.append(rows[-1] + min(size, n - first))
        begin += length + n
    ints = {"dtype": torch.int32, "device": case.device}
    return {
        "qo_indptr": torch.tensor(rows, **ints),
        "kv_indptr": torch.tensor(begins, **ints),
        "kv_ends": torch.tensor(ends, **ints),
        "kv_indices": torch.cat(indices),
        "max_q": size,
    }


def check_blocks_of_rows(
    device: str, requests: list[tuple[int, int]], size: int = 64, **options: Any
) -> None:
    """Requests of (prefix, rows) in blocks are causal attention over the whole of each. `options`:
    of `Case`, and `schedule`."""
    schedule = options.pop("schedule", None)
    case = Case(requests, tail=chain, device=device, **options)
    check(verify(case, "causal", schedule=schedule, **in_blocks(case, size)), case.expected())

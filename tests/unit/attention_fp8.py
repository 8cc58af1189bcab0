"""Attention over a cache in e4m3, checked through the public ops: in the simulator or on a GPU."""

from __future__ import annotations

import torch
from attention_cases import VALUES, WIDTH, Case, DecodeCase, Tail, random_bits, random_tree, star
from attention_hazards import FINE, check, verify

from overstory.kernels import ops
from overstory.kernels.reference import dequantize_kv, scale_for

_NAN = 0x7F


def check_lengths(device: str, q: int, lengths: tuple[int, ...], kv_scale: float) -> None:
    """Prefixes of all lengths in one batch, dense and cached tails, in both index types."""
    requests = [(length, q) for length in lengths]
    dtype = torch.int32 if q % 2 else torch.int64
    case = Case(
        requests, device=device, seed=q, unowned=2, kv_scale=kv_scale, index_dtype=dtype,
        tail=random_bits,
    )  # fmt: skip
    expected = case.expected()
    check(verify(case), expected)
    check(verify(case, dense=True, schedule=FINE), expected)


def check_masks(device: str, tail: Tail, mask: str) -> None:
    case = Case([(23, 9), (0, 5), (40, 33)], device=device, tail=tail, kv_scale=0.3)
    check(verify(case, mask), case.expected())


def check_decode(device: str, lengths: list[int], heads: int) -> None:
    case = DecodeCase(lengths, heads=heads, device=device, kv_scale=0.11)
    lse = torch.full(case.q.shape[:2], torch.nan, device=device)
    out = ops.decode_attention(
        case.q, case.kv, case.kv_indptr, case.kv_indices, scale=case.scale, lse=lse, kv_scale=0.11
    )
    check((out, lse), case.expected())


def check_every_number(device: str) -> None:
    """A cache of bytes. One key a request: its values are the output, and a query with a single 1
    finds one of its columns as the log-sum-exp. Scales are powers of two: nothing is rounded."""
    finite = [byte for byte in range(256) if byte & _NAN != _NAN]
    numbers = torch.tensor(finite, dtype=torch.uint8).repeat(3)[:WIDTH]
    requests, heads = WIDTH // 8, 8
    stored = torch.stack([numbers.roll(7 * i) for i in range(requests)]).to(device)
    q = torch.eye(WIDTH, device=device).view(requests, heads, WIDTH).bfloat16()
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device)
    slots = torch.arange(requests, device=device)
    lse = torch.empty(requests, heads, device=device)
    out = ops.decode_attention(q, stored, indptr, slots, scale=2.0, lse=lse, kv_scale=0.25)
    meant = dequantize_kv(stored, 0.25)
    assert torch.equal(out.float(), meant[:, None, :VALUES].expand(requests, heads, VALUES))
    scores = (q.float() @ meant.unsqueeze(2)).squeeze(2) * 2.0
    torch.testing.assert_close(lse, scores, rtol=1e-6, atol=1e-6)


def check_nan(device: str) -> None:
    """In slots of nobody: no influence. In a tail key: on the rows that see it. In a key of the
    prefix: on all rows of its request."""
    case = Case([(21, 9), (40, 3)], device=device, tail=star, kv_scale=1.0)
    keep = [i for i in range(12) if i != 4]
    expected, expected_lse = case.expected()
    case.kv.view(torch.uint8)[case.out_cache_loc[4], 100::7] = _NAN
    out, lse = verify(case, schedule=FINE)
    check((out[keep], lse[keep]), (expected[keep], expected_lse[keep]))
    assert not bool(torch.isfinite(out[4]).any())
    case.kv.view(torch.uint8)[case.kv_indices[21 + 39], 575] = _NAN | 0x80
    out, _ = verify(case, schedule=FINE)
    assert bool(out[9:].isnan().all())
    assert bool(torch.isfinite(out[:4]).all())


def check_near_bf16(device: str, prefix: int) -> None:
    """The same rows in bf16: what differs is the rounding to e4m3 and no more. Of millions of
    normal numbers some pass 4.5, which a scale of 0.01 would make NaN; none passes 8."""
    case = Case([(prefix, 9)], device=device, tail=random_tree)
    stored = Case([(prefix, 9)], device=device, tail=random_tree, kv_scale=scale_for(8.0))
    exact, _ = case.expected()
    error = (verify(stored)[0].double() - exact).norm() / exact.norm()
    assert 1e-3 < float(error) < 0.1


def check_repeatable(device: str, prefix: int, rounds: int) -> None:
    case = Case([(prefix, 9), (30, 4)], device=device, kv_scale=0.5)
    first = verify(case)
    for _ in range(rounds):
        again = verify(case)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])

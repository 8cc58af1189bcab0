"""The fp8 cache: what is stored, and attention over it against that over what it stands for."""

import math

import pytest
import torch

from overstory.kernels.reference import (
    FP8_MAX,
    decode_attention,
    dequantize_kv,
    kv_relocate,
    quantize_kv,
    scale_for,
    verify_attention,
)

WIDTH, VALUES, HEADS = 576, 512, 4


def every_number() -> torch.Tensor:
    """All 256 bytes as e4m3."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def meaning(byte: int) -> float:
    """Of one byte, from the definition: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    sign, exponent, mantissa = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_a_byte_means_what_e4m3_says() -> None:
    want = torch.tensor([meaning(byte) for byte in range(256)])
    assert float(want[want.isfinite()].max()) == FP8_MAX
    for stored in (every_number(), every_number().view(torch.uint8)):
        torch.testing.assert_close(dequantize_kv(stored), want, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0173])
def test_what_is_stored_is_the_nearest_number(scale: float) -> None:
    numbers = dequantize_kv(every_number()).double()
    numbers = numbers[numbers.isfinite()].unique()
    rows = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 40 * scale
    stored = dequantize_kv(quantize_kv(rows, scale)).double()
    target = (rows / scale).double()
    distance = (numbers[None] - target[:, None]).abs().min(dim=1).values
    assert torch.equal((stored - target).abs(), distance)


def test_ties_go_to_the_even_mantissa() -> None:
    halves = torch.tensor([1.0625, 1.1875, -1.0625, 2.0**-10, 3 * 2.0**-10])
    assert quantize_kv(halves).float().tolist() == [1.0, 1.25, -1.0, 0.0, 2.0**-8]


def test_a_stored_number_stays_what_it_is() -> None:
    finite = every_number()[dequantize_kv(every_number()).isfinite()]
    again = quantize_kv(dequantize_kv(finite))
    assert torch.equal(again.view(torch.uint8), finite.view(torch.uint8))


def test_what_does_not_fit_is_nan_and_a_scale_makes_it_fit() -> None:
    rows = torch.tensor([[700.0, -3.0, 0.5]])
    assert quantize_kv(rows).float().isnan().tolist() == [[True, False, False]]
    scale = scale_for(700.0)
    back = dequantize_kv(quantize_kv(rows, scale), scale)
    torch.testing.assert_close(back, rows, atol=0.1, rtol=2.0**-4)
    assert float(back[0, 0]) == pytest.approx(700.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_is_a_positive_number(scale: float) -> None:
    for call in (quantize_kv, dequantize_kv):
        with pytest.raises(ValueError, match="want a positive number"):
            call(quantize_kv(torch.ones(1)) if call is dequantize_kv else torch.ones(1), scale)


def test_other_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.int8"):
        dequantize_kv(torch.zeros(4, dtype=torch.int8))


class Request:
    """One request in a pool of random rows, in float32 and as stored."""

    def __init__(self, prefix: int, rows: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(prefix * 100 + rows)
        slots = torch.randperm(prefix + rows + 5, generator=generator)
        self.rows = torch.randn(len(slots), 1, WIDTH, generator=generator) * 3
        self.stored = quantize_kv(self.rows, scale)
        self.q = torch.randn(rows, HEADS, WIDTH, generator=generator)
        self.prefix, self.tail = slots[:prefix], slots[prefix : prefix + rows]
        self.scale = scale

    def verify(self, kv: torch.Tensor, **options: float) -> torch.Tensor:
        lse = torch.empty(self.q.shape[:2])
        indptr = torch.tensor([0, len(self.q)]), torch.tensor([0, len(self.prefix)])
        out = verify_attention(
            self.q, kv, *indptr, self.prefix, self.tail, scale=0.05, lse=lse, **options
        )
        return torch.cat((out.flatten(1), lse), dim=1)

    def decode(self, kv: torch.Tensor, **options: float) -> torch.Tensor:
        indptr = torch.tensor([0, len(self.prefix)])
        return decode_attention(self.q[:1], kv, indptr, self.prefix, scale=0.05, **options)


@pytest.mark.parametrize("scale", [1.0, 0.11])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_attention_is_that_over_what_the_cache_stands_for(scale: float, as_bytes: bool) -> None:
    request = Request(40, 6, scale)
    kv = request.stored.view(torch.uint8) if as_bytes else request.stored
    meant = dequantize_kv(request.stored, scale)
    assert torch.equal(request.verify(kv, kv_scale=scale), request.verify(meant))
    assert torch.equal(request.decode(kv, kv_scale=scale), request.decode(meant))


def test_attention_is_near_that_over_the_rows() -> None:
    """e4m3 rounds a number by up to 1/16: so far off, and no farther, is the result."""
    request = Request(300, 5, scale_for(20.0))
    exact = request.verify(request.rows)
    error = request.verify(request.stored, kv_scale=request.scale) - exact
    assert 1e-4 < float(error.norm() / exact.norm()) < 0.1


def test_nan_that_nobody_sees_stays_unseen() -> None:
    request = Request(9, 3, 1.0)
    want = request.verify(request.stored)
    unused = torch.ones(len(request.rows), dtype=torch.bool)
    unused[torch.cat((request.prefix, request.tail))] = False
    request.stored.view(torch.uint8)[unused] = 0x7F
    assert torch.equal(request.verify(request.stored), want)
    # The last row is seen by itself alone; what it does to the others, it does to none.
    request.stored.view(torch.uint8)[request.tail[-1]] = 0x7F
    got = request.verify(request.stored)
    torch.testing.assert_close(got[:2], want[:2], atol=1e-5, rtol=1e-5)
    assert bool(got[2].isnan().any())


def test_a_scale_for_a_cache_without_one_is_refused() -> None:
    request = Request(4, 2, 1.0)
    with pytest.raises(ValueError, match=r"kv_scale is 0\.5"):
        request.verify(request.rows, kv_scale=0.5)


def test_rows_move_as_bytes() -> None:
    """NaN and both zeros too."""
    stored = every_number().view(16, 1, 16).clone()
    want = stored.view(torch.uint8).clone()
    want[[3, 0]] = want[[0, 15]]
    kv_relocate([stored], torch.tensor([0, 15]), torch.tensor([3, 0]))
    assert torch.equal(stored.view(torch.uint8), want)

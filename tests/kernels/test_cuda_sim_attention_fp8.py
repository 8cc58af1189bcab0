"""The attention kernel over a cache in e4m3, in the simulator; tests/gpu has the same."""

import shutil

import attention_fp8
import pytest
import torch
from attention_cases import Case, Tail, chain, everything, nothing, random_bits, random_tree

from overstory.kernels import ops

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the simulator")
full = pytest.mark.full


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSTORY_KERNELS", "simulator")


def some(sample: list[int], rest: list[int]) -> list[object]:
    return [*sample, *(pytest.param(value, marks=full) for value in rest)]


@pytest.mark.parametrize("q", some([4, 9], [1, 2, 3, 5, 6, 7, 8, 17]))
def test_lengths_and_every_number_of_tiles(q: int) -> None:
    attention_fp8.check_lengths("cpu", q, (0, 15, 17, 31), 0.37)


@pytest.mark.parametrize("q", some([1], [2, 3, 4, 5, 8, 9]))
def test_long_enough_to_go_around(q: int) -> None:
    attention_fp8.check_lengths("cpu", q, (532, 1, 180), 1.0)


@pytest.mark.parametrize(
    ("mask", "tail"),
    [
        ("bytes", random_tree),
        pytest.param("words", random_bits, marks=full),
        pytest.param("causal", chain, marks=full),
        pytest.param("none", everything, marks=full),
        pytest.param("bytes", nothing, marks=full),
    ],
)
def test_masks(mask: str, tail: Tail) -> None:
    attention_fp8.check_masks("cpu", tail, mask)


@pytest.mark.parametrize("heads", some([8], [2, 4, 16]))
def test_decode(heads: int) -> None:
    attention_fp8.check_decode("cpu", [0, 1, 15, 16, 17, 100, 0], heads)


def test_every_number() -> None:
    attention_fp8.check_every_number("cpu")


def test_nan() -> None:
    attention_fp8.check_nan("cpu")


def test_near_bf16() -> None:
    attention_fp8.check_near_bf16("cpu", 60)


def test_repeatable() -> None:
    attention_fp8.check_repeatable("cpu", 40, 1)


def test_what_does_not_fit_is_refused() -> None:
    case = Case([(20, 2)])
    arguments = (case.q, case.kv, case.qo_indptr, case.kv_indptr, case.kv_indices)
    with pytest.raises(ValueError, match=r"kv_scale is 0\.5, but kv is"):
        ops.verify_attention(*arguments, case.out_cache_loc, scale=0.1, kv_scale=0.5)
    stored = Case([(20, 2)], kv_scale=0.5)
    arguments = (case.q, stored.kv, case.qo_indptr, case.kv_indptr, case.kv_indices)
    with pytest.raises(ValueError, match="want a positive number"):
        ops.verify_attention(*arguments, case.out_cache_loc, scale=0.1, kv_scale=0.0)
    with pytest.raises(ValueError, match=r"tail is torch\.bfloat16, kv torch\.float8_e4m3fn"):
        ops.verify_attention(*arguments, case.out_cache_loc, scale=0.1, tail=case.tail_keys())
    other = torch.zeros(len(stored.kv), 576, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="want the type of q, or e4m3"):
        ops.verify_attention(arguments[0], other, *arguments[2:], case.out_cache_loc, scale=0.1)

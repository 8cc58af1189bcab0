"""The public ops over the CUDA sources in the simulator: what lies before a launcher."""

import shutil
from collections.abc import Iterator

import op_checks
import pytest
import torch

from overstory.kernels import ops, reference
from overstory.kernels.ops.status import BadInputError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the simulator")


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OVERSTORY_KERNELS", "simulator")
    yield
    # None was met, or the test that met it has asked.
    ops.raise_bad_input(torch.device("cpu"))


@pytest.mark.parametrize("seed", range(12))
def test_trees(seed: int) -> None:
    op_checks.check_trees("cpu", seed, 3)


def test_a_workspace_of_attention_that_is_too_small_is_named() -> None:
    q = torch.randn(2, 8, 576).bfloat16()
    kv = torch.randn(5, 576).bfloat16()
    indptr = torch.tensor([0, 3, 5], dtype=torch.int32)
    space = ops.attention_workspace("cpu", 8, 1, ops.Schedule(4, 0))
    into = {"scale": 0.1, "workspace": space}
    ops.decode_attention(q, kv, indptr, torch.arange(5), schedule=ops.Schedule(4, 0), **into)
    with pytest.raises(ValueError, match=r"has 66304 bytes; 5 blocks for 8 heads .* need 82880"):
        ops.decode_attention(q, kv, indptr, torch.arange(5), schedule=ops.Schedule(5, 0), **into)


def test_numbers_that_no_attention_kernel_is_for_are_named() -> None:
    with pytest.raises(ValueError, match=r"Schedule\.blocks is 0; want 1\.\.65536"):
        ops.Schedule(0, 4)
    with pytest.raises(ValueError, match=r"Schedule\.min_chunk is -1; want 0\.\.65536"):
        ops.Schedule(4, -1)
    with pytest.raises(ValueError, match="3 heads; the kernels take"):
        ops.attention_workspace("cpu", 3, 1)
    with pytest.raises(ValueError, match=r"max_q is 65; want 1\.\.64"):
        ops.attention_workspace("cpu", 8, 65)


def test_device_time() -> None:
    times = torch.zeros(2, dtype=torch.int64)
    ops.device_time(times[:1])
    ops.device_time(times[1:])
    assert 0 < int(times[0]) <= int(times[1])


@pytest.mark.parametrize("seed", range(4))
def test_relocation(seed: int) -> None:
    op_checks.check_relocation("cpu", seed, layers=2, slots=50, moves=30)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_relocation_in_an_fp8_cache(dtype: torch.dtype) -> None:
    """Rows of 576 bytes, NaN among them, as SGLang's pool holds them and as it hands them out."""
    generator = torch.Generator().manual_seed(11)
    want = torch.randint(0, 256, (3, 40, 1, 576), dtype=torch.uint8, generator=generator)
    pool = want.clone()
    sources, targets = torch.randperm(40, generator=generator)[:24].view(2, 12)
    sources[5:9] = targets[4:8]  # a chain
    reference.kv_relocate(list(want), sources, targets)
    table = ops.LayerTable([layer.view(dtype) for layer in pool])
    assert table.row_bytes == 576
    ops.kv_relocate(table, sources, targets)
    assert torch.equal(pool, want)


@pytest.mark.parametrize("seed", range(4))
def test_rows_there_and_back(seed: int) -> None:
    op_checks.check_rows("cpu", seed, layers=2, slots=50, rows=(1, 7, 30, 50)[seed])


def test_a_slot_outside_is_reported() -> None:
    pool = [torch.zeros(5, 8, dtype=torch.int16)]
    slots = torch.tensor([1]), torch.tensor([5])
    ops.kv_relocate(pool, *slots)
    with pytest.raises(BadInputError, match="slot outside"):
        ops.raise_bad_input(torch.device("cpu"))
    ops.raise_bad_input(torch.device("cpu"))


@pytest.mark.parametrize("seed", range(3))
def test_candidates(seed: int) -> None:
    op_checks.check_candidates("cpu", seed, 3, 200)


def test_a_workspace_serves_fewer_rows_and_again() -> None:
    generator = torch.Generator().manual_seed(3)
    workspace = ops.candidates_workspace("cpu", 6, 3000)
    for rows in (6, 1, 4, 6):
        logits = op_checks.draw_logits(generator, rows, 3000)
        got = ops.candidates_topk(logits, 4, workspace=workspace)
        want = reference.candidates_topk(logits, 4)
        assert torch.equal(got.token_ids, want.token_ids)
        assert not workspace.arrived.any()
    with pytest.raises(ValueError, match="workspace is for fewer rows"):
        ops.candidates_topk(op_checks.draw_logits(generator, 7, 3000), 4, workspace=workspace)


def test_status_names_the_row_that_holds_nan() -> None:
    logits = torch.zeros(3, 100)
    logits[1, 50] = torch.nan
    status = torch.empty(3, dtype=torch.int32)
    ops.candidates_topk(logits, 2, status=status)
    assert status.tolist() == [0, 1, 0]


class Verify:
    """Two requests of 3 rows over one pool."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kv = torch.randn(100, 1, 576, generator=generator).bfloat16()
        self.q = torch.randn(6, 8, 576, generator=generator).bfloat16()
        slots = torch.randperm(100, generator=generator)
        self.indices, self.tail_slots = slots[:57].contiguous(), slots[57:63].contiguous()
        self.words = torch.tensor([1, 3, 5, 1, 3, 7])
        tail = ((self.words.view(2, 3, 1) >> torch.arange(3)) & 1).bool()
        parts = [
            torch.nn.functional.pad(tail[b], (prefix, 0)).flatten()
            for b, prefix in ((0, 20), (1, 37))
        ]
        self.mask, self.mask_indptr = torch.cat(parts), torch.tensor([0, 69, 189])

    def arguments(self, dtype: torch.dtype) -> list[torch.Tensor]:
        indptrs = (torch.tensor([0, 3, 6], dtype=dtype), torch.tensor([0, 20, 57], dtype=dtype))
        slots = (self.indices.to(dtype), self.tail_slots.to(dtype))
        return [self.q, self.kv, *indptrs, *slots]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(6, 8)
        arguments = (*self.arguments(torch.int64), self.mask, self.mask_indptr)
        return reference.verify_attention(*arguments, scale=0.1, lse=lse), lse


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_verify_attention_takes_every_form_of_its_arguments(dtype: torch.dtype) -> None:
    case = Verify()
    want, want_lse = case.expected()
    arguments = case.arguments(dtype)
    poisoned = case.kv.clone()
    poisoned[case.tail_slots] = torch.nan
    tail = case.kv[case.tail_slots].view(6, 576)
    by_mask = {"custom_mask": case.mask, "mask_indptr": case.mask_indptr}
    forms = [
        (case.kv, by_mask),
        (case.kv, {"mask_words": case.words}),
        (poisoned, {"mask_words": case.words, "tail": tail}),
        (poisoned, {**by_mask, "tail": tail, "max_q": 3}),
    ]
    for kv, options in forms:
        lse = torch.empty(6, 8)
        arguments[1] = kv
        got = ops.verify_attention(*arguments, scale=0.1, lse=lse, **options)
        assert float((got.float() - want.float()).norm() / want.float().norm()) < 5e-3
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


def test_decode_attention_writes_where_it_is_told() -> None:
    case = Verify()
    indptr = torch.tensor([0, 20, 57], dtype=torch.int32)
    out = torch.full((2, 8, 512), torch.nan, dtype=torch.bfloat16)
    workspace = ops.attention_workspace("cpu", 8, 1)
    got = ops.decode_attention(
        case.q[:2], case.kv, indptr, case.indices, scale=0.1, out=out, workspace=workspace
    )
    assert got is out
    want = reference.decode_attention(case.q[:2], case.kv, indptr, case.indices, scale=0.1)
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 5e-3


def test_what_the_kernels_are_not_made_for_is_refused() -> None:
    case = Verify()
    arguments = case.arguments(torch.int32)
    with pytest.raises(ValueError, match=r"q is torch\.float32"):
        ops.verify_attention(case.q.float(), case.kv.float(), *arguments[2:], scale=0.1)
    with pytest.raises(ValueError, match="3 heads; the kernels take"):
        ops.verify_attention(case.q[:, :3], *arguments[1:], scale=0.1)
    with pytest.raises(ValueError, match="values of 256"):
        ops.verify_attention(*arguments, scale=0.1, v_head_dim=256)
    small = torch.empty(10, dtype=torch.uint8)
    with pytest.raises(ValueError, match="workspace has 10 bytes; 3 blocks for 8 heads"):
        ops.verify_attention(*arguments, scale=0.1, workspace=small)


@pytest.mark.parametrize("kind", ["greedy", "plain", "any"])
def test_sampling(kind: str) -> None:
    op_checks.check_sampling("cpu", 1, 4, 1500, kind)


def test_a_row_that_breaks_the_promise_of_no_filters_gets_no_token() -> None:
    logits = torch.randn(2, 50)
    status = torch.empty(2, dtype=torch.int32)
    ones, zeros, ints = torch.ones(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    top_k = torch.tensor([0, 5])
    arguments = (logits, ones, top_k, ones, zeros, ints, ints)
    got = ops.sample_nodes(*arguments, filters=False, status=status)
    assert status.tolist() == [0, 4]
    assert got[1] == -1

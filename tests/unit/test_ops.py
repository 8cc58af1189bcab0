"""Which implementation the ops take, what they refuse, what torch knows of them."""

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from overstory.kernels import ops, reference
from overstory.kernels.errors import NoDeviceError
from overstory.kernels.ops import choice
from overstory.kernels.ops.attention_checks import check_kernel_limits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def default_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    choice._cuda_or_warn.cache_clear()


def test_cpu_tensors_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("auto", "reference", ""):
        monkeypatch.setenv(choice.VARIABLE, setting)
        assert choice.library_for("tree_build", CPU) is None


def test_prepare_says_what_serves_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.prepare("cpu") == "reference"
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="the tensors are on cpu"):
        ops.prepare("cpu")


def test_an_explicit_choice_that_cannot_be_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="OVERSTORY_KERNELS=cuda, but the tensors are on cpu"):
        choice.library_for("tree_build", CPU)
    monkeypatch.setenv(choice.VARIABLE, "simulator")
    with pytest.raises(ValueError, match="but the tensors are on cuda:0"):
        choice.library_for("tree_build", CUDA)
    monkeypatch.setenv(choice.VARIABLE, "gpu")
    with pytest.raises(ValueError, match="'gpu'; want one of auto, cuda, reference, simulator"):
        choice.library_for("tree_build", CPU)


@needs_no_gpu
def test_explicit_cuda_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(NoDeviceError, match="torch sees no GPU"):
        choice.library_for("tree_build", CUDA)


@needs_no_gpu
def test_automatic_choice_warns_once_and_says_what_it_took() -> None:
    with pytest.warns(RuntimeWarning, match=r"plain torch reference(.|\n)*torch sees no GPU"):
        assert choice.library_for("tree_build", CUDA) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice.library_for("tree_accept", CUDA) is None


def candidates() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    top = torch.log_softmax(torch.randn(2, 3, 20, generator=generator), dim=2).topk(4, dim=2)
    return torch.tensor([5, 6]), top.values, top.indices


def test_results_go_where_they_are_told() -> None:
    """On the CPU too, so that code made for capture can be tested there."""
    tree = ops.tree_build(*candidates(), 5)
    again = ops.tree_build(*candidates(), torch.tensor([5, 2], dtype=torch.int32), out=tree)
    assert again is tree
    want = reference.tree_build(*candidates(), torch.tensor([5, 2]), rows=6)
    assert torch.equal(tree.parents, want.parents)
    accepted = ops.tree_accept(tree, tree.tokens, 4)
    filled = ops.tree_accept(tree, tree.tokens + 1, out=accepted)
    assert filled is accepted
    assert accepted.lengths.tolist() == [0, 0]
    logits = torch.randn(2, 50)
    shard = ops.candidates_topk(logits, 3)
    assert ops.candidates_topk(logits + 1, 3, out=shard) is shard
    assert torch.equal(shard.logits, reference.candidates_topk(logits + 1, 3).logits)


def test_full_mask_without_its_prefix_on_the_cpu() -> None:
    tree = reference.tree_build(*candidates(), 3)
    lengths = torch.tensor([2, 3])
    flat, indptr = reference.full_mask(tree, lengths)
    full = torch.full((len(flat),), 7, dtype=torch.uint8)
    masks = ops.tree_mask(tree, lengths, full=full, fill_prefix=False)
    assert torch.equal(masks.mask_indptr, indptr)
    first = full[: indptr[1]].view(4, 6)
    assert set(first[:, :2].flatten().tolist()) == {7}
    assert torch.equal(first[:, 2:], flat[: indptr[1]].view(4, 6)[:, 2:].to(torch.uint8))
    with pytest.raises(ValueError, match="full has 3 elements"):
        ops.tree_mask(tree, lengths, full=full[:3])


def attention_inputs(tokens: int = 4) -> dict[str, Any]:
    return {
        "q": torch.randn(tokens, 2, 24),
        "kv": torch.randn(20, 1, 24),
        "qo_indptr": torch.tensor([0, tokens]),
        "kv_indptr": torch.tensor([0, 7]),
        "kv_indices": torch.arange(7),
        "out_cache_loc": torch.arange(7, 7 + tokens),
        "scale": 0.2,
        "v_head_dim": 16,
    }


def test_forms_of_attention_that_the_reference_does_not_have() -> None:
    inputs = attention_inputs()
    words = torch.tensor([1, 3, 5, 9])
    tail = torch.nn.functional.pad((words.view(4, 1) >> torch.arange(4)) & 1, (7, 0)).bool()
    mask = {"custom_mask": tail.flatten(), "mask_indptr": torch.tensor([0])}
    want = reference.verify_attention(**inputs, **mask)
    assert torch.equal(ops.verify_attention(**inputs, mask_words=words), want)
    keys = inputs["kv"][inputs["out_cache_loc"], 0]
    inputs["kv"] = inputs["kv"].clone()
    inputs["kv"][inputs["out_cache_loc"]] = torch.nan
    got = ops.verify_attention(**inputs, mask_words=words, tail=keys)
    torch.testing.assert_close(got, want)


def test_prefixes_that_overlap() -> None:
    """Two requests of two rows, the second behind all keys of the first: one of four, causal. With
    words for a mask too."""
    inputs = attention_inputs()
    want = reference.verify_attention(**inputs)
    inputs["kv_indices"] = torch.cat((inputs["kv_indices"], inputs["out_cache_loc"]))
    blocks = {
        "qo_indptr": torch.tensor([0, 2, 4]),
        "kv_indptr": torch.tensor([0, 0]),
        "kv_ends": torch.tensor([7, 9]),
    }
    torch.testing.assert_close(ops.verify_attention(**inputs | blocks), want)
    words = torch.tensor([1, 3, 1, 3])
    torch.testing.assert_close(ops.verify_attention(**inputs | blocks, mask_words=words), want)


def test_rows_that_no_request_owns_give_nothing() -> None:
    """As of a batch that is padded to what was captured."""
    inputs = attention_inputs()
    inputs["qo_indptr"] = torch.tensor([0, 3])
    lse, out = torch.zeros(4, 2), torch.full((4, 2, 16), torch.nan)
    ops.verify_attention(**inputs, lse=lse, out=out)
    assert bool(out[:3].isfinite().all())
    assert bool((out[3] == 0).all())
    assert lse[3].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_indices": torch.arange(7.0)}, r"kv_indices is torch\.float32; want torch\.int32"),
        ({"kv_indptr": torch.tensor([0, 7, 7])}, r"kv_indptr has shape \[3\]; want \[2\]"),
        ({"out_cache_loc": torch.arange(8)[::2]}, "out_cache_loc is not contiguous"),
        ({"kv": torch.randn(20, 1, 25)}, r"kv has shape \[20, 1, 25\]"),
        ({"mask_indptr": torch.tensor([0])}, "go together"),
        ({"max_q": 65}, r"max_q is 65; want 1\.\.64"),
        ({"out": torch.empty(4, 2, 24)}, r"out has shape \[4, 2, 24\]; want \[4, 2, 16\]"),
        ({"lse": torch.empty(4, 2).double()}, r"lse is torch\.float64"),
        ({"tail": torch.empty(3, 24)}, "tail has 3 rows; q has 4"),
        ({"mask_words": torch.ones(4)}, r"mask_words is torch\.float32"),
        ({"kv_ends": torch.tensor([7])}, r"kv_indptr \(with kv_ends\) has shape \[2\]; want \[1\]"),
        (
            {"kv_indptr": torch.tensor([0]), "kv_ends": torch.tensor([7], dtype=torch.int32)},
            r"kv_ends is torch\.int32; want torch\.int64",
        ),
    ],
)
def test_bad_arguments_of_attention_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.verify_attention(**{**attention_inputs(), **change})


def test_bad_arguments_of_the_other_ops_are_named() -> None:
    roots, logprobs, token_ids = candidates()
    tree = ops.tree_build(roots, logprobs, token_ids, 3)
    deep = torch.zeros(2, 17, 1)
    with pytest.raises(ValueError, match=r"depth is 17; want 0\.\.16"):
        ops.tree_build(roots, deep, deep.long(), 3, out=tree)
    with pytest.raises(ValueError, match=r"budgets is 4; want 0\.\.3"):
        ops.tree_build(roots, logprobs, token_ids, 4, out=tree)
    with pytest.raises(ValueError, match=r"seq_lens is torch\.float32"):
        ops.tree_mask(tree, torch.zeros(2))
    with pytest.raises(ValueError, match="columns of logits are 2 elements apart"):
        ops.candidates_topk(torch.zeros(2, 40)[:, ::2], 3)
    with pytest.raises(ValueError, match="num_valid is 41"):
        ops.candidates_topk(torch.zeros(2, 40), 3, num_valid=41)
    rows = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="listed twice"):
        ops.LayerTable([rows, rows])
    with pytest.raises(ValueError, match="rows of 12 bytes"):
        ops.LayerTable([torch.zeros(4, 3)])
    with pytest.raises(ValueError, match="no buffers"):
        ops.LayerTable([])


def test_fake_tensors_pass_and_their_shapes_are_checked() -> None:
    with FakeTensorMode() as mode:
        inputs = attention_inputs()
        fake = {
            k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()
        }
        out = ops.verify_attention(**fake)
        assert out.shape == (4, 2, 16)
        with pytest.raises(ValueError, match="kv_indptr has shape"):
            ops.verify_attention(**{**fake, "kv_indptr": fake["kv_indices"]})


def test_torch_knows_what_each_op_writes() -> None:
    inputs = attention_inputs()
    out, tree = torch.empty(4, 2, 16), ops.tree_build(*candidates(), 3)
    calls = {
        "verify_attention": (
            *(inputs["q"], inputs["kv"], inputs["qo_indptr"], torch.tensor([0]), torch.tensor([7])),
            *(
                inputs["kv_indices"],
                inputs["out_cache_loc"],
                None,
                None,
                None,
                None,
                0.2,
                1.0,
                16,
                True,
                4,
                0,
                0,
                out,
            ),
            *(torch.empty(4, 2), None),
        ),
        "tree_accept": (
            *(tree.tokens, tree.parents, tree.sizes, tree.tokens),
            *ops.tree_accept(tree, tree.tokens, 4),
        ),
    }
    for name, arguments in calls.items():
        op = getattr(torch.ops.overstory, name)
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "q",
    [
        torch.zeros(3, 8, 580, dtype=torch.bfloat16)[..., :576],
        torch.zeros(3, 8, 584, dtype=torch.bfloat16)[..., 4:580],
        torch.zeros(3 * 8 * 576 + 3 * 4, dtype=torch.bfloat16).as_strided(
            (3, 8, 576), (8 * 576 + 4, 576, 1)
        ),
    ],
)
def test_queries_that_16_byte_copies_cannot_read_are_refused(q: torch.Tensor) -> None:
    kv = torch.zeros(5, 1, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"rows of q .* multiples of 16: q.contiguous\(\)"):
        check_kernel_limits(q, {"kv": kv}, 0.1, 512)
    check_kernel_limits(q.contiguous(), {"kv": kv}, 0.1, 512)
    check_kernel_limits(torch.zeros(3, 8, 584, dtype=torch.bfloat16)[..., :576], {}, 0.1, 512)


def test_device_time_goes_on() -> None:
    first, second = torch.zeros(2, 1, dtype=torch.int64).unbind()
    ops.device_time(first)
    ops.device_time(second)
    assert 0 <= int(second - first) < 10**9
    with pytest.raises(ValueError, match=r"out has shape \[2\]; want \[1\]"):
        ops.device_time(torch.zeros(2, dtype=torch.int64))

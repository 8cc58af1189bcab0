import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.kernels.reference import PAD_TOKEN_ID, Shard, candidates_topk, merge_candidates


def naive(logits: torch.Tensor, k: int) -> tuple[list[list[float]], list[list[int]]]:
    """Candidates by sorting (-logprob, id) of the whole vocabulary in float64."""
    logprobs = torch.log_softmax(logits.double(), dim=1).tolist()
    best = [sorted((-p, i) for i, p in enumerate(row))[:k] for row in logprobs]
    return [[-p for p, _ in row] for row in best], [[i for _, i in row] for row in best]


def split(logits: torch.Tensor, cuts: list[int], k: int) -> list[Shard]:
    bounds = [0, *cuts, logits.shape[1]]
    return [
        candidates_topk(logits[:, a:b], k, first_token_id=a) for a, b in itertools.pairwise(bounds)
    ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sharding_gives_the_candidates_of_the_whole_vocabulary(data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(2, 12))
    # Few distinct values: ties in and across shards; 0 and halves are exact in float32.
    value = st.sampled_from([-2.0, -0.5, 0.0, 0.5, 3.0])
    rows = data.draw(
        st.lists(st.lists(value, min_size=vocabulary, max_size=vocabulary), min_size=1, max_size=3)
    )
    k = data.draw(st.integers(1, vocabulary))
    cuts = sorted(data.draw(st.sets(st.integers(1, vocabulary - 1), max_size=3)))
    logits = torch.tensor(rows)
    shards = split(logits, cuts, k)
    shards = data.draw(st.permutations(shards))
    logprobs, token_ids = merge_candidates(shards, k)
    want_logprobs, want_ids = naive(logits, k)
    assert token_ids.tolist() == want_ids
    torch.testing.assert_close(logprobs, torch.tensor(want_logprobs), atol=1e-5, rtol=0)


def test_stacked_shards_equal_a_sequence_of_shards() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    shards = split(logits, [13, 27], 6)
    stacked = Shard(*(torch.stack(parts) for parts in zip(*shards, strict=True)))
    for a, b in zip(merge_candidates(shards, 6), merge_candidates(stacked, 6), strict=True):
        assert torch.equal(a, b)


def test_types_and_padding_of_the_vocabulary() -> None:
    logits = torch.full((2, 8), 50.0, dtype=torch.bfloat16)
    logits[:, :3] = torch.tensor([1.0, 2.0, 0.0])
    logits[:, 3:] = torch.nan  # what stands in padding columns is never read
    shard = candidates_topk(logits, 2, first_token_id=100, num_valid=3)
    assert shard.logits.dtype == torch.float32
    assert shard.token_ids.dtype == torch.int64
    assert shard.token_ids.tolist() == [[101, 100]] * 2
    want = torch.logsumexp(torch.tensor([1.0, 2.0, 0.0]), dim=0)
    assert shard.logsumexp.tolist() == pytest.approx([float(want)] * 2)


def test_more_candidates_than_tokens_are_filled_up() -> None:
    logprobs, token_ids = merge_candidates([candidates_topk(torch.zeros(1, 2), 4)], 5)
    assert token_ids.tolist() == [[0, 1, *[PAD_TOKEN_ID] * 3]]
    assert logprobs[0, 2:].tolist() == [-torch.inf] * 3


def test_a_shard_of_padding_only_takes_no_part() -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    empty = candidates_topk(torch.full((3, 4), torch.nan), 3, first_token_id=6, num_valid=0)
    whole = candidates_topk(logits, 3)
    for a, b in zip(merge_candidates([empty, whole], 3), naive(logits, 3), strict=True):
        torch.testing.assert_close(a.double(), torch.tensor(b).double(), atol=1e-5, rtol=0)


def test_forbidden_tokens_come_last_with_no_probability() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0]])
    logprobs, token_ids = merge_candidates(split(logits, [2], 2), 4)
    assert token_ids[0, :2].tolist() == [1, 3]
    assert logprobs[0].tolist() == pytest.approx([-0.6931472, -0.6931472, -torch.inf, -torch.inf])


def test_rounding_never_gives_a_logprob_above_zero() -> None:
    """Another implementation of the shard may round its normaliser below the best logit."""
    shard = Shard(torch.tensor([[1.0]]), torch.tensor([[4]]), torch.tensor([0.9999999]))
    logprobs, _ = merge_candidates([shard], 1)
    assert logprobs.tolist() == [[0.0]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_poisoned_row_is_named(bad: float) -> None:
    logits = torch.zeros(4, 5)
    logits[2, 1] = bad
    with pytest.raises(ValueError, match=r"NaN or \+inf in row\(s\) \[2\] of 4"):
        candidates_topk(logits, 2)


def test_a_row_without_any_allowed_token_is_refused() -> None:
    shard = candidates_topk(torch.full((1, 5), -torch.inf), 2)
    with pytest.raises(ValueError, match="every token is forbidden"):
        merge_candidates([shard], 2)


def test_arguments_out_of_range() -> None:
    logits = torch.zeros(1, 5)
    with pytest.raises(ValueError, match="k is 0"):
        candidates_topk(logits, 0)
    with pytest.raises(ValueError, match="num_valid is 6"):
        candidates_topk(logits, 1, num_valid=6)
    with pytest.raises(ValueError, match="k is 0"):
        merge_candidates([candidates_topk(logits, 1)], 0)
    with pytest.raises(ValueError, match="no shard"):
        merge_candidates([], 1)


def test_no_rows() -> None:
    logprobs, token_ids = merge_candidates(split(torch.zeros(0, 6), [3], 2), 2)
    assert logprobs.shape == token_ids.shape == (0, 2)


def test_forbidden_tokens_come_before_those_that_do_not_exist() -> None:
    """In a merge of shards as within one, so that an order of shards changes nothing."""
    logits = torch.tensor([[2.0, -torch.inf, 1.0]])
    whole = candidates_topk(logits, 4)
    assert whole.token_ids.tolist() == [[0, 2, 1, PAD_TOKEN_ID]]
    none = candidates_topk(torch.empty(1, 0), 4, first_token_id=3)
    for shards in ([whole], [none, whole], [whole, none]):
        assert torch.equal(merge_candidates(shards, 4)[1], whole.token_ids)

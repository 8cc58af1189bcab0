"""Tree ops, candidates, sampling and relocation on the GPU against the reference on the CPU."""

import op_checks
import pytest
import torch
from chi_square import p_value

from overstory.kernels import ops, reference


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_thousands_of_random_trees(first: int) -> None:
    trees = sum(op_checks.check_trees("cuda", seed, 100) for seed in range(first, first + 20))
    assert trees > 500


@pytest.mark.parametrize("seed", range(20))
def test_candidates(seed: int) -> None:
    op_checks.check_candidates("cuda", seed, 1 + seed, (17, 1000, 4096)[seed % 3])


def test_candidates_of_a_whole_vocabulary() -> None:
    op_checks.check_candidates("cuda", 100, 16, 163_840)


@pytest.mark.parametrize("kind", ["greedy", "plain", "any"])
@pytest.mark.parametrize("columns", [33, 4096, 163_840])
def test_sampling(kind: str, columns: int) -> None:
    op_checks.check_sampling("cuda", columns, 16 if columns > 9999 else 300, columns, kind)


@pytest.mark.parametrize("filters", [False, True])
def test_sampled_tokens_follow_the_distribution(filters: bool) -> None:
    """One row of logits, 100,000 positions: chi-square against the exact probabilities."""
    rows, columns = 100_000, 300
    logits = torch.randn(1, columns, generator=torch.Generator().manual_seed(5)) * 2

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    parameters = [column(0.8), column(40 if filters else -1, torch.int64)]
    parameters += [column(0.9 if filters else 1.0), column(0.01 if filters else 0.0)]
    noise = [column(1234, torch.int64), torch.arange(rows, device="cuda")]
    drawn = ops.sample_nodes(
        logits.cuda().expand(rows, columns), *parameters, *noise, filters=filters
    )
    counts = torch.bincount(drawn.cpu(), minlength=columns)
    probs = reference.filtered_probs(logits, *(parameter[:1].cpu() for parameter in parameters))[0]
    assert p_value(counts, probs) > 1e-4


@pytest.mark.parametrize("seed", range(12))
def test_relocation(seed: int) -> None:
    op_checks.check_relocation(
        "cuda", seed, layers=3, slots=6000, moves=(1, 40, 1000, 4096)[seed % 4]
    )


def test_relocation_of_all_moves_at_once() -> None:
    op_checks.check_relocation("cuda", 7, layers=2, slots=9000, moves=8192)


@pytest.mark.parametrize("moves", [1000, 2049, 4096])
def test_relocation_without_overlap(moves: int) -> None:
    for seed in range(3):
        op_checks.check_relocation("cuda", seed, 3, 6000, moves, overlap=False)


@pytest.mark.parametrize("seed", range(8))
def test_rows_there_and_back(seed: int) -> None:
    op_checks.check_rows("cuda", seed, layers=3, slots=9000, rows=(1, 40, 1000, 9000)[seed % 4])


def test_a_slot_outside_is_reported() -> None:
    pool = [torch.zeros(5, 8, dtype=torch.int16, device="cuda")]
    slots = torch.tensor([1], device="cuda"), torch.tensor([5], device="cuda")
    ops.kv_relocate(pool, *slots)
    with pytest.raises(ops.BadInputError, match="slot outside"):
        ops.raise_bad_input(slots[0].device)
    ops.raise_bad_input(slots[0].device)


def test_the_same_input_gives_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = op_checks.draw_logits(generator, 24, 50_000).cuda()
    first = ops.candidates_topk(logits, 8)
    for _ in range(20):
        again = ops.candidates_topk(logits, 8)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

"""Environment variables of the ranks, as a deployment file may give them."""

from typing import Any

import pytest

from overstory.orchestrator.spec import SpecError, parse_spec


def test_strings_and_numbers_are_taken_as_written() -> None:
    given = {"SGLANG_LOG_MS": 1, "NCCL_IB_TIMEOUT": "22", "a_b": 0.5}
    spec = parse_spec({"model": "m", "drafter": "d", "environment": given})
    assert spec.environment == {"SGLANG_LOG_MS": "1", "NCCL_IB_TIMEOUT": "22", "a_b": "0.5"}
    assert parse_spec(spec.model_dump()) == spec


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, "Ray gives each rank its GPU"),
        ({"OMP_NUM_THREADS": 4}, "resources.cpus_per_rank"),
        ({"OVERSTORY_TREE_POLICY": "plain"}, "OVERSTORY_TREE_POLICY is not for the deployment"),
        ({"RAY_AUTH_MODE": "x"}, "RAY_AUTH_MODE is not for the deployment"),
        ({"A-B": "x"}, "no name of an environment variable"),
        ({"X": True}, "X is True; wanted a string or a number"),
        ({"X": None}, "X is None"),
        (["X=1"], "wanted names and values"),
    ],
)
def test_what_is_not_the_user_s_to_set_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec({"model": "m", "drafter": "d", "environment": given})
    assert said in str(refused.value)
    assert "environment" in str(refused.value)

"""What two replicas must have in common to hand over KV or weights, by SGLang's own arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from overstory.workers.handoff.identity import _NOT_OF_WEIGHTS, identity_of, weights_settings


@pytest.fixture
def arguments(pair: tuple[str, str]) -> ServerArgs:
    return ServerArgs(
        model_path=pair[0], speculative_draft_model_path=pair[1], device="cpu", random_seed=1
    )


def changed(arguments: ServerArgs, **fields: Any) -> ServerArgs:
    """A copy with other values, as they are: nothing is derived from them."""
    copied = object.__new__(ServerArgs)
    copied.__dict__.update(arguments.__dict__ | fields)
    return copied


@pytest.mark.parametrize(
    "field",
    [
        {"json_model_override_args": '{"rope_theta": 50000}'},  # fills buffers with other numbers
        {"moe_runner_backend": "flashinfer_cutlass"},  # the same shapes, other places
        {"quantization": "fp8"},
        {"dtype": "float16"},
        {"ep_size": 2},
        {"tp_size": 2},
    ],
)
def test_other_settings_are_other_weights(arguments: ServerArgs, field: dict[str, Any]) -> None:
    assert weights_settings(changed(arguments, **field), 0) != weights_settings(arguments, 0)


def test_other_ranks_are_other_weights(arguments: ServerArgs) -> None:
    assert weights_settings(arguments, 1) != weights_settings(arguments, 0)
    assert identity_of(arguments, 1) != identity_of(arguments, 0)


@pytest.mark.parametrize(
    "field",
    [
        {"random_seed": 2, "port": 1, "nccl_port": 2, "dist_init_addr": "192.0.2.1:5"},
        {"mem_fraction_static": 0.5, "max_total_tokens": 9, "context_length": 7},
        {"speculative_num_draft_tokens": 32, "speculative_num_steps": 7},
        {"custom_sigquit_handler": print},
    ],
)
def test_what_a_replica_has_of_its_own_does_not_count(
    arguments: ServerArgs, field: dict[str, Any]
) -> None:
    other = changed(arguments, **field)
    assert weights_settings(other, 0) == weights_settings(arguments, 0)
    assert identity_of(other, 0) == identity_of(arguments, 0)


@pytest.mark.parametrize(
    "field",
    [
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"tp_size": 2},
        {"json_model_override_args": '{"rope_theta": 50000}'},
        {"revision": "older"},
        {"quantization_param_path": "scales.json"},
        {"speculative_draft_model_path": None},
    ],
)
def test_other_rows(arguments: ServerArgs, field: dict[str, Any]) -> None:
    assert identity_of(changed(arguments, **field), 0) != identity_of(arguments, 0)


def test_the_arguments_are_sglangs() -> None:
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    assert not _NOT_OF_WEIGHTS - fields

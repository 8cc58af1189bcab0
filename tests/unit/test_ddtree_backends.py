"""What an engine with DDTREE refuses before it starts, by plain objects in place of SGLang's."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overstory.workers.ddtree.algorithm import _refuse_unsupported
from overstory.workers.ddtree.drafter_config import ARCHITECTURE, check_pair, read_drafter

FULL = {"decode": "full", "prefill": "full"}


def _arguments(graphs: dict[str, str] | None = None, **changes: Any) -> Any:
    """Of an engine on a GPU that may start; ``graphs`` by phase, none without."""
    config = {
        phase: SimpleNamespace(backend=backend) for phase, backend in (graphs or FULL).items()
    }
    fields = {
        "pp_size": 1,
        "enable_dp_attention": False,
        "enable_mixed_chunk": False,
        "enable_lora": None,
        "speculative_adaptive": False,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_use_rejection_sampling": False,
        "speculative_draft_window_size": None,
        "disaggregation_mode": "null",
        "page_size": None,
        "device": "cuda",
        "attention_backend": "overstory",
        "disable_cuda_graph": graphs is None,
        "cuda_graph_config": SimpleNamespace(**config),
        "speculative_draft_model_path": "drafter",
    }
    return SimpleNamespace(**fields | changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pp_size", 2),
        ("enable_dp_attention", True),
        ("enable_mixed_chunk", True),
        ("enable_lora", True),
        ("speculative_adaptive", True),
        ("speculative_accept_threshold_single", 0.9),
        ("speculative_accept_threshold_acc", 0.9),
        ("speculative_use_rejection_sampling", True),
        ("speculative_draft_window_size", 64),
        ("disaggregation_mode", "prefill"),
        ("page_size", 48),
        ("speculative_draft_model_path", None),
    ],
)
def test_what_a_tree_cannot_run_with_is_named(name: str, value: Any) -> None:
    _refuse_unsupported(_arguments())
    with pytest.raises(ValueError, match=name):
        _refuse_unsupported(_arguments(**{name: value}))


@pytest.mark.parametrize(
    ("simulated", "refused"), [("4.5", True), ("0.5", True), ("0", False), ("-1", False)]
)
def test_simulated_acceptance_is_refused_not_ignored(
    simulated: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", simulated)
    with pytest.raises(ValueError, match="unset it") if refused else nullcontext():
        _refuse_unsupported(_arguments())


@pytest.mark.parametrize("backend", ["flashinfer", "trtllm_mla", "cutlass_mla", "fa3", None])
@pytest.mark.parametrize("graphs", [None, FULL])
def test_backends_that_drop_a_mask_are_refused(
    backend: str | None, graphs: dict[str, str] | None
) -> None:
    with pytest.raises(ValueError, match="honour a tree's mask"):
        _refuse_unsupported(_arguments(graphs, attention_backend=backend))


def test_sglang_s_causal_graphs_are_refused() -> None:
    """They would take a tree for a chain, without a word."""
    with pytest.raises(ValueError, match="needs attention_backend=overstory, got triton"):
        _refuse_unsupported(_arguments(FULL, attention_backend="triton"))
    for free in (None, {"decode": "disabled", "prefill": "full"}):
        _refuse_unsupported(_arguments(free, attention_backend="triton"))


def test_forwards_are_captured_whole_or_not_at_all() -> None:
    for backend in ("breakable", "piecewise"):
        with pytest.raises(ValueError, match=f"must be full or disabled, got {backend}"):
            _refuse_unsupported(_arguments({"decode": backend, "prefill": "disabled"}))
    off = _arguments({"decode": "disabled", "prefill": "disabled"})
    _refuse_unsupported(off)


def test_prefill_is_left_uncaptured_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    asked = _arguments(FULL)
    _refuse_unsupported(asked)
    assert asked.cuda_graph_config.prefill.backend == "disabled"
    assert asked.cuda_graph_config.decode.backend == "full"
    assert "prefill runs without CUDA graphs" in caplog.text


def test_devices_without_a_backend_are_refused() -> None:
    for device, backend in (("npu", "ascend"), ("xpu", "triton"), ("cpu", "triton")):
        with pytest.raises(ValueError, match=device):
            _refuse_unsupported(_arguments(device=device, attention_backend=backend))
    _refuse_unsupported(_arguments(device="cpu", attention_backend="torch_native"))


def _pair(tmp_path: Path, target: dict[str, Any], **drafter: Any) -> None:
    """Checks a drafter (whose blocks are of 8) against a target."""
    for name, config in (
        ("target", {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 12} | target),
        (
            "drafter",
            {
                "architectures": [ARCHITECTURE],
                "vocab_size": 100,
                "hidden_size": 64,
                "dflash_config": {"block_size": 8, "mask_token_id": 99, "target_layer_ids": [1, 10]}
                | drafter.pop("dflash", {}),
            }
            | drafter,
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    check_pair(read_drafter(str(tmp_path / "drafter")), str(tmp_path / "target"))


def test_a_drafter_that_fits_is_taken(tmp_path: Path) -> None:
    _pair(tmp_path, {})


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        ({"vocab_size": 101}, "vocab_size is 101, that of the target .* is 100"),
        ({"hidden_size": 32}, "hidden_size is 32, that of the target .* is 64"),
        ({"dflash": {"mask_token_id": 100}}, "mask_token_id 100 is outside of its vocabulary"),
        (
            {"dflash": {"target_layer_ids": [1, 11]}},
            r"layers \[11\]; SGLang captures layers 0 to 10",
        ),
        ({"dflash": {"target_layer_ids": [-1, 3]}}, r"layers \[-1\]"),
        ({"dflash": {"block_size": 1}}, "states block_size 1; it must be 2 or more"),
        ({"architectures": ["Llama"]}, "DDTREE needs a DFlash drafter"),
    ],
)
def test_a_drafter_of_another_target_is_told_apart(
    tmp_path: Path, drafter: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        _pair(tmp_path, {}, **drafter)


def test_sizes_of_a_target_that_sees_are_those_of_its_text_model(tmp_path: Path) -> None:
    text = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 12}
    _pair(tmp_path, {"vocab_size": 7, "hidden_size": 7, "text_config": text})

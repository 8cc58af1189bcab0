"""`engine:` takes SGLang's names, checked without SGLang."""

from typing import Any

import pytest

from overstory.orchestrator.engine_args import (
    EngineArgError,
    canonical_name,
    check_engine_args,
    server_arg_fields,
)


def refusal(**given: Any) -> str:
    with pytest.raises(EngineArgError) as caught:
        check_engine_args(given, "cpu")
    return str(caught.value)


@pytest.mark.parametrize(
    "key",
    ["tp_size", "tp-size", "--tp-size", "tp", "--tensor-parallel-size", "tensor_parallel_size"],
)
def test_spellings_of_one_field(key: str) -> None:
    assert check_engine_args({key: 2}, "cpu") == {"tp_size": 2}


def test_typo_gets_a_suggestion() -> None:
    assert "did you mean `context_length`?" in refusal(contex_length=4096)
    assert "did you mean `mem_fraction_static`?" in refusal(mem_fraction_sttic=0.8)


def test_nonsense_gets_no_suggestion() -> None:
    assert "no such argument; see" in refusal(qqqqqqqq=1)


@pytest.mark.parametrize(
    ("vllm", "ours"),
    [
        ("gpu-memory-utilization", "engine.mem_fraction_static"),
        ("max-model-len", "engine.context_length"),
        ("max-num-seqs", "engine.max_running_requests"),
        ("max-num-batched-tokens", "engine.chunked_prefill_size"),
        ("speculative-config", "drafter and tree.budget"),
    ],
)
def test_vllm_names_point_to_ours(vllm: str, ours: str) -> None:
    with pytest.raises(EngineArgError, match=f"did you mean {ours}"):
        canonical_name(f"--{vllm}")


@pytest.mark.parametrize(
    ("name", "value", "use"),
    [
        ("model_path", "x", "use `model`"),
        ("device", "cpu", "use `resources.device`"),
        ("port", 1, "use `gateway.port`"),
        ("speculative_algorithm", "EAGLE", "use `drafter` and `tree`"),
        ("speculative_num_draft_tokens", 8, "use `drafter` and `tree`"),
        ("skip_tokenizer_init", True, "use `model`"),
        ("dp_size", 2, "use `replicas`"),
        ("dist_init_addr", "h:1", "Overstory places the ranks"),
        ("attention_backend", "triton", "Overstory brings its own"),
        ("tool_call_parser", "kimi_k2", "use `gateway.tool_call_parser`"),
        ("api_key", "x", "use `gateway.api_keys_file`"),
    ],
)
def test_what_overstory_sets_itself_is_refused(name: str, value: Any, use: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"engine.{name}: is not for the deployment to set")
    assert use in message


def test_reserved_names_exist_in_sglang() -> None:
    from overstory.orchestrator import engine_args

    named = {*engine_args._RESERVED, *engine_args._RESERVED_ON_CPU, *engine_args._FIXED_AT_ONE}
    assert named - set(server_arg_fields()) == set()
    for prefix in engine_args._RESERVED_PREFIXES:
        assert any(name.startswith(prefix) for name in server_arg_fields()), prefix


def test_attention_backend_is_free_on_cuda() -> None:
    assert check_engine_args({"attention_backend": "triton"}, "cuda")
    assert check_engine_args({"attention_backend": "overstory"}, "cuda")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tp_size", "2", "got '2' (str), wanted int"),
        ("tp_size", True, "got True (bool), wanted int"),
        ("tp_size", 1.5, "got 1.5 (float), wanted int"),
        ("tp_size", 0, "got 0, wanted at least 1"),
        ("mem_fraction_static", "high", "got 'high' (str), wanted float or null"),
        ("mem_fraction_static", 1.0, "got 1.0, wanted a share of a GPU's memory, above 0"),
        ("mem_fraction_static", 0, "got 0, wanted a share"),
        ("mem_fraction_static", float("inf"), "got inf (float), wanted float"),
        ("schedule_conservativeness", float("nan"), "got nan (float), wanted float"),
        ("dtype", "int8", "got 'int8', wanted one of: auto, half"),
        ("disable_radix_cache", 1, "got 1 (int), wanted bool"),
        ("cuda_graph_bs_prefill", [1, "a"], "wanted list[int]"),
        ("page_size", 48, "engine.page_size: got 48, wanted a power of two: 1, 16, 64"),
        ("page_size", 0, "got 0, wanted a power of two"),
        ("page_size", -16, "got -16, wanted a power of two"),
        ("pp_size", 2, "wanted 1"),
    ],
)
def test_wrong_values(name: str, value: Any, said: str) -> None:
    assert said in refusal(**{name: value})


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
def test_pages(page_size: int | None) -> None:
    given = {"page_size": page_size, "chunked_prefill_size": 128}
    assert check_engine_args(given, "cpu") == given
    assert check_engine_args(given | {"chunked_prefill_size": -1}, "cuda")


def test_chunks_that_are_no_whole_pages() -> None:
    said = refusal(page_size=64, chunked_prefill_size=100)
    assert "engine.chunked_prefill_size: got 100" in said
    assert "multiple of engine.page_size (64), for example 128" in said


def test_numbers_may_carry_suffixes_where_sglang_reads_them() -> None:
    read = check_engine_args({"context_length": "4Ki", "max_prefill_tokens": "1.5k"}, "cpu")
    assert read == {"context_length": 4096, "max_prefill_tokens": 1500}
    assert "wanted int" in refusal(context_length="4x")
    assert "wanted int" in refusal(context_length="k")


def test_null_where_sglang_takes_none() -> None:
    assert check_engine_args({"context_length": None}, "cpu") == {"context_length": None}


def test_one_field_twice() -> None:
    assert "given twice" in refusal(tp=2, tp_size=2)


def test_all_faults_at_once() -> None:
    assert len(refusal(tp_size="x", portt=1, port=1).splitlines()) == 3

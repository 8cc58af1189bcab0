"""Checks the `engine:` section of a deployment against the pinned SGLang's `ServerArgs`.

Light on purpose (no SGLang import): the fields come from `engine_args_table.json`, which
`engine_args_table` writes and a test compares with the real class.
"""

import difflib
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

from overstory.orchestrator.engine_args_table import TABLE_PATH

# Short spellings that SGLang's command line takes by prefix or history, not by declaration.
_SHORT_NAMES = {"tp": "tp_size", "pp": "pp_size", "dp": "dp_size"}

# What users of vLLM type; where SGLang knows the name too (tensor_parallel_size) it is accepted.
_VLLM_NAMES = {
    "gpu_memory_utilization": "engine.mem_fraction_static",
    "max_model_len": "engine.context_length",
    "max_num_seqs": "engine.max_running_requests",
    "max_num_batched_tokens": "engine.chunked_prefill_size",
    "speculative_config": "drafter and tree.budget",
    "enforce_eager": "engine.disable_cuda_graph",
    "enable_prefix_caching": "engine.disable_radix_cache (prefix caching is on by default)",
    "block_size": "engine.page_size",
    "tokenizer": "model (the tokenizer lies in the model's folder)",
}

_PLACED = "Overstory places the ranks: see `overstory plan FILE`"
_TOKENIZER = "use `model`: the tokenizer lies in its folder and runs in the gateway"
_DRAFT = "use `drafter` and `tree`"
_WARM = "a replica warms itself up before it counts as ready"
_HTTP = "it acts only in SGLang's own HTTP server, in whose place the gateway stands"
_TEMPLATE = "the chat template is the one in the model's folder"
_SAMPLER = "Overstory samples by itself, so that a seed gives one text"
_CPU_ATTENTION = "on resources.device cpu Overstory brings its own attention"

# ServerArgs fields that Overstory sets itself, or that would do nothing -> where to say it instead,
# or why nowhere.
_RESERVED: dict[str, str] = {
    "model_path": "use `model`",
    "served_model_name": "use `served_model_name`",
    "tokenizer_path": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_worker_num": _TOKENIZER,
    "detokenizer_worker_num": _TOKENIZER,
    "skip_tokenizer_init": _TOKENIZER,
    "device": "use `resources.device`",
    "host": "use `gateway.host`",
    "port": "use `gateway.port`",
    "max_queued_requests": "use `gateway.max_queued_requests`",
    "dp_size": "use `replicas`",
    "enable_dp_attention": "use `replicas`",
    "nnodes": _PLACED,
    "node_rank": _PLACED,
    "dist_init_addr": _PLACED,
    "nccl_port": _PLACED,
    "base_gpu_id": _PLACED,
    "gpu_id_step": _PLACED,
    "use_ray": _PLACED,
    "stream_interval": "tokens are streamed step by step",
    "incremental_streaming_output": "tokens are streamed step by step",
    "sampling_backend": _SAMPLER,
    "tokenizer_backend": _TOKENIZER,
    "tokenizer_metrics_custom_labels_header": _HTTP,
    "tokenizer_metrics_allowed_custom_labels": _HTTP,
    "enable_tokenizer_batch_encode": _HTTP,
    "disable_tokenizer_batch_decode": _HTTP,
    "fastapi_root_path": _HTTP,
    "file_storage_path": _HTTP,
    "enable_http2": _HTTP,
    "enable_cache_report": _HTTP,
    "stream_response_default_include_usage": _HTTP,
    "sampling_defaults": "use `gateway.sampling_defaults`",
    "preferred_sampling_params": _HTTP,
    "allow_auto_truncate": _HTTP,
    "log_level_http": _HTTP,
    "api_key": "use `gateway.api_keys_file`",
    "admin_api_key": "use `gateway.api_keys_file`",
    "chat_template": _TEMPLATE,
    "hf_chat_template_name": _TEMPLATE,
    "completion_template": _TEMPLATE,
    "default_chat_template_kwargs": _TEMPLATE,
    "reasoning_parser": "use `gateway.reasoning_parser`",
    "tool_call_parser": "use `gateway.tool_call_parser`",
    "tool_server": _HTTP,
    "strip_thinking_cache": _HTTP,
    "enable_strict_thinking": _HTTP,
    "custom_sigquit_handler": "a rank ends alone and reports its cause",
    "skip_server_warmup": _WARM,
    "warmups": _WARM,
}
_RESERVED_PREFIXES = {
    "speculative_": _DRAFT,
    "decoupled_spec": _DRAFT,
    "disaggregation_": "Overstory does not split prefill and decode",
    "asr_": _HTTP,
    "uvicorn_": _HTTP,
    "sidecar": _HTTP,
    "enable_dynamic_batch_tokenizer": _HTTP,
    "dynamic_batch_tokenizer_": _HTTP,
    "smg_": "use `gateway`",
    "grpc_": "use `gateway`",
    "ssl_": "use `gateway.tls_cert_file` and `gateway.tls_key_file`",
}
_RESERVED_ON_CPU = {
    "attention_backend": _CPU_ATTENTION,
    "prefill_attention_backend": _CPU_ATTENTION,
    "decode_attention_backend": _CPU_ATTENTION,
    "disable_cuda_graph": "on resources.device cpu there are no CUDA graphs",
    "quantization": "on resources.device cpu weights run in engine.dtype",
}
_FIXED_AT_ONE = {
    "pp_size": "DFlash drafting cannot cross pipeline stages",
}
_AT_LEAST = {"tp_size": 1, "ep_size": 1}
# Names that our plugin adds to SGLang's own lists.
_PLUGIN_CHOICES = {"attention_backend": ("overstory",)}

_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class EngineArgError(ValueError):
    """`engine:` keys that cannot be used: one line each, beginning with the dotted key."""


def _fault(key: str, message: str) -> EngineArgError:
    return EngineArgError(f"engine.{key}: {message}")


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE_PATH.read_text())


def sglang_version() -> str:
    """Version of SGLang whose `ServerArgs` the table describes."""
    return _table()["sglang"]


def server_arg_fields() -> Mapping[str, dict[str, Any]]:
    """Field name of `ServerArgs` -> its row (see `engine_args_table.describe_server_args`)."""
    return _table()["fields"]


@functools.cache
def _spellings() -> dict[str, str]:
    names = dict(_SHORT_NAMES)
    for name, row in server_arg_fields().items():
        names[name] = name
        for alias in row.get("aliases", ()):
            names.setdefault(alias, name)
    return names


def canonical_name(key: str) -> str:
    """The `ServerArgs` field that `key` means; `--tp-size`, `tp-size` and `tp` are `tp_size`.

    Raises `EngineArgError` for a name that SGLang does not have, with the nearest one that it has.
    """
    plain = key.lstrip("-").replace("-", "_")
    if plain in _VLLM_NAMES and plain not in server_arg_fields():
        raise _fault(key, f"is vLLM's name; did you mean {_VLLM_NAMES[plain]}?")
    if plain in _spellings():
        return _spellings()[plain]
    near = difflib.get_close_matches(plain, _spellings(), n=1, cutoff=0.6)
    hint = f"did you mean `{_spellings()[near[0]]}`?" if near else "see SGLang's server arguments"
    raise _fault(key, f"SGLang {sglang_version()} has no such argument; {hint}")


def _reason_reserved(name: str, device: str) -> str | None:
    reason = _RESERVED.get(name)
    if reason is None and device == "cpu":
        reason = _RESERVED_ON_CPU.get(name)
    if reason is None:
        prefix = next((p for p in _RESERVED_PREFIXES if name.startswith(p)), None)
        reason = _RESERVED_PREFIXES[prefix] if prefix else None
    return reason


def _parse_suffixed(text: str) -> int | None:
    """Number written as SGLang allows on its command line ("32k", "1.5M", "64Ki"), else None."""
    for units, number in ((_BINARY, int), (_DECIMAL, float)):
        for suffix, factor in units.items():
            if text.endswith(suffix):
                try:
                    return int(number(text.removesuffix(suffix)) * factor)
                except ValueError:
                    return None
    return None


def _matches(kind: str, value: Any) -> bool:
    match kind:
        case "any":
            return True
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and math.isfinite(value)
        case "str":
            return isinstance(value, str)
        case "dict":
            return isinstance(value, dict)
    assert kind.startswith("list"), f"unknown kind {kind!r} in {TABLE_PATH}"
    item = kind.removeprefix("list").strip("[]") or "any"
    return isinstance(value, list) and all(_matches(item, entry) for entry in value)


def _check_value(name: str, value: Any) -> Any:
    row = server_arg_fields()[name]
    kind = row["kind"]
    if value is None and row.get("nullable"):
        return None
    if row.get("suffixes") and isinstance(value, str):
        value = _parse_suffixed(value) if _parse_suffixed(value) is not None else value
    if not _matches(kind, value):
        wanted = kind + (" or null" if row.get("nullable") else "")
        raise _fault(name, f"got {value!r} ({type(value).__name__}), wanted {wanted}")
    choices = [*row.get("choices", ()), *_PLUGIN_CHOICES.get(name, ())]
    wrong = [v for v in (value if isinstance(value, list) else [value]) if v not in choices]
    if row.get("choices") and wrong:
        listed = ", ".join(map(str, choices))
        raise _fault(name, f"got {wrong[0]!r}, wanted one of: {listed}")
    if name in _AT_LEAST and value < _AT_LEAST[name]:
        raise _fault(name, f"got {value}, wanted at least {_AT_LEAST[name]}")
    if name == "mem_fraction_static" and value is not None and not 0 < value < 1:
        raise _fault(name, f"got {value}, wanted a share of a GPU's memory, above 0 and below 1")
    if name == "page_size" and (value < 1 or value & (value - 1)):
        raise _fault(name, f"got {value}, wanted a power of two: 1, 16, 64, ...")
    if name in _FIXED_AT_ONE and value not in (None, 1):
        raise _fault(name, f"got {value!r}, wanted 1: {_FIXED_AT_ONE[name]}")
    return value


def _check_one(key: str, value: Any, device: str, taken: Mapping[str, Any]) -> tuple[str, Any]:
    name = canonical_name(key)
    reason = _reason_reserved(name, device)
    if reason is not None:
        raise _fault(key, f"is not for the deployment to set, remove it; {reason}")
    if name in taken:
        raise _fault(key, f"is `{name}`, which is given twice; keep one")
    return name, _check_value(name, value)


def _faults_between(checked: Mapping[str, Any]) -> list[str]:
    """Values that are right by themselves and do not go together."""
    page, chunk = checked.get("page_size") or 1, checked.get("chunked_prefill_size") or 0
    if chunk <= 0 or chunk % page == 0:
        return []
    return [
        f"engine.chunked_prefill_size: got {chunk}, wanted a multiple of engine.page_size "
        f"({page}), for example {-(-chunk // page) * page}"
    ]


def check_engine_args(given: Mapping[str, Any], device: str) -> dict[str, Any]:
    """`given` by `ServerArgs` field names, every name and value checked.

    Args:
        given: the `engine:` section as written; keys may use dashes, leading dashes and aliases.
        device: `cpu` or `cuda`; on a CPU Overstory sets more by itself.

    Raises:
        EngineArgError: unknown names, ones that Overstory sets itself, wrong types or choices,
            fields named twice.
    """
    checked: dict[str, Any] = {}
    faults = []
    for key, value in given.items():
        try:
            name, checked_value = _check_one(str(key), value, device, checked)
        except EngineArgError as fault:
            faults.append(str(fault))
        else:
            checked[name] = checked_value
    faults += _faults_between(checked)
    if faults:
        raise EngineArgError("\n".join(faults))
    return checked

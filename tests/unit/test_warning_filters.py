"""Which warnings the tests hide: other projects', never ours."""

import tomllib
import warnings
from pathlib import Path

import pytest
from _pytest.config import parse_warning_filter

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
FIELD = "Using extra keyword arguments on `Field` is deprecated and will be removed."


@pytest.mark.parametrize(
    ("message", "category", "module", "hidden"),
    [
        (FIELD, DeprecationWarning, "ray.serve._private.config", True),
        (FIELD, DeprecationWarning, "overstory.orchestrator.spec", False),
        ("builtin type SwigPyPacked has no __module__ attribute", DeprecationWarning, "sys", True),
        ("`torch.jit.script_method` is deprecated.", DeprecationWarning, "torch.jit._script", True),
        ("`torch.jit.script` is deprecated.", DeprecationWarning, "overstory.kernels", False),
        ("Only CUDA, HIP and XPU support AWQ currently.", UserWarning, "sglang.srt.awq", True),
        ("Only CUDA, MUSA and NPU support GGUF", UserWarning, "sglang.srt.gguf", True),
        ("Only CUDA, HIP and XPU support AWQ", UserWarning, "overstory.workers.rank", False),
        ("anything else", UserWarning, "sglang.srt.server_args", False),
        ("anything else", DeprecationWarning, "overstory.workers.rank", False),
    ],
)
def test_only_noise_of_others_is_hidden(
    message: str, category: type[Warning], module: str, hidden: bool
) -> None:
    options = tomllib.loads(PROJECT.read_text())["tool"]["pytest"]["ini_options"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        for line in options["filterwarnings"]:
            warnings.filterwarnings(*parse_warning_filter(line, escape=False))
        warnings.warn_explicit(message, category, "file.py", 1, module)
    assert (seen == []) is hidden

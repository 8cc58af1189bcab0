"""SGLang's own parsers of tool calls and reasoning, without SGLang's engine.

`import sglang` and `import xgrammar` run package files that bring in torch and transformers: 20 s
and 0.9 GB. The parsers and the protocol types they take need neither, so their modules are loaded
below packages whose own files are left out: 1.2 s and 60 MB, and only in a gateway that parses.
See `docs/decisions/0006-parsers-in-the-gateway.md`.
"""

import functools
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_PACKAGES = ("sglang", "xgrammar")

_FROM_XGRAMMAR = {
    "StructuralTag": "xgrammar.structural_tag",
    "get_model_structural_tag": "xgrammar.builtin_structural_tag",
}
"""What SGLang's parsers import from the package `xgrammar` itself."""


@dataclass(frozen=True)
class SglangParsers:
    """SGLang's names, as they are there.

    Attributes:
        function_call: `FunctionCallParser`, whose `ToolCallParserEnum` has the parsers by name.
        json_array: `JsonArrayParser`, of tool calls that a JSON schema forced.
        reasoning: `ReasoningParser`, whose `DetectorMap` has the parsers by name.
        tool, tool_choice: the protocol types that `function_call` takes.
        tools_schema: `get_json_schema_constraint`.
        normalize_types: `normalize_json_schema_types`, in place.
        detect_reasoning: `detect_reasoning_pattern`, of a chat template.
    """

    function_call: Any
    json_array: Any
    reasoning: Any
    tool: Any
    tool_choice: Any
    tools_schema: Any
    normalize_types: Any
    detect_reasoning: Any


@functools.cache
def sglang_parsers() -> SglangParsers:
    """The parsers; the first call imports them. Where SGLang is imported already, it is used."""
    for name in _PACKAGES:
        if name not in sys.modules:
            sys.modules[name] = _bare(name)
    protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    calls = importlib.import_module("sglang.srt.function_call.function_call_parser")
    arrays = importlib.import_module("sglang.srt.function_call.json_array_parser")
    utils = importlib.import_module("sglang.srt.function_call.utils")
    reasoning = importlib.import_module("sglang.srt.parser.reasoning_parser")
    templates = importlib.import_module("sglang.srt.parser.template_detection")
    return SglangParsers(
        function_call=calls.FunctionCallParser,
        json_array=arrays.JsonArrayParser,
        reasoning=reasoning.ReasoningParser,
        tool=protocol.Tool,
        tool_choice=protocol.ToolChoice,
        tools_schema=utils.get_json_schema_constraint,
        normalize_types=utils.normalize_json_schema_types,
        detect_reasoning=templates.detect_reasoning_pattern,
    )


def _bare(name: str) -> ModuleType:
    """A package whose modules can be imported and whose own file has not run."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is a dependency"
    assert spec.submodule_search_locations, f"{name} is a package"
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec

    def missing(attribute: str) -> Any:
        if name == "xgrammar" and attribute in _FROM_XGRAMMAR:
            return getattr(importlib.import_module(_FROM_XGRAMMAR[attribute]), attribute)
        raise AttributeError(
            f"{name}.{attribute} is not there: this process has the parsers of {name} only"
        )

    package.__dict__["__getattr__"] = missing
    return package

"""Names of SGLang's parsers, for `gateway.tool_call_parser` and `gateway.reasoning_parser`.

Kept here so that a deployment file can be checked without importing SGLang; a test compares them
with SGLang's own tables.
"""

import difflib
from collections.abc import Sequence

TOOL_CALL_PARSERS = (
    "apertus2509", "cohere_command4", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4",
    "gemma4", "gigachat3", "glm", "glm45", "glm47", "gpt-oss", "hermes", "hunyuan", "inkling",
    "interns1", "kimi_k2", "kimi_k3", "lfm2", "llama3", "mimo", "minicpm5", "minimax-m2",
    "minimax-m3", "mistral", "poolside_v1", "pythonic", "qwen", "qwen25", "qwen3_coder", "step3",
    "step3p5", "trinity",
)  # fmt: skip
"""Keys of `FunctionCallParser.ToolCallParserEnum`."""

REASONING_PARSERS = (
    "apertus2509", "cohere_command4", "deepseek-r1", "deepseek-v3", "deepseek-v4", "gemma4",
    "glm45", "gpt-oss", "hunyuan", "inkling", "interns1", "kimi", "kimi_k2", "kimi_k3", "mimo",
    "minimax", "minimax-append-think", "minimax-m3", "mistral", "nemotron_3", "poolside_v1",
    "qwen3", "qwen3-thinking", "step3", "step3p5",
)  # fmt: skip
"""Keys of `ReasoningParser.DetectorMap`."""


def check_parser(name: str | None, known: Sequence[str]) -> str | None:
    """`name` itself.

    Raises:
        ValueError: SGLang has no such parser.
    """
    if name is None or name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"SGLang has no such parser; {hint}It has: {', '.join(known)}")

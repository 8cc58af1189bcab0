"""How a model wants to be sampled where a chat does not say: its `generation_config.json`."""

import json
from pathlib import Path
from typing import Literal, get_args

SamplingDefault = Literal["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]


def sampling_defaults(model_dir: str) -> dict[SamplingDefault, float]:
    """What the model's folder says, by names of a request's fields; empty without such a file. The
    same fields as SGLang takes (`ModelConfig.get_default_sampling_params`).

    Raises:
        ValueError: the file cannot be read, or a value is no number; with the way out.
    """
    file = Path(model_dir) / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: is no JSON: {error}; {_WAY_OUT}") from error
    found: dict[SamplingDefault, float] = {}
    for name in get_args(SamplingDefault):
        value = given.get(name)
        if value is None:
            continue
        wanted = int if name == "top_k" else int | float
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{file}: {name} is {value!r}, wanted a number; {_WAY_OUT}")
        found[name] = value
    return found


_WAY_OUT = "correct it, or set gateway.sampling_defaults to openai"

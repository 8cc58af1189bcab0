"""Embeddings that go into a model as its own dtype."""

from __future__ import annotations

from typing import Any


def embeddings_in_model_dtype(kwargs: dict[str, Any], runner: Any, batch: Any, *_: Any) -> Any:
    """AFTER hook on ``ModelRunner._extend_forward_kwargs``, which casts to bfloat16.

    The drafter's blocks come as embeddings, so one in float32 or float16 would get rows that its
    first product refuses, and one whose norms cast back would draft from rounded ones.
    """
    if batch.input_embeds is not None:
        kwargs["input_embeds"] = batch.input_embeds.to(runner.dtype)
    return kwargs

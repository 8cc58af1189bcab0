"""A drafter's embeddings keep the dtype of its model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overstory.workers.ddtree.model_dtype import embeddings_in_model_dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embeddings_are_not_rounded(dtype: torch.dtype) -> None:
    given = torch.tensor([[1.0 + 2.0**-9]], dtype=dtype)
    batch: Any = SimpleNamespace(input_embeds=given)
    cast = {"input_embeds": given.bfloat16(), "other": 1}  # what SGLang makes of it
    kwargs = embeddings_in_model_dtype(cast, SimpleNamespace(dtype=dtype), batch)
    assert kwargs["input_embeds"].dtype == dtype
    assert kwargs["input_embeds"].equal(given)
    assert kwargs["other"] == 1


def test_batches_of_tokens_are_left_alone() -> None:
    batch: Any = SimpleNamespace(input_embeds=None)
    assert embeddings_in_model_dtype({}, SimpleNamespace(dtype=torch.float32), batch) == {}

"""SGLang's sampling parameters of a batch, with our rules of its requests beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from overstory.workers.ddtree.grammar import apply_mask
from overstory.workers.ddtree.rules import RequestRules


@dataclasses.dataclass
class RuledSamplingInfo(SamplingBatchInfo):
    """What `SamplingBatchInfo` holds, and the rules of each request.

    SGLang applies neither bias nor penalties to it: the one sampler does, node by node.
    """

    rules: list[RequestRules | None] = dataclasses.field(default_factory=list)

    @classmethod
    def around(cls, info: SamplingBatchInfo, reqs: list[Any]) -> RuledSamplingInfo:
        """``info`` of ``reqs``, in their order."""
        fields = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
        return cls(**fields, rules=[RequestRules.of(req) for req in reqs])

    def copy_for_forward(self) -> RuledSamplingInfo:
        """Called by SGLang at each step; its own calls the constructor of thirty fields."""
        self.update_penalties()
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, penalizer_orchestrator=None)
        return copied

    def apply_logits_bias(self, logits: torch.Tensor) -> None:
        """Called by SGLang before its sampler; only the grammar's mask is left to do there."""
        if self.grammar_mask is not None:
            apply_mask(self.grammar_mask, logits)

    def adjusted_filter_batch(
        self, keep_indices: list[int], keep_indices_device: torch.Tensor
    ) -> None:
        """Called by SGLang's ``filter_batch``."""
        self.rules = [self.rules[i] for i in keep_indices]

    def adjusted_merge_batch(self, other: SamplingBatchInfo) -> None:
        """Called by SGLang's ``merge_batch``."""
        assert isinstance(other, RuledSamplingInfo), type(other)
        self.rules = [*self.rules, *other.rules]

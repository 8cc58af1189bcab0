"""Our filters against SGLang's own function, not a transcript of it."""

import pytest
import torch

from overstory.kernels.reference import filtered_probs


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_support_and_distribution_are_those_of_sglang(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    rows, vocabulary = 96, 4096
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(7)) * scale
    temperature = torch.tensor([1.0, 0.7, 1.3]).repeat(32)
    top_k = torch.tensor([2, 20, 300, 4096]).repeat(24)
    top_p = torch.tensor([0.3, 0.9, 0.99]).repeat_interleave(32)
    min_p = torch.tensor([0.0, 0.05]).repeat(48)
    probs = torch.softmax(logits / temperature.unsqueeze(1), dim=1)

    # What SGLang hands to its multinomial draw is the distribution, in sorted order.
    handed: list[torch.Tensor] = []

    def multinomial(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        handed.append(weights.clone())
        return torch.zeros(rows, num_samples, dtype=torch.int64)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), top_k, top_p, min_p, True, None, torch.zeros(rows)
    )
    order = probs.sort(dim=1, descending=True).indices
    theirs = torch.zeros(rows, vocabulary).scatter(1, order, handed[0]).double()
    theirs /= theirs.sum(dim=1, keepdim=True)
    ours = filtered_probs(logits, temperature, top_k, top_p, min_p)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)
    assert int((ours > 0).sum(dim=1).max()) > 1

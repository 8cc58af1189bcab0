"""Our attention's error against that of the algorithm of SGLang's Triton kernel; float64 judges.

Emulated in torch, since its kernel needs a GPU (tests/gpu/test_gpu_attention_error.py runs it):
blocks of 64 keys, a running maximum and sum in float32, weights rounded to bf16 for the product.
"""

import itertools
import shutil

import pytest
import torch
from attention_cases import VALUES, Case, random_tree
from attention_hazards import verify

from overstory.kernels import ops

MOST = 1.08
"""Ours may be so much larger where few parts of many granules make up a context, as they do here:
maxima move late. With the parts that a GPU makes of one request it is no larger, which
test_gpu_attention_error.py asks (docs/kernels-attention.md, "How exact it is")."""


def triton_s_algorithm(case: Case) -> torch.Tensor:
    """[rows, heads, 512] bf16 of a case of one request."""
    (prefix, n), tail = case.requests[0], case.tails[0]
    keys = case.kv[torch.cat((case.kv_indices, case.out_cache_loc))].float()
    seen = torch.nn.functional.pad(tail, (prefix, 0), value=True).unsqueeze(1)
    top = torch.full((n, case.heads, 1), -torch.inf)
    total, out = torch.zeros(n, case.heads, 1), torch.zeros(n, case.heads, VALUES)
    bounds = [*range(0, prefix, 64), prefix]  # prefix and tail are two loops
    for first, end in [*itertools.pairwise(bounds), (prefix, prefix + n)]:
        block = keys[first:end]
        scores = (case.q.float() @ block.T) * case.scale
        scores = scores.masked_fill(~seen[:, :, first:end], -torch.inf)
        higher = torch.maximum(top, scores.amax(dim=2, keepdim=True))
        weights, factor = (scores - higher).exp(), (top - higher).exp()
        total = total * factor + weights.sum(dim=2, keepdim=True)
        out = out * factor + weights.bfloat16().float() @ block[:, :VALUES]
        top = higher
    return (out / total).bfloat16()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the simulator")
@pytest.mark.parametrize(("prefix", "q"), [(500, 5), pytest.param(1500, 9, marks=pytest.mark.full)])
@pytest.mark.parametrize("scale", [0.06, 0.4])
def test_error_is_about_as_large(
    monkeypatch: pytest.MonkeyPatch, prefix: int, q: int, scale: float
) -> None:
    monkeypatch.setenv("OVERSTORY_KERNELS", "simulator")
    case = Case([(prefix, q)], tail=random_tree, scale=scale, seed=q)
    want, _ = case.expected()
    ours = verify(case, schedule=ops.Schedule(4, 1))[0].double() - want
    theirs = triton_s_algorithm(case).double() - want
    assert float(theirs.norm() / want.norm()) < 5e-3, "the emulation is attention"
    assert float(ours.norm()) <= MOST * float(theirs.norm())
    assert float(ours.abs().mean()) <= MOST * float(theirs.abs().mean())

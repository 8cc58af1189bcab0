"""A few launches of our attention at one shape and nothing else, for a profiler.

ncu --clock-control none -k regex:attention -s 4 -c 1 python -m overstory.kernels.bench.probe
"""

from __future__ import annotations

import argparse

import torch

from .cases import AttentionCase
from .inputs import draw_inputs
from .ours import ours


def main() -> None:
    """Launch each rotating set twice."""
    parser = argparse.ArgumentParser(prog="overstory.kernels.bench.probe", description=__doc__)
    parser.add_argument("--op", default="verify_attention")
    for name, default in {"bs": 1, "q": 9, "context": 65_536, "heads": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    case = AttentionCase(chosen.op, chosen.bs, chosen.q, chosen.context, chosen.heads)
    launches = [ours(inputs) for inputs in draw_inputs(case)]
    for launch in [*launches, *launches]:
        launch()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()

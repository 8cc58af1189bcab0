"""The CUDA sources without a GPU: in the simulator (g++), and as nvcc compiles them."""

import os
import sys
from pathlib import Path

from hypothesis import settings

# Shared with the unit tests: random trees, checks of ops, chi-square.
sys.path.append(str(Path(__file__).parents[1] / "unit"))

# As in a rank on a CPU: OpenMP threads that spin against each other only cost time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As in the unit tests.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("anew", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

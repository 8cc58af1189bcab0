import os

# As in a rank on a CPU: OpenMP threads that spin against each other only cost time on small tensors.
os.environ.setdefault("OMP_NUM_THREADS", "1")

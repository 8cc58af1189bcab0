"""Times of our ops and of others' kernels on one GPU: `python -m overstory.kernels.bench`.

What is timed, and how, is in docs/kernels.md.
"""

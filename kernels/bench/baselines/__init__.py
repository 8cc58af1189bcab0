"""Other implementations of attention over the same inputs.

Each names what it does not do of what our op does: some cover only a part of the work, which makes
them faster than a complete one of their kind would be.
"""

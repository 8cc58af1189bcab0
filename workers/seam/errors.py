"""Errors of the seam."""


class SeamError(RuntimeError):
    """SGLang is not what the seam relies on, or a change to it did not take. Names what and where."""


class MissingKernelError(NotImplementedError):
    """An op of SGLang's compiled kernel package was called on a CPU and nothing stands in for it."""

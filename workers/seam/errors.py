"""Errors of the seam."""


class SeamError(RuntimeError):
    """SGLang is not what the seam relies on, or a change to it did not take. Says what."""


class MissingKernelError(NotImplementedError):
    """An op of SGLang's compiled kernel package was called on a CPU; nothing stands in for it."""

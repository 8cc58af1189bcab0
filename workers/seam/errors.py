"""Errors of the seam."""


class SeamError(RuntimeError):
    """SGLang is not what the seam relies on, or a change to it did not take. Says what."""


class MissingOpError(NotImplementedError):
    """A name of a package that only has a stand-in on a plain CPU was called."""

"""Registration with torch.library, so that FakeTensor and torch.compile know the ops.

Every op is registered in one form: it writes into tensors that it is given and returns nothing.
The public functions allocate what a caller does not give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "overstory"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

_Function = Callable[..., None]


def register(schema: str, check: _Function) -> Callable[[_Function], _Function]:
    """Make a function the op `overstory::<name>` for tensors of any device.

    Args:
        schema: "name(Tensor x, Tensor(a!) out) -> ()".
        check: takes the op's arguments and raises where they do not fit, without reading values:
            it runs before the function, and alone it is what the op does to fake tensors.

    Returns:
        a decorator; what it returns calls the op through torch's dispatcher.
    """
    name = schema.partition("(")[0]

    def decorate(function: _Function) -> _Function:
        def checked(*arguments: Any) -> None:
            check(*arguments)
            function(*arguments)

        _LIBRARY.define(schema)
        _LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", check, lib=_LIBRARY)
        op: _Function = getattr(getattr(torch.ops, NAMESPACE), name).default
        return op

    return decorate

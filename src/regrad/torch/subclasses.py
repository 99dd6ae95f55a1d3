"""Subclasses of Tensor, which may define what torch's functions do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)


def as_given(y: Any, xs: Sequence[Any]) -> Any:
    """Return a result in the arguments' subclass of Tensor, as torch does."""
    if type(y) is not torch.Tensor:
        return y
    for x in xs:
        if type(x) not in PLAIN:
            kind = type(x)
            break
    else:
        return y
    # (a subclass with its own protocol has called for y, and converts y itself)
    return y.as_subclass(kind) if _protocol(kind) is _TENSORS_OWN else y


def has_own_protocol(kind: type) -> bool:
    """Return whether a subclass of Tensor defines what torch's functions do with it."""
    return _protocol(kind) not in (None, _TENSORS_OWN)


def is_dispatched(kind: type) -> bool:
    """Return whether a subclass of Tensor represents other tensors (DTensor), op by op."""
    return any("__torch_dispatch__" in vars(k) for k in kind.__mro__[:-3])


def _protocol(kind: type) -> Any:
    """Return the function behind a class's `__torch_function__`; None if that is disabled."""
    return getattr(kind.__torch_function__, "__func__", None)


_TENSORS_OWN = _protocol(torch.Tensor)

"""Answers to functions of PyTorch and JAX that are given a Tensor, not an array of theirs.

A Tensor refuses, with the way out. Operators (`array + t`) run regrad's op: both libraries leave
them to us. Conversions (`torch.asarray`, `jnp.asarray`) go by `__array__` or DLPack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from regrad.core.hints import of_name
from regrad.errors import ArgumentError, GradientError


def torch_function(
    cls: type,
    func: Callable[..., Any],
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """`__torch_function__`: what PyTorch calls for `torch.sin(t)` and `layer(t)`.

    Its operators take the error, which is a TypeError, to mean that they are left to us.
    """
    name = getattr(func, "__name__", "a function")
    raise ArgumentError(_advice(f"PyTorch's {name}", name, "torch", "torch.asarray"))


def jax_array(x: Any) -> Any:
    """`__jax_array__`: what JAX asks for in `jnp.sin(t)`.

    Its conversions and operators ask, too, and are told that there is nothing.
    """
    frame, caller = sys._getframe(1), ""
    if frame.f_code.co_varnames[:2] == ("self", "other"):
        raise AttributeError("__jax_array__")
    while frame is not None and frame.f_globals.get("__name__", "").startswith("jax."):
        frame, caller = frame.f_back, frame.f_code.co_name  # in the end what the user has called
    if caller in ("", "array", "asarray"):
        raise AttributeError("__jax_array__")
    refuse_in_jax(x, caller)


def refuse_in_jax(x: Any, name: str = "") -> NoReturn:
    """Refuse to be an argument in JAX (which would take a TypeError for an answer)."""
    raise GradientError(_advice("a function of JAX", name, "jax", "jax.numpy.asarray"))


def _advice(what: str, name: str, library: str, conversion: str) -> str:
    return (
        f"{what} was given a regrad Tensor, which only regrad's functions take.{of_name(name, ())} "
        f"regrad.{library}.from_regrad makes regrad code a function of {library}'s arrays; "
        f"{conversion}(x) returns the values, without a gradient. For {library}'s code itself "
        f"there are the tools of regrad.{library}."
    )

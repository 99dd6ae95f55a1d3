"""Handling of functions of PyTorch and JAX that receive a Tensor instead of their own array.

A Tensor raises an error that names the alternatives. Operators (`array + t`) run regrad's op,
because both libraries defer them to regrad. Conversions (`torch.asarray`, `jnp.asarray`) use
`__array__` or DLPack.
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
    """Implement `__torch_function__`: `torch.sin(t)` and `layer(t)`.

    The error is a TypeError. PyTorch's operators take it as a signal to defer to regrad.
    """
    name = getattr(func, "__name__", "a function")
    raise ArgumentError(_advice(f"PyTorch's {name}", name, "torch", "torch.asarray"))


def jax_array(x: Any) -> Any:
    """Implement `__jax_array__`, which JAX calls in `jnp.sin(t)`.

    JAX's conversions and operators look for it, too. For those it raises AttributeError, as if the
    attribute did not exist.
    """
    frame, caller = sys._getframe(1), ""
    if frame.f_code.co_varnames[:2] == ("self", "other"):
        raise AttributeError("__jax_array__")
    while frame is not None and frame.f_globals.get("__name__", "").startswith("jax."):
        frame, caller = frame.f_back, frame.f_code.co_name  # ends at the function the user called
    if caller in ("", "array", "asarray"):
        raise AttributeError("__jax_array__")
    refuse_in_jax(x, caller)


def refuse_in_jax(x: Any, name: str = "") -> NoReturn:
    """Raise the error for an argument of a JAX function. (JAX would catch a TypeError.)"""
    raise GradientError(_advice("a function of JAX", name, "jax", "jax.numpy.asarray"))


def _advice(what: str, name: str, library: str, conversion: str) -> str:
    return (
        f"{what} was given a regrad Tensor, which only regrad's functions take.{of_name(name, ())} "
        f"regrad.{library}.from_regrad makes regrad code a function of {library}'s arrays; "
        f"{conversion}(x) returns the values, without a gradient. For {library} code itself, "
        f"use the tools of regrad.{library}."
    )

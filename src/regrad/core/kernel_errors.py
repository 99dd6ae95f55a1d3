"""The errors of kernels, restated with the op and its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regrad.core.backends import GONE, backend_of, gone, is_inexact
from regrad.core.dims import is_known
from regrad.core.registry import Attrs, Op
from regrad.core.sharding import trouble
from regrad.core.signatures import is_of_caller
from regrad.core.tape import NO_ATTRS
from regrad.core.tensor import Tensor
from regrad.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    RegradError,
    ShapeError,
    TraceError,
    is_of_a_matrix,
    prefixed,
    refusal,
)

LEAKED = (
    "a Tensor that was made while a function was traced is used after the trace has ended, and so "
    "never had a value. Return it from the compiled function, or assign it to a Variable, and do "
    "not keep it in a list, an attribute or a global."
)


NOT_FOR_DTYPE = (  # phrases in messages of NumPy, JAX and PyTorch
    "not supported for the input types",
    "does not accept dtype",
    "not implemented for",
    "not inexact",
)


def explain(error: Exception, op: Op, xs: Sequence[Tensor], attrs: Attrs = NO_ATTRS) -> Exception:
    """Return a kernel's error, with the op, its inputs and its attributes."""
    if op.type.startswith("_") and is_of_caller(error):
        return error  # of the function of a host_call; other private ops run no code of the caller
    inputs = " and ".join(f"{x.dtype} {x.shape}" for x in xs)
    if isinstance(error, RegradError):
        own = op.type.startswith("_") or op.type in str(error) or is_of_caller(error)
        return error if own else prefixed(error, op.name)
    if type(error).__name__ == "UnexpectedTracerError":
        return TraceError(f"{op.type}: {LEAKED}")
    if gone(error):
        return ArgumentError(f"{op.type}: {GONE}")
    if (where := trouble(error, xs)) is not None:
        return DeviceError(f"{op.type}: {where}")
    if any(c.__name__ == "ConcretizationTypeError" for c in type(error).__mro__):  # JAX's
        return TraceError(
            f"{op.type}: regrad.{op.name} of {inputs} needs values, for the shape of its result or "
            "for a branch, but a traced Tensor has no values. Call it outside the compiled "
            "function, or use functions that keep the shape (where, multiplication by a mask)."
        )
    if _no_halves(error, xs):
        return DTypeError(
            f"{op.type}: regrad.{op.name} of {inputs}: {backend_of(*[x._data for x in xs]).name} "
            "does not implement it in half precision. Cast before and after: "
            f"astype({op.name}(astype(x, rg.float32)), x.dtype)."
        )
    if any(words in str(error) for words in NOT_FOR_DTYPE):
        return _undefined(op, inputs)
    if is_of_a_matrix(error):
        return refusal(error, f"{op.type}: regrad.{op.name} of {inputs}", attrs)
    if op.broadcasts and not _broadcast([x.shape for x in xs]):
        return ShapeError(
            f"{op.type}: operands could not be broadcast together, regrad.{op.name} got {inputs}. "
            "From the last axis on, sizes have to be equal, or one of them 1."
        )
    if is_of_caller(error):
        error.add_note(f"in the op type {op.type!r} (regrad.{op.name}) of {inputs}")
        return error
    if not op.attrs and isinstance(error, TypeError | NotImplementedError):
        return _undefined(op, f"{inputs} ({error!s:.200})")
    return refusal(error, f"{op.type}: regrad.{op.name} of {inputs}", attrs)


def _undefined(op: Op, inputs: str) -> DTypeError:
    return DTypeError(
        f"{op.type}: regrad.{op.name} is not defined for {inputs}. "
        + ("It works on the bits of integers and bools. " if "bit" in op.name else "")
        + "Convert the input first, with astype."
    )


def _no_halves(error: Exception, xs: Sequence[Tensor]) -> bool:
    """Return whether a library reports that it lacks the function for float16 (or bfloat16)."""
    if not any(is_inexact(x.dtype) and x.dtype.itemsize == 2 for x in xs):
        return False
    return isinstance(error, TypeError | NotImplementedError) or "Half" in str(error)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether shapes broadcast together, as far as their sizes are known."""
    if not all(map(is_known, shapes)):
        return True
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        return False
    return True

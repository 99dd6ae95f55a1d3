"""Equations of JAX programs: their inputs and lines, and which of them are differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import jax
from jax.extend import core

from regrad.core.callers import PACKAGE
from regrad.jax.host import programs
from regrad.jax.primitives import is_float


def has_batches(jaxpr: core.Jaxpr) -> bool:
    """Return whether a program contains differentiable equations that a vmap has batched."""
    every = programs.equations(jaxpr)
    return any("vmap" in programs.transforms(eqn) and is_differentiable(eqn) for eqn in every)


def is_differentiable(eqn: core.JaxprEqn) -> bool:
    """Return whether a gradient may pass: the equation has float inputs and float outputs."""
    # (A literal is a constant of the program, so no gradient passes to it.)
    avals = [v.aval for v in operands_of(eqn)]
    return any(map(may_carry_gradient, avals)) and any(
        may_carry_gradient(v.aval) for v in eqn.outvars
    )


def may_carry_gradient(aval: Any) -> bool:
    """Return whether an array of this type may carry a gradient: a float."""
    return hasattr(aval, "dtype") and is_float(aval)


def program_of(eqn: core.JaxprEqn, whole: bool = False) -> Any:
    """Return an equation as a separate program; constants in it stay where they are.

    (With `whole`, they are inputs.)
    """
    if eqn.primitive is programs.closed_call_p:
        return programs.called(eqn)
    inputs = [
        None if isinstance(v, core.Literal) and not whole else core.Var(v.aval) for v in eqn.invars
    ]
    given = [v if x is None else x for x, v in zip(inputs, eqn.invars, strict=True)]
    outs = [core.Var(v.aval) for v in eqn.outvars]
    body = eqn.replace(invars=given, outvars=outs)
    info = programs.unnamed(jax.make_jaxpr(lambda: 0)())
    return core.ClosedJaxpr(
        core.Jaxpr([], [x for x in inputs if x is not None], outs, [body], eqn.effects, info), ()
    )


def operands_of(eqn: core.JaxprEqn) -> list[Any]:
    """Return the inputs of an equation, without its literals."""
    return [v for v in eqn.invars if not isinstance(v, core.Literal)]


def constant_of(v: core.Literal) -> Any:
    """Return a literal as an array of its own type."""
    with jax.ensure_compile_time_eval():  # a value, and not a part of an open trace
        return jax.numpy.asarray(v.val, jax.typeof(v.val).dtype)


def call_site(call: Any, running: Sequence[tuple[Any, int]]) -> Any:
    """Return where a function with a custom derivative was called, or None if it is identified.

    In a program that was compiled first and differentiated later, the remainder of such a call only
    shows that `call` (JAX's code) was running.
    """
    inner = [*takewhile(lambda each: each[0] is not call, running)]
    if not all(code.co_filename.startswith(programs.MACHINERY) for code, _ in inner):
        return None  # another library's derivative: regrad's code would be among the frames
    return tuple(running[len(inner) :]) or None


def find_line(eqn: core.JaxprEqn, otherwise: str) -> str:
    """Return the line outside JAX and regrad that made an equation: `model.py:12`."""
    for file, number in programs.lines(eqn):
        if not file.startswith((PACKAGE, programs.JAX, "<frozen ")):
            return f"{file}:{number}"
    return otherwise

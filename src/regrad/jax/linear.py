"""A test whether a JAX program is linear in its inputs.

A rule that is linear in the incoming gradient has a transpose, which forward mode needs. JAX's own
transposition accepts an affine function as linear, so regrad checks linearity first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from regrad.core.backends import is_traced
from regrad.jax.host.programs import CALLS, CUSTOM, Params, branches, called, scan

CONSTANT, ZERO, LINEAR = "constant", "zero", "linear"
TRANSPOSING: ContextVar[bool] = ContextVar("regrad_transposing", default=False)

# The first operand may be linear, the others must be constants.
FIRST = frozenset({
    "neg", "convert_element_type", "reshape", "broadcast_in_dim", "transpose", "rev",
    "squeeze", "expand_dims", "slice", "dynamic_slice", "gather", "reduce_sum", "cumsum",
    "copy", "copy_p", "real", "imag", "conj", "reduce_window_sum", "all_gather", "all_to_all",
    "ppermute", "reduce_scatter", "psum_scatter", "fft", "device_put", "div", "split",
    "sharding_constraint", "mesh_cast", "reduce_window", "unstack", "tile", "layout_constraint",
})  # fmt: skip
# Every float operand may be linear, or zero.
ALL = frozenset({
    "add", "sub", "add_any", "concatenate", "pad", "dynamic_update_slice", "select_n",
    "complex", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub", "stack",
    "psum", "psum_invariant", "pvary", "pcast",
    "optimization_barrier",
})  # fmt: skip
# Just one operand may be linear.
ONE = frozenset({"mul", "dot_general", "ragged_dot_general", "conv_general_dilated"})
LAST = frozenset({"triangular_solve", "tridiagonal_solve", "custom_linear_solve"})
# the first operand, selected by the second
SOURCE = frozenset({"select_and_scatter_add", "select_and_gather_add"})
OPENED = CALLS | CUSTOM | {"call", "custom_vjp_call_jaxpr", "regrad_op", "shard_map"}
KEEP_ZERO = FIRST | ALL | ONE | {"select_n"}


class NotLinear(Exception):
    """Raised with the equations of a program that are not linear."""


def check(program: Any, given: Sequence[str]) -> list[str]:
    """Return how the outputs depend on inputs of these kinds; raises NotLinear."""
    jaxpr = getattr(program, "jaxpr", program)
    consts = getattr(program, "consts", ())
    env: dict[Any, str] = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
    env.update(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> str:
        return _constant(atom.val) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _propagate(eqn, [*map(read, eqn.invars)]), strict=True))
    return [*map(read, jaxpr.outvars)]


def _constant(value: Any) -> str:
    known = not is_traced(value)
    if known and np.issubdtype(getattr(value, "dtype", type(value)), np.number):
        return CONSTANT if np.any(np.asarray(value)) else ZERO
    return CONSTANT


def _propagate(eqn: core.JaxprEqn, given: list[str]) -> list[str]:
    """Return how the outputs of one equation depend on inputs of these kinds."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in OPENED:
        return check(called(eqn), given)
    if name in ("scan", "cond"):
        return (_scan if name == "scan" else _cond)(eqn, given)
    if LINEAR not in given:
        zero = name in KEEP_ZERO and (ZERO in given if name in ONE else {*given} == {ZERO})
        return [ZERO if zero else CONSTANT] * count
    if not _is_linear(eqn, name, given):
        raise NotLinear(f"{name} of it")
    return [LINEAR] * count


def _is_linear(eqn: core.JaxprEqn, name: str, given: list[str]) -> bool:
    linear = [i for i, g in enumerate(given) if g == LINEAR]
    if name == "regrad_tangent":
        return _tangent(eqn, given)
    if name == "integer_pow":
        return Params(eqn)["y"] == 1
    if name == "convert_element_type" and not is_float(eqn.outvars[0].aval):
        return False
    if name == "reduce_window":
        return False
    if name in ALL:
        floats = [g for g, x in zip(given, eqn.invars, strict=True) if is_float(x.aval)]
        return CONSTANT not in floats
    places = {FIRST: [0], ONE: linear[:1], LAST: [len(given) - 1], SOURCE: [0]}
    return any(name in names and linear == places[names] for names in places)


def is_float(aval: Any) -> bool:
    """Return whether an array of this type has a gradient."""
    return jnp.issubdtype(aval.dtype, np.inexact)


def _tangent(eqn: Any, given: list[str]) -> bool:
    """Return whether a tangent is linear in its operands, or in its residuals as well."""
    count = eqn.params["count"]
    if LINEAR not in given[:count]:
        return CONSTANT not in given[count:]
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    closed = jax.make_jaxpr(lambda *xs: eqn.primitive.impl(*xs, **eqn.params))(*avals)
    check(closed, given)
    return True


def _scan(eqn: core.JaxprEqn, given: list[str]) -> list[str]:
    run, _, _, fixed, carried = scan(eqn)
    while True:
        outs = check(run, given)
        carry = given[fixed : fixed + carried]
        joined = [*map(_join, carry, outs[:carried])]
        if joined == carry:
            return [*joined, *outs[carried:]]
        given = [*given[:fixed], *joined, *given[fixed + carried :]]


def _cond(eqn: core.JaxprEqn, given: list[str]) -> list[str]:
    which, *given = given
    if which == LINEAR:
        raise NotLinear("a branch that it selects")
    first, *rest = [check(branch, given) for branch in branches(eqn)]
    for other in rest:
        first = [*map(_join, first, other)]
    return first


def _join(a: str, b: str) -> str:
    """Return the kind of a value that has one kind or the other."""
    if {a, b} == {CONSTANT, LINEAR}:
        raise NotLinear("a value that is sometimes a constant")
    return a if b in (a, ZERO) else b


def transpose(f: Callable[..., Sequence[Any]], like: Sequence[Any], ts: Sequence[Any]) -> Any:
    """Return the transpose of a linear function, applied to `ts`; raises NotLinear otherwise."""
    closed = jax.make_jaxpr(lambda *xs: tuple(f(xs)))(*like)
    kinds = check(closed, [LINEAR] * len(like))
    if CONSTANT in kinds:
        raise NotLinear("a result that does not depend on it")
    token = TRANSPOSING.set(True)
    try:
        return jax.linear_transpose(core.jaxpr_as_fun(closed), *like)(list(ts))
    finally:
        TRANSPOSING.reset(token)

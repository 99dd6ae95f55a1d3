"""Spikes that a JAX program writes as a comparison and a cast: the op type "Threshold".

    z = (v > a).astype(v.dtype)            # gt, then convert_element_type
    z = jnp.where(v > a, 1.0, 0.0)         # gt, then a call of select_n with two numbers

The idea: the comparison returns booleans, which have no gradient, so neither equation alone is an
op that a rule could belong to. `restore_spikes` replaces the equation that casts by a call of the
operands of the comparison and of the booleans. Under a rule, `put_threshold` makes the call a step
at the difference of the operands, with the rule as its derivative and the value of the booleans.

Any other equation that reads the booleans leaves none of this. A comparison without a cast counts
as untouched, with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from regrad.jax.gradients import Equation, RuleGradient
from regrad.jax.host import programs
from regrad.jax.keys import SPIKE, ThresholdKey
from regrad.jax.learned import taking_more
from regrad.jax.primitives import is_float, run_op
from regrad.jax.replacing import replaced_program

NOT_CAST = f" ({ThresholdKey.label}, not cast)"  # how reports show a comparison whose booleans end
# By primitive: the sign of the difference where a comparison is true.
COMPARISONS = {"gt": 1, "ge": 1, "lt": -1, "le": -1}
_OF_NUMBERS = {"broadcast_in_dim", "select_n", "convert_element_type"}


class Compared(NamedTuple):
    """A comparison whose result is at hand, with the values where it is false and true."""

    eqn: Any
    low: Any = 0
    high: Any = 1


# The comparison of each call that `restore_spikes` makes, by the program of the call.
_CALLS: WeakKeyDictionary[Any, Compared] = WeakKeyDictionary()


# -- where a program has them ----------------------------------------------------------------------


def restore_spikes(eqns: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the equations, with a call for each cast of a comparison; and comparisons without."""
    known: dict[Any, Any] = {}
    made: list[Any] = []
    open_: dict[Any, Any] = {}  # comparisons that no cast has read yet, by result
    for eqn in eqns:
        _follow(eqn, known)
        found = known.get(eqn.outvars[0]) if eqn.outvars else None
        if not isinstance(found, Compared):
            made.append(eqn)
        elif found.eqn is eqn:
            open_[eqn.outvars[0]] = eqn
            made.append(eqn)
        elif is_float(eqn.outvars[0].aval):
            open_.pop(found.eqn.outvars[0], None)
            made.append(_as_call(eqn, found))
        else:
            made.append(eqn)
    return made, [*open_.values()]


def _follow(eqn: Any, known: dict[Any, Any]) -> None:
    """Note the result of an equation, if it is a number or made of a comparison and numbers."""
    name, (y, *more) = eqn.primitive.name, eqn.outvars or [None]
    if name in COMPARISONS and all(is_float(v.aval) for v in eqn.invars):
        known[y] = Compared(eqn)
    elif name in ("broadcast_in_dim", "convert_element_type"):
        found = _value(eqn.invars[0], known)
        if isinstance(found, Compared) and name == "broadcast_in_dim":
            return  # (its booleans have another shape)
        if found is not None:
            known[y] = found
    elif name == "select_n" and len(eqn.invars) == 3:
        which, low, high = (_value(v, known) for v in eqn.invars)
        plain = isinstance(which, Compared) and (which.low, which.high) == (0, 1)
        if plain and _are_numbers(low, high):
            known[y] = which._replace(low=low, high=high)
    elif name in programs.JITS and not more:
        body = programs.called(eqn)
        if body is not None and {e.primitive.name for e in body.jaxpr.eqns} <= _OF_NUMBERS:
            given = zip(body.jaxpr.invars, [_value(v, known) for v in eqn.invars], strict=True)
            inner = {v: x for v, x in given if x is not None}
            for each in body.jaxpr.eqns:
                _follow(each, inner)
            found = _value(body.jaxpr.outvars[0], inner)
            if isinstance(found, Compared):
                known[y] = found


def _value(v: Any, known: Mapping[Any, Any]) -> Any:
    """Return the number or the comparison that an operand is; None for any other operand."""
    if isinstance(v, core.Literal):
        return v.val if getattr(v.aval, "shape", None) == () else None
    return known.get(v)


def _are_numbers(low: Any, high: Any) -> bool:
    """Return whether these are two numbers, whose difference is finite and not 0."""
    if low is None or high is None or isinstance(low, Compared) or isinstance(high, Compared):
        return False
    return np.asarray(low).dtype.kind in "iuf" and bool(0 < abs(high - low) < inf)


def _as_call(eqn: Any, found: Compared) -> Any:
    """Return an equation that casts as a call of the operands and the result of the comparison."""
    (y,), mask = eqn.outvars, found.eqn.outvars[0]
    operands = [core.Var(v.aval) for v in (*found.eqn.invars, mask)]
    body = jax.make_jaxpr(partial(_cast, found, y.aval))(*_like([mask]))
    info = programs.renamed(body, SPIKE)
    inner = body.jaxpr.replace(invars=[*operands[:2], *body.jaxpr.invars], debug_info=info)
    program = core.ClosedJaxpr(inner, ())
    _CALLS[program] = found
    return programs.as_call(eqn, program, invars=[*found.eqn.invars, mask], effects=set())


def _cast(found: Compared, aval: Any, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, jnp.asarray(found.high, aval.dtype), jnp.asarray(found.low, aval.dtype))


def _like(atoms: Sequence[Any]) -> list[Any]:
    return [programs.struct_of(v.aval) for v in atoms]


# -- under a rule ----------------------------------------------------------------------------------


def put_threshold(eqn: Any, binding: Any, hit: Any) -> Any:
    """Return a call of `restore_spikes` as a step with a rule, of the value of the booleans."""
    found, out, more = _CALLS[programs.called(eqn)], eqn.outvars[0].aval, binding.learned
    difference = _difference(COMPARISONS[found.eqn.primitive.name])
    x, mask = jax.eval_shape(difference, *_like(eqn.invars[:2])), *_like(eqn.invars[2:])
    body = jax.make_jaxpr(lambda x, m: m.astype(x.dtype))(x, mask)
    equation = Equation(body, [0, None], [None, None])
    body, places = taking_more(body, more), [0, None, *range(1, 1 + len(more))]
    rule = binding.bind(binding.key.known)
    gradient = RuleGradient(rule, hit, body.in_avals, body.out_avals, places, {}, {})
    if rule.runs_op or binding.replaces:
        gradient.equation = equation
    if binding.replaces:
        body = replaced_program(gradient, body)

    def whole(a: Any, b: Any, mask: Any, *more: Any) -> Any:
        (y,) = run_op([difference(a, b), mask, *more], body, gradient)
        if binding.replaces:
            return (found.low + (found.high - found.low) * y).astype(out.dtype)
        if (found.low, found.high) == (0, 1):
            return y.astype(out.dtype)
        # the value of the program itself, which a sum of the two numbers may miss by a rounding
        y = (found.high - found.low) * (y - jax.lax.stop_gradient(y))
        return _cast(found, out, mask) + y.astype(out.dtype)

    made = jax.make_jaxpr(whole)(*_like(eqn.invars), *body.in_avals[2:])
    return programs.as_call(eqn, made, invars=[*eqn.invars, *more])


def _difference(sign: int) -> Callable[[Any, Any], Any]:
    return (lambda a, b: a - b) if sign > 0 else (lambda a, b: b - a)

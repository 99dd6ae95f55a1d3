"""JAX functions that leave no boundary in a program, found again by their equations.

JAX records for each equation which code was running. If this code is a function of a key, regrad
traces the function once more for these operands, and compares the equations. If they are the same,
regrad puts them into one call, as if JAX had compiled the function. If they differ, regrad raises
an error that names the call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from regrad.jax.host.programs import as_call, called, codes, renamed
from regrad.jax.keys import FunctionKey
from regrad.jax.primitives import is_float


def restore_calls(
    jaxpr: core.Jaxpr, keys: Sequence[FunctionKey], values: Sequence[Any] = ()
) -> Iterator[tuple[Any, FunctionKey | None]]:
    """Yield a program's equations, with the calls of keys that JAX has inlined as one each.

    An equation of a call that was not recognized comes with its key. `values` are keys whose values
    are replaced, so their calls count even without a gradient.
    """
    eqns, at = jaxpr.eqns, 0
    while at < len(eqns):
        key = next((k for k in keys if was_running(k, eqns[at])), None)
        found = key and _call(key, eqns[at:], jaxpr.outvars)
        call, count = found or (eqns[at], 1)
        if (
            not found
            or key in values
            or all(is_float(v.aval) for v in (*call.invars, *call.outvars))
        ):
            # (The conversion to the `dtype` of a mean is not a part of it, and does not identify
            # one.)
            yield call, (None if found or call.primitive.name == "convert_element_type" else key)
        else:  # nothing to differentiate
            yield from ((eqn, None) for eqn in eqns[at : at + count])
        at += count


def was_running(key: FunctionKey, eqn: core.JaxprEqn) -> bool:
    """Return whether the function of a key was running when JAX made an equation."""
    return any(code is key.code for code, _ in codes(eqn))


def _call(key: FunctionKey, eqns: Sequence[Any], outs: Sequence[Any]) -> tuple[Any, int] | None:
    """Return the call with which equations begin, and the number of equations that it takes."""
    given = [v for v in eqns[0].invars if not isinstance(v, core.Literal) and v.aval.dtype != bool]
    for x, options in itertools.product(given[:1], key.options(eqns)):
        kind = x.aval.shape, x.aval.dtype, getattr(x.aval, "weak_type", False)
        try:
            expected = _trace(key.function, *kind, tuple(options.items()))
        except (TypeError, ValueError):  # the options belong to a call on another operand
            continue
        count = len(expected.eqns)
        names = _match(expected, eqns[:count], x)
        if names is not None and not _escapes(eqns, count, names[expected.outvars[0]], outs):
            call = _as_call(key, expected, eqns[:count], x, names[expected.outvars[0]])
            key.given[called(call)] = {k: v for k, v in options.items() if k != "dtype"}
            return call, count
    return None


def _escapes(eqns: Sequence[Any], count: int, y: core.Var, outs: Sequence[Any]) -> bool:
    """Return whether the remaining equations read another result than y of the first ones."""
    read = [*outs, *(v for eqn in eqns[count:] for v in eqn.invars)]
    inner = {v for eqn in eqns[:count] for v in eqn.outvars if v is not y}
    return any(not isinstance(v, core.Literal) and v in inner for v in read)


@functools.lru_cache(maxsize=1024)
def _trace(function: Callable[..., Any], shape: Any, dtype: Any, weak: bool, options: Any) -> Any:
    x = jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
    return jax.make_jaxpr(functools.partial(function, **dict(options)))(x).jaxpr


def _match(expected: core.Jaxpr, eqns: Sequence[Any], x: core.Var) -> dict[Any, Any] | None:
    """Return the variables of these equations by an equal program's variables, or None."""
    names = {expected.invars[0]: x}
    if len(eqns) != len(expected.eqns) or expected.constvars:
        return None
    for a, b in zip(expected.eqns, eqns, strict=True):
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
            return None
        if not all(_same_atom(p, q, names) for p, q in zip(a.invars, b.invars, strict=True)):
            return None
        if not all(_same_param(a.params[k], b.params.get(k)) for k in a.params):
            return None
        names.update(zip(a.outvars, b.outvars, strict=True))
    return names if expected.outvars[0] in names else None


def _same_atom(a: Any, b: Any, names: dict[Any, Any]) -> bool:
    if isinstance(a, core.Literal):
        return isinstance(b, core.Literal) and str(a) == str(b)
    return names.get(a) is b


def _same_param(a: Any, b: Any) -> bool:
    return callable(a) or a is b or a == b or str(a) == str(b)


def _as_call(key: FunctionKey, expected: core.Jaxpr, eqns: Sequence[Any], x: Any, y: Any) -> Any:
    info = renamed(expected, f"{key.name} at {key.place}", ("x",), ("y",))
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    body = core.ClosedJaxpr(core.Jaxpr([], [x], [y], list(eqns), effects, info), ())
    return as_call(eqns[0], body, invars=[x], outvars=[y], effects=effects)

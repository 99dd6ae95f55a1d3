"""`compare_gradients` for JAX functions: the gradient that counts, and the true one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.extend import core

from regrad.checking import slopes
from regrad.core.signatures import helpful
from regrad.errors import ArgumentError, kind
from regrad.inspection.comparisons import RTOL, Compared, GradientComparison
from regrad.jax.bridge import conjugate
from regrad.jax.host.programs import as_call, mapped
from regrad.jax.primitives import is_float
from regrad.jax.running import LONGEST, Given, Ran, wide
from regrad.jax.sites import body_of_custom, is_custom
from regrad.jax.surgery import OPENED


@helpful("compare_gradients")
def compare_gradients(
    f: Callable[..., Any],
    other: Callable[..., Any] | Literal["true", "differences"] | None = None,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    surrogates: Sequence[str] = (),
    rtol: float = RTOL,
    longest_scan: int = LONGEST,
) -> Callable[..., GradientComparison]:
    """Return a function that compares the gradient of `f` with another one.

    Args:
        f: A function as `trace_gradients` takes it.
        other: None or `"true"`: the true gradient of f, with all rules off that are not JAX's own
            (those of `override`, `custom_grad`, `jax.custom_vjp` and `jax.custom_jvp`); what
            they were put on is differentiated op by op. `"differences"`: central differences, in
            float64. Or another function of the same arguments.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.
        surrogates: Ops, names of rules or names of arguments whose gradients are meant to
            differ. `assert_same()` of the result passes them over.
        rtol: The tolerance, relative to the larger of both norms.
        longest_scan: The longest scan whose ops have rows of their own.

    Returns:
        A function of f's arguments that returns a `GradientComparison`: a row for each array
        that is differentiated by, and, next to the true gradient, a row for each input of each
        op with such a rule, in place: the gradient that arrived there goes through the op's
        rule and through its true derivative.

    Raises:
        ArgumentError: other is none of these.
        GradientError: as `trace_gradients`; the two gradients have other shapes.

    >>> import jax.numpy as jnp, regrad as rg
    >>> model = rg.jax.override(lambda x: jnp.sum(jnp.sin(x)), {"Sin": lambda dy: 2 * dy})
    >>> found = rg.jax.compare_gradients(model)(jnp.array([0.0, 0.0]))
    >>> [(row.kind, row.ratio) for row in found.rows]
    [('argument', 2.0), ('op', 2.0)]
    """
    if not (other is None or other in ("true", "differences") or callable(other)):
        raise ArgumentError(
            "compare_gradients(f, other): other is a function, 'true', 'differences' or None, got "
            f"{kind(other)}"
        )

    def compared(*args: Any, **kwargs: Any) -> GradientComparison:
        given = Given(f, args, kwargs, "compare_gradients", argnums, has_aux)
        run = given.run(keeps=True, longest=longest_scan)
        ops = [row for step in run.backward() for row in _in_place(*step)]
        if callable(other):
            second = Given(other, args, kwargs, "compare_gradients", argnums, has_aux)
            found, name, ops = _gradients(second, second.program()), "second", []
            by_name = dict(zip(second.asked, found, strict=True))
            found = [by_name.get(name) for name in given.asked]
        elif other == "differences":
            found, name, ops = _by_differences(given), "differences", []
        else:
            found, name = _gradients(given, without_rules(given.program())), "true"
        pairs = zip(given.asked, run.gradients, found, strict=True)
        rows = [Compared.of("argument", name, a, b) for name, a, b in pairs]
        names = ("first" if name == "second" else "given", name)
        return GradientComparison.declare([*rows, *ops], surrogates, names=names, rtol=rtol)

    return compared


# -- the other gradient --------------------------------------------------------------------------


def _gradients(given: Given, program: Any) -> list[Any]:
    """The gradients of a program, by `jax.vjp`."""
    f = given.of_watched(program)
    ys, pull = jax.vjp(f, *[given.arrays[i] for i in given.watched])
    return list(pull([jax.numpy.ones_like(y) for y in ys]))


def _by_differences(given: Given) -> list[Any]:
    """The gradients by differences, in JAX's convention."""
    with jax.enable_x64(True):
        given.arrays = [wide(x) for x in given.arrays]
        f = jax.jit(given.of_watched(given.program()))
        xs = [np.asarray(given.arrays[i]) for i in given.watched]
        found = slopes.gradients(lambda xs: [np.asarray(y) for y in f(*xs)], xs)
        return [conjugate(jax.numpy.asarray(dx)) for dx in found]


# -- rules off -----------------------------------------------------------------------------------


def without_rules(program: Any) -> Any:
    """A program (closed or open) in which JAX's own derivatives count, and no others."""
    jaxpr = getattr(program, "jaxpr", program)
    eqns = [_without_rule(eqn) for eqn in jaxpr.eqns]
    if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return program
    made = jaxpr.replace(eqns=eqns)
    return made if program is jaxpr else program.replace(jaxpr=made)


def _without_rule(eqn: Any) -> Any:
    if is_custom(eqn):
        return as_call(eqn, _closed(without_rules(body_of_custom(eqn))))
    if eqn.primitive.name not in OPENED:
        return eqn
    params = {key: mapped(value, without_rules) for key, value in eqn.params.items()}
    same = all(params[key] is eqn.params[key] for key in params)
    return eqn if same else eqn.replace(params=params)


def _closed(program: Any) -> Any:
    is_open = not isinstance(program, core.ClosedJaxpr)
    return core.ClosedJaxpr(program, ()) if is_open else program


def _in_place(ran: Ran, arrived: Sequence[Any], left: Sequence[Any]) -> list[Compared]:
    """Return the rows of an op with a rule of the user's: that rule and the true derivative."""
    if not is_custom(ran.eqn):
        return []
    run = core.jaxpr_as_fun(_closed(without_rules(body_of_custom(ran.eqn))))
    floats = [i for i, y in enumerate(ran.outs) if is_float(jax.typeof(y))]

    def of_wanted(*moved: Any) -> list[Any]:
        xs = list(ran.xs)
        for i, x in zip(ran.wanted, moved, strict=True):
            xs[i] = x
        ys = run(*xs)
        return [ys[i] for i in floats]

    true = jax.vjp(of_wanted, *[ran.xs[i] for i in ran.wanted])[1](list(arrived))
    site = ran.site
    about = {"op_type": site.op_type, "rule": site.rule, "line": site.line, "path": site.path}
    pairs = zip(ran.names, left, true, strict=True)
    return [Compared.of("op", name, a, b, **about) for name, a, b in pairs]

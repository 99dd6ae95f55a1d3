"""Parameters of rules, as inputs of the programs whose operations have these rules.

An operation under a rule that `learns` takes the parameters as operands, so that JAX differentiates
by them as by any other operand. The equation around it (a loop, a branch, a call) passes the
parameters on: if its inner program takes additional inputs, regrad creates a new equation around
that program, using JAX's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend import core

from regrad.core.surrogates import Learns
from regrad.errors import GradientError
from regrad.jax.equations import operands_of
from regrad.jax.host import programs
from regrad.jax.primitives import is_float


def learned_arrays(rule: Any) -> list[Any]:
    """Return the parameters of a rule: JAX arrays, differentiated or not."""
    if not isinstance(rule, Learns):
        return []
    rule.check(
        lambda x: isinstance(x, jax.Array) and is_float(jax.typeof(x)),
        "a JAX array of floats (an argument of the differentiated function)",
    )
    return [*rule.parameters.values()]


def taking_more(program: Any, more: Sequence[core.Var]) -> Any:
    """Return a program that takes more inputs, which it does not read."""
    if not more:
        return program
    jaxpr = getattr(program, "jaxpr", program)
    invars = [*jaxpr.invars, *[core.Var(v.aval) for v in more]]
    made = jaxpr.replace(invars=invars, debug_info=programs.unnamed(program))
    return made if jaxpr is program else program.replace(jaxpr=made)


def takes_more(new: Any, program: Any) -> bool:
    """Return whether a program takes more inputs than the program that it was made from."""
    return len(getattr(new, "jaxpr", new).invars) > len(getattr(program, "jaxpr", program).invars)


def reading(jaxpr: core.Jaxpr, more: Sequence[core.Var]) -> core.Jaxpr:
    """Return a program with additional first inputs, if its equations read any."""
    if {v for eqn in jaxpr.eqns for v in operands_of(eqn)}.isdisjoint(more):
        return jaxpr
    return jaxpr.replace(invars=[*more, *jaxpr.invars], debug_info=programs.unnamed(jaxpr))


def handing_on(
    eqn: Any, params: dict[str, Any], more: Sequence[core.Var], where: str,
    what: str = "an operation with a rule that learns",
) -> Any:  # fmt: skip
    """Return an equation with these parameters, whose programs take additional inputs."""
    k = len(more)
    like: list[Any] = [v.aval for v in (*more, *eqn.invars)]
    given = [*map(programs.struct_of, like)]
    run = _runner(eqn.replace(params=params), k)
    if run is None:
        raise GradientError(
            f"override: {what} is inside {eqn.primitive.name} ({where}), into which regrad cannot "
            "pass its parameters. Put the override inside."
        )
    try:
        made = jax.make_jaxpr(lambda *xs: run(xs[:k], xs[k:]))(*given)
    except NameError as error:
        raise GradientError(
            f"override: {what} is inside {eqn.primitive.name} ({where}) in a vmap with named axes, "
            "whose program regrad cannot rebuild. Put the override inside."
        ) from error
    return programs.as_call(eqn, made, invars=[*more, *eqn.invars], effects=made.effects)


def _runner(eqn: Any, k: int) -> Callable[[Any, Any], Any] | None:
    """Return a function of the additional inputs of the equation and of its programs."""
    name, p = eqn.primitive.name, programs.Params(eqn)
    fs = [_function(f) for f in programs.runs(eqn)] if name in _RUN else []
    if name == "scan":
        body = programs.scan(eqn)
        n, m = body.consts, body.consts + body.carried

        def scan(more: Any, xs: Any) -> Any:
            def step(carry: Any, x: Any) -> Any:
                ys = fs[0](more, [*xs[:n], *carry, *x])
                return ys[: body.carried], ys[body.carried :]

            last, ys = lax.scan(
                step, [*xs[n:m]], [*xs[m:]], body.length, body.reverse, p.get("unroll", 1)
            )
            return [*last, *ys]

        return scan
    if name == "while":
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        return lambda more, xs: lax.while_loop(
            lambda carry: fs[0](more, [*xs[:n], *carry])[0],
            lambda carry: fs[1](more, [*xs[n:m], *carry]),
            [*xs[m:]],
        )
    if name == "cond":
        return lambda more, xs: lax.switch(xs[0], [partial(f, more, xs[1:]) for f in fs])
    if name in programs.REMATS:
        options = {"policy": p["policy"], "prevent_cse": p["prevent_cse"]}
        return lambda more, xs: jax.checkpoint(fs[0], **options)(more, xs)
    if name in programs.JITS:
        return lambda more, xs: jax.jit(fs[0])(more, xs)
    if name == "regrad_vmap":
        params = {**p, "in_dims": (*[None] * k, *p["in_dims"])}
        return lambda more, xs: eqn.primitive.bind(*more, *xs, **params)
    return fs[0] if fs else None


_RUN = programs.CALLS | {"scan", "while", "cond"}


def _function(program: Any) -> Callable[[Any, Any], Any]:
    """Return a program as a function of its additional inputs, if any, and its own inputs."""
    closed = programs.as_closed(program)
    run = core.jaxpr_as_fun(closed)

    def f(more: Any, xs: Any) -> Any:
        return run(*more, *xs) if len(closed.in_avals) > len(xs) else run(*xs)

    return f

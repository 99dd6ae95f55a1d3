"""`check_gradients` and `gradient_report` for JAX functions and the rules inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from regrad.checking.check import Arrays, Settings
from regrad.checking.findings import Finding, GradientReport
from regrad.core.signatures import helpful
from regrad.errors import GradientError
from regrad.inspection.checks import (
    Flat,
    Library,
    by_order,
    checked,
    explained,
    settings_of,
    wrong,
)
from regrad.jax.bridge import conjugate
from regrad.jax.running import CLOSES_OVER, ProgramCall, ProgramRun, wide
from regrad.jax.sites import is_custom
from regrad.testing import raising


@helpful("gradient_report")
def gradient_report(
    f: Callable[..., Any],
    args: Sequence[Any],
    order: int = 1,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    step: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> GradientReport:
    """Compare the gradients of a JAX function at `args` with differences, up to an order.

    Args:
        f: A function as in `trace_gradients`.
        args: The list of its arguments. Floats are converted to float64, whatever JAX's settings
            are; integers and bools are passed on.
        order: 1 checks the gradient, 2 also the gradient of the gradient, by the arguments and by
            the incoming gradient (`dy` in findings; `dy2` is the incoming gradient at order 2), and
            so on. The check stops at the first wrong order.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.
        step: The largest step, the same for all elements; by default relative to each element.
        rtol: Tolerance relative to the compared numbers, by default 1e-6.
        atol: Absolute tolerance, by default 0. The check always allows for the rounding of f.
        seed: The seed of the random directions and of the weights of the outputs.

    Returns:
        A `GradientReport`. It covers reverse mode, and forward mode if f has it (a `jax.custom_vjp`
        has none). `causes` are the rules that are wrong by themselves. Each `custom_vjp`,
        `custom_jvp`, `custom_grad` and `override` on the path is checked alone, at its inputs in
        this run. If none is wrong, the causes are the `stop_gradient` calls that you wrote.

    Raises:
        ArgumentError: `args` is not a list, or `order` is less than 1.
        GradientError: As in `trace_gradients`.

    >>> import jax, jax.numpy as jnp, regrad as rg
    >>> @jax.custom_vjp
    ... def cube(x):
    ...     return x**3
    >>> cube.defvjp(lambda x: (x**3, x), lambda x, dy: (2 * dy * x**2,))
    >>> report = rg.jax.gradient_report(lambda x: jnp.sum(cube(x)), [jnp.array([1.0, 2.0])])
    >>> report.causes[0].op_type, report.causes[0].kind
    ('cube', 'scaled by 0.6667')
    """
    settings = settings_of(args, order, step, rtol, atol, seed)
    with _telling(), jax.enable_x64(True), jax.debug_nans(False), jax.debug_infs(False):
        given = ProgramCall(f, args, {}, "check_gradients", argnums, has_aux)
        given.arrays = [wide(x) for x in given.arrays]
        of_watched = given.of_watched(given.program())
        flat, floats = lambda xs: of_watched(*xs), given.floats
        return explained(
            checked(JAX_ARRAYS, flat, floats, given.asked, order, settings),
            lambda order: by_order(JAX_ARRAYS, flat, floats, order, partial(_found, settings)),
        )


@raising(gradient_report)
def check_gradients() -> None:
    """Check the gradients of a JAX function at `args` against differences, up to an order.

    Args:
        f: A function as in `trace_gradients`.
        args: The list of its arguments.
        order: See `gradient_report`.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.
        step: See `gradient_report`.
        rtol: See `gradient_report`.
        atol: See `gradient_report`.
        seed: See `gradient_report`.

    Raises:
        GradientCheckError: `gradient_report`, which takes the same arguments, finds an error. The
            message names order, mode, input, element and numbers, and the rules that disagree with
            differences of their op alone. An inconclusive comparison (a kink, rounding) is not an
            error; it is in the report.
        ArgumentError: There is nothing to compare: no elements, or no finite values.

    Source: `check_grads` of HIPS autograd and JAX.

    >>> import jax, jax.numpy as jnp, regrad as rg
    >>> rg.jax.check_gradients(lambda x: jnp.sin(x) * x, [jnp.array([0.5, 1.0])], order=2)
    """


@contextmanager
def _telling() -> Iterator[None]:
    """Add to errors that a function closes over a differentiated array."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise GradientError(f"check_gradients: {CLOSES_OVER}") from error


class CompiledWithPull:
    """A function and its pull, each compiled once."""

    def __init__(self, f: Flat) -> None:
        self.run: Any = jax.jit(f)
        self.pull: Any = jax.jit(lambda xs, dys: jax.vjp(f, xs)[1](dys)[0])

    def __call__(self, xs: Sequence[Any]) -> list[Any]:
        return self.run(list(xs))


class JaxArrays(Library):
    """The JAX library: pulls by `jax.vjp`, compiled, and pushes by `jax.jvp` where possible."""

    array: Callable[..., Any] = staticmethod(np.asarray)
    zeros: Callable[..., Any] = staticmethod(jax.numpy.zeros_like)

    def compiled(self, f: Flat) -> CompiledWithPull:
        return f if isinstance(f, CompiledWithPull) else CompiledWithPull(f)

    def like(self, arrays: Arrays, xs: Sequence[Any]) -> list[Any]:
        return [jax.numpy.asarray(a, x.dtype) for a, x in zip(arrays, xs, strict=True)]

    def pull(self, f: Flat, xs: Sequence[Any]) -> tuple[list[Any], Callable[..., list[Any]]]:
        g, xs = self.compiled(f), list(xs)
        return g(xs), lambda dys: list(map(conjugate, g.pull(xs, list(map(conjugate, dys)))))

    def push(self, f: Flat, xs: Sequence[Any]) -> Callable[..., list[Any]] | None:
        push = jax.jit(lambda xs, dxs: jax.jvp(f, (xs,), (dxs,))[1])
        try:
            push.lower(list(xs), list(xs))  # (a custom_vjp raises when it is compiled)
        except (TypeError, GradientError) as error:
            if "forward" not in str(error):
                raise
            return None
        return push


JAX_ARRAYS = JaxArrays()


def _found(settings: Settings, f: Flat, xs: Sequence[Any], orders: int) -> list[Finding]:
    """Return the findings on rules that are not JAX's own; without any, on stopped gradients."""
    program = jax.make_jaxpr(lambda *xs: f(list(xs)))(*xs)
    places = range(len(xs)), range(len(program.out_avals))
    ran = ProgramRun(program, xs, *places, keeps=True).ran
    with_rules = [op for op in ran if op.wanted and op.eqn is not None and is_custom(op.eqn)]
    stopped = [op for op in ran if op.wanted and op.op_type == "stop_gradient" and not op.by_jax]
    found = ([c for each in suspects for c in wrong(JAX_ARRAYS, each, orders, settings)]
             for suspects in (with_rules, stopped))  # fmt: skip
    unique = {(c.rule, c.input, c.order): c for c in next(filter(None, found), [])}
    # (the last finding of each rule: forward mode, if that is wrong as well)
    return [*unique.values()]

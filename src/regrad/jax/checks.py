"""`check_gradients` and `gradient_report` for JAX functions and the rules inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from regrad.checking import check
from regrad.checking.check import Settings
from regrad.checking.findings import Finding, GradientReport
from regrad.core.signatures import helpful
from regrad.errors import GradientError
from regrad.inspection.checks import by_order, explained, settings_of, weights
from regrad.jax.bridge import conjugate
from regrad.jax.running import CLOSES_OVER, ProgramCall, ProgramOp, ProgramRun, as_function, wide
from regrad.jax.sites import is_custom
from regrad.testing import raise_if_wrong

OfArrays = Callable[..., list[Any]]


@helpful("check_gradients")
def check_gradients(
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
) -> None:
    """Check the gradients of a JAX function at `args` against differences, to the given order.

    Args:
        f: A function as `trace_gradients` takes it.
        args: Its arguments.
        order: See `gradient_report`.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.
        step: See `gradient_report`.
        rtol: See `gradient_report`.
        atol: See `gradient_report`.
        seed: See `gradient_report`.

    Raises:
        GradientCheckError: `gradient_report`, which takes the same arguments, finds something.
            The message names order, mode, input, element and numbers, and the rules that
            disagree with differences of their op alone. What differences cannot judge (a kink,
            rounding) is not an error; the report has it.
        ArgumentError: nothing could be compared: there are no elements, or no finite values.

    Source: `check_grads` of HIPS autograd and JAX.

    >>> import jax, jax.numpy as jnp, regrad as rg
    >>> rg.jax.check_gradients(lambda x: jnp.sin(x) * x, [jnp.array([0.5, 1.0])], order=2)
    """
    report = gradient_report(
        f, args, order, argnums=argnums, has_aux=has_aux, step=step, rtol=rtol, atol=atol, seed=seed
    )
    raise_if_wrong(report)


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
    """Compare the gradients of a JAX function at `args` with differences, to the given order.

    Args:
        f: A function as `trace_gradients` takes it.
        args: Its arguments. Floats are taken in float64, whatever JAX is set to; integers and
            bools are passed on.
        order: 1 checks the gradient, 2 also the gradient of the gradient, by the arguments and by
            the gradient that arrives (`dy` in findings; `dy2` is what arrives at order 2), and so
            on. The first order that is wrong is the last that is checked.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.
        step: The largest step, the same for all; by default relative to each element.
        rtol: Tolerance relative to the numbers compared, by default 1e-6.
        atol: Absolute tolerance, by default 0. The rounding of f is allowed for anyway.
        seed: Of the random directions and of the weights of the outputs.

    Returns:
        A `GradientReport`. Reverse mode is checked, and forward mode where f has it (a
        `jax.custom_vjp` has none). `causes` are the rules that are wrong by themselves: each
        `custom_vjp`, `custom_jvp`, `custom_grad` and `override` on the way is checked alone, with
        what it was given in this run; where none is wrong, each `stop_gradient` that you wrote.

    Raises:
        ArgumentError: args is not a list, or order is less than 1.
        GradientError: as `trace_gradients`.

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
        checked = given.of_watched(given.program())
        floats = given.floats
        return explained(
            _report(checked, floats, order, given.asked, settings),
            lambda order: by_order(checked, floats, order, partial(_found, settings), _derived),
        )


@contextmanager
def _telling() -> Iterator[None]:
    """Say in errors what a function may not close over."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise GradientError(f"check_gradients: {CLOSES_OVER}") from error


# -- functions of JAX's arrays as functions of NumPy's -------------------------------------------


def _report(
    f: OfArrays, xs: Sequence[Any], order: int, names: Sequence[str], settings: Settings
) -> GradientReport:
    arrays = [np.asarray(x) for x in xs]
    return check.report(_of_numpy(f, arrays), arrays, order, names=names, settings=settings)


def _of_numpy(f: OfArrays, xs: Sequence[np.ndarray]) -> check.Function:
    """A function of JAX's arrays as one of NumPy's, with its gradients in regrad's convention."""
    run = jax.jit(f)
    outs = jax.eval_shape(f, *xs)
    pull = jax.jit(lambda xs, dys: _pulled(f, xs, dys, outs))

    def vjp(arrays: check.Arrays) -> check.Pull:
        return lambda dys: [np.asarray(dx) for dx in pull(list(arrays), list(dys))]

    def gradient(dys: check.Arrays) -> check.Function:
        return _of_numpy(_derive(f, dys), [*xs, *map(np.ones_like, dys)])

    return check.Function(
        lambda arrays: [np.asarray(y) for y in run(*arrays)], vjp, gradient, _forward(f, xs)
    )


def _pulled(f: OfArrays, xs: Sequence[Any], dys: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    given = [conjugate(jax.numpy.asarray(dy, y.dtype)) for dy, y in zip(dys, outs, strict=True)]
    return [conjugate(dx) for dx in jax.vjp(f, *xs)[1](given)]


def _forward(f: OfArrays, xs: Sequence[np.ndarray]) -> Any:
    """Forward mode, if the function has it."""
    push = jax.jit(lambda xs, dxs: jax.jvp(f, tuple(xs), tuple(dxs))[1])
    try:
        push.lower(list(xs), list(xs))  # (a custom_vjp says no when it is compiled)
    except (TypeError, GradientError) as error:
        if "forward" not in str(error):
            raise
        return None
    return lambda arrays, dxs: [np.asarray(dy) for dy in push(list(arrays), list(dxs))]


# -- which rule it is ----------------------------------------------------------------------------


def _found(settings: Settings, f: OfArrays, xs: Sequence[Any], orders: int) -> list[Finding]:
    """The findings about rules that are not JAX's own; if there are none, about what is stopped."""
    program = jax.make_jaxpr(f)(*xs)
    places = range(len(xs)), range(len(program.out_avals))
    ran = ProgramRun(program, xs, *places, keeps=True).ran
    found = ([c for each in suspects for c in _wrong(each, orders, settings)]
             for suspects in (_with_rules(ran), _stopped(ran)))  # fmt: skip
    unique = {(c.rule, c.input, c.order): c for c in next(filter(None, found), [])}
    return [*unique.values()]  # (the last of each: forward mode, where that is wrong too)


def _derived(f: OfArrays, xs: Sequence[Any]) -> tuple[OfArrays, list[Any]]:
    """The gradient of a function, as a function, and where it is taken."""
    dys = [weights(y.shape, y.dtype) for y in jax.eval_shape(f, *xs)]
    return _derive(f, dys), [*xs, *map(np.ones_like, dys)]


def _with_rules(ran: Sequence[ProgramOp]) -> list[ProgramOp]:
    """Return the ops that have a rule that is not JAX's own."""
    return [each for each in ran if each.wanted and each.eqn is not None and is_custom(each.eqn)]


def _stopped(ran: Sequence[ProgramOp]) -> list[ProgramOp]:
    """Return where the user's code stops a gradient."""
    named = (each for each in ran if each.op_type == "stop_gradient")
    return [each for each in named if each.wanted and not each.by_jax]


def _derive(f: OfArrays, dys: Sequence[np.ndarray]) -> OfArrays:
    """The function (*xs, *scales) -> the gradients by xs, where scales * dys arrive."""

    def g(*moved: Any) -> list[Any]:
        count = len(moved) - len(dys)
        xs, scales = moved[:count], moved[count:]
        given = [scale * dy for scale, dy in zip(scales, dys, strict=True)]
        return _pulled(f, xs, given, jax.eval_shape(f, *xs))

    return g


def _wrong(ran: ProgramOp, order: int, settings: Settings) -> list[Finding]:
    """Return the findings on the rule of one op, for the inputs that it had."""
    alone = ran.alone(as_function(ran.eqn))
    report = _report(alone, [ran.xs[i] for i in ran.wanted], order, ran.names, settings)
    what = describe(ran)
    return [replace(f, rule=what, op_type=ran.op_type) for f in report.findings]


def describe(ran: ProgramOp) -> str:
    """The rule of an op in a message, with the line that ran the op."""
    rule = f"the {ran.kind} rule of {ran.op_type!r} ({ran.rule})" if ran.rule else ran.op_type
    return f"{rule}, run at {ran.line}" if ran.line else rule

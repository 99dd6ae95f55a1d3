"""Numerical checks of gradients, to any order; they report the wrong op and the wrong input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, update_wrapper
from inspect import signature
from typing import Any, ParamSpec

import numpy as np

from regrad.autodiff.gradients import callable_or_raise
from regrad.checking.check import Method, Settings
from regrad.checking.findings import Finding, GradientReport
from regrad.core import dispatch
from regrad.core.backends import is_inexact
from regrad.core.containers import replaced
from regrad.core.hints import hint_in
from regrad.core.pullback import or_zeros, run_watched
from regrad.core.signatures import check_passed, helpful
from regrad.core.state import masked
from regrad.core.tensor import Tensor, TensorLike
from regrad.core.walk import walk_from
from regrad.errors import ArgumentError, GradientError, RegradError, kind
from regrad.inspection.checks import (
    Flat,
    Library,
    by_order,
    checked,
    explained,
    settings_of,
    wrong,
)
from regrad.inspection.tapes import KeepingTape, TapedOp, like
from regrad.transforms.derivatives import Linearized

P = ParamSpec("P")


class GradientCheckError(GradientError, AssertionError):
    """Raised if a gradient differs from its numerical counterpart; `report` has all findings."""

    def __init__(self, report: GradientReport) -> None:
        hint = (
            " No single op is wrong by itself; check parts that are compiled, batched or "
            "replayed as a whole."
        )
        super().__init__(report.error + ("" if report.causes else hint))
        self.report = report


def raising(
    report: Callable[P, GradientReport],
) -> Callable[[Callable[[], None]], Callable[P, None]]:
    """Make a function of which only the name and docstring matter take the arguments of a report.

    The function raises for a report with findings, and for a report without a single comparison.
    """

    def decorate(named: Callable[[], None]) -> Callable[P, None]:
        def check(*args: P.args, **options: P.kwargs) -> None:
            found = report(*args, **options)
            if not found.ok:
                raise GradientCheckError(found)
            if not found.comparisons:
                why = found.inconclusive[0].kind
                raise ArgumentError(
                    f"check_gradients: nothing was checked: {why}; pass other arguments"
                )

        made: Any = update_wrapper(check, named)
        del made.__wrapped__
        made.__signature__ = signature(report).replace(return_annotation="None")
        return helpful(named.__name__)(made)

    return decorate


@helpful("gradient_report")
def gradient_report(
    f: Callable[..., Any],
    args: Sequence[Any],
    order: int = 1,
    *,
    method: Method = "central",
    step: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> GradientReport:
    """Compare the gradients of `f` at `args` with differences, up to an order.

    Args:
        f: A function of Tensors that returns a Tensor, or a tuple or list of Tensors.
        args: The list of its arguments. Floats are converted to float64 and differentiated;
            integers and bools are passed on.
        order: 1 checks the gradient, 2 also the gradient of the gradient, by the arguments and by
            the incoming gradient (`dy` in findings; `dy2` is the incoming gradient at order 2), and
            so on. The check stops at the first wrong order.
        method: `"central"`: central differences. `"complex"`: a complex step (exact up to rounding,
            first order only, for functions of real arguments that are analytic and whose ops accept
            complex numbers).
        step: The largest step, the same for all elements; by default relative to each element.
        rtol: Tolerance relative to the compared numbers, by default 1e-6.
        atol: Absolute tolerance, by default 0. The check always allows for the rounding of f.
        seed: The seed of the random directions and of the weights of the outputs.

    Small functions (up to 8 numbers in and out) are checked entry by entry of the Jacobian. Other
    functions are checked input by input in a random direction, with weights under which all outputs
    count equally. Where a quick difference disagrees, extrapolated differences of many steps
    estimate their own error, element by element. So a tiny gradient next to a large one is judged
    by its own size, and a difference that does not converge (at a kink) is judged by the slopes on
    both sides. If this is inconclusive, the report lists it, and nearby points are checked.

    If a gradient is wrong, the check searches for the wrong op, to the same order, also in the
    bodies of jit, checkpoint, loops and branches.

    Returns:
        A `GradientReport`: its findings, and the inconclusive comparisons.

    Raises:
        ArgumentError: f is not callable, args is not a list, or a setting is unknown.

    Source: Ridders (1982) for the extrapolation, Moré and Wild (2011) for the noise, Squire and
    Trapp (1998) for the complex step.

    >>> import regrad as rg
    >>> from regrad.testing import gradient_report
    >>> with rg.gradient_override_map({"Sin": lambda dy, x: -dy * rg.cos(x)}):
    ...     report = gradient_report(rg.sin, [[0.5]])
    >>> report.findings[0].kind, report.causes[0].op_type
    ('wrong sign', 'Sin')
    """
    callable_or_raise(f, "check_gradients")
    _check_options(order, method)
    settings = settings_of(args, order, step, rtol, atol, seed, method)
    check_passed(f, args, "check_gradients(f, args)")
    xs = [_as_float64(a) for a in args]
    places = [i for i, x in enumerate(xs) if is_inexact(x.dtype)]
    if not places:
        raise ArgumentError("check_gradients: no argument is a float, so there is no gradient")
    floats = [xs[i] for i in places]
    if method == "complex" and any(x.dtype.kind == "c" for x in floats):
        raise ArgumentError(
            "check_gradients: a complex step needs real arguments; leave out method='complex'"
        )

    def of_floats(floats: Sequence[Tensor]) -> list[Tensor]:
        return _outputs(f(*replaced(xs, places, floats)))

    with np.errstate(all="ignore"):
        given = of_floats(floats)
    if not given:
        raise ArgumentError(
            "check_gradients: f returns no floats, so there is no gradient to check"
        )
    names = [f"args[{i}]" for i in places]
    report = checked(TENSORS, of_floats, floats, names, order, settings)
    return explained(
        report, lambda order: by_order(TENSORS, of_floats, floats, order, partial(_found, settings))
    )


@raising(gradient_report)
def check_gradients() -> None:
    """Check the gradients of `f` at `args` against differences, up to an order.

    Args:
        f, args, order, method, step, rtol, atol, seed: As in `gradient_report`.

    Raises GradientCheckError if `gradient_report`, which takes the same arguments, finds an error.
    The message names order, input, element and numbers, and the rules or custom gradients that
    disagree with differences of their op alone. An inconclusive comparison (a kink, rounding) is
    not an error; it is in the report. Raises ArgumentError if there was nothing to compare: no
    elements, or no finite value.

    Source: `check_grads` of HIPS autograd and JAX.

    >>> import regrad as rg
    >>> from regrad.testing import check_gradients
    >>> check_gradients(lambda x: rg.sin(x) * x, [[0.5, 1.0]], order=3)
    """


def _check_options(order: int, method: str) -> None:
    if order < 1 or method not in ("central", "complex"):
        raise ArgumentError(
            "check_gradients: expected an order of 1 or more and a method of 'central' or "
            f"'complex', got order={order!r}, method={method!r}"
        )
    if method == "complex" and order > 1:
        raise ArgumentError(
            "check_gradients: a complex step needs an analytic function, and a gradient of complex "
            "numbers is conjugated, so it checks order 1 only; use method='central' beyond"
        )


def _as_float64(value: TensorLike) -> Tensor:
    x = dispatch.lift(value)
    if not is_inexact(x.dtype):
        return x
    return dispatch.as_dtype(x, np.dtype("complex128" if x.dtype.kind == "c" else "float64"))


def _outputs(y: Any) -> list[Tensor]:
    """Return the results of f that have gradients, as a list of Tensors."""
    ys = list(y) if isinstance(y, tuple | list) else [y]
    for t in ys:
        if not isinstance(t, Tensor):
            raise ArgumentError(f"check_gradients: f must return Tensors, got {kind(t)}")
    return [t for t in ys if is_inexact(t.dtype)]


class Tensors(Library):
    """The regrad library: pulls by the walk over a tape, in the libraries of the data."""

    unruled: Callable[..., Any] = staticmethod(masked)
    array: Callable[..., Any] = staticmethod(Tensor._values)
    zeros: Callable[..., Any] = staticmethod(partial(or_zeros, None))

    def like(self, arrays: Sequence[np.ndarray], xs: Sequence[Tensor]) -> list[Tensor]:
        return like(arrays, xs)

    def pull(self, f: Flat, xs: Sequence[Tensor]) -> tuple[list[Tensor], Callable[..., list[Any]]]:
        run = Linearized(lambda *xs: f(xs), xs, "check_gradients")

        def pull(dys: Sequence[Tensor]) -> list[Tensor | None]:
            ids = [y._id for y in run.ys]
            found = walk_from(reversed(run.tape.records), ids, dys, run.watched)
            return [found.get(x._id) for (x,) in run.inputs]

        return run.ys, pull


TENSORS = Tensors()


# -- which op it is ----------------------------------------------------------------------------


def _found(settings: Settings, f: Flat, xs: Sequence[Tensor], orders: int) -> list[Finding]:
    """Return the findings on all ops between xs and f(xs), including ops in compiled bodies."""
    tape = KeepingTape()
    run_watched(tape, f, xs, range(len(xs)))
    found = []
    for record in tape.records:
        op = TapedOp(record, tape, tape.watched)
        op.op_type = record.op.type
        with suppress(RegradError):  # it cannot run by itself
            found += wrong(TENSORS, op, orders, settings) if op.runs_alone else []
    return found


__all__ = ["Finding", "GradientCheckError", "GradientReport", "check_gradients", "gradient_report"]


hint_in(__name__)

"""`fixed_point`: the solution of `x = f(x, *args)`, with the implicit gradient.

The adjoint equation `u = dy + Jᵀ u` is a fixed point, too, so the gradient function solves it with
the same code. Derivatives of every order follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from regrad.autodiff.custom import custom_grad
from regrad.autodiff.gradients import callable_or_raise
from regrad.core import containers, dispatch
from regrad.core.backends import is_array, is_inexact
from regrad.core.containers import replaced
from regrad.core.rule import place
from regrad.core.shapes import as_count
from regrad.core.signatures import helpful
from regrad.core.state import masked
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, DTypeError, InvalidValueError, ShapeError, kind
from regrad.ops.binary import logical_and, where
from regrad.ops.casting import stop_gradient
from regrad.ops.dtypes import finfo
from regrad.ops.elementwise import abs as magnitude
from regrad.ops.elementwise import isfinite, logical_not
from regrad.ops.reduction import max as largest
from regrad.transforms.control_flow import while_loop
from regrad.transforms.derivatives import vjp
from regrad.transforms.region import in_trace

Step = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]  # the next x, of x and args


@helpful("fixed_point")
def fixed_point(
    f: Callable[..., Any],
    x0: Any,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int = 1000,
) -> Any:
    """Return the solution of `x = f(x, *args)`, found by iteration from `x0`.

    Args:
        f: A function of a Tensor (or a container of Tensors) and `args` that returns the next x, in
            the same structure. Pass each value that f uses and that needs a gradient in `args`.
        x0: The start: a Tensor, a number, or a container of these. If f broadcasts or promotes x0,
            the solution has the shape and dtype of f(x0). The solution has no gradient with respect
            to x0.
        *args: Further arguments of f.
        rtol, atol: regrad stops when `max |f(x) - x| <= atol + rtol * max |f(x)|`, for each Tensor
            of x. The default of both is `eps ** 0.75`, where eps belongs to the dtype: about 2e-12
            in float64 and 6e-6 in float32.
        max_steps: The maximum number of calls of f.

    Returns:
        The solution, in the structure of x0.

    The gradient is implicit: the tapes keep the solution and `args`, and no iteration. For the
    incoming gradient dy, regrad solves `u = dy + Jᵀ u` by iteration, with the Jacobian J of f at
    the solution, and pulls u back through one call of f. This solve also ends at `rtol` (with
    `atol=0`) or raises an error. Overrides that are active at the call of fixed_point apply in
    these calls of f. Derivatives of every order in reverse mode are implicit; `jvp` raises
    GradientError.

    If the iteration does not converge, eager mode raises InvalidValueError. A compiled program
    cannot raise, so under `jit` the solution (or, for the adjoint, the gradient) is NaN.

    Raises:
        InvalidValueError: The iteration, or the iteration of a gradient, does not converge.
        ArgumentError: f is not callable, or returns another structure than x0.
        ShapeError: f returns another shape for its own result.
        DTypeError: x is not a float or complex Tensor.
        GradientError: f closes over a Tensor that is being differentiated.

    Source: Bai, Kolter and Koltun, "Deep Equilibrium Models" (2019).

    >>> import regrad as rg
    >>> def solution(a):
    ...     return rg.fixed_point(lambda x, a: rg.cos(a * x), 1.0, a)
    >>> x, dx = rg.value_and_grad(solution)(rg.tensor(1.0, dtype="float64"))
    >>> round(x.item(), 6), round(dx.item(), 6)
    (0.739085, -0.297474)
    """
    callable_or_raise(f, "fixed_point")
    as_count(max_steps, "max_steps")
    start, close_x, structure = containers.opened(x0)
    leaves, close_args = containers.flatten(args)
    places = [i for i, a in enumerate(leaves) if dispatch.is_tensor(a) or is_array(a)]

    def step(x: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
        found, _, other = containers.opened(
            f(close_x(x), *close_args(replaced(leaves, places, xs)))
        )
        if other != structure:
            raise ArgumentError(
                f"fixed_point: {place(f)} must keep the structure of x0, {structure}, and returned "
                f"{other}"
            )
        ys = list(map(dispatch.lift, found))
        if wrong := [kind(y) for y in ys if not is_inexact(y.dtype)]:
            raise DTypeError(f"fixed_point: {place(f)} must return floats, got {wrong[0]}")
        return ys

    xs = [dispatch.lift(leaves[i]) for i in places]
    settings = Settings(f, f"fixed_point: {place(f)}", rtol, atol, max_steps)
    return close_x(_solved(step, list(map(dispatch.lift, start)), xs, settings))


class Settings(NamedTuple):
    """The function, its name in messages, and the parameters of the iteration."""

    f: Callable[..., Any]
    name: str
    rtol: float | None
    atol: float | None
    max_steps: int


def _solved(
    step: Step, start: Sequence[Tensor], xs: Sequence[Tensor], settings: Settings
) -> Sequence[Tensor]:
    """Return the x with `step(x, xs) = x`, as a function of xs with the implicit gradient."""
    with masked():
        start = list(map(stop_gradient, start))

    def called(*xs: Tensor, save: object) -> tuple[Any, Callable[[Any], Any]]:
        with masked():
            constants = list(map(stop_gradient, xs))
        ys = _iterated(lambda x: step(x, constants), start, settings)
        pull: Any = lambda dys: _pulled(step, dys, ys, xs, settings)  # noqa: E731
        pull.__wrapped__ = settings.f  # for messages
        return tuple(ys), pull

    named: Any = called
    named.__signature__ = signature(called)
    named.__name__, named.__wrapped__ = getattr(settings.f, "__name__", "f"), settings.f
    return custom_grad(named)(*xs)


def _iterated(
    step: Callable[[Sequence[Tensor]], list[Tensor]], x: Sequence[Tensor], settings: Settings
) -> list[Tensor]:
    """Apply `step` until x converges."""

    def measured(x: Sequence[Tensor], y: Sequence[Tensor], count: Any) -> Any:
        if (got := _specs(y)) != (expected := _specs(x)):
            raise ShapeError(
                f"{settings.name} must keep the shapes and dtypes of x, {expected}, and returned "
                f"{got}"
            )
        with masked():
            residuals = [largest(magnitude(b - a)) for a, b in zip(x, y, strict=True)]
            ends = map(partial(_ends, settings), y, residuals)
            return y, reduce(logical_and, ends), residuals, count + 1

    def goes_on(carry: Any) -> Tensor:
        _, ended, _, count = carry
        with masked():
            return logical_and(logical_not(ended), count < settings.max_steps)

    y = step(x)
    if _specs(x) != _specs(y):  # x0 is a number that f broadcasts or converts
        x, y = y, step(y)
    first = measured(x, y, dispatch.lift(np.int32(0)))
    advance = lambda carry: measured(carry[0], step(carry[0]), carry[-1])  # noqa: E731
    y, ended, residuals, count = while_loop(goes_on, advance, first)
    if in_trace([ended]):
        with masked():
            return [where(ended, leaf, np.nan) for leaf in y]
    if not bool(ended):
        raise InvalidValueError(
            f"{settings.name} did not converge in {count.item()} steps: the residual "
            f"max |f(x) - x| is {max(r.item() for r in residuals):.3g}. Start nearer to the "
            "solution, raise max_steps, rtol or atol, or damp f: x + 0.5 * (f(x) - x)."
        )
    return y


def _specs(x: Sequence[Tensor]) -> str:
    return ", ".join(f"{y.dtype} {y.shape}" for y in x)


def _ends(settings: Settings, y: Tensor, residual: Tensor) -> Tensor:
    """Return whether a residual of y is within the tolerance."""
    usual = float(finfo(y.dtype).eps) ** 0.75
    rtol, atol = [usual if tol is None else tol for tol in (settings.rtol, settings.atol)]
    limit = atol + rtol * largest(magnitude(y))
    return logical_and(residual <= limit, isfinite(residual))


def _pulled(
    step: Step, dys: Sequence[Tensor], ys: Sequence[Tensor], xs: Sequence[Tensor],
    settings: Settings,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients by xs: the implicit function theorem."""
    n = len(ys)

    def adjoint(us: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        dys, ys, xs = given[:n], given[n : 2 * n], given[2 * n :]
        products = vjp(lambda *ys: step(ys, xs), *ys)[1](list(us))
        with masked():
            return [dy + product for dy, product in zip(dys, products, strict=True)]

    places = [i for i, x in enumerate(xs) if is_inexact(x.dtype)]
    name = f"{settings.name}: the solve of the adjoint equation of its gradient"
    inner = settings._replace(name=name, atol=0.0)
    us = _solved(adjoint, dys, [*dys, *ys, *xs], inner)
    last = vjp(lambda *floats: step(ys, replaced(xs, places, floats)), *[xs[i] for i in places])
    return replaced([None] * len(xs), places, last[1](list(us)))

"""A check against finite differences, through an interface to a library and its derivatives.

class Plain(Library):                       # NumPy, with handwritten pulls
    def array(self, x): return x
    def like(self, arrays, xs): return list(arrays)
    def zeros(self, x): return np.zeros_like(x)
    def pull(self, f, xs): return f(xs), lambda dys: [...]

report = checked(Plain(), f, xs, ["x"], 2, Settings())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from regrad.checking import check
from regrad.checking.check import Arrays, Function, Method, Pull, Settings
from regrad.checking.findings import Finding, GradientReport
from regrad.errors import ArgumentError, kind
from regrad.inspection.kinds import telling
from regrad.inspection.numbers import wide

# A function of a list of arrays that returns a list of arrays, all floats.
Flat: TypeAlias = Callable[[Sequence[Any]], list[Any]]


def settings_of(
    args: Any, order: int, step: float | None, rtol: float | None, atol: float | None, seed: int,
    method: Method = "central",
) -> Settings:  # fmt: skip
    """Return the settings of a check; raise unless args is a list and order is at least 1."""
    if not isinstance(args, list | tuple):
        raise ArgumentError(
            f"check_gradients(f, args): args must be a list, got {kind(args)}. Write "
            "check_gradients(f, [x])."
        )
    if order < 1:
        raise ArgumentError(f"check_gradients: order must be 1 or more, got {order!r}")
    return Settings(method, step, 1e-6 if rtol is None else rtol, atol or 0.0, seed)


class Library:
    """An array library: its conversions, and how it differentiates functions of lists of arrays.

    Attributes:
        array: Returns an array of the library as a NumPy array.
        zeros: Returns zeros like an array.
        unruled: Returns a block in which the user's rules do not apply.
    """

    array: Callable[[Any], np.ndarray]
    zeros: Callable[[Any], Any]
    unruled: Callable[[], AbstractContextManager[Any]] = nullcontext

    def like(self, arrays: Arrays, xs: Sequence[Any]) -> list[Any]:
        """Return NumPy arrays as arrays of the library, on the devices of xs."""
        raise NotImplementedError

    def pull(self, f: Flat, xs: Sequence[Any]) -> tuple[list[Any], Callable[..., Sequence[Any]]]:
        """Return a function's results, and its pull from incoming gradients to gradients by xs.

        Gradients follow regrad's convention, and are None where a gradient is missing. The pull can
        be differentiated itself.
        """
        raise NotImplementedError

    def push(self, f: Flat, xs: Sequence[Any]) -> Callable[..., Sequence[Any]] | None:
        """Return the forward-mode function (xs, dxs) -> dys, or None if there is none."""

    def compiled(self, f: Flat) -> Flat:
        """Return the function in a form that runs many times efficiently."""
        return f


def of_arrays(library: Library, f: Flat, xs: Sequence[Any], forward: bool = True) -> Function:
    """Return a function of a library's arrays as a function of NumPy arrays, with its gradients."""
    array, like, run = library.array, library.like, library.compiled(f)

    def values(arrays: Arrays) -> list[np.ndarray]:
        return list(map(array, run(like(arrays, xs))))

    def vjp(arrays: Arrays) -> Pull:
        ys, pull = library.pull(run, like(arrays, xs))
        return lambda dys: [None if dx is None else array(dx) for dx in pull(like(dys, ys))]

    def gradient(dys: Arrays) -> Function:
        g, more = derived(library, f, xs, dys)
        return of_arrays(library, g, more, forward)

    def jvp(arrays: Arrays, dxs: Arrays) -> list[np.ndarray]:
        assert push is not None
        return list(map(array, push(like(arrays, xs), like(dxs, xs))))

    push = library.push(f, xs) if forward else None
    return Function(values, vjp, gradient, None if push is None else jvp)


def derived(
    library: Library, f: Flat, xs: Sequence[Any], dys: Arrays | None = None
) -> tuple[Flat, list[Any]]:
    """Return the gradient of a function, as a function, and the point at which it is evaluated.

    The function maps (*xs, *scales) to the gradients by xs for incoming gradients scales * dys,
    evaluated at scales of 1. By default the dys are `weights`.
    """
    f, like = library.compiled(f), library.like
    ys = f(xs)
    values = [library.array(y) for y in ys]
    given = like([weights(y.shape, y.dtype) for y in values] if dys is None else dys, ys)

    def g(moved: Sequence[Any]) -> list[Any]:
        xs, scales = moved[: -len(given)], moved[-len(given) :]
        with library.unruled():
            arriving = [scale * dy for scale, dy in zip(scales, given, strict=True)]
        found = library.pull(f, xs)[1](arriving)
        return [library.zeros(x) if dx is None else dx for x, dx in zip(xs, found, strict=True)]

    return g, [*xs, *like(list(map(np.ones_like, values)), ys)]


def checked(
    library: Library, f: Flat, xs: Sequence[Any], names: Sequence[str], order: int,
    settings: Settings, forward: bool = True,
) -> GradientReport:  # fmt: skip
    """Compare the gradients of a function with differences, up to an order."""
    arrays = [wide(library.array(x)) for x in xs]
    function = of_arrays(library, f, xs, forward)
    return check.report(function, arrays, order, names=names, settings=settings)


def wrong(
    library: Library, op: Any, order: int, settings: Settings, forward: bool = True
) -> list[Finding]:
    """Return the inputs by which the rule of an op is wrong, at the op's recorded arguments.

    The op has `xs`, `input_names` and a `title`, and runs again by `again(xs)`.
    """
    report = checked(library, op.again, op.xs, op.input_names, order, settings, forward)
    function = of_arrays(library, op.again, op.xs, False)
    arrays = [wide(library.array(x)) for x in op.xs]
    found = [telling(function, arrays, op.input_names, each) for each in report.findings]
    return [replace(each, rule=op.title, op_type=op.op_type, **op.where) for each in found]


def explained(report: GradientReport, causes: Callable[[int], Iterable[Finding]]) -> GradientReport:
    """Return a report with the rules that are wrong by themselves: each rule and input once."""
    unique: dict[Any, Finding] = {}
    for cause in () if report.ok else causes(report.findings[0].order):
        unique.setdefault((cause.rule, cause.input, cause.order, cause.line), cause)
    return replace(report, causes=tuple(unique.values()))


def by_order(
    library: Library, f: Flat, xs: Sequence[Any], order: int,
    found: Callable[[Flat, Sequence[Any], int], list[Finding]],
) -> list[Finding]:  # fmt: skip
    """Return the rules between xs and f(xs) that are wrong by themselves, at the first such order.

    At order n, the gradient of order n - 1 consists of ops as well. So the ops that it runs are
    checked, to the remaining orders: `found(f, xs, orders)`.
    """
    for orders in range(order, 0, -1):
        if findings := found(f, xs, orders):
            return findings
        f, xs = derived(library, f, xs)
    return []


def weights(shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """Return an incoming gradient for an output, without symmetry."""
    count = int(np.prod(shape))
    return np.cos(1.0 + np.arange(count)).reshape(shape).astype(dtype)

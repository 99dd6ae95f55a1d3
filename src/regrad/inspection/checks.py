"""A check against differences, over what a library tells: its arrays, and how it differentiates.

class Plain(Library):                       # NumPy, with pulls that somebody wrote
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

# A function of a list of arrays that returns a list of them, all floats.
Flat: TypeAlias = Callable[[Sequence[Any]], list[Any]]


def settings_of(
    args: Any, order: int, step: float | None, rtol: float | None, atol: float | None, seed: int,
    method: Method = "central",
) -> Settings:  # fmt: skip
    """Return the settings of a check, whose arguments are a list, to an order from 1 on."""
    if not isinstance(args, list | tuple):
        raise ArgumentError(
            f"check_gradients(f, args): args is a list, got {kind(args)}. Write "
            "check_gradients(f, [x])."
        )
    if order < 1:
        raise ArgumentError(f"check_gradients: order is 1 or more, got {order!r}")
    return Settings(method, step, 1e-6 if rtol is None else rtol, atol or 0.0, seed)


class Library:
    """A library of arrays: how it differentiates functions of lists of them.

    Attributes:
        array: Gives an array of the library as one of NumPy's.
        zeros: Gives zeros like an array.
        unruled: Gives a block in which no rule of the user's concerns what is computed.
    """

    array: Callable[[Any], np.ndarray]
    zeros: Callable[[Any], Any]
    unruled: Callable[[], AbstractContextManager[Any]] = nullcontext

    def like(self, arrays: Arrays, xs: Sequence[Any]) -> list[Any]:
        """Arrays of NumPy's as the library's, where xs are."""
        raise NotImplementedError

    def pull(self, f: Flat, xs: Sequence[Any]) -> tuple[list[Any], Callable[..., Sequence[Any]]]:
        """The results of a function, and its pull: from the gradients that arrive to those by xs.

        Gradients are in regrad's convention, and None where none came. The pull can be
        differentiated itself.
        """
        raise NotImplementedError

    def push(self, f: Flat, xs: Sequence[Any]) -> Callable[..., Sequence[Any]] | None:
        """Forward mode: (xs, dxs) -> dys, None if the function has none."""

    def compiled(self, f: Flat) -> Flat:
        """The function as it is best run many times."""
        return f


def of_arrays(library: Library, f: Flat, xs: Sequence[Any], forward: bool = True) -> Function:
    """A function of a library's arrays as one of NumPy's, with its gradients."""
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
    """The gradient of a function, as a function, and where it is taken.

    It is the function (*xs, *scales) -> the gradients by xs, where scales * dys arrive, at scales
    of 1. By default the dys are `weights`.
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
    """Compare the gradients of a function with differences, to an order."""
    arrays = [wide(library.array(x)) for x in xs]
    function = of_arrays(library, f, xs, forward)
    return check.report(function, arrays, order, names=names, settings=settings)


def wrong(
    library: Library, op: Any, order: int, settings: Settings, forward: bool = True
) -> list[Finding]:
    """The inputs by which the rule of an op is wrong, for what it was given.

    The op tells `xs`, `input_names` and its `title`, and runs `again(xs)`.
    """
    report = checked(library, op.again, op.xs, op.input_names, order, settings, forward)
    function = of_arrays(library, op.again, op.xs, False)
    arrays = [wide(library.array(x)) for x in op.xs]
    found = [telling(function, arrays, op.input_names, each) for each in report.findings]
    return [replace(each, rule=op.title, op_type=op.op_type, **op.where) for each in found]


def explained(report: GradientReport, causes: Callable[[int], Iterable[Finding]]) -> GradientReport:
    """A report with the rules that are wrong by themselves, one of each rule and input."""
    unique: dict[Any, Finding] = {}
    for cause in () if report.ok else causes(report.findings[0].order):
        unique.setdefault((cause.rule, cause.input, cause.order, cause.line), cause)
    return replace(report, causes=tuple(unique.values()))


def by_order(
    library: Library, f: Flat, xs: Sequence[Any], order: int,
    found: Callable[[Flat, Sequence[Any], int], list[Finding]],
) -> list[Finding]:  # fmt: skip
    """The rules on the way from xs to f(xs) that are wrong by themselves, at the first such order.

    At order n the gradient of order n - 1 is made of ops too; so the ops that it runs are checked,
    to as many orders as remain: `found(f, xs, orders)`.
    """
    for orders in range(order, 0, -1):
        if findings := found(f, xs, orders):
            return findings
        f, xs = derived(library, f, xs)
    return []


def weights(shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """A gradient to arrive at an output: without symmetry."""
    count = int(np.prod(shape))
    return np.cos(1.0 + np.arange(count)).reshape(shape).astype(dtype)

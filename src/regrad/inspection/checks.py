"""A check against differences, and what the checks of all libraries ask in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from regrad.checking.check import Method, Settings
from regrad.checking.findings import Finding, GradientReport
from regrad.errors import ArgumentError, kind


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


def explained(report: GradientReport, causes: Callable[[int], Iterable[Finding]]) -> GradientReport:
    """A report with the rules that are wrong by themselves, one of each rule and input."""
    unique: dict[Any, Finding] = {}
    for cause in () if report.ok else causes(report.findings[0].order):
        unique.setdefault((cause.rule, cause.input, cause.order, cause.line), cause)
    return replace(report, causes=tuple(unique.values()))


def by_order(
    f: Any, xs: Any, order: int, wrong: Callable[..., list[Finding]], derived: Callable[..., Any]
) -> list[Finding]:
    """The rules on the way from xs to f(xs) that are wrong by themselves, at the first such order.

    At order n the gradient of order n - 1 is made of ops too; so the ops that it runs are checked,
    to as many orders as remain: `wrong(f, xs, orders)`. `derived(f, xs)` is that gradient, as a
    function, and where it is taken.
    """
    for orders in range(order, 0, -1):
        if found := wrong(f, xs, orders):
            return found
        f, xs = derived(f, xs)
    return []


def weights(shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """A gradient to arrive at an output: without symmetry."""
    count = int(np.prod(shape))
    return np.cos(1.0 + np.arange(count)).reshape(shape).astype(dtype)

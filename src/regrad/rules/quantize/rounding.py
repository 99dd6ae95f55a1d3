"""Numbers on a grid: the arithmetic of quantizers, for arrays of any library.

The formula of a quantizer is written once, with the functions of `Arithmetic`. These are the Array
API functions of the array's library (regrad, PyTorch, JAX), and functions that the standard lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from regrad.autodiff.custom import custom_grad
from regrad.core.backends import BACKENDS
from regrad.core.dispatch import lift
from regrad.core.extras import needed
from regrad.core.tensor import Tensor
from regrad.ops.casting import stop_gradient
from regrad.rules.quantize.formats import POWERS, Format

TINY = 1e-30  # the divisor of an empty block


class Codes(NamedTuple):
    """Quantized numbers: `(codes - zero) * scale + offset`, with `codes` on the grid.

    `straight` replaces the value in gradients, if the codes and the scale do not determine it.
    """

    codes: Any
    scale: Any
    zero: Any = None
    offset: Any = None
    straight: Any = None


def stop(x: Any) -> Any:
    """Return an array, of any library, as a constant for gradients."""
    if isinstance(x, Tensor):
        return stop_gradient(x)
    if BACKENDS[type(x)].name == "torch":
        return x.detach()
    return sys.modules["jax"].lax.stop_gradient(x)


def ste(value: Any, surrogate: Any) -> Any:
    """Return a value with the gradient of another array; the value itself is unchanged."""
    return stop(value) + (surrogate - stop(surrogate))


class Arithmetic:
    """Functions for arrays like a given one, whose parts have their own scales.

    Args:
        like: The array.
        per: The part that has one scale: `"tensor"`, `"channel"` or `"token"`.
        channel: The axis of channels.
    """

    def __init__(self, like: Any, per: str = "tensor", channel: int = 0) -> None:
        self.like = like
        is_tensor = isinstance(like, Tensor)
        self.is_torch: bool = not is_tensor and BACKENDS[type(like)].name == "torch"
        self.xp: Any = like.__array_namespace__() if is_tensor else BACKENDS[type(like)].xp
        n = len(like.shape)
        kept = {"tensor": [*range(n)], "token": [n - 1]}.get(per)
        self.axes: tuple[int, ...] = tuple(kept or [i for i in range(n) if i != channel % n])
        self.keepdims: bool = per != "tensor"

    def array(self, values: Any) -> Any:
        """Return numbers as an array of the library, dtype and device."""
        if isinstance(self.like, Tensor):
            return self.xp.asarray(values, dtype=self.like.dtype)
        where = {"device": self.like.device} if self.is_torch else {}
        return self.xp.asarray(values, dtype=self.like.dtype, **where)

    def given(self, state: Any) -> Any:
        """Return a state array, or a number, as an array of the library."""
        if isinstance(self.like, Tensor):
            return lift(state)
        return state if hasattr(state, "shape") else self.array(state)

    # -- parts ---------------------------------------------------------------------------------

    def _reduced(self, name: str, v: Any) -> Any:
        return getattr(self.xp, name)(v, axis=self.axes, keepdims=self.keepdims)

    def max(self, v: Any) -> Any:
        """Return the largest number of each part."""
        return self._reduced("max", v)

    def min(self, v: Any) -> Any:
        """Return the smallest number of each part."""
        return self._reduced("min", v)

    def mean(self, v: Any) -> Any:
        """Return the mean of each part."""
        return self._reduced("mean", v)

    def sum(self, v: Any) -> Any:
        """Return the sum of each part."""
        return self._reduced("sum", v)

    def absmax(self, v: Any) -> Any:
        """Return the largest magnitude of each part."""
        return self.max(abs(v))

    @property  # (torch.compile does not support the lock of cached_property.)
    def count(self) -> int:
        """Return the number of values in a part."""
        return prod([int(self.like.shape[i]) for i in self.axes])

    # -- gradients -----------------------------------------------------------------------------

    def round(self, v: Any) -> Any:
        """Round to the nearest integer, half to even; the gradient passes."""
        return ste(self.xp.round(stop(v)), v)

    def clip(self, v: Any, low: Any, high: Any) -> Any:
        """Clip; the gradient passes within the bounds, including the bounds themselves."""
        # (On the bounds, the gradient of `clip` is none in PyTorch 2.15, all in 2.13, and half in
        # JAX.)
        return self.xp.where(v < low, low, self.xp.where(v > high, high, v))

    def sign(self, v: Any) -> Any:
        """Return -1, 0 or 1."""
        # (the standard's function writes with a mask)
        return v.sign() if self.is_torch else self.xp.sign(v)

    def at_least(self, v: Any, low: float) -> Any:
        """Return the larger of a number and a bound, which has no gradient."""
        return self.xp.where(v < low, low, v)

    def sigmoid(self, v: Any) -> Any:
        """Return the logistic function, whose gradient is also finite for large magnitudes."""
        return 0.5 + 0.5 * self.xp.tanh(0.5 * v)

    def scaled(self, x: Any, factor: float) -> Any:
        """Return an array whose gradient is scaled."""
        return ste(x, x * factor)

    def grid(self, u: Any, low: float, high: float, clip: str) -> Any:
        """Return numbers in units of a step as integers in bounds.

        `clip` is "before" (clip, then round), "after" (round, then clip) or "straight" (the
        gradient also passes outside of the bounds).
        """
        if clip == "before":
            return self.round(self.clip(u, low, high))
        if clip == "after":
            return self.clip(self.round(u), low, high)
        return ste(self.clip(self.xp.round(stop(u)), low, high), u)

    def by_rule(self, function: Callable[..., Any], rule: Callable[..., Any], v: Any) -> Any:
        """Return a function of an array with a gradient `rule(dy, x, y)`."""

        def f(x: Any, save: Any) -> Any:
            y = function(x)
            save([x, y])
            return y, lambda dy, saved: rule(dy, *saved)

        if isinstance(v, Tensor):
            return custom_grad(f)(v)
        host = BACKENDS[type(v)].name
        return needed(f"regrad.{host}", host, "quantize").custom_grad(f)(v)

    # -- tables --------------------------------------------------------------------------------

    def nearest(self, u: Any, table: Sequence[float]) -> Any:
        """Return the nearest numbers of a sorted table; a tie goes to the smaller one."""
        middles = [(a + b) / 2 for a, b in pairwise(table)]
        return self._looked_up(table, middles, u, "left")

    def as_float(self, u: Any, form: Format) -> Any:
        """Return the nearest numbers of a floating-point format, half to even; it saturates."""
        u = stop(u)
        magnitude = abs(u)
        powers = form.powers
        exponent = self._looked_up(powers, powers[1:], magnitude, "right")
        step = exponent * 2.0**-form.mantissa
        rounded = self.xp.round(magnitude / step) * step
        return self.sign(u) * self.clip(rounded, 0.0, form.largest)

    def power_below(self, v: Any) -> Any:
        """Return the largest powers of two that are not larger than positive numbers."""
        return self._looked_up(POWERS, POWERS[1:], stop(v), "right")

    def _looked_up(
        self, table: Sequence[float], bounds: Sequence[float], u: Any, side: str
    ) -> Any:  # fmt: skip
        flat = self.xp.reshape(stop(u), (-1,))  # (PyTorch warns for another order of axes.)
        places = self.xp.searchsorted(self.array(bounds), flat, side=side)
        flat = self.xp.take(self.array(table), places, axis=0)
        return self.xp.reshape(flat, tuple(u.shape))

"""How functions that make rules are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from typing import Annotated, Any, ParamSpec, cast, get_type_hints

from regrad.core.backends import is_array
from regrad.core.dispatch import lift
from regrad.core.made import remade
from regrad.core.signatures import helpful
from regrad.core.tensor import Readable, Tensor
from regrad.errors import ArgumentError, RuleError, brief
from regrad.ops.binary import clip
from regrad.ops.casting import astype
from regrad.shapes.sizes import differ

P = ParamSpec("P")
Rule = Callable[..., Tensor]
Above0 = Annotated[float, 0]  # a parameter that is greater than this number
Above1 = Annotated[float, 1]
FAR = 1e15  # (its square is finite in single precision)


def factory(maker: Callable[P, Rule]) -> Callable[P, Rule]:
    """Return a function that makes rules for steps from numbers, Tensors and arrays.

    Numbers are finite and not negative, except for a shift. The rules compute float16 in float32,
    and clip x to a finite range, so that derivatives at inf are not NaN.
    """

    known = signature(maker)

    @wraps(maker)
    def make(*args: P.args, **options: P.kwargs) -> Rule:
        values = known.bind(*args, **options).arguments
        for name, value in values.items():
            _check(maker, name, value)

        def rule(dy: Tensor, x: Tensor) -> Tensor:
            is_half = str(getattr(x, "dtype", "")).removeprefix("torch.") == "float16"
            wide = astype(x, "float32") if is_half else x
            held = {n: _held(f"{rule.__name__}: {n}", v, wide) for n, v in values.items()}
            dx = cast("Callable[..., Rule]", maker)(**held)(dy, clip(wide, -FAR, FAR))
            return astype(dx, "float16") if is_half else dx

        rule.__name__ = rule.__qualname__ = maker.__name__
        return rule

    make.__signature__ = known  # pyright: ignore[reportAttributeAccessIssue]
    return remade(helpful(maker.__name__)(make))


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | Readable) or is_array(value)


@cache
def _expected(maker: Callable[..., Rule]) -> dict[str, tuple[float, str]]:
    """Return the largest number that is too small for each parameter, and the bound in words."""
    hints = get_type_hints(maker, include_extras=True)
    known = {n: getattr(h, "__metadata__", (None,))[0] for n, h in hints.items()}
    found = {n: (-1e-300, " of 0 or more") if b is None else (b, f" above {b}")
             for n, b in known.items()}  # fmt: skip
    return found | {"shift": (-math.inf, "")}


def _check(maker: Callable[..., Rule], name: str, value: Any) -> None:
    """Refuse a parameter that is not a number within its bounds, a Tensor or an array."""
    default = signature(maker).parameters[name].default
    if isinstance(default, bool):
        is_right, expected = isinstance(value, bool), "True or False"
    elif isinstance(default, int):
        is_right, expected = type(value) is int and value > 0, "a whole number above 0"
    else:
        low, bound = _expected(maker)[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = _is_array(value) or (is_number and low < value < math.inf)
        expected = f"a number{bound}, a Tensor or an array"
    if not is_right:
        raise ArgumentError(f"{name} is {expected} (default {default}), got {brief(value)}")


def _held(name: str, value: Any, x: Tensor) -> Any:
    """Return a parameter for the rule of an op: a Tensor instead of an array, in x's dtype."""
    if not _is_array(value):
        return value
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        value = value.float()
    x = lift(x)
    held = astype(lift(value), x.dtype)  # (an array would be computed with outside of the rule)
    pairs = zip(reversed(held.shape), reversed(x.shape), strict=False)
    if len(held.shape) > len(x.shape) or any(n != 1 and differ(n, m) for n, m in pairs):
        raise RuleError(f"{name} has the shape {tuple(held.shape)}, expected a shape that "
                        f"broadcasts to the shape of x, {tuple(x.shape)}")  # fmt: skip
    return held

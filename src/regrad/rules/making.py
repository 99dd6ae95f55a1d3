"""How functions that make rules are written."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec

from regrad.core.backends import is_array
from regrad.core.made import remade
from regrad.core.signatures import given, helpful
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, brief

P = ParamSpec("P")
Rule = Callable[..., Tensor]


def factory(maker: Callable[P, Rule]) -> Callable[P, Rule]:
    """A function that makes rules from numbers that are not negative, but for a shift."""

    @wraps(maker)
    def make(*args: P.args, **options: P.kwargs) -> Rule:
        for name, value in given(maker, args, options).items():
            is_number = isinstance(value, int | float) and (value >= 0 or name == "shift")
            if not (is_number or is_array(value) or isinstance(value, Tensor)):
                raise ArgumentError(f"{name} is a number of 0 or more, got {brief(value)}")
        return maker(*args, **options)

    make.__signature__ = signature(maker)  # pyright: ignore[reportAttributeAccessIssue]
    return remade(helpful(maker.__name__)(make))

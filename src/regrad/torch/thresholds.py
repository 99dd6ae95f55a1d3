"""Spikes that a program writes as a comparison and a cast: the op type "Threshold".

    z = (v > a).float()                    # also .to(dtype), .type_as(v), …
    z = torch.where(v > a, 1.0, 0.0)

The comparison returns booleans, which have no gradient. So neither function alone is an op that a
rule could belong to. Under a rule for "Threshold", regrad stores the difference `v - a` for the
booleans, with its record in autograd. A cast of these booleans returns torch's value, and has the
gradient of `optypes.step` at the difference. The rule belongs to `step`, so it fires there as for
any op. The gradient reaches `v` and a learned `a` through the difference.

Any other function of the booleans (`&`, an index, a view) returns a tensor without a difference. A
comparison counts as untouched, with its line, until a cast of its booleans runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import cache
from math import inf
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from regrad.core.callers import find_caller
from regrad.core.reports import Untouched
from regrad.torch.composites import Fused, row
from regrad.torch.nodes import LIBRARIES
from regrad.torch.open_scopes import AROUND, SCOPES
from regrad.torch.optypes import COMPARISONS, THRESHOLD, functions_named, step
from regrad.torch.parts import Lookup
from regrad.torch.places import path_here

KEY = THRESHOLD.type
NOT_CAST = f" ({KEY}, not cast)"  # the mark in reports of a comparison without a cast
IN_PLACE = "gt_ ge_ lt_ le_ greater_ greater_equal_ less_ less_equal_"
CASTS = "to type type_as float double half bfloat16 int long short char byte _to_copy"

# The `Compared` of booleans, and of integers that a program converted from booleans.
_COMPARED: Any = WeakTensorKeyDictionary()


class Compared:
    """A comparison whose result the program still holds.

    Args:
        x: The difference, above 0 where the comparison is true.
        at_zero: The value of the step where the difference is 0.
        unused: The counts and the key under which reports list the comparison, until a cast runs.
    """

    low: float = 0  # the value of the result where the comparison is false
    high: float = 1

    def __init__(self, x: torch.Tensor, at_zero: float, unused: list[Any]) -> None:
        self.x: torch.Tensor = x
        self.at_zero: float = at_zero
        self.unused: list[Any] = unused

    def between(self, low: float, high: float) -> Compared:
        """Return the same comparison for a result of two other values."""
        made = copy(self)
        made.low, made.high = low, high
        return made

    def step(self, op: Lookup, dtype: torch.dtype) -> torch.Tensor:
        """Return the step at the difference, under its rule."""
        while self.unused:
            counts, key = self.unused.pop()
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
        return (self.low + (self.high - self.low) * op(step)(self.x, self.at_zero)).to(dtype)


@cache
def rows() -> Mapping[Any, list[Fused]]:
    """Return the decompositions of comparisons and casts under a rule for "Threshold"."""
    found: list[tuple[Any, Fused]] = []
    for names, kind in COMPARISONS.items():
        found += row(names, KEY, _compare, *kind, compares=True)
    found += row(IN_PLACE, KEY, None, when=_is_of_floats, what=" (in place)")
    for function in functions_named(CASTS):
        found += row([function], KEY, _cast, function, when=_is_discrete, compares=True)
    found += row("where", KEY, _select, when=_is_of_numbers, compares=True)
    return {function: [form] for function, form in found}


def _compare(
    function: Callable[..., Any], sign: int, at_zero: float, op: Lookup, input: Any, other: Any
) -> torch.Tensor:
    """Run a comparison, and store the difference if it compares floats."""
    y = function(input, other)
    dtype = torch.result_type(input, other)
    if dtype.is_floating_point:
        a, b = (x.to(dtype) if isinstance(x, torch.Tensor) else x for x in (input, other))
        _COMPARED[y] = Compared(a - b if sign > 0 else b - a, at_zero, _list(function))
    return y


def _list(function: Callable[..., Any]) -> list[Any]:
    """List a comparison as untouched, and return the counts and the key of the entry."""
    place = AROUND.get().place
    spot = SCOPES.get() if place is None else place.spot
    scope = next((s for s in reversed(spot) if KEY in s._ruleset.rules), None)
    if scope is None or (place is not None and place.has_run):
        return []
    where, path = "", "" if scope._modules is None else path_here(scope, spot)
    if place is None:
        where, counts = find_caller(LIBRARIES), scope._root._untouched.counts
    else:  # (Dynamo may discard the program)
        where, note = place.where, Untouched()
        place.notes.append((scope, note))
        counts = note.counts
    key = f"torch.{function.__name__}{NOT_CAST}", where, path
    counts[key] += 1
    return [(counts, key)]


def _cast(
    function: Callable[..., Any], op: Lookup, input: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor | None:
    found = _COMPARED.get(input)
    return found and _result(found, op, function(input, *args, **options))


def _select(op: Lookup, condition: torch.Tensor, input: float, other: float) -> torch.Tensor | None:
    found = _COMPARED.get(condition)
    y = found and torch.where(condition, input, other)
    return found and _result(found.between(other, input), op, y)


def _result(found: Compared, op: Lookup, y: torch.Tensor) -> torch.Tensor:
    """Return the step for a float result; otherwise store the difference for the result.

    (The result is torch's own, and the caller attaches its value to the step.)
    """
    if y.is_floating_point():
        return found.step(op, y.dtype)
    if not y.is_complex():
        _COMPARED[y] = found
    return y


# -- conditions on calls (torch.compile traces these functions) ------------------------------------


def _is_discrete(input: torch.Tensor, *args: Any, **options: Any) -> bool:
    return not (input.is_floating_point() or input.is_complex())


def _is_of_floats(input: torch.Tensor, *args: Any, **options: Any) -> bool:
    return input.is_floating_point()


def _is_of_numbers(
    condition: Any = None, input: Any = None, other: Any = None, **options: Any
) -> bool:
    """Return whether `where` selects between two numbers with a finite difference that is not 0."""
    if type(input) not in (int, float) or type(other) not in (int, float):
        return False
    return 0 < abs(input - other) < inf

"""Calls of ops: which rule applies if keys count calls or read sites, and the hit of the call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from regrad.core.callers import find_caller
from regrad.core.foreign import ForeignRule
from regrad.core.places import Counts, Fit, Site, pick, site_of
from regrad.core.reports import Binding, Hit
from regrad.errors import ArgumentError, PassedOverError
from regrad.torch.bridge import is_differentiable
from regrad.torch.nodes import LIBRARIES
from regrad.torch.open_scopes import AROUND, SCOPES
from regrad.torch.places import counts_of, path_here, step_here
from regrad.transforms.closures import names_in


def site_here(scope: Any, op_type: str, n: int, xs: Iterable[torch.Tensor]) -> Site:
    """Return the site of a call of an op on some tensors, in a scope."""
    place = AROUND.get().place
    spot = SCOPES.get() if place is None else place.spot
    where = find_caller(LIBRARIES) if place is None else place.where
    return site_of([step_here(scope, spot)], op_type, n, xs, where)


class Choice:
    """The rule of an op whose keys count its calls, or read the site of each call."""

    chooses = True
    key: Any = None

    def __init__(self, op_type: str, held: dict[Fit, ForeignRule]) -> None:
        self.op_type = op_type
        self.held = held
        self.replaces: bool = any(rule.replaces for rule in self.held.values())
        self.takes_all: bool = any(rule.takes_all for rule in self.held.values())
        biased = {rule.has_bias for rule in self.held.values()}
        if len(biased) > 1:
            keys = " and ".join(repr(fit.key) for fit in self.held)
            raise ArgumentError(
                f"{keys}: for calls of one module, a rule that names the bias of {op_type} and a "
                "rule that does not name it cannot both apply. Let both name it."
            )
        self.has_bias: bool = True in biased

    def pick(self, scope: Any, xs: Sequence[torch.Tensor]) -> ForeignRule | None:
        """Return the rule of a call; None if no key fits, or if the call cannot have a gradient.

        (A norm in training counts its batches, in integers. Such a call does not count.)
        """
        if not (self.replaces or any(map(is_differentiable, xs))):
            return None
        place = AROUND.get().place
        if place is not None and (fit := self._counting()):
            place.error = PassedOverError(
                f"{fit.key!r} counts calls, and torch.compile writes one program for all calls. "
                "Name the module instead, or call the model without torch.compile."
            )
            return None
        counts = Counts() if place else counts_of(scope)
        fit, _ = pick([*self.held], counts, lambda n: site_here(scope, self.op_type, n, xs))
        return None if fit is None else self.held[fit]

    def _counting(self) -> Fit | None:
        """Return a fit whose key counts calls, directly or in a predicate."""
        for fit in self.held:
            asked = [f for entry in fit.predicates for f in entry]
            if fit.key.counts or any("nth" in names_in([f]) for f in asked):
                return fit
        return None


def at_its_site(held: Any, scope: Any, op_type: str, xs: Sequence[torch.Tensor]) -> ForeignRule:
    """Return a rule that reads the site of its op, for the call that the program makes here."""
    n = -1  # (torch.compile writes one program for all calls)
    if AROUND.get().place is None:
        n = counts_of(scope).meet((held.key, op_type))
    return held.at_site(site_here(scope, op_type, n, xs))


def bind_call(scope: Any, key: Any, op_type: str, shape: tuple[int, ...]) -> Hit:
    """Count a call under the rule of a key, at its line; `shape` is its first tensor's shape."""
    if (within := AROUND.get().within) is not None:
        raise within.hides(op_type)
    place = AROUND.get().place
    where = find_caller(LIBRARIES) if place is None else place.where
    hit = hit_at(scope._root, key, op_type, where, place and place.spot)
    if place is None:
        hit.add(shape)
    else:  # the place counts the call when the program is certain to run
        place.meets(hit, shape)
    return hit


def hit_at(scope: Any, key: Any, op_type: str, where: str, spot: Any = None) -> Hit:
    """Return the hit of a rule at a line, and in the running module if the scope has modules."""
    binding: Binding = scope._bindings[key]
    if scope._modules is None:
        return binding.by_line.get(where) or binding.hit_at(where)  # (`get` saves a call)
    return binding.hit_in(path_here(scope, spot), op_type, where)

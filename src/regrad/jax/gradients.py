"""A rule that was put on an operation of a JAX program, as a gradient of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from regrad.core.foreign import ForeignCall, ForeignRule
from regrad.core.reports import Hit
from regrad.core.tensor import Tensor, wrap
from regrad.errors import GradientError
from regrad.jax.bridge import bridge, conjugate
from regrad.jax.primitives import Arrays, EquationGradient, WrappedGradient, fit, is_float
from regrad.transforms.closures import names_in


class RuleGradient(EquationGradient):
    """The gradient of one operation under a rule of ours.

    `places` says for each operand which input of the op it is, or which attribute (by name), or
    None for neither; `fixed` are operands that are constants of the program, by place.
    """

    def __init__(
        self, rule: ForeignRule, hit: Hit, avals: Arrays, outs: Arrays,
        places: Sequence[int | str | None], fixed: dict[int, Any], attrs: dict[str, Any],
    ) -> None:  # fmt: skip
        self.rule = rule
        self.hit = hit
        self.name: str = f"the rule {rule.name!r} for {hit.op_type!r} ({hit.where})"
        self.avals = avals
        self.outs = outs
        self.places = places
        self.fixed = fixed
        self.known = attrs
        self.operand: dict[int | str, int] = {p: i for i, p in enumerate(places) if p is not None}

    def keeps(self, wanted: Sequence[int]) -> tuple[Sequence[int], bool]:
        inputs, output = self.rule.keeps(self._inputs(wanted))
        named = [i for i, p in enumerate(self.places) if isinstance(p, str) or p in inputs]
        return named, output

    def _inputs(self, wanted: Sequence[int]) -> list[int]:
        return [p for p in (self.places[i] for i in wanted) if isinstance(p, int)]

    def allow(self, wanted: Sequence[int]) -> None:
        for i in wanted:
            if not isinstance(self.places[i], int):
                what = self.places[i] or "a value that the function closes over"
                raise GradientError(
                    f"{self.name} returns no gradient by {what}, which is being differentiated. "
                    "Pass it as an argument, or use jax.lax.stop_gradient on it."
                )

    def pull(self, xs: Arrays, ys: Arrays | None, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        self.hit.ran += 1
        return self.answer(xs, ys, dys, wanted)

    def answer(self, xs: Arrays, ys: Arrays | None, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        """Return the gradients by the rule, uncounted."""
        call, given, y, dy = self._call(xs, ys, [*map(conjugate, dys)])
        inputs, rule = self._inputs(wanted), self.rule
        if rule.plain is None and rule.named is None:
            rule.named = names_in(rule.functions)
        by_regrad = partial(self._by_regrad, call, given, y, dy, inputs)
        dxs = call.pull_either(given, y, dy, inputs, by_regrad)
        pairs = zip(wanted, dxs, strict=True)
        return [fit(conjugate(dx), self.avals[i]) for i, dx in pairs]

    def _call(
        self, xs: Sequence[Any], ys: Sequence[Any] | None, dys: Sequence[Any]
    ) -> tuple[ForeignCall, Any, Any, Any]:
        count = len(self.rule.op.inputs)
        given, specs = [None] * count, [((), np.dtype("float32"))] * count
        for i, value in self.fixed.items():
            given[i], specs[i] = value, _spec(jax.typeof(value))
        attrs = dict(self.known)
        for p, i in self.operand.items():
            if isinstance(p, str):
                attrs[p] = xs[i]
            else:
                given[p], specs[p] = xs[i], _spec(self.avals[i])
        several = len(self.outs) > 1
        outputs = [*map(_spec, self.outs)] if several else None
        call = ForeignCall(self.rule, specs, attrs, None, outputs, self.hit)
        y = ys and (tuple(ys) if several else ys[0])
        return call, given, y, self._arriving_gradients(dys) if several else dys[0]

    def _arriving_gradients(self, dys: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients of all outputs; integers get zeros."""
        found = iter(dys)
        return tuple(
            next(found) if is_float(a) else jax.numpy.zeros(a.shape, a.dtype) for a in self.outs
        )

    def _by_regrad(
        self, call: ForeignCall, xs: Sequence[Any], y: Any, dy: Any, wanted: list[int]
    ) -> list[Any]:
        """The rule run on Tensors, and differentiated by regrad from there on."""
        leaves, structure = jax.tree_util.tree_flatten((list(xs), y, dy))  # (None is not a leaf)

        def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
            xs, y, dy = jax.tree_util.tree_unflatten(structure, tensors)
            dxs = call.pull(xs, y, dy, wanted)
            pairs = zip(wanted, dxs, strict=True)
            return [_zeros(call.specs[i]) if dx is None else dx for i, dx in pairs]

        return bridge(flat, [*map(jax.numpy.asarray, leaves)], self.name)


class ScaledGradient(WrappedGradient):
    """The gradient of an operation that computes what another one does, times known numbers."""

    def __init__(self, one: EquationGradient, scale: Any) -> None:
        super().__init__(one)
        self.scale = scale

    def pull(self, xs: Arrays, ys: Arrays | None, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        scale = jax.numpy.asarray(self.scale, dys[0].dtype)
        return self.one.pull(xs, ys and [ys[0] / scale], [dys[0] * scale], wanted)


class CountedGradient(EquationGradient):
    """The gradient of nothing but a note, behind an operation, that a gradient passes there."""

    def __init__(self, hit: Hit, avals: Sequence[Any]) -> None:
        self.hit = hit
        self.name: str = f"JAX's own derivative of {hit.op_type!r} ({hit.where})"
        self.avals = avals

    def keeps(self, wanted: Sequence[int]) -> tuple[Sequence[int], bool]:
        return (), False

    def pull(self, xs: Arrays, ys: Arrays | None, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        self.hit.ran += 1
        return [dys[i] for i in wanted]


def _zeros(spec: tuple[Any, Any]) -> Tensor:
    shape, dtype = spec
    return wrap(jax.numpy.zeros(shape, dtype))


def _spec(aval: Any) -> tuple[Any, Any]:
    return tuple(aval.shape), aval.dtype

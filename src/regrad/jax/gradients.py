"""A rule for an operation of a JAX program, as the operation's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from regrad.core.backends import is_traced
from regrad.core.call import Call, gradients, on_tensors
from regrad.core.containers import replaced
from regrad.core.foreign import ForeignRule
from regrad.core.reports import Hit
from regrad.core.tensor import Tensor, wrap
from regrad.errors import GradientError
from regrad.jax.bridge import bridge, conjugate
from regrad.jax.primitives import Arrays, EquationGradient, WrappedGradient, fit, is_float
from regrad.transforms.closures import Closure, names_in, reached


def closes_over(name: str) -> GradientError:
    """Return the error that a rule closes over an array whose gradient would be lost."""
    return GradientError(
        f"{name} closes over an array that JAX is differentiating, or that was made in a function "
        "that JAX has traced. Pass it to the rule as a parameter, rg.rules.learns(rule, "
        "name=array), or close over jax.lax.stop_gradient(array)."
    )


class RuleGradient(EquationGradient):
    """The gradient of one operation under a rule of regrad.

    `places` has for each operand its input of the op, its attribute (by name), or None for neither.
    `fixed` are operands that are constants of the program, by place. `equation` computes the
    operation itself, for a rule that takes `builtin` or `forward`.
    """

    equation: Equation | None = None

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
        self.once: bool = rule.once
        self.known = attrs
        self.operand: dict[int | str, int] = {p: i for i, p in enumerate(places) if p is not None}
        if rule.is_surrogate and any(map(is_traced, reached(Closure(*rule.functions)))):
            raise closes_over(self.name)

    def keeps(self, wanted: Sequence[int]) -> tuple[Sequence[int], bool]:
        inputs, output = self.rule.keeps(self._inputs(wanted))
        if self.rule.runs_op:
            return range(len(self.places)), output
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
        try:
            dxs = call.pull_either(given, y, dy, inputs, by_regrad)
        except jax.errors.UnexpectedTracerError as error:
            raise closes_over(self.name) from error
        pairs = zip(wanted, dxs, strict=True)
        return [fit(conjugate(dx), self.avals[i]) for i, dx in pairs]

    def _call(
        self, xs: Sequence[Any], ys: Sequence[Any] | None, dys: Sequence[Any]
    ) -> tuple[Call, Any, Any, Any]:
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
        own = self.equation and OwnEquation(self.equation, xs)
        call = Call(self.rule, specs, attrs, None, outputs, self.hit, own)
        y = ys and (tuple(ys) if several else ys[0])
        return call, given, y, self._arriving_gradients(dys) if several else dys[0]

    def _arriving_gradients(self, dys: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients of all outputs; integers get zeros."""
        found = iter(dys)
        return tuple(next(found) if is_float(a) else jnp.zeros(a.shape, a.dtype) for a in self.outs)

    def _by_regrad(
        self, call: Call, xs: Sequence[Any], y: Any, dy: Any, wanted: list[int]
    ) -> list[Any]:
        """Run the rule on Tensors; from there on, regrad differentiates it."""
        leaves, structure = jax.tree_util.tree_flatten((list(xs), y, dy))  # (None is not a leaf)

        def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
            xs, y, dy = jax.tree_util.tree_unflatten(structure, tensors)
            dxs = call.pull(xs, y, dy, wanted)
            pairs = zip(wanted, dxs, strict=True)
            return [_zeros(call.specs[i]) if dx is None else dx for i, dx in pairs]

        return bridge(flat, [*map(jnp.asarray, leaves)], self.name)


class Equation(NamedTuple):
    """An operation as a program of its operands, and of the constants among them."""

    program: core.ClosedJaxpr
    places: Sequence[int | str | None]  # as in `RuleGradient`, also for constants
    fixed: Sequence[Any]  # None for an operand
    scale: Any = None  # the factor between the equation and the op type

    def outputs(self, operands: Sequence[Any]) -> list[Any]:
        """Return the results in the form of the op type."""
        ys = core.jaxpr_as_fun(self.program)(*operands)
        return ys if self.scale is None else [y / jnp.asarray(self.scale, y.dtype) for y in ys]


def vjp(function: Any, xs: Sequence[Any], dys: Any) -> list[Any]:
    """Return the gradients of a function by its inputs, in regrad's convention; None for integers.

    Integers among its results have no gradients either; their dys are ignored. The dys may be a
    function of the results, if these are floats.
    """
    xs = [*map(jnp.asarray, xs)]
    floats = [i for i, x in enumerate(xs) if is_float(jax.typeof(x))]

    def moved(*inputs: Any) -> list[Any]:
        ys = function(replaced(xs, floats, inputs))
        reached[:] = [i for i, y in enumerate(ys) if is_float(jax.typeof(y))]
        return [ys[i] for i in reached]

    reached: list[int] = []
    ys, pull = jax.vjp(moved, *[xs[i] for i in floats])
    dys = dys(ys) if callable(dys) else dys
    pairs = zip([dys[i] for i in reached], ys, strict=True)
    dxs = pull([conjugate(jnp.asarray(0 * y if dy is None else dy, y.dtype)) for dy, y in pairs])
    return replaced([None] * len(xs), floats, map(conjugate, dxs))


class OwnEquation:
    """One run of an operation, and JAX's own gradient of it."""

    vjp: Any = staticmethod(vjp)

    def __init__(self, equation: Equation, xs: Sequence[Any]) -> None:
        rest = iter(xs)
        self.equation = equation
        self.operands: list[Any] = [next(rest) if c is None else c for c in equation.fixed]
        places = enumerate(equation.places)
        self.at: dict[int, int] = {p: i for i, p in places if isinstance(p, int)}

    def pull(self, xs: Sequence[Any], dys: Sequence[Any], only: int | None = None) -> Any:
        """Return JAX's gradients by the inputs of the op; None for integers."""
        given = [self.operands[i] if xs[p] is None else xs[p] for p, i in self.at.items()]
        return dict(zip(self.at, gradients(self._outputs, vjp, given, dys), strict=True))

    def values_at(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the results for other inputs."""
        held = [leaves[p] if p < len(leaves) else self.operands[i] for p, i in self.at.items()]
        return on_tensors(self._outputs, vjp, held)  # (a whole call keeps its parameters)

    def _outputs(self, inputs: Sequence[Any]) -> list[Any]:
        return self.equation.outputs(replaced(self.operands, [*self.at.values()], inputs))


class ScaledGradient(WrappedGradient):
    """The gradient of an operation that computes another one's result, times known numbers."""

    def __init__(self, one: EquationGradient, scale: Any) -> None:
        super().__init__(one)
        self.scale = scale

    def pull(self, xs: Arrays, ys: Arrays | None, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        scale = jnp.asarray(self.scale, dys[0].dtype)
        return self.one.pull(xs, ys and [ys[0] / scale], [dys[0] * scale], wanted)


class CountedGradient(EquationGradient):
    """The gradient of a note behind an operation, which counts the gradients that pass there."""

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
    return wrap(jnp.zeros(shape, dtype))


def _spec(aval: Any) -> tuple[Any, Any]:
    return tuple(aval.shape), aval.dtype

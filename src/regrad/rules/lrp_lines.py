"""A relevance rule for any op: its gradient, averaged between a reference and an input."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from regrad.core.backends import has_values
from regrad.core.containers import flatten
from regrad.core.dispatch import lift
from regrad.core.registry import Op, bind
from regrad.core.rule import MapRule, Rule
from regrad.core.signatures import helpful
from regrad.errors import ArgumentError, brief
from regrad.rules.lrp_maps import _check, _ones
from regrad.transforms.control_flow import while_loop

TOLERANCE = 1e-12  # of one op; relative to the differences of its outputs
MOST = 1000  # steps of an op; further steps are accepted as they are
LARGE = 1e30  # in place of the infinities of masks, whose difference is NaN
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


@helpful("mean_gradient")
def mean_gradient(points: int = 8) -> MeanGradient:
    """Return the rule of an op's own gradient, averaged from the reference to the input.

    The points lie on the straight line from the reference to the input; all inputs of the op that
    depend on the model's inputs move together. For any op with one result: norms, softmax, products
    of two values, quotients, gated activations. Batches are as in `rescale`, and the differences
    from the reference are conserved. For an elementwise op with one input the average is the slope
    of `rescale`, which is exact also at kinks.

    The line is divided into steps of Gauss-Legendre quadrature. A step is halved until the
    gradients conserve the difference of its ends to 1e-12 of the op's difference, or to the
    precision of the numbers. After 1000 steps, the rule accepts the remaining steps as they are,
    and `relevance` reports the difference as `missing`.

    Args:
        points: The number of points in a step; even. For products of two values (`Mul`, `MatMul`),
            2 points in one step are exact, because their gradient is linear along the line.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: `points` is not an even number of 2 or more.
        RuleError: (when the op runs) The op has several results, or an input or the result is not a
            batch of inputs and their references.

    Source: Sundararajan, Taly and Yan, "Axiomatic Attribution for Deep Networks" (2017), whose path
    is the same line, here for each op; Shrikumar et al. (2017), as for `rescale`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Mul": rg.rules.lrp.mean_gradient(2)}):
    ...     da, db = rg.grads(lambda a, b: a * b)([rg.tensor([5.0, 1.0]), rg.tensor([4.0, 2.0])])
    >>> (5 - 1) * da[0].item() + (4 - 2) * db[0].item(), 5 * 4 - 1 * 2
    (18.0, 18)
    """
    if not isinstance(points, int) or points < 2 or points % 2:
        raise ArgumentError(
            f"mean_gradient: expected an even number of points, got {brief(points)}"
        )
    return MeanGradient(points)


class MeanGradient(MapRule):
    """A rule that averages an op's gradient along a line; see `mean_gradient`."""

    __name__ = "mean_gradient"
    closes_over: tuple[str, ...] = ()
    asks: Sequence[str] = ()

    def __init__(self, points: int) -> None:
        self.points = points

    def bound_to(self, op: Op) -> Rule:
        """The rule for an op, of all its inputs."""

        def rule(dy: Any, y: Any, needs: Any, builtin: Any, *given: Any) -> Any:
            moves = [any(n) if isinstance(n, list | tuple) else bool(n) for n in needs]
            if sum(moves) > 1:  # (a parameter whose relevance is differentiated is not a batch)
                pairs = zip(moves, given[2:], strict=True)
                moves = [is_one and _has_batch_of(x, y) for is_one, x in pairs]
            if self.points == 2 and sum(moves) == 1:  # (linear in this input)
                return builtin(dy)
            _check(hasattr(y, "shape"), self.__name__, "an op with one result")
            dxs = iter(_Line(dy, y, moves, *given).gradients(self.points))
            found = [next(dxs) if moves_too else None for moves_too in moves]
            return found if len(found) > 1 else found[0]

        asked = ("dy", "y", "needs", "builtin", "forward", "vjp_", *[i.name for i in op.inputs])
        every = [inspect.Parameter(n, POSITIONAL) for n in asked]
        rule.__signature__ = inspect.Signature(every)  # pyright: ignore[reportFunctionMemberAccess]
        rule.__name__ = self.__name__
        return bind(rule, op, self.__name__)

    @property
    def identity(self) -> Any:
        return self.points

    def __repr__(self) -> str:
        return f"mean_gradient({self.points})"


def _has_batch_of(x: Any, y: Any) -> bool:
    """Return whether an input has the first axis of the result, or is a list."""
    return not hasattr(x, "shape") or tuple(x.shape)[:1] == tuple(y.shape)[:1]


class _Line:
    """The line from the references to the inputs of one call, in the two halves of its batch."""

    def __init__(
        self, dy: Any, y: Any, moves: Sequence[bool], forward: Any, vjp_: Any, *inputs: Any
    ) -> None:
        self.moves, self.forward, self.vjp_, self.inputs = moves, forward, vjp_, inputs
        moving = [x for x, is_one in zip(inputs, moves, strict=True) if is_one]
        self.leaves, self.rebuild = flatten(moving)
        shapes = {tuple(x.shape)[:1] for x in (y, *self.leaves)}
        fits = len(shapes) == 1 and len(y.shape) > 0 and len(y) % 2 == 0
        _check(
            fits, "mean_gradient", "a batch of inputs and their references, as relevance(…, "
            "reference=) makes, on the first axis of the result and of each input that moves",
        )  # fmt: skip
        self.pairs: list[Any] = [_pair(x.clip(-LARGE, LARGE)) for x in self.leaves]
        self.runs: list[Any] = [x[0] - x[1] for x in self.pairs]
        self.ends: Any = _pair(y)
        self.arrived: Any = _pair(dy)[0]  # (the gradient of references is not read)
        self.seed: Any = (_ones(self.ends) * self.arrived).reshape(dy.shape)
        self.eps: float = 2.0 ** {8: -52, 4: -23}.get(y.dtype.itemsize, -8)

    def at(self, first: Any, second: Any) -> list[Any]:
        """Return the inputs at two points, one in each half of the batch."""
        found = [
            x[1] + (second * run + (first - second) * (x - x[1]))
            for x, run in zip(self.pairs, self.runs, strict=True)
        ]
        return [v.reshape(x.shape) for v, x in zip(found, self.leaves, strict=True)]

    def op(self, points: Sequence[Any]) -> Any:
        """Return the op's result for other values of the inputs that move."""
        moving = iter(self.rebuild(list(points)))
        pairs = zip(self.inputs, self.moves, strict=True)
        return self.forward(*[next(moving) if is_one else x for x, is_one in pairs])

    def step(self, start: Any, width: Any, nodes: Any) -> tuple[list[Any], Any]:
        """Return the sum of the gradients in a step, and whether it conserves the difference."""
        low, high = _pair(self.op(self.at(start, start + width)))
        sums: list[Any] = [run * 0 for run in self.runs]
        for node, weight in nodes:  # (they are symmetric, and each half of the batch has one)
            points = self.at(start + width * node, start + width * (1 - node))
            dxs = map(_pair, self.vjp_(lambda xs: [self.op(xs)], points, [self.seed]))
            sums = [s + width * weight * (dx[0] + dx[1]) for s, dx in zip(sums, dxs, strict=True)]
        shares = [s * run for s, run in zip(sums, self.runs, strict=True)]
        gap = sum(map(_each, shares)) - _each(self.arrived * (high - low))
        bound = TOLERANCE * _each(abs(self.arrived * (self.ends[0] - self.ends[1])))
        noise = _each(abs(self.arrived) * (abs(low) + abs(high))) + sum(
            _each(abs(v)) for v in shares
        )
        return sums, (abs(gap) <= bound + 16 * self.eps * noise).all() | (gap != gap).any()

    def gradients(self, count: int) -> Any:
        """Return the average gradients by the inputs that move."""
        places, weights = (v[: count // 2] / 2 for v in np.polynomial.legendre.leggauss(count))
        nodes = [*zip((0.5 + places).tolist(), weights.tolist(), strict=True)]
        is_known = has_values(lift(self.ends)._data)

        def body(carry: Any) -> Any:
            start, width, steps, sums = carry
            found, fits = self.step(start, width, nodes)
            fits = bool(fits) if is_known else fits
            small = width < max(1e-10, 4 * self.eps) * start + 1e-15
            fits = 1 * (fits | small | (steps >= MOST))
            start = start + fits * width
            sums = [s + fits * v for s, v in zip(sums, found, strict=True)]
            width, rest = (0.25 + 3.75 * fits) * width, 1 - start
            is_less = 1 * (width < rest)
            return start, is_less * width + (1 - is_less) * rest, steps + 1, sums

        def goes_on(carry: Any) -> Any:
            return carry[0] < 1 - 4 * min(self.eps, 1e-7)

        sums = [run * 0 for run in self.runs]
        if is_known:
            carry = 0.0, 1.0, 0.0, sums
            while goes_on(carry):
                carry = body(carry)
        else:
            zero = lift(self.ends * 0).sum()
            carry = while_loop(goes_on, body, (zero, zero + 1, zero, [*map(lift, sums)]))
        both = [x * 0 + s for x, s in zip(self.pairs, carry[-1], strict=True)]
        return self.rebuild([v.reshape(x.shape) for v, x in zip(both, self.leaves, strict=True)])


def _pair(v: Any) -> Any:
    """Return a batch as an array of the inputs and the references."""
    return v.reshape((2, len(v) // 2, *v.shape[1:]))


def _each(v: Any) -> Any:
    """Return the sum of each example."""
    return v.reshape((len(v), -1)).sum(-1)

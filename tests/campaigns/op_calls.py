"""An op called as the samples call it, under a rule whose answer NumPy knows.

The rule gives `(3x + 7) * sum(dy)` for every float input x. The results are weighed by fixed
numbers, so that the gradient, the second derivative, the Jacobian and the tangent are known.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import regrad as rg
from regrad.core.state import masked
from regrad.errors import RegradError
from tests.helpers import sample_runs as runs

Function = Callable[..., Any]
Arrays = list[np.ndarray]


def sentinel(op: Any, *dys: Any) -> Any:
    """`(3x + 7) * sum(dy)` for each float input: linear in dy, and nobody's own rule."""
    total = functools.reduce(rg.add, [rg.sum(dy) for dy in dys if dy is not None])
    xs = [rg.asarray(x) for x in op.inputs]  # (a graph shows TensorFlow's view of them)
    found = [(3 * x + 7) * cast(total, x.dtype) if is_float(x) else None for x in xs]
    return found[0] if len(found) == 1 else found


def cast(total: Any, dtype: Any) -> Any:
    real = total.dtype.kind == "c" and np.dtype(dtype).kind == "f"
    return rg.astype(rg.real(total) if real else total, dtype)


def is_float(x: Any) -> bool:
    return x.dtype.kind in "fc"


def in_force(op_type: str, **others: Any) -> Any:
    return rg.gradient_override_map({**others, op_type: sentinel})


def lost(op: Any, *dys: Any) -> None:
    """A rule for what a region does for itself, in which no override may have a say."""


@dataclass
class Call:
    """One op, called once, directly on what is differentiated."""

    op_type: str
    arrays: Arrays
    attrs: dict[str, Any]
    ys: Arrays = field(default_factory=list)

    @property
    def places(self) -> list[int]:
        return [i for i, a in enumerate(self.arrays) if is_float(a)]

    @property
    def xs(self) -> Arrays:
        return [self.arrays[i] for i in self.places]

    @property
    def is_real(self) -> bool:
        return all(a.dtype.kind != "c" for a in [*self.xs, *self.ys])

    def apply(self, *floats: Any) -> list[Any]:
        """The results of the op, its float inputs given."""
        given = dict(zip(self.places, floats, strict=True))
        leaves = [given.get(i, rg.asarray(a)) for i, a in enumerate(self.arrays)]
        return runs.outputs(rg.find_op(self.op_type).function(*self.grouped(leaves), **self.attrs))

    def grouped(self, leaves: list[Any]) -> list[Any]:
        """Leaves by parameter: a sequence takes what the others leave, an optional one may lack."""
        inputs = rg.find_op(self.op_type).inputs
        spare = len(leaves) - sum(i.kind == "one" for i in inputs)
        rest, found = iter(leaves), []
        for each in inputs:
            if each.kind == "many":
                found.append([next(rest) for _ in range(spare)])
            elif each.kind == "optional" and spare <= 0:
                found.append(None)
            else:
                spare -= each.kind == "optional"
                found.append(next(rest))
        return found

    def f(self, *floats: Any) -> Any:
        """A scalar: the results, weighed. Only the op itself is under the rule."""
        ys = self.apply(*floats)
        with masked():
            return weighed(ys)

    @property
    def arrives(self) -> complex:
        """The sum of the gradients that reach the op."""
        return sum(complex((weights(y) * slope(y)).sum()) for y in self.ys)

    def slopes(self, xs: Arrays) -> Arrays:
        """The rule's answer."""
        return [((3 * x + 7) * fit(self.arrives, x)).astype(x.dtype) for x in xs]

    def second(self) -> Arrays:
        """The gradients of a weighed sum of the rule's answers."""
        s = self.arrives
        return [
            (weights(x) * slope(x) * 3 * np.conj(fit(s, x)) * np.ones_like(x)).astype(x.dtype)
            for x in self.xs
        ]


def fit(total: complex, x: np.ndarray) -> Any:
    return total if x.dtype.kind == "c" else total.real


def weights(y: np.ndarray) -> np.ndarray:
    return 2 + np.cos(np.arange(y.size, dtype=np.float64)).reshape(y.shape)


def slope(y: np.ndarray) -> complex:
    """What arrives at a complex result whose real part counts 0.7 and its imaginary part 0.3."""
    return 0.7 + 0.3j if y.dtype.kind == "c" else 1.0


def weighed(ys: Sequence[Any]) -> Any:
    """A scalar of float64 of all results, bools and integers included."""
    total = rg.asarray(np.float64(0.0))
    for y in ys:
        parts = [(rg.real(y), 0.7), (rg.imag(y), 0.3)] if y.dtype.kind == "c" else [(y, 1.0)]
        for part, factor in parts:
            w = rg.asarray(factor * weights(np.empty(y.shape)))
            total = total + rg.sum(rg.astype(part, np.float64) * w)
    return total


@functools.cache
def call_of(op_type: str) -> Call | None:
    """A call of an op type as the table of samples has it; None if no float input leads there."""
    rows = sorted(runs.ROWS, key=lambda r: -r.order)
    covering = (row for row in rows if op_type in {rg.find_op(t).type for t in row.covers})
    return next(filter(None, (caught(op_type, row) for row in covering)), None)


def covered() -> set[str]:
    """The op types that the samples have."""
    return {rg.find_op(t).type for row in runs.ROWS for t in row.covers}


def op_types() -> list[str]:
    """Those among them that the samples call with a float input."""
    return sorted(t for t in covered() if call_of(t))


class Caught(Exception):
    """The inputs and attributes of an op, brought by a rule that runs."""


def finite(array: np.ndarray) -> np.ndarray:
    """Without infinities, of which a gradient of zero along a second path would make NaN."""
    return np.nan_to_num(array, nan=2.0, posinf=3.0, neginf=-3.0) if is_float(array) else array


def caught(op_type: str, row: Any) -> Call | None:
    """How a sample calls an op type; None if no float input leads there."""
    arrays = runs.inputs_of(row, "numpy")
    places = [i for i, a in enumerate(arrays) if is_float(a)]

    def spy(op: Any, *dys: Any) -> Any:
        attrs = {n: op.get_attr(n) for n in rg.find_op(op_type).attrs}
        raise Caught([finite(np.asarray(x._values())) for x in op.inputs], attrs)

    def scalar(*floats: Any) -> Any:
        leaves = [rg.asarray(a) for a in arrays]
        for i, x in zip(places, floats, strict=True):
            leaves[i] = x
        with rg.gradient_override_map({op_type: spy}):
            ys = runs.outputs(row.f(*leaves))
        return weighed(ys)

    try:
        rg.grads(scalar)([arrays[i] for i in places])
    except Caught as what:
        call = Call(op_type, *what.args)
        call.ys = [np.asarray(y._values()) for y in call.apply(*map(rg.asarray, call.xs))]
        return call if call.xs and all(x.size for x in call.xs) and call.arrives else None
    except RegradError:
        pass
    return None

"""Every sample through graph mode: with static shapes, with sizes hidden, with the rank hidden.

What a graph computes is what eager NumPy computes: values, gradients, second derivatives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import UnknownShapeError
from tests import test_ops as eager
from tests.samples import Sample

pytestmark = pytest.mark.usefixtures("graph")

SHAPES = {  # how much of an input's shape the graph is told
    "static": lambda array: list(array.shape),
    "sizes hidden": lambda array: [None] * array.ndim,
    "rank hidden": lambda array: None,
}

# Samples that need to know what is hidden, and why. Each raises an UnknownShapeError.
COUNTED = "the length of the axis says how many tensors there are"
UNSTACKED = {
    "array: unstack": COUNTED,
    "array: unstack the last axis": COUNTED,
    "array: unstack, one part used": COUNTED,
    "array: unstack of complex numbers": COUNTED,
}
NEEDS: dict[str, dict[str, str]] = {
    "static": {},
    "sizes hidden": UNSTACKED,
    "rank hidden": UNSTACKED,
}


def over(rows: list[Sample]) -> Any:
    chosen = [(row, hidden) for hidden in SHAPES for row in rows if str(row) not in NEEDS[hidden]]
    return pytest.mark.parametrize(("row", "hidden"), chosen, ids=str)


class Built:
    """A sample as a graph, and the arrays to feed."""

    def __init__(self, row: Sample, hidden: str) -> None:
        self.arrays = eager.given(row, "numpy")
        self.xs = [tf.placeholder(a.dtype, SHAPES[hidden](a)) for a in self.arrays]
        self.feed = dict(zip(self.xs, self.arrays, strict=True))
        self.ys = eager.outputs(row.f(*[rg.asarray(x) for x in self.xs]))

    def run(self, tensors: list[Any]) -> list[np.ndarray]:
        with tf.Session() as session:
            return [np.asarray(y) for y in session.run(list(tensors), self.feed)]

    def gradients(self, values: list[Any], order: int) -> list[np.ndarray]:
        """As `test_ops.gradients`: `values` are what `ys` are when they run."""
        floats = [x for x, a in zip(self.xs, self.arrays, strict=True) if eager.is_float(a)]
        ys, kept = self.ys, values
        for _ in range(order):
            parts, weights = weighed(ys, kept)
            ys = tf.gradients(parts, floats, grad_ys=weights, unconnected_gradients="zero")
            kept = [a for a in self.arrays if eager.is_float(a)]
        return self.run(ys)


def weighed(ys: list[Any], values: list[Any]) -> tuple[list[Any], list[np.ndarray]]:
    """The real parts of the outputs, and the weights that `test_ops.weighed` gives them."""
    parts, weights = [], []
    for y, value in zip(ys, values, strict=True):
        if value.dtype.kind == "f":
            parts.append(y)
            weights.append(np.cos(np.arange(value.size, dtype=value.dtype)).reshape(value.shape))
        elif value.dtype.kind == "c":
            real = value.real.dtype
            parts += [rg.real(y), rg.imag(y)]
            weights += [np.full(value.shape, 0.7, real), np.full(value.shape, 0.3, real)]
    return parts, weights


def eager_values(row: Sample) -> list[np.ndarray]:
    return eager.numbers(row.f(*[rg.asarray(a) for a in eager.given(row, "numpy")]))


@over(eager.ROWS)
def test_values_are_those_of_eager_mode(row: Sample, hidden: str) -> None:
    built, due = Built(row, hidden), eager_values(row)
    assert len(built.ys) == len(due)
    for y, got, expected in zip(built.ys, built.run(built.ys), due, strict=True):
        assert isinstance(y, rg.Tensor)
        assert got.shape == expected.shape
        assert y.dtype == got.dtype == expected.dtype
        assert tf.convert_to_tensor(y).shape.is_compatible_with(expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@over([row for row in eager.ROWS if row.order])
def test_gradients_are_those_of_eager_mode(row: Sample, hidden: str) -> None:
    built, values = Built(row, hidden), eager_values(row)
    for order in range(1, min(row.order, 2) + 1):
        due = eager.gradients(row, eager.given(row, "numpy"), order)
        got = built.gradients(values, order)
        for a, b in zip(got, due, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7 * (1 + np.abs(b).max(initial=0)))


@pytest.mark.parametrize(
    ("row", "hidden"),
    [(r, hidden) for hidden, names in NEEDS.items() for r in eager.ROWS if str(r) in names],
    ids=str,
)
def test_what_must_be_known_is_asked_for(row: Sample, hidden: str) -> None:
    with pytest.raises(UnknownShapeError, match="run"):
        built = Built(row, hidden)
        if row.order:
            built.gradients(eager_values(row), min(row.order, 2))


def test_every_exception_is_a_sample() -> None:
    known = {str(row) for row in eager.ROWS}
    assert [name for names in NEEDS.values() for name in names if name not in known] == []


# -- rules in force for ops whose results are integers or bools -----------------------------------


def threes(op: Any, *dys: Any) -> list[Any]:
    """A rule for any op: 3 by each of the floats that go in."""
    xs = [rg.asarray(x) for x in op.inputs]
    return [rg.full_like(x, 3.0) if x.dtype.kind in "fc" else None for x in xs]


def overridden(op_type: str, row: Sample, xs: list[Any]) -> tuple[list[Any], Any]:
    """The results of a sample under that rule, and the sum of their elements and of the inputs."""
    with rg.gradient_override_map({op_type: threes}):
        ys = eager.outputs(row.f(*xs))
    floats = [x for x in xs if x.dtype.kind in "fc"]
    return ys, sum(rg.sum(rg.astype(rg.real(t), rg.float64)) for t in (*ys, *floats))


def gives_integers(row: Sample, op_type: str) -> bool:
    if not any(map(eager.is_float, row.inputs)):
        return False
    ys, _ = overridden(op_type, row, [rg.asarray(a) for a in eager.given(row, "numpy")])
    return any(y.dtype.kind in "biu" for y in ys)


WHOLE = [(row, t) for row in eager.ROWS for t in row.covers if gives_integers(row, t)]


def test_there_are_samples_of_such_ops() -> None:
    assert len({op_type for _, op_type in WHOLE}) > 20


@pytest.mark.parametrize("by", ["tf.gradients", "a tape"])
@pytest.mark.parametrize("hidden", SHAPES)
@pytest.mark.parametrize(("row", "op_type"), WHOLE, ids=str)
def test_a_rule_for_an_op_of_integers_fires(
    row: Sample, op_type: str, hidden: str, by: str
) -> None:
    arrays = eager.given(row, "numpy")
    places = [i for i, a in enumerate(arrays) if eager.is_float(a)]
    xs = [tf.placeholder(arrays[i].dtype, SHAPES[hidden](arrays[i])) for i in places]

    def f(*floats: Any) -> Any:
        given = [rg.asarray(a) for a in arrays]
        for i, x in zip(places, floats, strict=True):
            given[i] = rg.asarray(x)
        return overridden(op_type, row, given)[1]

    found = tf.gradients(f(*xs), xs) if by == "tf.gradients" else rg.grads(f)(xs)
    with tf.Session() as session:
        slopes = session.run(found, {x: arrays[i] for x, i in zip(xs, places, strict=True)})
    for i, slope in zip(places, slopes, strict=True):  # 3 by the rule, and 1 by the sum of x
        np.testing.assert_array_equal(slope, np.full(arrays[i].shape, 4.0))

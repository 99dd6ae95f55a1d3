"""The errors and surprises that were recorded from TensorFlow.js, and regrad's answers.

The numbers are those of the recorded cases. docs/tfjs_differences.md lists where regrad
answers what TensorFlow.js refuses or gets wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, DTypeError, GradientError, RuleError, ShapeError
from regrad.state import current
from tests.helpers.tfjs_cases import near

# -- errors that TensorFlow.js raises, and regrad with it ----------------------------------------


def square(x: Any) -> Any:
    return x.square()


def custom(*answer: Any) -> Callable[..., Any]:
    return rg.custom_grad(lambda x: (x.square(), *answer))


V1, V2 = rg.tensor1d([1]), rg.tensor1d([2, 3])
INT2 = rg.tensor1d([1, 2], dtype="int32")
ERRORS = [  # the case in oracle order: what was called, our error, its words
    ("001", lambda: rg.grad(3), ArgumentError, r"f passed in grad\(f\) must be a function"),
    ("002", lambda: rg.grads(None), ArgumentError, r"f passed in grads\(f\) must be a function"),
    ("003", lambda: rg.value_and_grad("a"), ArgumentError, "must be a function"),
    ("004", lambda: rg.value_and_grads({}), ArgumentError, "must be a function"),
    ("005", lambda: rg.variable_grads(5), ArgumentError, "must be a function"),
    ("006", lambda: rg.custom_grad(3), ArgumentError, "must be a function"),
    ("011", lambda: rg.grads(square)(V1), ArgumentError, "args must be a list"),
    ("017", lambda: rg.value_and_grads(square)(V1), ArgumentError, "args must be a list"),
    ("020", lambda: rg.grad(square)(V2, [1, 2, 3]), ShapeError, r"dy must.*\(2,\), got \(3,\)"),
    ("024", lambda: rg.grad(square)(V2, INT2), DTypeError, "dy must be of floats"),
    ("026", lambda: rg.value_and_grad(square)(V2, INT2), DTypeError, "dy must be of floats"),
    ("027", lambda: rg.grad(lambda x: 3)(V1), ArgumentError, "must return a Tensor, got int"),
    ("028", lambda: rg.grad(lambda x: None)(V1), ArgumentError, "return statement"),
    ("029", lambda: rg.grad(lambda x: [x.square()])(V1), ArgumentError, "got list"),
    (
        "034",
        lambda: rg.value_and_grads(lambda a, b: a.square())([V1, V2]),
        GradientError,
        r"by args\[1\]: no path",
    ),
    ("035", lambda: rg.grads(lambda a, b: rg.scalar(3))([V1, V2]), GradientError, "no path"),
    ("040", lambda: rg.grad(lambda x: x.greater(0))(V1), GradientError, "returned bool"),
    ("041", lambda: rg.grad(lambda x: x < 0)(V1), GradientError, "returned bool"),
    ("042", lambda: rg.grad(lambda x: x == 0)(V1), GradientError, "returned bool"),
    ("043", lambda: rg.grad(lambda x: x != 0)(V1), GradientError, "returned bool"),
    ("044", lambda: rg.grad(lambda x: x <= 0)(V1), GradientError, "returned bool"),
    ("081", lambda: custom(3)(V1), ArgumentError, "its grad_func is int"),
    ("082", lambda: custom()(V1), ArgumentError, "must return"),
    (
        "089",
        lambda: rg.grad(custom(lambda dy: rg.astype(dy, rg.int32)))(V1),
        RuleError,
        "dtype int32, expected float32",
    ),
    (
        "096",
        lambda: rg.variable_grads(lambda: FROZEN.square(), [FROZEN]),
        GradientError,
        "none of the 1",
    ),
    ("101", lambda: rg.variable_grads(lambda: PAIR.square()), ShapeError, "scalar.*rank 1"),
    ("105", lambda: rg.variable_grads(lambda: rg.scalar(1.0), [PAIR]), GradientError, "no path"),
    ("107", lambda: rg.variable_grads(lambda: PAIR.sum() > 1), GradientError, "returned bool"),
    ("113", lambda: rg.tensor([1, 2, 3], [2, 2]), ShapeError, "4 values, but 3"),
    ("114", lambda: rg.tensor([[1, 2], [3, 4]], [4, 1]), ShapeError, r"\(2, 2\).*\(4, 1\)"),
    ("116", lambda: rg.scalar([1]), ArgumentError, "a single number or bool"),
    ("122", lambda: rg.matmul(rg.ones((2, 3)), rg.ones((2, 3))), Exception, "MatMul|matmul"),
    ("123", lambda: rg.reshape(V2, [3]), ShapeError, "2 elements"),
    ("127", lambda: rg.concat([rg.ones((2, 2)), rg.ones((3, 3))], axis=0), ShapeError, "concat"),
    (
        "134",
        lambda: rg.losses.mean_squared_error(rg.ones(2), rg.ones(3)),
        ShapeError,
        "mean_squared_error",
    ),
    ("quirk 041", lambda: rg.tensor([[1, 2], [3]]), ShapeError, "unequal rows"),
]
FROZEN = rg.Variable(2.0, trainable=False)
PAIR = rg.Variable([1.0, 2.0])


@pytest.mark.parametrize(("case", "call", "error", "words"), ERRORS, ids=[e[0] for e in ERRORS])
def test_errors(case, call, error, words):
    with pytest.raises(error, match=words):
        call()
    assert current() is None


def test_exceptions_of_f_propagate_unchanged():
    class Boom(Exception):
        pass

    def f(x):
        raise Boom("boom")

    with pytest.raises(Boom, match="boom"):
        rg.grad(f)(V1)


# -- where TensorFlow.js raises or is wrong, and regrad answers ----------------------------------


def scaled_power(x, n, save):
    return x.pow(n), lambda dy: dy * x.square() * 10


MATRIX = rg.tensor([[1, 2, 3], [4, 5, 6]])
ANSWERS = [
    ("014 value_and_grad takes lists", lambda: rg.value_and_grad(square)([1.0])[1], [2]),
    ("016 value_and_grads takes lists", lambda: rg.value_and_grads(square)([[1.0]])[1][0], [2]),
    (
        "009 grad takes containers",
        lambda: rg.grad(lambda x: x["a"].square())({"a": V2})["a"],
        [4, 6],
    ),
    (
        "046 strided slices have gradients",
        lambda: rg.grad(lambda x: x[::2].square().sum())(rg.tensor1d([1, 2, 3])),
        [2, 0, 6],
    ),
    (
        "049 top_k has a gradient",
        lambda: rg.grad(lambda x: rg.top_k(x, 1)[0].sum())(V2),
        [0, 1],
    ),
    (
        "050 scatter_nd has a gradient",
        lambda: rg.grad(lambda x: rg.scatter_nd([[0], [1]], x.square(), (3,)).sum())(V2),
        [4, 6],
    ),
    (
        "057 maximum broadcasts",
        lambda: rg.grads(lambda a, b: rg.maximum(a, b))([V2, rg.scalar(2.5)])[1],
        1,
    ),
    (
        "059 squared_difference broadcasts",
        lambda: rg.grads(lambda a, b: rg.squared_difference(a, b))([V2, rg.scalar(1.5)])[1],
        -4,
    ),
    (
        "061 cumulative_sum along any axis",
        lambda: rg.grad(lambda x: rg.cumulative_sum(x, axis=0))(MATRIX),
        [[2, 2, 2], [1, 1, 1]],
    ),
    (
        "062 prod along a negative axis",
        lambda: rg.grad(lambda x: rg.prod(x, axis=-1))(rg.tensor1d([1, 2, 3])),
        [6, 3, 2],
    ),
    (
        "069 second order of tanh",
        lambda: rg.grad(rg.grad(rg.tanh))(rg.tensor1d([1, 2])),
        -2 * np.tanh([1, 2]) / np.cosh([1, 2]) ** 2,
    ),
    (
        "070 second order of softmax",
        lambda: rg.grad(rg.grad(lambda x: rg.nn.softmax(x)[0]))(rg.tensor1d([0, 0])),
        [0, 0],
    ),
    (
        "second order of x exp(x)",
        lambda: rg.grad(rg.grad(lambda x: x * rg.exp(x)))(rg.scalar(1.0)),
        3 * np.e,
    ),
    (
        "079 custom_grad passes on what is no tensor",
        lambda: rg.grad(lambda x: rg.custom_grad(scaled_power)(x, 3))(V2),
        [40, 90],
    ),
    (
        "087 None from grad_func is no gradient",
        lambda: rg.grad(custom(lambda dy: None))(V2),
        [0, 0],
    ),
    (
        "125 softmax along any axis",
        lambda: rg.nn.softmax(rg.ones((2, 2)), axis=0),
        np.full((2, 2), 0.5),
    ),
    ("129 sqrt of integers", lambda: rg.sqrt(rg.tensor([4], dtype="int32")), [2]),
    ("130 sigmoid of integers", lambda: rg.nn.sigmoid(rg.tensor([0], dtype="int32")), [0.5]),
    (
        "quirk 002 partial derivatives, though one tensor",
        lambda: rg.grads(lambda a, b: a * b)([V2, V2])[0],
        [2, 3],
    ),
    (
        "quirk 004 custom_grad that returns its input",
        lambda: rg.grad(rg.custom_grad(lambda x: (x, lambda dy: dy * 7)))(V2),
        [7, 7],
    ),
    (
        "quirk 012 second order of sigmoid_cross_entropy",
        lambda: rg.grad(
            rg.grad(lambda x: rg.losses.sigmoid_cross_entropy([0.0, 1.0, 0.0], x, reduction="sum"))
        )(rg.tensor1d([0, 0, 0])),
        [0.25, 0.25, 0.25],
    ),
    (
        "quirk 013 cumulative_sum of a square matrix",
        lambda: rg.grad(
            lambda x: (rg.cumulative_sum(x, axis=0) * rg.tensor([[1, 10], [100, 1000]])).sum()
        )(rg.ones((2, 2))),
        [[101, 1010], [100, 1000]],
    ),
    (
        "quirk 014 reflecting pad",
        lambda: rg.grad(lambda x: rg.pad(x, [(1, 1)], mode="reflect"))(rg.tensor1d([1, 2, 3])),
        [1, 3, 1],
    ),
    (
        "quirk 015 average pooling with same padding",
        lambda: rg.grad(lambda x: rg.nn.avg_pool(x, 2, 1, "same"))(rg.ones((1, 2, 2, 1))),
        np.reshape([0.25, 0.75, 0.75, 2.25], (1, 2, 2, 1)),
    ),
    ("quirk 018 a list for dy", lambda: rg.grad(square)(V2, [10, 100]), [40, 600]),
    (
        "quirk 023 unused ops",
        lambda: rg.grads(lambda a, b: (a.square(), a * b)[1])([V1, rg.tensor1d([3])])[0],
        [3],
    ),
    ("quirk 031 integers and a Python float", lambda: INT2 + 1.0, [2, 3]),
    ("quirk 033 integers divide as numbers", lambda: INT2 / INT2 * 1.5, [1.5, 1.5]),
]  # fmt: skip


@pytest.mark.parametrize(("case", "call", "due"), ANSWERS, ids=[a[0] for a in ANSWERS])
def test_answers(case, call, due):
    near(call(), due)


def test_saving_twice_keeps_the_last():  # quirk 005
    @rg.custom_grad
    def op(x, save):
        save([x])
        save([x * 2, x * 3])
        return x.square(), lambda dy, saved: dy * saved[0] * saved[1]

    near(rg.grad(op)(rg.tensor1d([1, 2])), [6, 24])


def test_a_gradient_for_an_input_that_the_value_does_not_use():  # quirk 009
    op = rg.custom_grad(lambda a, b: (a.square(), lambda dy: [dy, dy * 9]))
    near(rg.grads(op)([V2, V2])[1], [9, 9])


def test_an_intermediate_keeps_its_history():  # errors 077 and 092
    @rg.custom_grad
    def op(x, save):
        h = x.square()
        save([h])
        return h * x, lambda dy, saved: dy * saved[0] * 3

    near(rg.grad(rg.grad(op))(rg.tensor1d([-1, -2, 3])), [-6, -12, 18])


def test_grad_inside_a_custom_function():  # error 093
    op = rg.custom_grad(lambda x: (rg.grad(square)(x), lambda dy: dy))
    near(op(rg.tensor1d([2])), [4])
    near(rg.grad(op)(rg.tensor1d([2])), [1])


def test_where_masks_and_does_not_multiply():
    """TF.js multiplies dy by the mask, and NaN times 0 is NaN."""
    f = lambda x: rg.where(x > 0, x, rg.zeros_like(x))  # noqa: E731
    near(rg.grad(f)(rg.tensor1d([4, -1]), rg.tensor([1.0, np.nan])), [1, 0])


def test_a_singular_branch_that_is_not_selected():  # quirk 026: the same here
    with np.errstate(all="ignore"):
        f = lambda x: rg.where(x >= 0, rg.sqrt(x), rg.zeros_like(x))  # noqa: E731
        near(rg.grad(f)(rg.tensor1d([4, -1, 0])), [0.25, np.nan, np.inf])


def test_a_variable_named_twice_in_var_list():  # quirk 022
    v = rg.Variable([3.0, 4.0], name="a")
    value, grads = rg.variable_grads(lambda: v.square().sum(), [v, v])
    assert value.item() == 25.0
    near(grads["a"], [6, 8])

"""What TensorFlow.js documents of its gradient functions, and what its own tests check.

The examples of its API pages; `gradients_test`, `tape_test` and `variable_test` retold; and
the errors and the surprises that were recorded from it. Where regrad answers otherwise, the
test says so (docs/tfjs_differences.md has the list).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    MissingRuleError,
    RuleError,
    ShapeError,
)
from regrad.state import current


def near(got: Any, due: Any) -> None:
    np.testing.assert_allclose(got._values(), due, rtol=1e-5, atol=1e-6)


# -- the documentation's examples ----------------------------------------------------------------


def test_grad_documented():
    g = rg.grad(lambda x: x.square())
    near(g(rg.tensor1d([2, 3])), [4, 6])


def test_second_order_documented():
    gg = rg.grad(rg.grad(lambda x: x.pow(rg.scalar(3, "int32"))))
    near(gg(rg.tensor1d([2, 3])), [12, 18])


def test_grads_documented():
    g = rg.grads(lambda a, b: a.mul(b))
    da, db = g([rg.tensor1d([2, 3]), rg.tensor1d([-2, -3])])
    near(da, [-2, -3])
    near(db, [2, 3])


def test_custom_grad_documented(capsys):
    @rg.custom_grad
    def op(x, save):
        save([x])
        return {"value": x.square(), "grad_func": lambda dy, saved: [dy.mul(saved[0].abs())]}

    x = rg.tensor1d([-1, -2, 3])
    op(x).print()
    rg.grad(op)(x).print()
    assert capsys.readouterr().out == "Tensor\n    [1, 4, 9]\nTensor\n    [1, 2, 3]\n"


def test_value_and_grad_documented():
    value, dx = rg.value_and_grad(lambda x: x.square())(rg.tensor1d([2, 3]))
    near(value, [4, 9])
    near(dx, [4, 6])


def test_value_and_grads_documented():
    g = rg.value_and_grads(lambda a, b: a.mul(b))
    value, (da, db) = g([rg.tensor1d([2, 3]), rg.tensor1d([-2, -3])])
    near(value, [-4, -9])
    near(da, [-2, -3])
    near(db, [2, 3])


def test_variable_grads_documented():
    a, b = rg.Variable(rg.tensor1d([3, 4]), name="a"), rg.Variable(rg.tensor1d([5, 6]), name="b")
    x = rg.tensor1d([1, 2])
    value, grads = rg.variable_grads(lambda: a.mul(x.square()).add(b.mul(x)).sum())
    near(value, 36)
    assert list(grads) == ["a", "b"]
    near(grads["a"], [1, 4])
    near(grads["b"], [1, 2])


# -- gradients_test ------------------------------------------------------------------------------

A = [[-1.0, 2.0, -3.0], [10.0, -20.0, 30.0]]
B = [[2.0, -3.0], [4.0, -1.0], [2.0, -3.0]]
DA = [[-3.0, -1.0, -3.0], [0.0, 0.0, 0.0]]
DB = [[0.0, -1.0], [0.0, 2.0], [0.0, -3.0]]


def layer(a: rg.Tensor, b: rg.Tensor) -> rg.Tensor:
    return rg.nn.relu(rg.matmul(a, b)).sum()


def test_grads_of_matmul_relu_sum():
    da, db = rg.grads(layer)([rg.tensor(A), rg.tensor(B)])
    near(da, DA)
    near(db, DB)


def test_value_and_grads_of_matmul_relu_sum():
    value, (da, db) = rg.value_and_grads(layer)([rg.tensor(A), rg.tensor(B)])
    near(value, 10)
    near(da, DA)
    near(db, DB)


def test_one_gradient_function_serves_many_calls():
    g = rg.grad(lambda x: x.square())
    near(g(rg.tensor1d([0.1, 0.2])), [0.2, 0.4])
    near(g(rg.tensor1d([0.1, 0.4])), [0.2, 0.8])
    gs = rg.grads(lambda x: x.square())
    near(gs([rg.tensor1d([0.1, 0.2])])[0], [0.2, 0.4])
    near(gs([rg.tensor1d([0.1, 0.4])])[0], [0.2, 0.8])


def test_an_exception_in_the_forward_pass_leaves_the_tape_off():
    def f(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rg.grad(f)(rg.tensor1d([0.1, 0.2]))
    assert current() is None


def test_an_exception_in_the_backward_pass_leaves_the_tape_off():
    def fails(dy):
        raise ZeroDivisionError

    op = rg.custom_grad(lambda x, save: (x, fails))
    with pytest.raises(ZeroDivisionError):
        rg.grad(op)(rg.tensor1d([0.1, 0.2]))
    assert current() is None


def test_reshape_inside_f():
    exponents = rg.tensor1d([2, 2, 2, 2], dtype="int32")
    dx = rg.grad(lambda x: x.reshape((4,)).pow(exponents).sum())(rg.tensor([[1, 2], [3, 4]]))
    near(dx, [[2, 4], [6, 8]])


def test_reshape_outside_f_is_no_path():
    a = rg.tensor([[1, 2], [3, 4]])
    b = a.reshape((4,))
    with pytest.raises(GradientError, match=r"by args\[0\]"):
        rg.grads(lambda a, b: b.square().sum())([a, b])


def test_ops_without_a_gradient_beside_the_path():
    def f(x):
        rg.logical_and(x > 0, x > 1)
        return x.sum()

    near(rg.grad(f)(rg.tensor1d([1, 1])), [1, 1])


def test_ops_without_a_gradient_on_the_path():
    with pytest.raises(GradientError, match="bool"):
        rg.grad(lambda x: rg.logical_and(x > 0, x > 1))(rg.tensor1d([1, 1]))


def test_cast_inside_f_of_integers_is_refused_before_f_runs():
    x = rg.tensor([[1, 2], [3, 4]], dtype="int32")
    with pytest.raises(GradientError, match="Convert it first"):
        rg.grad(lambda x: rg.astype(x, rg.float32).square().sum())(x)
    near(rg.grad(lambda x: x.square().sum())(rg.astype(x, rg.float32)), [[2, 4], [6, 8]])


def test_cast_outside_f_is_no_path():
    a = rg.tensor([1.0, 2.0])
    b = rg.astype(a, rg.float64)
    with pytest.raises(GradientError, match="no path"):
        rg.grad(lambda x: b.square().sum())(a)


def test_saved_values_survive():
    x = rg.Variable(1.0, name="x")
    value, grads = rg.variable_grads(lambda: x.square().square())
    x.assign_sub(grads["x"] * 0.1)
    assert (value.item(), grads["x"].item()) == (1.0, 4.0)
    near(x.value, 0.6)


def test_second_order():
    near(rg.grad(rg.grad(lambda x: x.mul(x).mul(x)))(rg.tensor1d([0.1, 0.2])), [0.6, 1.2])
    near(rg.grad(rg.grad(lambda x: x.square()))(rg.scalar(3)), 2)


def test_grads_inside_grads():
    g = rg.grads(lambda x: rg.grads(lambda x: x.mul(x).mul(x))([x])[0])
    near(g([rg.tensor1d([0.1, 0.2])])[0], [0.6, 1.2])


def test_custom_grad_with_a_gradient_of_its_own():
    op = rg.custom_grad(lambda a: (a.pow(2), lambda dy: dy.mul(0.1)))
    value, da = rg.value_and_grad(op)(rg.scalar(3), rg.scalar(4))
    near(value, 9)
    near(da, 0.4)


def saving(a: Any, save: Any) -> Any:
    save([a])
    return {"value": a.pow(2), "grad_func": lambda dy, saved: dy.mul(saved[0])}


def test_custom_grad_second_order():
    near(rg.grad(rg.grad(rg.custom_grad(saving)))(rg.scalar(3), rg.scalar(5)), 5)


def test_custom_grad_evaluated_twice():
    g = rg.grad(rg.custom_grad(lambda x: (x.square(), lambda dy: dy.mul(x.abs()))))
    for _ in range(2):
        near(g(rg.tensor1d([-1, -2, 3])), [1, 2, 3])


# -- tape_test: which rules run, and what they see -----------------------------------------------


class Nodes:
    """Ops that add 1 to the gradient, and a list of those whose rule ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(self, name: str, *xs: Any) -> Any:
        def rule(dy: Any) -> Any:
            self.ran.append(name)
            return [dy + 1 for _ in xs]

        return rg.custom_grad(lambda *xs: (rg.add_n(list(xs)), rule))(*xs)


def test_a_node_of_another_tensor_is_left_out():
    node = Nodes()

    def f(x):
        node("0", x)
        return node("1", rg.scalar(2.0))

    with pytest.raises(GradientError, match="no path"):
        rg.grad(f)(rg.scalar(1.0))
    assert node.ran == []


def test_one_node():
    node = Nodes()
    near(rg.grad(lambda x: node("0", x))(rg.scalar(1.0)), 2)
    assert node.ran == ["0"]


def test_two_nodes_in_a_chain():
    node = Nodes()
    near(rg.grad(lambda x: node("1", node("0", x)))(rg.scalar(1.0)), 3)
    assert node.ran == ["1", "0"]


def test_both_inputs_of_a_node():
    node = Nodes()
    da, db = rg.grads(lambda a, b: node("0", a, b))([1.0, 2.0])
    near(da, 2)
    near(db, 2)


def test_three_inputs_in_two_nodes():
    node = Nodes()
    grads = rg.grads(lambda a, b, c: node("1", c, node("0", a, b)))([1.0, 2.0, 3.0])
    assert [g.item() for g in grads] == [3.0, 3.0, 2.0]


def test_an_orphan_does_not_run():
    node = Nodes()

    def f(x):
        node("orphan", x)
        return node("1", x)

    near(rg.grad(f)(rg.scalar(1.0)), 2)
    assert node.ran == ["1"]


def test_paths_that_meet_are_added():
    node = Nodes()
    dx = rg.grad(lambda x: node("y", node("m1", x), node("m2", x)))(rg.scalar(1.0))
    near(dx, 6)
    assert node.ran == ["y", "m2", "m1"]


def test_only_what_is_wanted_runs():
    """TF.js filters its tape; regrad does not even run the rule of an unwanted input."""
    ran = []

    @rg.op("DocumentedProduct")
    def product(xp: Any, a: rg.Tensor, b: rg.Tensor, /) -> rg.Tensor:
        return a * b

    rg.gradient("DocumentedProduct", "a")(lambda dy, b: (ran.append("a"), dy * b)[1])
    rg.gradient("DocumentedProduct", "b")(lambda dy, a: (ran.append("b"), dy * a)[1])
    near(rg.grad(lambda a: product(a, rg.scalar(3.0)))(rg.scalar(2.0)), 3)
    assert ran == ["a"]


def three(seen: list[Any]) -> Callable[..., Any]:
    """x of three elements → three scalars; the gradient stacks what arrives."""

    @rg.custom_grad
    def op(x):
        def rule(dys):
            seen.append([dy.item() for dy in dys])
            return rg.stack(list(dys))

        return tuple(rg.unstack(x)), rule

    return op


@pytest.mark.parametrize("place", [0, 1, 2])
def test_several_outputs_of_which_one_is_used(place):
    seen: list[Any] = []
    op = three(seen)
    dx = rg.grad(lambda x: op(x)[place])(rg.tensor1d([1, 2, 3]), rg.scalar(5))
    due = [5.0 if i == place else 0.0 for i in range(3)]
    assert seen == [due]
    near(dx, due)


def test_a_node_without_a_rule():
    @rg.op("DocumentedWithoutRule")
    def without_rule(xp: Any, x: rg.Tensor, /) -> rg.Tensor:
        return x + 1

    with pytest.raises(MissingRuleError, match="DocumentedWithoutRule"):
        rg.grad(without_rule)(rg.scalar(1.0))


# -- variable_test -------------------------------------------------------------------------------


def test_assign():
    v = rg.Variable(rg.tensor1d([1, 2, 3]))
    before = v.value
    v.assign(rg.tensor1d([4, 5, 6]))
    near(v.value, [4, 5, 6])
    near(before, [1, 2, 3])


def test_names():
    a, b = rg.Variable(1.0), rg.Variable(2.0)
    assert a.name
    assert b.name
    assert a.name != b.name
    assert rg.Variable(1.0, name="given").name == "given"
    assert rg.Variable(1.0, trainable=False).trainable is False


def test_ops_accept_variables():
    v = rg.Variable(rg.tensor1d([1, 2, 3]))
    near(rg.sum(v), 6)
    near(v.sum(), 6)
    near(rg.scalar(2) * v, [2, 4, 6])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (rg.tensor([1.0, 2.0]), ShapeError),
        (rg.tensor([[1.0, 2.0, 3.0]]), ShapeError),
        (rg.tensor([1, 2, 3], dtype="int32"), DTypeError),
        (rg.tensor([True, False, True]), DTypeError),
    ],
)
def test_assign_keeps_shape_and_dtype(value, error):
    with pytest.raises(error, match="assign to the variable"):
        rg.Variable(rg.tensor1d([1, 2, 3])).assign(value)


def test_a_variable_is_no_copy_of_a_variable():
    a = rg.Variable(rg.scalar(1.0))
    b = rg.Variable(a)
    a.assign(2.0)
    assert (a.value.item(), b.value.item()) == (2.0, 1.0)
    assert isinstance(a, rg.Variable)
    assert not isinstance(a.value, rg.Variable)


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

    with pytest.raises(Boom, match="^boom$"):
        rg.grad(f)(V1)


# -- where TensorFlow.js raises or is wrong, and regrad answers ----------------------------------

MATRIX = rg.tensor([[1, 2, 3], [4, 5, 6]])
ANSWERS = [
    ("014 value_and_grad takes lists", lambda: rg.value_and_grad(square)([1.0])[1], [2]),
    ("016 value_and_grads takes lists", lambda: rg.value_and_grads(square)([[1.0]])[1][0], [2]),
    ("009 grad takes containers", lambda: rg.grad(lambda x: x["a"].square())({"a": V2})["a"], [4, 6]),
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
        "079 custom_grad takes lists",
        lambda: custom(lambda dy: dy)([1.0, 2.0]),
        [1, 4],
    ),
    (
        "087 None from grad_func is no gradient",
        lambda: rg.grad(custom(lambda dy: None))(V2),
        [0, 0],
    ),
    ("125 softmax along any axis", lambda: rg.nn.softmax(rg.ones((2, 2)), axis=0), np.full((2, 2), 0.5)),
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


def test_the_unselected_branch_of_where():  # quirk 026: TF.js multiplies by a mask, which gives NaN
    f = lambda x: rg.where(x >= 0, x, rg.zeros_like(x))  # noqa: E731
    near(rg.grad(f)(rg.tensor1d([4, -1, 0])), [1, 0, 1])
    with np.errstate(all="ignore"):
        dx = rg.grad(lambda x: rg.where(x > 0, x, x * np.float32(np.nan)))(rg.tensor1d([4, 9]))
    near(dx, [1, 1])


def test_a_variable_named_twice_in_var_list():  # quirk 022
    v = rg.Variable([3.0, 4.0], name="a")
    value, grads = rg.variable_grads(lambda: v.square().sum(), [v, v])
    assert value.item() == 25.0
    near(grads["a"], [6, 8])

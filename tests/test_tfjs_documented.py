"""What TensorFlow.js documents of its gradient functions, and what its own tests check.

The examples of its API pages; `gradients_test`, `tape_test` and `variable_test` retold. Where
regrad answers otherwise, the test says so (docs/tfjs_differences.md has the list).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import regrad as rg
from regrad.errors import (
    DTypeError,
    GradientError,
    MissingRuleError,
    ShapeError,
)
from regrad.state import current
from tests.helpers.tfjs_cases import near

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

        return rg.custom_grad(lambda *xs, save: (rg.add_n(list(xs)), rule))(*xs)


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

"""Variables and variable_grads."""

import numpy as np
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import ArgumentError, DTypeError, GradientError, ShapeError
from tests.helpers.rows import plain, refused


def assigned(v, w):
    v.assign(v * v)
    return v * 2.0  # 2 v² of the old v


def assigned_first(v, w):
    v.assign(rg.scalar(5.0))
    return v * w


def assigned_late(v, w):
    y = v * v
    v.assign(100.0)
    return y


# Of v = 3 and w = 2: the gradients, by name, and the values afterwards.
VALUES = {
    "one used": (lambda v, w: v * 1 + rg.stop_gradient(w * 1), {"v": 1.0}, (3.0, 2.0)),
    "both, in order of creation": (lambda v, w: w * 2 + v, {"v": 1.0, "w": 2.0}, (3.0, 2.0)),
    "a Variable returned": (lambda v, w: v, {"v": 1.0}, (3.0, 2.0)),
    "used many times": (lambda v, w: v * v * v, {"v": 27.0}, (3.0, 2.0)),
    "read after an assignment": (assigned, {"v": 12.0}, (9.0, 2.0)),
    "assigned before the first read": (assigned_first, {"w": 5.0}, (5.0, 2.0)),
    "assigned after use": (assigned_late, {"v": 6.0}, (100.0, 2.0)),
    "nested": (lambda v, w: rg.variable_grads(lambda: v * v * w, [v]).grads["v"],
               {"v": 4.0, "w": 6.0}, (3.0, 2.0)),
    "a grad inside": (lambda v, w: rg.grad(lambda x: x * x * v)(w), {"v": 4.0, "w": 6.0},
                      (3.0, 2.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_gradients_by_variables(name):
    f, expected, after = VALUES[name]
    v, w = rg.Variable(3.0, name="v"), rg.Variable(2.0, name="w")
    found = plain(rg.variable_grads(lambda: f(v, w)).grads)
    assert (found, [*found]) == (expected, [*expected])
    assert (v.item(), w.item()) == after


def test_the_documented_example():
    a, b = rg.Variable([3.0, 4.0], name="a"), rg.Variable([5.0, 6.0], name="b")
    found = rg.variable_grads(lambda: (a * X.square() + b * X).sum())
    assert plain(found) == (36.0, {"a": [1.0, 4.0], "b": [1.0, 2.0]})


X = rg.tensor([1.0, 2.0])


def test_a_list_of_variables():
    a, b = rg.Variable(1.0, name="a"), rg.Variable(2.0, name="b")
    frozen = rg.Variable(3.0, trainable=False, name="frozen")
    f = lambda: a * b * frozen  # noqa: E731
    assert plain(rg.variable_grads(f, [a, frozen]).grads) == {"a": 6.0, "frozen": None}
    assert list(rg.variable_grads(f).grads) == ["a", "b"]


def test_variable_grads_inside_of_grad():
    v = rg.Variable(2.0, name="v")
    assert rg.grad(lambda x: rg.variable_grads(lambda: v * v * x).grads["v"])(5.0).item() == 4.0


def test_updates_do_not_keep_a_tape_alive():
    v = rg.Variable(1.0, name="v")
    for _ in range(3):
        v.assign_sub(rg.variable_grads(lambda: v * v).grads["v"] * 0.25)
    assert v.value.item() == 0.125


def test_operators_methods_and_identity():
    v = rg.Variable([1.0, 2.0])
    v.assign([3, 4])
    assert plain([v + 1, 1 + v, v.square(), v @ v, v[0]]) == [[4, 5], [4, 5], [9, 16], 25, 3]
    assert v == v and {v: 1}[v] == 1  # a Variable equals itself alone
    assert v != rg.Variable([3.0, 4.0])
    assert plain([v == 3, v != rg.tensor([3.0, 4.0])]) == [[True, False], [False, False]]
    assert v in [rg.Variable(1.0), v]
    np.testing.assert_array_equal(np.asarray(v), [3.0, 4.0])
    assert f"{v[0]:.2f}" == "3.00" and f"{rg.Variable(1.0):.2f}" == "1.00"
    assert rg.Variable(1.0).name != rg.Variable(1.0).name


def iadd(v):
    v += 1.0


def isub(v):
    v -= 1.0


def same():
    a, b = rg.Variable(1.0, name="same"), rg.Variable(2.0, name="same")
    return a * b


SHAPE = r"variable 'v': its shape is \(2,\), got \(3,\)"
# Of the Variable v and a constant Variable c.
ERRORS = {
    "no function": (lambda v, c: rg.variable_grads(3), ArgumentError, "must be a function"),
    "no Tensor": (lambda v, c: rg.variable_grads(lambda: 3.0), ArgumentError, "must return a Ten"),
    "no scalar": (lambda v, c: rg.variable_grads(lambda: v * 1), ShapeError, "a scalar.*rank 1"),
    "a number": (lambda v, c: rg.variable_grads(v.sum, [3]), ArgumentError, "list of Variables"),
    "a constant": (lambda v, c: rg.variable_grads(lambda: c * 1, [c]), GradientError, "of the 1 g"),
    "no Variable": (lambda v, c: rg.variable_grads(lambda: c * 1, []), GradientError, "of the 0 g"),
    "no path": (lambda v, c: rg.variable_grads(lambda: X.sum()), GradientError, "no path leads"),
    "an integer": (lambda v, c: rg.variable_grads(lambda: (v > 0).sum()), GradientError, "d int64"),
    "one name": (lambda v, c: rg.variable_grads(same), GradientError, "are called 'same'"),
    "a shape": (lambda v, c: v.assign([1.0, 2.0, 3.0]), ShapeError, SHAPE),
    "a dtype": (lambda v, c: v.assign(rg.asarray([1, 2])), DTypeError, "float32, got int64"),
    "+=": (lambda v, c: iadd(v), ArgumentError, r"v.assign_add\(x\)"),
    "-=": (lambda v, c: isub(v), ArgumentError, "leave the Variable 'v' as it is"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, error, words = ERRORS[name]
    v, c = rg.Variable([1.0, 2.0], name="v"), rg.Variable(1.0, trainable=False)
    refused(lambda: call(v, c), error, words)
    assert current() is None

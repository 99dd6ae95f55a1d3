"""Variables and variable_grads."""

import numpy as np
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import ArgumentError, DTypeError, GradientError, ShapeError


def test_the_documented_example():
    a, b = rg.Variable([3.0, 4.0], name="a"), rg.Variable([5.0, 6.0], name="b")
    x = rg.tensor([1.0, 2.0])
    value, grads = rg.variable_grads(lambda: (a * x.square() + b * x).sum())
    assert value.item() == 36.0
    assert {k: v.tolist() for k, v in grads.items()} == {"a": [1.0, 4.0], "b": [1.0, 2.0]}


def test_order_is_that_of_creation_and_unconnected_ones_are_absent():
    a, b, c = (rg.Variable(float(i), name=n) for i, n in enumerate("abc"))
    result = rg.variable_grads(lambda: b * 2 + a * 1 + rg.stop_gradient(c * 1))
    assert list(result.grads) == ["a", "b"]


def test_var_list():
    a, b = rg.Variable(1.0, name="a"), rg.Variable(2.0, name="b")
    frozen = rg.Variable(3.0, trainable=False, name="frozen")
    result = rg.variable_grads(lambda: a * b * frozen, [a, frozen])
    assert result.grads["a"].item() == 6.0
    assert result.grads["frozen"] is None
    assert list(rg.variable_grads(lambda: a * b * frozen).grads) == ["a", "b"]


def test_f_may_return_a_variable():
    v = rg.Variable(2.0, name="v")
    assert rg.variable_grads(lambda: v).grads["v"].item() == 1.0


def test_a_variable_used_many_times():
    v = rg.Variable(3.0, name="v")
    assert rg.variable_grads(lambda: v * v * v).grads["v"].item() == 27.0


def test_a_read_after_an_assignment_sees_the_history():
    v = rg.Variable(3.0, name="v")

    def f():
        v.assign(v * v)  # 9
        return v * 2.0  # d/dv (2 v²) = 4 v

    value, grads = rg.variable_grads(f)
    assert (value.item(), grads["v"].item(), v.value.item()) == (18.0, 12.0, 9.0)


def test_assigned_before_the_first_read():
    v, w = rg.Variable(3.0, name="v"), rg.Variable(1.0, name="w")

    def f():
        v.assign(rg.scalar(5.0))
        return v * w

    assert list(rg.variable_grads(f).grads) == ["w"]


def test_assignment_after_use_does_not_disturb():
    v = rg.Variable(3.0, name="v")

    def f():
        y = v * v
        v.assign(100.0)
        return y

    assert rg.variable_grads(f).grads["v"].item() == 6.0


def test_nested():
    v, w = rg.Variable(2.0, name="v"), rg.Variable(3.0, name="w")

    def outer():
        inner = rg.variable_grads(lambda: v * v * w, [v])
        return inner.grads["v"]  # 2 v w

    grads = rg.variable_grads(outer).grads
    assert (grads["v"].item(), grads["w"].item()) == (6.0, 4.0)


def test_grad_inside_variable_grads_and_the_other_way_round():
    v = rg.Variable(2.0, name="v")
    f = lambda: rg.grad(lambda x: x * x * v)(rg.scalar(3.0))  # noqa: E731
    assert rg.variable_grads(f).grads["v"].item() == 6.0
    g = lambda x: rg.variable_grads(lambda: v * v * x).grads["v"]  # noqa: E731
    assert rg.grad(g)(5.0).item() == 4.0


def test_updates_do_not_keep_a_tape_alive():
    v = rg.Variable(1.0, name="v")
    for _ in range(3):
        v.assign_sub(rg.variable_grads(lambda: v * v).grads["v"] * 0.25)
    assert v.value.item() == 0.125


def test_assign_checks():
    v = rg.Variable([1.0, 2.0], name="v")
    v.assign([3, 4])
    assert v.value.tolist() == [3.0, 4.0]
    with pytest.raises(ShapeError, match=r"variable 'v': its shape is \(2,\), got \(3,\)"):
        v.assign([1.0, 2.0, 3.0])
    with pytest.raises(DTypeError, match="float32, got int64"):
        v.assign(rg.asarray([1, 2]))


def test_operators_methods_and_identity():
    v = rg.Variable([1.0, 2.0])
    assert (v + 1).tolist() == (1 + v).tolist() == [2.0, 3.0]
    assert v.square().tolist() == [1.0, 4.0]
    assert (v @ v).item() == 5.0
    assert v[0].item() == 1.0
    assert v == v  # a Variable equals itself alone
    assert v != rg.Variable([1.0, 2.0])
    assert {v: 1}[v] == 1
    np.testing.assert_array_equal(np.asarray(v), [1.0, 2.0])


def test_default_names_are_unique():
    assert rg.Variable(1.0).name != rg.Variable(1.0).name


ERRORS = [
    (lambda v, c: rg.variable_grads(3), ArgumentError, "must be a function"),
    (lambda v, c: rg.variable_grads(lambda: 3.0), ArgumentError, "must return a Tensor"),
    (lambda v, c: rg.variable_grads(lambda: v * 1.0), ShapeError, "a scalar.*rank 1"),
    (lambda v, c: rg.variable_grads(lambda: v.sum(), [3]), ArgumentError, "list of Variables"),
    (lambda v, c: rg.variable_grads(lambda: c * 1.0, [c]), GradientError, "none of the 1 given"),
    (lambda v, c: rg.variable_grads(lambda: c * 1.0, []), GradientError, "none of the 0 given"),
    (lambda v, c: rg.variable_grads(lambda: rg.scalar(1.0)), GradientError, "no path leads"),
    (lambda v, c: rg.variable_grads(lambda: (v > 0).sum()), GradientError, "f returned int64"),
]


@pytest.mark.parametrize(("call", "error", "words"), ERRORS)
def test_errors(call, error, words):
    v = rg.Variable([1.0, 2.0])
    with pytest.raises(error, match=words):
        call(v, rg.Variable(1.0, trainable=False))
    assert current() is None


def test_two_variables_of_one_name():
    a, b = rg.Variable(1.0, name="same"), rg.Variable(2.0, name="same")
    with pytest.raises(GradientError, match="two different variables are called 'same'"):
        rg.variable_grads(lambda: a * b)


def test_augmented_assignment_is_refused():
    v = rg.Variable(1.0, name="v")
    with pytest.raises(ArgumentError, match=r"v.assign_add\(x\)"):
        v += 1.0
    with pytest.raises(ArgumentError, match="leave the Variable 'v' as it is"):
        v -= 1.0
    assert f"{v:.2f}" == "1.00"

"""check_gradients must find what is wrong, and say which op and input it is."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError
from regrad.testing import GradientCheckError, check_gradients

X = np.array([0.4, -1.3, 0.9])


def test_right_gradients_pass():
    check_gradients(lambda x: rg.sin(x) * rg.exp(x), [X], order=3)
    check_gradients(lambda x, y: (rg.tanh(x) * y, y / x), [X, X[::-1].copy()], order=2)
    check_gradients(lambda x: rg.sin(x) * rg.exp(x), [X], method="complex")


WRONG = {
    "a factor": lambda dy, x: dy * rg.cos(x) * 1.001,
    "a sign": lambda dy, x: -dy * rg.cos(x),
    "nothing": lambda dy: None,
    "a constant": lambda dy, x: dy * rg.stop_gradient(rg.cos(x)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found_and_named(name):
    order = 2 if name == "a constant" else 1
    with rg.gradient_override_map({"Sin": WRONG[name]}):
        if order == 2:
            check_gradients(lambda x: rg.sin(x) * x, [X])  # the first order is right
        with pytest.raises(GradientCheckError, match=f"order {order}") as caught:
            check_gradients(lambda x: rg.sin(x) * x, [X], order=2)
    if order == 1:
        assert "op type 'Sin', input 'x'" in str(caught.value)
        assert "Mul" not in str(caught.value)


def test_one_input_of_two():
    with (
        rg.gradient_override_map({"Mul": lambda dy, a, b: (dy * b, dy * a * 1.01)}),
        pytest.raises(GradientCheckError, match="op type 'Mul', input 'b'"),
    ):
        check_gradients(lambda a, b: a * b, [X, X + 1])


def test_the_element_is_named_for_small_functions():
    def rule(dy, x):
        return dy * rg.cos(x) + rg.asarray(np.array([0.0, 0.1, 0.0])) * dy

    with (
        rg.gradient_override_map({"Sin": rule}),
        pytest.raises(GradientCheckError, match=r"args\[0\]\(1,\)"),
    ):
        check_gradients(rg.sin, [X])


def test_a_custom_gradient():
    f = rg.custom_grad(lambda x: (x * x, lambda dy: dy * x))
    with pytest.raises(GradientCheckError, match="No single op is wrong"):
        check_gradients(f, [X])
    check_gradients(rg.custom_grad(lambda x: (x * x, lambda dy: dy * 2 * x)), [X], order=3)


def test_nan_does_not_pass():
    with (
        rg.gradient_override_map({"Sin": lambda dy, x: dy * rg.log(-rg.abs(x))}),
        pytest.raises(GradientCheckError),
    ):
        check_gradients(rg.sin, [X])


def test_arguments():
    with pytest.raises(ArgumentError, match="no argument is a float"):
        check_gradients(lambda x: x, [rg.asarray([1, 2])])
    with pytest.raises(ArgumentError, match="order is 1 or more"):
        check_gradients(lambda x: x, [X], order=0)
    with pytest.raises(ArgumentError, match="checks order 1 only"):
        check_gradients(lambda x: x, [X], order=2, method="complex")
    with pytest.raises(ArgumentError, match="must return Tensors"):
        check_gradients(lambda x: 3, [X])

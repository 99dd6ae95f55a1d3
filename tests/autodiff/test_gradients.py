"""grad, grads, value_and_grad(s), variable_grads: values, errors, nothing that stays open."""

import gc

import numpy as np
import pytest

import regrad as rg
from regrad.core.state import LIVE, current
from regrad.errors import ArgumentError, DTypeError, GradientError, ShapeError
from tests.helpers.rows import refused, results, under


def cube(x):
    return x * x * x


def square(x):
    return (x * x).sum()


def weighted(p):
    return (p["w"] * p["layers"][0]).sum() + p["b"] * 2


def first(a, b):
    return a * 1.0


def surrogate(x):
    """The value of the sign, and the gradient of tanh."""
    g = rg.tanh(x)
    return g + rg.stop_gradient(rg.sign(x) - g)


def bent(x):
    return x * x if x > 1 else -x


def deep(x):
    for _ in range(20_000):
        x = x + 1.0
    return x


def fails(*_):
    raise RuntimeError("boom")


X = rg.tensor([2.0, 3.0])
MIXED = X, rg.asarray(np.array([3.0, 4.0]))
VALUES = {
    "a value": (lambda: rg.value_and_grad(cube)(X), ([8.0, 27.0], [12.0, 27.0])),
    "of a list": (lambda: rg.grad(square)([2.0, 3.0]), [4.0, 6.0]),
    "of an array": (lambda: rg.grad(square)(np.array([2.0, 3.0], "f4")), [4.0, 6.0]),
    "of a Tensor": (lambda: rg.grad(square)(X), [4.0, 6.0]),
    "of a Variable": (lambda: rg.grad(square)(rg.Variable([2.0, 3.0])), [4.0, 6.0]),
    "of a number": (lambda: rg.grad(cube)(2.0), 12.0),
    "of containers": (lambda: rg.grad(weighted)({"w": [1.0, 2.0], "layers": (X,), "b": 1.0}),
                      {"w": [2.0, 3.0], "layers": ([1.0, 2.0],), "b": 2.0}),
    "of one Tensor twice": (lambda: rg.grads(lambda a, b: a * b * b)([X, X]),
                            [[4.0, 9.0], [8.0, 18.0]]),
    "of a container and a number": (lambda: rg.grads(lambda a, b: a["x"] * b)([{"x": 2.0}, 3.0]),
                                    [{"x": 3.0}, 2.0]),
    "by dy": (lambda: rg.grad(lambda x: x * x)(X, [10.0, 100.0]), [40.0, 600.0]),
    "of second order": (lambda: rg.grad(rg.grad(cube))(2.0), 12.0),
    "of third order": (lambda: rg.grad(rg.grad(rg.grad(cube)))(2.0), 6.0),
    "within a gradient": (lambda: rg.grad(lambda x: x * rg.grad(lambda y: x + y)(1.0))(3.0), 1.0),
    "by an alias": (lambda: rg.grad(
        lambda x: (h := x * x) * rg.grad(lambda z: h * z)(x).item())(3.0), 54.0),
    "of the identity": (lambda: rg.grad(lambda x: x)(2.0), 1.0),
    "unconnected, zero": (lambda: rg.grads(first, unconnected="zero")([1.0, 2.0]), [1.0, 0.0]),
    "unconnected, none": (lambda: rg.grads(first, unconnected="none")([1.0, 2.0]), [1.0, None]),
    "a rule returns None": (lambda: rg.grad(lambda x: rg.round(x * x) + 0.0)(1.5), 0.0),
    "a rule returns None for a part": (lambda: rg.grad(lambda x: rg.round(x) + x)(1.5), 1.0),
    "of a branch": (lambda: rg.grad(bent)(2.0), 4.0),
    "of the other branch": (lambda: rg.grad(bent)(0.5), -1.0),
    "of a deep chain": (lambda: rg.grad(deep)(1.0), 1.0),
    "of mixed dtypes": (lambda: rg.grads(lambda a, b: a * b)(MIXED), [[3.0, 4.0], [2.0, 3.0]]),
    "of a constant in NumPy": (lambda: rg.grad(lambda x: x * rg.stop_gradient(x).numpy())(2.0), 2),
    "of Python's numbers": (lambda: rg.grad(lambda x: x * float(x) * x.item() * bool(x))(2.0), 4.0),
}  # fmt: skip
test_gradients = results(VALUES)


def test_each_input_has_a_gradient_of_its_dtype():
    a, b = MIXED
    assert rg.grad(cube)(np.array([2.0])).dtype == (a * b).dtype == np.float64
    assert [d.dtype for d in rg.grads(lambda a, b: a * b)([a, b])] == [np.float32, np.float64]
    dda = rg.grad(lambda a: rg.grad(lambda b: (a * b * b).sum())(b).sum())(a)
    assert (dda.dtype, dda.tolist()) == (np.float32, [6.0, 8.0])


def test_a_surrogate_by_stop_gradient():
    value, dx = rg.value_and_grad(surrogate)(rg.tensor([0.5, -2.0]))
    np.testing.assert_allclose(value.numpy(), [1.0, -1.0], rtol=1e-6)
    np.testing.assert_allclose(dx.numpy(), 1 - np.tanh([0.5, -2.0]) ** 2, rtol=1e-6)


WORDS = r"f\(x\), \(2,\), got \(3,\)"
BARE = r"must return a Tensor.*return statement"
ERRORS = {
    "no path": (lambda: rg.grads(first)([1.0, 2.0]), GradientError, r"by args\[1\]: no path"),
    "no path by a leaf": (lambda: rg.grad(lambda p: p["a"] * 1.0)({"a": 1.0, "b": 2.0}),
                          GradientError, r"x\['b'\]"),
    "by integers": (lambda: rg.grad(cube)(rg.asarray([1, 2])), GradientError, "only floats"),
    "by int32": (lambda: rg.grad(cube)(rg.tensor([1], dtype="int32")), GradientError, "only float"),
    "by bools": (lambda: rg.grad(cube)(np.array([True])), GradientError, "only floats"),
    "by text": (lambda: rg.grad(cube)({"a": "text"}), ArgumentError, "differentiates by Tensors"),
    "of None": (lambda: rg.grad(lambda x: None)(1.0), ArgumentError, BARE),
    "of a list": (lambda: rg.grad(lambda x: [x])(1.0), ArgumentError, "a Tensor, got list"),
    "of a bool": (lambda: rg.grad(lambda x: x > 0)(1.0), GradientError, "f returned bool"),
    "dy of another shape": (lambda: rg.grad(cube)(X, [1.0, 2.0, 3.0]), ShapeError, WORDS),
    "dy is a number": (lambda: rg.grad(cube)(X, 1.0), ShapeError, "broadcast_to"),
    "dy of integers": (lambda: rg.grad(cube)(X, rg.asarray([1, 2])), DTypeError, "dy must be of f"),
    "args are no list": (lambda: rg.grads(cube)(X), ArgumentError, "args must be a list"),
    "no args": (lambda: rg.grads(lambda: 1)([]), ArgumentError, "args is empty"),
    "numpy()": (lambda: rg.grad(lambda x: x * x.numpy())(2.0), GradientError, "stop_gradient"),
    "asarray": (lambda: rg.grad(lambda x: x * np.asarray(x))(2.0), GradientError, "stop_gradient"),
    "data": (lambda: rg.grad(lambda x: x * x.data)(2.0), GradientError, "stop_gradient"),
    "a list of Tensors": (lambda: rg.grad(lambda x: rg.tensor([x, x * 2]))(1.0), ArgumentError,
                          "join them with stack"),
    "f fails": (lambda: rg.grad(fails)(1.0), RuntimeError, "boom"),
    "a rule fails": (lambda: under({"Sign": lambda dy: fails()}, rg.grad(rg.sign), 1.0),
                     RuntimeError, "boom"),
    **{f"{api.__name__} of a number": (lambda api=api: api(3), ArgumentError,
                                       rf"in {api.__name__}\(f\) must be a function, got int")
       for api in (rg.grad, rg.grads, rg.value_and_grad, rg.value_and_grads)},
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_leave_no_tape_open(name):
    refused(*ERRORS[name])
    assert current() is None
    assert rg.grad(cube)(2.0).item() == 12.0


def test_nothing_stays_live():
    gc.collect()
    before = len(LIVE)
    for _ in range(10):
        rg.grad(rg.grad(cube))(2.0)
    assert len(LIVE) == before


def test_attributes_and_arrays_may_change_after_they_were_used():
    axis, a = [0], np.array([1.0, 2.0])

    def f(x):
        y = rg.sum(x, axis=axis) * a
        axis[0], a[:] = 1, 100.0
        return y.sum()

    assert rg.grad(f)(np.array([[1.0, 2.0], [3.0, 4.0]])).tolist() == [[1.0, 2.0], [1.0, 2.0]]

    @rg.custom_grad
    def g(x, save):
        buffer = np.array([3.0])
        save([buffer, x])
        buffer[0] = 7.0
        return x * 1.0, lambda dy, saved: dy * saved[0]

    assert rg.grad(g)(np.array([1.0])).tolist() == [3.0]
    t = rg.asarray(np.array([1.0]))
    for view in (t.data, t.numpy(), np.asarray(t)):
        refused(lambda view=view: view.fill(2.0), ValueError, "read-only")

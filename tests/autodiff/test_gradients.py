"""grad, grads, value_and_grad(s), variable_grads: values, errors, nothing that stays open."""

import gc

import numpy as np
import pytest

import regrad as rg
from regrad.core.state import LIVE, current
from regrad.errors import ArgumentError, DTypeError, GradientError, ShapeError
from tests.helpers.rows import plain, refused, results, under


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


# -- Variables -------------------------------------------------------------------------------------


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
BY_VARIABLES = {
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


@pytest.mark.parametrize("name", BY_VARIABLES)
def test_gradients_by_variables(name):
    f, expected, after = BY_VARIABLES[name]
    v, w = rg.Variable(3.0, name="v"), rg.Variable(2.0, name="w")
    found = plain(rg.variable_grads(lambda: f(v, w)).grads)
    assert (found, [*found]) == (expected, [*expected])
    assert (v.item(), w.item()) == after


def test_the_documented_example():
    a, b = rg.Variable([3.0, 4.0], name="a"), rg.Variable([5.0, 6.0], name="b")
    found = rg.variable_grads(lambda: (a * DATA.square() + b * DATA).sum())
    assert plain(found) == (36.0, {"a": [1.0, 4.0], "b": [1.0, 2.0]})


DATA = rg.tensor([1.0, 2.0])


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
ERRORS_OF_VARIABLES = {
    "no function": (lambda v, c: rg.variable_grads(3), ArgumentError, "must be a function"),
    "no Tensor": (lambda v, c: rg.variable_grads(lambda: 3.0), ArgumentError, "must return a Ten"),
    "no scalar": (lambda v, c: rg.variable_grads(lambda: v * 1), ShapeError, "a scalar.*rank 1"),
    "a number": (lambda v, c: rg.variable_grads(v.sum, [3]), ArgumentError, "list of Variables"),
    "a constant": (lambda v, c: rg.variable_grads(lambda: c * 1, [c]), GradientError, "of the 1 g"),
    "no Variable": (lambda v, c: rg.variable_grads(lambda: c * 1, []), GradientError, "of the 0 g"),
    "no path": (lambda v, c: rg.variable_grads(lambda: DATA.sum()), GradientError, "no path leads"),
    "an integer": (lambda v, c: rg.variable_grads(lambda: (v > 0).sum()), GradientError, "d int64"),
    "one name": (lambda v, c: rg.variable_grads(same), GradientError, "are called 'same'"),
    "a shape": (lambda v, c: v.assign([1.0, 2.0, 3.0]), ShapeError, SHAPE),
    "a dtype": (lambda v, c: v.assign(rg.asarray([1, 2])), DTypeError, "float32, got int64"),
    "+=": (lambda v, c: iadd(v), ArgumentError, r"v.assign_add\(x\)"),
    "-=": (lambda v, c: isub(v), ArgumentError, "not change the Variable 'v'"),
}


@pytest.mark.parametrize("name", ERRORS_OF_VARIABLES)
def test_errors_of_variables(name):
    call, error, words = ERRORS_OF_VARIABLES[name]
    v, c = rg.Variable([1.0, 2.0], name="v"), rg.Variable(1.0, trainable=False)
    refused(lambda: call(v, c), error, words)
    assert current() is None

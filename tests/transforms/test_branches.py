"""Branches of cond that return Python numbers: under jit as in eager mode."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, DTypeError, ShapeError

RETURNS = {
    "bool": (lambda w: (2 * w, True), lambda w: (w, False)),
    "Tensor or number": (lambda w: w * w, lambda w: 0.0),
    "number or Tensor": (lambda w: 1, lambda w: w),
    "bool or Tensor": (lambda w: True, lambda w: w),
    "bool or comparison": (lambda w: False, lambda w: w < 0),
    "ints": (lambda w: 1, lambda w: 2),
    "int or float": (lambda w: 1, lambda w: 2.5),
    "int Tensor or int": (lambda w: rg.astype(w, rg.int32), lambda w: 7),
    "int Tensor or float": (lambda w: rg.astype(w, rg.int32), lambda w: 0.5),
    "signed zeros": (lambda w: 0.0, lambda w: -0.0),
    "dict": (lambda w: {"a": w, "n": 1, "s": "x"}, lambda w: {"a": 2.0, "n": 3, "s": "x"}),
    "lists of numbers": (lambda w: [1.0, 2.0], lambda w: [3.0, 4.0]),
    "list of numbers or Tensors": (lambda w: [1.0, w], lambda w: [w, 2.0]),
    "all the same": (lambda w: (w, 3, None, "a"), lambda w: (w, 3, None, "a")),
    "array": (lambda w: np.float32(2), lambda w: w),
}
BESIDE = [np.float32(3), np.float16(3), np.int32(3)]


def leaves(value):
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


@pytest.mark.parametrize("functions", RETURNS.values(), ids=RETURNS)
@pytest.mark.parametrize("start", [2.0, -2.0])
def test_values_are_those_of_eager_mode(functions, start):
    def f(w):
        return rg.cond(w > 0, *functions, w)

    w = rg.scalar(start)
    found, expected = leaves(rg.jit(f)(w)), leaves(f(w))
    assert len(found) == len(expected)
    for y, z in zip(found, expected, strict=True):
        if isinstance(z, str | None):
            assert y == z
        else:
            np.testing.assert_array_equal(np.asarray(y, float), np.asarray(z, float))
            assert np.signbit(float(y)) == np.signbit(float(z))


NUMBERS = [(2.0, 3.0), (2, 3), (True, False), (2, 2), (-1.5, -1.5)]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("beside", BESIDE, ids=lambda x: str(x.dtype))
@pytest.mark.parametrize("start", [2.0, -2.0])
def test_numbers_are_as_weak_as_in_eager_mode(numbers, beside, start):
    def f(w, z):
        a, b = numbers
        return rg.cond(w > 0, lambda: a, lambda: b) * z

    w, z = rg.scalar(start), rg.asarray(beside)
    found, expected = rg.jit(f)(w, z), f(w, z)
    assert (found.dtype, found.item()) == (expected.dtype, expected.item())


def test_gradients():
    def f(w):
        y, flag = rg.cond(w > 0, lambda w: (2 * w, 3.0), lambda w: (w * w, 5.0), w)
        return y * flag

    def g(w):
        return rg.cond(w > 0, lambda: w * w * w, lambda: 0.0)

    for start in (2.0, -2.0):
        w = rg.scalar(start)
        assert rg.jit(rg.grad(f))(w).item() == rg.grad(f)(w).item()
    assert rg.jit(rg.grad(rg.grad(g)))(rg.scalar(2.0)).item() == 12.0
    assert rg.jit(rg.grad(g))(rg.scalar(-2.0)).item() == 0.0
    assert rg.grad(rg.jit(g))(rg.scalar(2.0)).item() == 12.0


def test_in_loops_batches_and_branches():
    def f(x):
        return rg.cond(x > 0, lambda: rg.cond(x > 1, lambda: 2.0, lambda: x), lambda: 0)

    x = rg.tensor([-1.0, 0.5, 3.0])
    assert rg.jit(rg.vmap(f))(x).tolist() == [0.0, 0.5, 2.0]
    assert rg.jit(lambda x: rg.map(f, x))(x).tolist() == [0.0, 0.5, 2.0]
    gradient = rg.jit(rg.grad(lambda x: rg.map(f, x)))(x)
    assert gradient.tolist() == [0.0, 1.0, 0.0]


def test_variables_that_a_branch_assigns_to():
    v = rg.Variable(1.0)

    def add():
        v.assign_add(1.0)
        return 3.0

    f = rg.jit(lambda w: rg.cond(w > 0, add, lambda: w))
    assert (f(rg.scalar(1.0)).item(), v.numpy()) == (3.0, 2.0)
    assert (f(rg.scalar(-1.0)).item(), v.numpy()) == (-1.0, 2.0)


def test_each_branch_is_traced_once_if_no_number_is_due():
    calls = []

    def branch(w):
        calls.append(1)
        return w, 3

    rg.jit(lambda w: rg.cond(w > 0, branch, branch, w))(rg.scalar(1.0))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("functions", "error", "words"),
    [
        ((lambda w: (w, w), lambda w: w), ArgumentError,
         ["(Tensor(float32, ()), Tensor(float32, ())) and Tensor(float32, ())"]),
        ((lambda w: {"a": w}, lambda w: {"b": 1}), ArgumentError,
         ["{'a': Tensor(float32, ())} and {'b': 1}"]),
        ((lambda w: None, lambda w: w), ArgumentError, ["None and Tensor(float32, ())"]),
        ((lambda w: ("a", 1), lambda w: ("b", 1)), ArgumentError, ["('a', 1) and ('b', 1)"]),
        ((lambda w: [w], lambda w: [w, 2]), ArgumentError, ["[Tensor(float32, ()), 2]"]),
        ((lambda w: rg.stack([w, w]), lambda w: 0.0), ShapeError, ["(2,) and ()"]),
        ((lambda w: rg.astype(w, rg.int32), lambda w: w), DTypeError, ["int32 and float32"]),
    ],
)  # fmt: skip
def test_what_differs_is_shown(functions, error, words):
    rg.jit(rg.identity)(rg.scalar(1.0))  # (which says so if there is nothing to compile with)
    with pytest.raises(error) as caught:
        rg.jit(lambda w: rg.cond(w > 0, *functions, w))(rg.scalar(1.0))
    assert [w for w in words if w not in str(caught.value)] == [], caught.value


# -- bodies that return a Tensor from outside as it is ---------------------------------------------

BODIES = {
    "cond": lambda y: rg.cond(y.sum() > 0, lambda: y, lambda: -y),
    "nested cond": lambda y: rg.cond(
        y.sum() > 0, lambda: rg.cond(y.sum() > 0.5, lambda: y, lambda: -y), lambda: -y
    ),
    "ys of scan": lambda y: rg.scan(lambda c, _: (c, y), 0.0, None, 1)[1][0],
    "carry of scan": lambda y: rg.scan(lambda c, _: (y, c), y * 0, None, 2)[0],
    "while_loop": lambda y: rg.while_loop(lambda c: c.sum() <= 0, lambda c: y, y * 0, max_steps=3),
    "vmap": lambda y: rg.vmap(lambda _: y)(rg.ones(1))[0],
    "map": lambda y: rg.map(lambda _: y, rg.ones(1))[0],
    "checkpoint": lambda y: rg.checkpoint(lambda: y)(),
    "jit": lambda y: rg.jit(lambda: y)(),
    "in a container": lambda y: rg.jit(lambda: {"a": [y]})()["a"][0],
}


@pytest.mark.parametrize("mode", [lambda f: f, rg.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_result_from_outside_keeps_its_history(body, mode):
    def f(x):
        return body(x * x).sum()

    x = rg.tensor([0.5, 2.0])
    assert mode(rg.grad(f))(x).tolist() == [1.0, 4.0]
    twice = rg.grad(lambda x: (rg.grad(f)(x) * x).sum())
    assert mode(twice)(x).tolist() == [2.0, 8.0]


def test_a_result_from_outside_is_read_at_each_call():
    y = rg.tensor([1.0])
    f = rg.jit(lambda: y)
    assert f().tolist() == [1.0]
    y = rg.tensor([2.0])
    assert f().tolist() == [2.0]

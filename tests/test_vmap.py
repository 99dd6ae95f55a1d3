"""`rg.vmap`: one example after another on NumPy data, all at once on JAX data, the same results."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RuleError, ShapeError, TraceError
from tests.helpers.quick import nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)

DATA = pytest.mark.parametrize("data", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
X = np.arange(6.0).reshape(3, 2)


@DATA
def test_containers_in_and_out(data):
    f = rg.vmap(lambda p, q: {"sum": (p["a"] + q[0], None, 3), "a": p["a"]})
    out = f({"a": data(X)}, [data(X[:, 0])])
    assert out["sum"][0].tolist() == (X + X[:, :1]).tolist()
    assert out["sum"][1:] == (None, 3)
    assert out["a"].tolist() == X.tolist()


@DATA
@pytest.mark.parametrize(
    ("in_axes", "due"),
    [(0, X * X), ((0, 0), X * X), ((1, 1), (X * X).T), ((-1, 1), (X * X).T), ((0, None), None)],
)
def test_in_axes(data, in_axes, due):
    out = rg.vmap(lambda a, b: a * b, in_axes=in_axes)(data(X), data(X))
    due = X[:, None] * X if due is None else due
    assert out.tolist() == due.tolist()


@DATA
def test_in_axes_of_containers(data):
    f = rg.vmap(lambda p: p["a"] * p["b"][0], in_axes=({"a": 0, "b": None},))
    assert f({"a": data(X), "b": (data(X[0]),)}).tolist() == (X * X[0]).tolist()
    g = rg.vmap(lambda p: p["a"] * p["b"], in_axes=({"a": 0, "b": 1},))
    assert g({"a": data(X), "b": data(X.T)}).tolist() == (X * X).tolist()


@DATA
def test_out_axes(data):
    f = lambda x: (x, {"y": x * 2})  # noqa: E731
    x, y = rg.vmap(f, out_axes=1)(data(X))
    assert (x.shape, y["y"].shape) == ((2, 3), (2, 3))
    x, y = rg.vmap(f, out_axes=(0, {"y": -1}))(data(X))
    assert (x.shape, y["y"].tolist()) == ((3, 2), (X * 2).T.tolist())


@DATA
def test_what_does_not_fit(data):
    f = lambda a, b: a + b  # noqa: E731
    with pytest.raises(ShapeError, match="differ in the number of examples"):
        rg.vmap(f)(data(X), data(X[:2]))
    with pytest.raises(ArgumentError, match="in_axes has 1 entries, and there are 2 arguments"):
        rg.vmap(f, in_axes=(0,))(data(X), data(X))
    with pytest.raises(ArgumentError, match="None for every Tensor"):
        rg.vmap(f, in_axes=None)(data(X), data(X))
    with pytest.raises((ShapeError, IndexError)):
        rg.vmap(f, in_axes=(0, 5))(data(X), data(X))
    with pytest.raises((ShapeError, IndexError)):
        rg.vmap(f)(data(np.float64(1.0)), data(X))
    with pytest.raises(ArgumentError, match="must be a function"):
        rg.vmap(3)


def test_no_examples():
    with pytest.raises(ShapeError, match="no examples"):
        rg.vmap(rg.sin)(np.zeros((0, 2)))
    assert rg.vmap(rg.sin)(jnp.zeros((0, 2))).shape == (0, 2)


@DATA
def test_gradients_through_and_per_example(data):
    w = rg.asarray(data(np.array([0.5, -1.0])))
    f = lambda w, x: rg.tanh((w * x).sum())  # noqa: E731
    looped = lambda w: rg.stack([f(w, x) for x in rg.unstack(rg.asarray(data(X)))]).sum()  # noqa: E731
    through = lambda w: rg.vmap(f, in_axes=(None, 0))(w, data(X)).sum()  # noqa: E731
    closed = lambda w: rg.vmap(lambda x: f(w, x))(data(X)).sum()  # noqa: E731
    squared = lambda g: lambda w: (rg.grad(g)(w) ** 2).sum()  # noqa: E731
    due = looped
    for _ in range(3):
        for g in (through, closed):
            np.testing.assert_allclose(
                rg.grad(g)(w).numpy(), rg.grad(due)(w).numpy(), rtol=1e-10, atol=1e-12
            )
            np.testing.assert_allclose(
                rg.jit(rg.grad(g))(w).numpy(), rg.grad(due)(w).numpy(), rtol=1e-10, atol=1e-12
            )
        through, closed, due = squared(through), squared(closed), squared(due)
    own = lambda w, x: rg.grad(lambda w: f(w, x))(w)  # noqa: E731
    each = rg.vmap(own, in_axes=(None, 0))(w, data(X))
    total = each.sum(axis=0)
    np.testing.assert_allclose(total.numpy(), rg.grad(looped)(w).numpy(), rtol=1e-12)


@DATA
def test_variables(data):
    v = rg.Variable(np.array([2.0, 3.0]), name="v")
    f = lambda x: (x * v).sum()  # noqa: E731
    value, grads = rg.variable_grads(lambda: rg.vmap(f)(data(X)).sum())
    assert (value.item(), grads["v"].tolist()) == (39.0, X.sum(0).tolist())
    each = rg.vmap(lambda x: rg.variable_grads(lambda: f(x)).grads["v"])(data(X))
    assert each.tolist() == X.tolist()

    def assigning(x):
        v.assign(x)
        return x

    with pytest.raises(TraceError, match="assigns to the Variable 'v'"):
        rg.vmap(assigning)(data(X))
    assert v.tolist() == [2.0, 3.0]


@DATA
def test_rules_see_single_examples(data):
    shapes = []

    def rule(dy, x):
        shapes.append((dy.shape, x.shape))
        return dy * 3.0

    with rg.gradient_override_map({"Sign": rule}) as used:
        dx = rg.grad(lambda x: rg.vmap(rg.sign)(x).sum())(data(X))
    assert dx.tolist() == np.full((3, 2), 3.0).tolist()
    assert set(shapes) == {((2,), (2,))}
    used.assert_fired()
    with (
        pytest.raises(RuleError, match=r"shape \(3, 2\), expected \(2,\)"),
        rg.gradient_override_map({"Sign": lambda dy: rg.ones((3, 2), dtype="float64")}) as used,
    ):
        rg.grad(lambda x: rg.vmap(rg.sign)(x).sum())(data(X))


@DATA
def test_custom_gradients(data):
    clipped = rg.custom_grad(lambda x: (x * 1.0, lambda dy: rg.clip(dy, -1.0, 1.0)))
    f = lambda x: (rg.vmap(clipped)(x) * 10.0).sum()  # noqa: E731
    for g in (rg.grad(f), rg.jit(rg.grad(f)), rg.grad(rg.jit(f))):
        assert g(data(X)).tolist() == np.ones((3, 2)).tolist()

    def closing(w):
        inner = rg.custom_grad(lambda x: (x * w, lambda dy: dy))
        return rg.vmap(inner)(data(X)).sum()

    with pytest.raises(GradientError, match=r"closes over|no path"):
        rg.grad(closing)(rg.asarray(np.float64(2.0)))


@DATA
def test_nests(data):
    f = lambda a, b: rg.sin(a * b)  # noqa: E731
    table = rg.vmap(rg.vmap(f, in_axes=(None, 0)), in_axes=(0, None))
    a, b = X[:, 0], X[0]
    due = np.sin(a[:, None] * b)
    for g in (table, rg.jit(table), rg.vmap(rg.jit(rg.vmap(f, in_axes=(None, 0))), (0, None))):
        np.testing.assert_allclose(g(data(a), data(b)).numpy(), due, rtol=1e-12)
    dx = rg.grad(lambda a: table(a, data(b)).sum())(data(a))
    np.testing.assert_allclose(dx.numpy(), (b * np.cos(a[:, None] * b)).sum(1), rtol=1e-12)


def test_jacobians_by_vmap():
    f = lambda x: rg.sin(x) * x.sum()  # noqa: E731
    x = np.array([0.5, -1.0, 2.0])
    _, back = rg.vjp(f, x)
    for data in (np.asarray, jnp.asarray):
        rows = rg.vmap(lambda dy: back(dy)[0])(data(np.eye(3)))
        np.testing.assert_allclose(rows.numpy(), rg.jacobian(f)(x).numpy(), rtol=1e-12)


def test_values_of_examples():
    assert rg.vmap(lambda x: x * 2 if x > 2 else x)(X[:, 1]).tolist() == [1.0, 6.0, 10.0]
    with pytest.raises(TraceError, match="vmap"):
        rg.vmap(lambda x: x * 2 if x > 2 else x)(jnp.asarray(X[:, 1]))


@DATA
def test_constants_and_integers(data):
    assert rg.vmap(lambda x: rg.scalar(1.0))(data(X)).tolist() == [1.0] * 3
    assert rg.vmap(lambda x, i: x[i])(data(X), data(np.array([0, 1, 0]))).tolist() == [
        0.0,
        3.0,
        4.0,
    ]
    assert rg.vmap(lambda x: x.argmax())(data(X)).tolist() == [1, 1, 1]


def test_keywords():
    with pytest.raises(TypeError):
        rg.vmap(lambda x, *, k: x * k)(X, k=2.0)

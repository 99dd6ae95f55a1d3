"""`rg.vmap`: one example after another on NumPy data, all at once on JAX data, the same results."""

import jax.numpy as jnp
import numpy as np
import optree
import pytest

import regrad as rg
from regrad.errors import GradientError, RuleError, TraceError
from tests.helpers.quick import nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)

DATA = pytest.mark.parametrize("data", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
X = np.arange(6.0).reshape(3, 2)
I = np.array([0, 1, 0])  # noqa: E741

# A function, options, arguments, and what is due; of containers the parts in the order of leaves.
AXES = {
    "containers": (
        lambda p, q: {"sum": (p["a"] + q[0], None, 3), "a": p["a"]}, {}, ({"a": X}, [X[:, 0]]),
        {"sum": (X + X[:, :1], None, 3), "a": X},
    ),
    "0": (rg.multiply, {"in_axes": 0}, (X, X), X * X),
    "1": (rg.multiply, {"in_axes": (1, 1)}, (X, X), (X * X).T),
    "-1": (rg.multiply, {"in_axes": (-1, 1)}, (X, X), (X * X).T),
    "None": (rg.multiply, {"in_axes": (0, None)}, (X, X), X[:, None] * X),
    "of a dict": (
        lambda p: p["a"] * p["b"][0], {"in_axes": ({"a": 0, "b": None},)},
        ({"a": X, "b": (X[0],)},), X * X[0],
    ),
    "two of a dict": (
        lambda p: p["a"] * p["b"], {"in_axes": ({"a": 0, "b": 1},)}, ({"a": X, "b": X.T},), X * X,
    ),
    "out": (lambda x: (x, {"y": x * 2}), {"out_axes": 1}, (X,), (X.T, {"y": 2 * X.T})),
    "out of a dict": (
        lambda x: (x, {"y": x * 2}), {"out_axes": (0, {"y": -1})}, (X,), (X, {"y": 2 * X.T}),
    ),
    "a constant": (lambda x: rg.scalar(1.0), {}, (X,), np.ones(3)),
    "an index": (lambda x, i: x[i], {}, (X, I), np.array([0.0, 3.0, 4.0])),
    "an integer": (lambda x: x.argmax(), {}, (X,), np.ones(3)),
}  # fmt: skip


def converted(value, to):
    """The arrays in containers as what is made of them."""
    known = np.ndarray | rg.Tensor
    return optree.tree_map(lambda x: to(x) if isinstance(x, known) else x, value)


@DATA
@pytest.mark.parametrize("name", AXES)
def test_axes_and_containers(name, data):
    f, options, given, due = AXES[name]
    found = rg.vmap(f, **options)(*converted(given, data))
    assert converted(found, lambda y: y.tolist()) == converted(due, lambda y: y.tolist())


@DATA
def test_gradients_through_and_per_example(data):
    w, xs = rg.asarray(data(np.array([0.5, -1.0]))), rg.asarray(data(X))
    f = lambda w, x: rg.tanh((w * x).sum())  # noqa: E731
    looped = lambda w: rg.stack([f(w, x) for x in rg.unstack(xs)]).sum()  # noqa: E731
    through = lambda w: rg.vmap(f, in_axes=(None, 0))(w, xs).sum()  # noqa: E731
    closed = lambda w: rg.vmap(lambda x: f(w, x))(xs).sum()  # noqa: E731
    squared = lambda g: lambda w: (rg.grad(g)(w) ** 2).sum()  # noqa: E731
    each = rg.vmap(lambda w, x: rg.grad(lambda w: f(w, x))(w), in_axes=(None, 0))(w, xs)
    np.testing.assert_allclose(each.sum(axis=0).numpy(), rg.grad(looped)(w).numpy(), rtol=1e-12)
    for _ in range(3):
        due = rg.grad(looped)(w).numpy()
        for g in (through, closed):
            for found in rg.grad(g)(w), rg.jit(rg.grad(g))(w):
                np.testing.assert_allclose(found.numpy(), due, rtol=1e-10, atol=1e-12)
        through, closed, looped = squared(through), squared(closed), squared(looped)


@DATA
def test_variables(data):
    v = rg.Variable(np.array([2.0, 3.0]), name="v")
    f = lambda x: (x * v).sum()  # noqa: E731
    value, grads = rg.variable_grads(lambda: rg.vmap(f)(data(X)).sum())
    assert (value.item(), grads["v"].tolist()) == (39.0, X.sum(0).tolist())
    each = rg.vmap(lambda x: rg.variable_grads(lambda: f(x)).grads["v"])(data(X))
    assert each.tolist() == X.tolist()
    with pytest.raises(TraceError, match="assigns to the Variable 'v'"):
        rg.vmap(lambda x: (v.assign(x), x)[1])(data(X))
    assert v.tolist() == [2.0, 3.0]


@DATA
def test_rules_see_single_examples(data):
    shapes, gradient = [], rg.grad(lambda x: rg.vmap(rg.sign)(x).sum())
    rule = lambda dy, x: shapes.append((dy.shape, x.shape)) or dy * 3.0  # noqa: E731
    with rg.gradient_override_map({"Sign": rule}) as used:
        assert gradient(data(X)).tolist() == np.full((3, 2), 3.0).tolist()
    assert set(shapes) == {((2,), (2,))}
    used.assert_fired()
    with (
        pytest.raises(RuleError, match=r"shape \(3, 2\), expected \(2,\)"),
        rg.gradient_override_map({"Sign": lambda dy: rg.ones((3, 2), dtype="float64")}),
    ):
        gradient(data(X))


@DATA
def test_custom_gradients(data):
    clipped = rg.custom_grad(lambda x: (x * 1.0, lambda dy: rg.clip(dy, -1.0, 1.0)))
    f = lambda x: (rg.vmap(clipped)(x) * 10.0).sum()  # noqa: E731
    for g in (rg.grad(f), rg.jit(rg.grad(f)), rg.grad(rg.jit(f))):
        assert g(data(X)).tolist() == np.ones((3, 2)).tolist()
    closing = lambda w: rg.custom_grad(lambda x: (x * w, lambda dy: dy))  # noqa: E731
    with pytest.raises(GradientError, match=r"closes over|no path"):
        rg.grad(lambda w: rg.vmap(closing(w))(data(X)).sum())(rg.asarray(np.float64(2.0)))


@DATA
def test_nests(data):
    f = lambda a, b: rg.sin(a * b)  # noqa: E731
    table = rg.vmap(rg.vmap(f, in_axes=(None, 0)), in_axes=(0, None))
    a, b = X[:, 0], X[0]
    for g in (table, rg.jit(table), rg.vmap(rg.jit(rg.vmap(f, in_axes=(None, 0))), (0, None))):
        np.testing.assert_allclose(g(data(a), data(b)).numpy(), np.sin(a[:, None] * b), rtol=1e-12)
    dx = rg.grad(lambda a: table(a, data(b)).sum())(data(a))
    np.testing.assert_allclose(dx.numpy(), (b * np.cos(a[:, None] * b)).sum(1), rtol=1e-12)


@DATA
def test_jacobians_by_vmap(data):
    f, x = (lambda x: rg.sin(x) * x.sum()), np.array([0.5, -1.0, 2.0])
    rows = rg.vmap(lambda dy: rg.vjp(f, x)[1](dy)[0])(data(np.eye(3)))
    np.testing.assert_allclose(rows.numpy(), rg.jacobian(f)(x).numpy(), rtol=1e-12)


def test_what_numpy_data_allow_and_jax_data_do_not():
    assert rg.vmap(lambda x: x * 2 if x > 2 else x)(X[:, 1]).tolist() == [1.0, 6.0, 10.0]
    assert rg.vmap(rg.sin)(jnp.zeros((0, 2))).shape == (0, 2)

"""vjp, jvp, jacobian, hessian; forward mode under custom rules, or its refusal."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, GradientError, ShapeError


def close(a, b):
    np.testing.assert_allclose(np.asarray(a._values()), b, rtol=1e-6)


def f64(x):
    return rg.asarray(np.asarray(x, float))


def test_vjp_can_be_called_again_and_differentiated():
    y, back = rg.vjp(lambda a, b: rg.sin(a) * b, f64(0.5), f64(2.0))
    close(y, 2 * np.sin(0.5))
    for dy in (1.0, 3.0):
        da, db = back(dy)
        close(da, dy * 2 * np.cos(0.5))
        close(db, dy * np.sin(0.5))
    assert rg.grad(lambda dy: back(dy)[0])(f64(1.0)).item() == pytest.approx(2 * np.cos(0.5))


def test_vjp_inside_a_derivative():
    f = rg.grad(lambda x: rg.vjp(lambda z: z * z * z, x)[1](1.0)[0])
    assert f(2.0).item() == 12.0


def test_containers():
    y, back = rg.vjp(lambda p: {"s": p["a"] + p["b"], "m": p["a"] * p["b"]}, {"a": 2.0, "b": 3.0})
    (dp,) = back({"s": 1.0, "m": 10.0})
    assert (dp["a"].item(), dp["b"].item()) == (31.0, 21.0)
    assert sorted(y) == ["m", "s"]
    values, dy = rg.jvp(lambda p: [p["a"] * p["b"]], [{"a": 2.0, "b": 3.0}], [{"a": 1.0, "b": 0.0}])
    assert (values[0].item(), dy[0].item()) == (6.0, 3.0)


def test_zeros_where_nothing_is_connected():
    assert rg.vjp(lambda a, b: a * 1.0, 1.0, 2.0)[1](1.0)[1].item() == 0.0
    assert rg.jvp(lambda x: rg.scalar(3.0), [2.0], [1.0])[1].item() == 0.0
    assert rg.jacobian(lambda x: rg.ones((2,)))(f64([1.0, 2.0, 3.0])).shape == (2, 3)
    assert not rg.hessian(lambda x: (x * 2).sum())(f64([1.0, 2.0])).numpy().any()


def functions():
    w = np.linspace(-1, 1, 6).reshape(2, 3)
    return [
        lambda x: rg.sin(x) * x,
        lambda x: (x * x).sum(),
        lambda x: rg.matmul(f64(w), x) / (1 + x[0] * x[0]),
        lambda x: rg.where(x > 0, x * x, -x),
        lambda x: rg.concat([x[1:], rg.exp(x[:1])]),
        lambda x: rg.nn.softmax(x) * rg.max(x),
        lambda x: rg.cumulative_prod(x),
        lambda x: rg.sort(x) * x,
    ]


@pytest.mark.parametrize("f", functions())
def test_forward_and_reverse_agree_with_differences(f):
    x, v = np.array([0.4, -1.3, 0.9]), np.array([0.3, 0.8, -0.5])
    jacobian = rg.jacobian(f)(f64(x)).numpy()
    y, dy = rg.jvp(f, [f64(x)], [f64(v)])
    close(dy, jacobian @ v)
    h = 1e-6
    difference = (f(f64(x + h * v)).numpy() - f(f64(x - h * v)).numpy()) / (2 * h)
    np.testing.assert_allclose(dy.numpy(), difference, rtol=1e-6, atol=1e-8)
    assert y.tolist() == f(f64(x)).tolist()


def test_forward_over_reverse_is_the_hessian_vector_product():
    f = lambda x: (rg.sin(x) * x * x).sum()  # noqa: E731
    x, v = f64([0.4, -1.3, 0.9]), f64([0.3, 0.8, -0.5])
    _, hv = rg.jvp(rg.grad(f), [x], [v])
    close(hv, rg.hessian(f)(x).numpy() @ v.numpy())


def test_reverse_over_forward():
    f = lambda x: rg.exp(x) * x  # noqa: E731
    g = rg.grad(lambda x: rg.jvp(f, [x], [f64(1.0)])[1])
    assert g(f64(0.5)).item() == pytest.approx(np.exp(0.5) * 2.5)


def test_custom_rules_count_in_forward_mode():
    f = rg.custom_grad(lambda x: (rg.sign(x), lambda dy: dy * 7))
    assert rg.jvp(f, [2.0], [3.0])[1].item() == 21.0
    with rg.gradient_override_map({"Sign": lambda dy, x: rg.where(abs(x) < 1, dy, 0)}):
        assert rg.jvp(rg.sign, [[0.5, 2.0]], [[3.0, 3.0]])[1].tolist() == [3.0, 0.0]


NOT_LINEAR = {
    "a comparison": (lambda dy, x: rg.where(dy > 0, dy, 0), "'Greater'"),
    "clipping": (lambda dy: rg.clip(dy, -1, 1), "'ClipByValue'"),
    "a product": (lambda dy: dy * dy, "'Mul'"),
    "a sign": (lambda dy: rg.sign(dy), "'Sign'"),
    "a maximum": (lambda dy: rg.maximum(dy, 0), "'Maximum'"),
    "a norm": (lambda dy: dy / rg.sqrt(rg.sum(dy * dy)), "'Mul'"),
    "a constant": (lambda dy: dy + 1, "even where none arrives"),
    "a cut": (lambda dy: rg.stop_gradient(dy), "'StopGradient'"),
    "a custom function": (lambda dy: rg.rules.reverse_gradient(dy), "'CustomGrad'"),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_forward_mode_is_refused_where_a_rule_is_not_linear(name):
    rule, words = NOT_LINEAR[name]
    with rg.gradient_override_map({"Round": rule}):
        rg.grad(rg.round)([0.2, 1.4])
        with pytest.raises(GradientError, match=f"forward mode.*'Round'.*{words}|{words}.*'Round'"):
            rg.jvp(rg.round, [[0.2, 1.4]], [[1.0, 1.0]])


def test_every_op_that_is_differentiable_has_forward_mode():
    from tests.samples import all_samples

    rows = [r for r in all_samples() if r.order and all(a.dtype == float for a in r.inputs)]
    for row in rows:
        xs = [f64(a) for a in row.inputs]
        vs = [f64(np.cos(np.arange(a.size)).reshape(a.shape)) for a in row.inputs]
        y, dy = rg.jvp(row.f, xs, vs)
        ys, dys = (y, dy) if isinstance(y, tuple | list) else ([y], [dy])
        _, back = rg.vjp(row.f, *xs)
        ws = [f64(np.sin(np.arange(1, t.size + 1)).reshape(t.shape)) for t in ys]
        ws = [w if t.dtype.kind in "fc" else t for w, t in zip(ws, ys, strict=True)]
        ws = [rg.astype(w, t.dtype) for w, t in zip(ws, ys, strict=True)]
        dxs = back(tuple(ws) if isinstance(y, tuple) else ws if isinstance(y, list) else ws[0])
        left = sum(
            complex((w * d).sum()).real
            for w, d, t in zip(ws, dys, ys, strict=True)
            if t.dtype.kind in "fc"
        )
        right = sum(float((dx * v).sum()) for dx, v in zip(dxs, vs, strict=True))
        assert left == pytest.approx(right, rel=1e-8, abs=1e-9), str(row)


def test_errors():
    with pytest.raises(ArgumentError, match=r"vjp.*must be a function"):
        rg.vjp(3, 1.0)
    with pytest.raises(ArgumentError, match="nothing to differentiate by"):
        rg.vjp(lambda: 1)
    with pytest.raises(ShapeError, match=r"expected the shape \(2,\), got \(3,\)"):
        rg.vjp(lambda x: x * 1.0, [1.0, 2.0])[1]([1.0, 2.0, 3.0])
    with pytest.raises(ArgumentError, match="xs and dxs are lists"):
        rg.jvp(lambda x: x, 1.0, 1.0)
    with pytest.raises(ShapeError, match=r"hessian\(f\) must return a scalar"):
        rg.hessian(lambda x: x * 1.0)([1.0, 2.0])
    with pytest.raises(ArgumentError, match="must return a Tensor or a container"):
        rg.jacobian(lambda x: "text")(1.0)


# -- forward mode through rules that differentiate ------------------------------------------------

STRAIGHT = {
    "number": lambda dy, x: 3 * dy,
    "factor": lambda dy, x: dy * rg.cos(x),
    "sum": lambda dy, x: dy + rg.mean(dy) * x,
    "reversed": lambda dy, x: rg.flip(dy) / 2,
    "mask": lambda dy, x: rg.where(x > 0, dy, 0),
    "ones": lambda dy, x: dy * rg.ones_like(dy),
    "full": lambda dy, x: dy * rg.full_like(dy, 2.0) + rg.zeros_like(dy),
    "grad": lambda dy, x: rg.grad(lambda z: (rg.sin(z) * dy).sum())(x),
    "grad of no scalar": lambda dy, x: rg.grad(lambda z: z * z * dy)(x),
    "grad with dy": lambda dy, x: rg.grad(rg.sin)(x, dy),
    "grad by dy": lambda dy, x: rg.grad(lambda d: (d * x).sum())(dy) * dy,
    "value_and_grad": lambda dy, x: rg.value_and_grad(lambda z: (z**3 * dy).sum())(x).grad,
    "grad of grad": lambda dy, x: rg.grad(rg.grad(lambda z: (z**3 * dy).sum()))(x),
    "vjp": lambda dy, x: rg.vjp(rg.sin, x)[1](dy)[0],
    "vjp of the product": lambda dy, x: rg.vjp(lambda z: z * z * dy, x)[1](rg.ones_like(x))[0],
    "jvp": lambda dy, x: rg.jvp(rg.sin, [x], [dy])[1],
}
BENT = {
    "square": lambda dy, x: dy * dy,
    "relu": lambda dy, x: rg.nn.relu(dy),
    "clipped": lambda dy, x: rg.clip(dy, -1, 1),
    "sign": lambda dy, x: rg.sign(dy) * x,
    "normalized": lambda dy, x: dy / rg.linalg.vector_norm(dy),
    "masked by itself": lambda dy, x: rg.where(dy > 0, dy, 0),
    "plus ones": lambda dy, x: dy + rg.ones_like(dy),
    "grad": lambda dy, x: rg.grad(lambda z: (z * dy * dy).sum())(x),
    "grad by dy": lambda dy, x: rg.grad(lambda d: (d * d * d).sum())(dy),
    "vjp": lambda dy, x: rg.vjp(lambda z: z * dy, x)[1](dy)[0],
    "jvp": lambda dy, x: rg.jvp(lambda z: z * dy, [x], [dy])[1],
}
LIBRARIES = {
    "numpy": np.asarray,
    "jax": lambda v: __import__("jax").numpy.asarray(v),
    "torch": lambda v: __import__("torch").tensor(v),
}
WAYS = [("numpy", False), ("numpy", True), ("jax", False), ("jax", True), ("torch", False)]
ways = pytest.mark.parametrize(("library", "jitted"), WAYS)
VALUES = np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)  # seeds that are ops


def under(rule, jitted):
    def f(x):
        with rg.gradient_override_map({"Tanh": rule}):
            return rg.tanh(x) * 2

    return rg.jit(f) if jitted else f


@ways
@pytest.mark.parametrize("kind", STRAIGHT)
@pytest.mark.parametrize("size", [2, 70])
def test_forward_mode_of_linear_rules(kind, library, jitted, size):
    x, v, dy = [rg.tensor(LIBRARIES[library](row[:size])) for row in VALUES]
    f = under(STRAIGHT[kind], jitted)
    (dx,) = rg.vjp(f, x)[1](dy)
    got = rg.jvp(f, [x], [v])[1]
    assert float((dy * got).sum()) == pytest.approx(float((dx * v).sum()), rel=1e-4)
    assert float((got * got).sum()) > 0


@ways
@pytest.mark.parametrize("kind", BENT)
def test_forward_mode_of_rules_that_are_not_linear(kind, library, jitted):
    x, v, _ = [rg.tensor(LIBRARIES[library](row)) for row in VALUES]
    f = under(BENT[kind], jitted)
    try:
        dy = rg.jvp(f, [x], [v])[1]
    except GradientError as error:
        assert "forward mode" in str(error)
    else:  # of what is traced only the run can tell
        assert jitted
        assert np.isnan(dy.numpy()).all()


@ways
def test_an_override_of_what_makes_constants_counts(library, jitted):
    def rule(dy, x):
        with rg.gradient_override_map({"OnesLike": lambda dy: dy}):
            ones = rg.ones_like(dy)
        return dy * ones

    x, v, _ = [rg.tensor(LIBRARIES[library](row)) for row in VALUES]
    with pytest.raises(GradientError, match=r"not linear.*'Mul'"):
        rg.jvp(under(rule, jitted), [x], [v])


def in_graph(rule, values):
    """The result of `under` and its tangent, by a session."""
    with tf.Graph().as_default() as graph:
        x, v = [tf.placeholder(np.float32, [None]) for _ in values]
        with graph.gradient_override_map({"Tanh": rule}):
            found = rg.jvp(lambda x: rg.tanh(x) * 2, [x], [v])
        with tf.Session() as session:
            return session.run(list(found), dict(zip([x, v], values, strict=True)))


@pytest.mark.parametrize("kind", STRAIGHT)
def test_forward_mode_of_linear_rules_in_a_graph(kind):
    x, v = VALUES[:2]
    y, dy = in_graph(STRAIGHT[kind], [x, v])
    due = rg.jvp(under(STRAIGHT[kind], jitted=False), [x], [v])
    np.testing.assert_allclose(y, due[0].numpy(), rtol=1e-6)
    np.testing.assert_allclose(dy, due[1].numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", BENT)
def test_forward_mode_of_rules_that_are_not_linear_in_a_graph(kind):
    try:
        dy = in_graph(BENT[kind], VALUES[:2])[1]
    except GradientError as error:
        assert "forward mode" in str(error)
    else:  # only the run can tell
        assert np.isnan(dy).all()


def test_forward_mode_of_second_order_in_a_graph():
    x, v = VALUES[:2].astype(np.float64)
    with tf.Graph().as_default():
        p = tf.placeholder(np.float64, [None])
        found = rg.jvp(rg.grad(lambda x: rg.sin(x).sum()), [p], [rg.asarray(v)])[1]
        with tf.Session() as session:
            np.testing.assert_allclose(session.run(found, {p: x}), -np.sin(x) * v)

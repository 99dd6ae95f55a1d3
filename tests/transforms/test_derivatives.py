"""vjp, jvp, jacobian, hessian, linearize, hvp; forward mode under rules, or its refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import GradientError
from tests.samples import all_samples

X = np.array([0.3, -0.7, 1.1])
A = np.array([[1.0, 2.0, -1.0], [0.5, -2.0, 3.0]])


def f64(x):
    return rg.asarray(np.asarray(x, float))


def test_vjp_can_be_called_again_and_differentiated():
    y, back = rg.vjp(lambda a, b: rg.sin(a) * b, f64(0.5), f64(2.0))
    assert y.item() == pytest.approx(2 * np.sin(0.5))
    for dy in (1.0, 3.0):
        found = [d.item() for d in back(dy)]
        assert found == pytest.approx([dy * 2 * np.cos(0.5), dy * np.sin(0.5)])
    assert rg.grad(lambda dy: back(dy)[0])(f64(1.0)).item() == pytest.approx(2 * np.cos(0.5))


def test_containers():
    y, back = rg.vjp(lambda p: {"s": p["a"] + p["b"], "m": p["a"] * p["b"]}, {"a": 2.0, "b": 3.0})
    (dp,) = back({"s": 1.0, "m": 10.0})
    assert (dp["a"].item(), dp["b"].item(), sorted(y)) == (31.0, 21.0, ["m", "s"])
    values, dy = rg.jvp(lambda p: [p["a"] * p["b"]], [{"a": 2.0, "b": 3.0}], [{"a": 1.0, "b": 0.0}])
    assert (values[0].item(), dy[0].item()) == (6.0, 3.0)
    jacobian, aux = rg.jacfwd(lambda x: (x * x, "aux"), has_aux=True)(X)
    assert (jacobian.numpy() == np.diag(2 * X)).all() and aux == "aux"


def test_zeros_where_nothing_is_connected():
    assert rg.vjp(lambda a, b: a * 1.0, 1.0, 2.0)[1](1.0)[1].item() == 0.0
    assert rg.jvp(lambda x: rg.scalar(3.0), [2.0], [1.0])[1].item() == 0.0
    for api in rg.jacobian, rg.jacfwd:
        dy = api(lambda x: rg.ones((2,)))(X)
        assert dy.shape == (2, 3) and not dy.numpy().any()
    assert not rg.hessian(lambda x: (x * 2).sum())(X).numpy().any()
    assert rg.jacfwd(lambda x: x * 2)(rg.zeros([0])).shape == (0, 0)


W = np.linspace(-1, 1, 6).reshape(2, 3)
FUNCTIONS = {
    "product": lambda x: rg.sin(x) * x,
    "scalar": lambda x: (x * x).sum(),
    "matrix": lambda x: rg.matmul(W, x) / (1 + x[0] * x[0]),
    "where": lambda x: rg.where(x > 0, x * x, -x),
    "concat": lambda x: rg.concat([x[1:], rg.exp(x[:1])]),
    "softmax": lambda x: rg.nn.softmax(x) * rg.max(x),
    "cumulative": lambda x: rg.cumulative_prod(x),
    "sort": lambda x: rg.sort(x) * x,
}


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_forward_and_reverse_agree_with_differences(f):
    x, v, h = np.array([0.4, -1.3, 0.9]), np.array([0.3, 0.8, -0.5]), 1e-6
    y, dy = rg.jvp(f, [f64(x)], [f64(v)])
    difference = (f(f64(x + h * v)).numpy() - f(f64(x - h * v)).numpy()) / (2 * h)
    for found in dy.numpy(), rg.jacobian(f)(f64(x)).numpy() @ v:
        np.testing.assert_allclose(found, difference, rtol=1e-6, atol=1e-8)
    assert y.tolist() == f(f64(x)).tolist()


# What regrad has as JAX has it: a function of the library and of its sine.
def of_two(sin):
    return lambda x, a: {"y": sin(a @ x), "z": x[0] * a}


def vector(sin):
    return lambda x: (sin(x) * x[0], x.sum())


def scalar(sin):
    return lambda x: (sin(x) * x[0]).sum()


def linearized(lib, sin):
    y, moved = lib.linearize(vector(sin), X)
    return y, moved(X + 1), moved(2 * (X + 1))


LIKE_JAX = {
    "jacfwd": lambda lib, sin: lib.jacfwd(of_two(sin), argnums=(0, 1))(X, A),
    "jacrev": lambda lib, sin: lib.jacrev(of_two(sin), argnums=(0, 1))(X, A),
    "jacfwd of jacrev": lambda lib, sin: lib.jacfwd(lib.jacrev(lambda x: sin(x) * x[0]))(X),
    "jacrev of jacfwd": lambda lib, sin: lib.jacrev(lib.jacfwd(lambda x: sin(x) * x[0]))(X),
    "hessian": lambda lib, sin: lib.hessian(scalar(sin))(X),
    "jvp of grad": lambda lib, sin: lib.jvp(lib.grad(scalar(sin)), (X,), (X + 1,))[1],
    "linearize": linearized,
}


@pytest.mark.parametrize("name", LIKE_JAX)
def test_what_jax_has_too(name):
    due = optree.tree_leaves(LIKE_JAX[name](jax, jnp.sin))
    for mode in (lambda f: f, rg.jit):
        found = optree.tree_leaves(mode(lambda: LIKE_JAX[name](rg, rg.sin))())
        for y, expected in zip(found, due, strict=True):
            assert y.shape == expected.shape
            np.testing.assert_allclose(y.numpy(), expected, rtol=1e-7, atol=1e-12)


def test_hvp_is_the_hessian_times_the_vector():
    hvp = lambda x, dx: rg.hvp(scalar(rg.sin), [x], [dx])[0]  # noqa: E731
    for f in hvp, rg.jit(hvp):
        due = jax.hessian(scalar(jnp.sin))(X) @ (X + 1)
        np.testing.assert_allclose(f(f64(X), f64(X + 1)).numpy(), due, rtol=1e-7)


# -- forward mode under rules ----------------------------------------------------------------------

# With X as the vector and as the point, each is of the rule's 3 X.
DIRECTIONS = {
    "jvp": lambda f: rg.jvp(f, [X], [X])[1],
    "jacfwd": lambda f: rg.jacfwd(f)(f64(X)).numpy().sum(0) * X,
    "jacrev": lambda f: rg.jacrev(f)(f64(X)).numpy().sum(0) * X,
    "linearize": lambda f: rg.linearize(f, f64(X))[1](X),
    "hvp": lambda f: rg.hvp(lambda x: f(x).sum(), [f64(X)], [X])[0] * X,
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_rules_in_force_count_or_raise(name):
    call = DIRECTIONS[name]
    with rg.gradient_override_map({"Sin": lambda op, dy: 3 * dy * op.inputs[0]}):
        np.testing.assert_allclose(np.asarray(call(rg.sin)), 3 * X * X)
    custom = rg.custom_grad(lambda x: (rg.sign(x), lambda dy: dy * 3 * x))
    np.testing.assert_allclose(np.asarray(call(custom)), 3 * X * X)
    if name != "jacrev":
        f = (lambda x: rg.sin(x * x) ** 2) if name == "hvp" else rg.sin
        with (
            rg.gradient_override_map({"Sin": lambda op, dy: rg.abs(dy)}),
            pytest.raises(GradientError, match="Abs"),
        ):
            call(f)


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
@pytest.mark.parametrize("around", [lambda f: f, rg.checkpoint], ids=["alone", "checkpoint"])
def test_forward_mode_is_refused_where_a_rule_is_not_linear(name, around):
    (rule, words), f = NOT_LINEAR[name], around(rg.round)
    with rg.gradient_override_map({"Round": rule}):
        rg.grad(f)([0.2, 1.4])
        with pytest.raises(GradientError, match=f"forward mode.*'Round'.*{words}|{words}.*'Round'"):
            rg.jvp(f, [[0.2, 1.4]], [[1.0, 1.0]])


def test_every_op_that_is_differentiable_has_forward_mode():
    """The product of its derivative with two vectors is that of reverse mode."""
    for row in all_samples():
        if not row.order or any(a.dtype != float for a in row.inputs):
            continue
        f = lambda *xs: [y for y in optree.tree_leaves(row.f(*xs)) if y.dtype.kind in "fc"]  # noqa: B023, E731
        xs = [f64(a) for a in row.inputs]
        vs = [f64(np.cos(np.arange(a.size)).reshape(a.shape)) for a in row.inputs]
        ys, dys = rg.jvp(f, xs, vs)
        ws = [f64(np.sin(np.arange(1, y.size + 1)).reshape(y.shape)) for y in ys]
        ws = [rg.astype(w, y.dtype) for w, y in zip(ws, ys, strict=True)]
        dxs = rg.vjp(f, *xs)[1](ws)
        left = sum(complex((w * d).sum()).real for w, d in zip(ws, dys, strict=True))
        right = sum(float((dx * v).sum()) for dx, v in zip(dxs, vs, strict=True))
        assert left == pytest.approx(right, rel=1e-8, abs=1e-9), str(row)


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
ways = pytest.mark.parametrize(
    ("library", "jitted"),
    [("numpy", False), ("numpy", True), ("jax", False), ("jax", True), ("torch", False)],
)
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
    due = rg.jvp(under(STRAIGHT[kind], jitted=False), [x], [v])
    for y, expected in zip(in_graph(STRAIGHT[kind], [x, v]), due, strict=True):
        np.testing.assert_allclose(y, expected.numpy(), rtol=1e-6)


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
    with tf.Graph().as_default(), tf.Session() as session:
        p = tf.placeholder(np.float64, [None])
        found = rg.jvp(rg.grad(lambda x: rg.sin(x).sum()), [p], [rg.asarray(v)])[1]
        np.testing.assert_allclose(session.run(found, {p: x}), -np.sin(x) * v)

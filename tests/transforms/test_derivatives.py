"""vjp, jvp, jacobian, hessian, linearize, hvp; forward mode under rules, or its refusal."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import GradientError
from tests.samples import all_samples
from tests.transforms.regions import REGIONS

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
    "jacobian": lambda lib, sin: lib.jacobian(of_two(sin), argnums=(1, 0))(X, A),
    "hessian": lambda lib, sin: lib.hessian(scalar(sin))(X),
    "jvp of grad": lambda lib, sin: lib.jvp(lib.grad(scalar(sin)), (X,), (X + 1,))[1],
    "linearize": linearized,
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", LIKE_JAX)
def test_what_jax_has_too(name):
    due = optree.tree_leaves(LIKE_JAX[name](jax, jnp.sin))
    for mode in (lambda f: f, rg.jit):
        found = optree.tree_leaves(mode(lambda: LIKE_JAX[name](rg, rg.sin))())
        for y, expected in zip(found, due, strict=True):
            assert y.shape == expected.shape
            np.testing.assert_allclose(y.numpy(), expected, rtol=1e-7, atol=1e-12)


@pytest.mark.slow
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


@pytest.mark.slow
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
    "number": lambda dy, x: 3 * dy, "factor": lambda dy, x: dy * rg.cos(x),
    "sum": lambda dy, x: dy + rg.mean(dy) * x, "reversed": lambda dy, x: rg.flip(dy) / 2,
    "mask": lambda dy, x: rg.where(x > 0, dy, 0), "ones": lambda dy, x: dy * rg.ones_like(dy),
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
}  # fmt: skip
# Rules that are not linear in dy, and the op that the error names.
BENT = {
    "square": (lambda dy, x: dy * dy, "'Mul'"), "relu": (lambda dy, x: rg.nn.relu(dy), "'Relu'"),
    "clipped": (lambda dy, x: rg.clip(dy, -1, 1), "'ClipByValue'"),
    "sign": (lambda dy, x: rg.sign(dy) * x, "'Sign'"),
    "maximum": (lambda dy, x: rg.maximum(dy, 0), "'Maximum'"),
    "normalized": (lambda dy, x: dy / rg.linalg.vector_norm(dy), "not linear"),
    "a norm": (lambda dy, x: dy / rg.sqrt(rg.sum(dy * dy)), "'Mul'"),
    "masked by itself": (lambda dy, x: rg.where(dy > 0, dy, 0), "'Greater'"),
    "a constant": (lambda dy, x: dy + 1, "even if the incoming gradient is 0"),
    "plus ones": (lambda dy, x: dy + rg.ones_like(dy), "even if the incoming gradient is 0"),
    "cut": (lambda dy, x: rg.stop_gradient(dy), "'StopGradient'"),
    "custom": (lambda dy, x: rg.rules.reverse_gradient(dy), "'CustomGrad'"),
    "grad": (lambda dy, x: rg.grad(lambda z: (z * dy * dy).sum())(x), "not linear"),
    "grad by dy": (lambda dy, x: rg.grad(lambda d: (d * d * d).sum())(dy), "not linear"),
    "vjp": (lambda dy, x: rg.vjp(lambda z: z * dy, x)[1](dy)[0], "not linear"),
    "jvp": (lambda dy, x: rg.jvp(lambda z: z * dy, [x], [dy])[1], "not linear"),
}  # fmt: skip
LIBRARIES = {
    "numpy": np.asarray, "jax": jnp.asarray, "torch": lambda v: __import__("torch").tensor(v),
    "graph": np.asarray,
}  # fmt: skip
WAYS = [(library, "alone") for library in LIBRARIES]
WAYS += [("numpy", "jit"), ("jax", "jit"), ("numpy", "checkpoint")]
ways = pytest.mark.parametrize(("library", "around"), WAYS)
VALUES = np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)  # seeds that are ops


def under(rule, around):
    def f(x):
        with rg.gradient_override_map({"Tanh": rule}):
            return rg.tanh(x) * 2

    return REGIONS[around](f)


def tangent(rule, library, around, x, v):
    """The derivative of `under`, by a session if the library is a graph."""
    if library != "graph":
        to = LIBRARIES[library]
        return rg.jvp(under(rule, around), [rg.tensor(to(x))], [rg.tensor(to(v))])[1].numpy()
    with tf.Graph().as_default() as graph, tf.Session() as session:
        at, along = [tf.placeholder(np.float32, [None]) for _ in range(2)]
        with graph.gradient_override_map({"Tanh": rule}):
            found = rg.jvp(lambda x: rg.tanh(x) * 2, [at], [along])[1]
        return session.run(found, {at: x, along: v})


@pytest.mark.slow(but=40)
@ways
@pytest.mark.parametrize("kind", STRAIGHT)
@pytest.mark.parametrize("size", [2, 70])
def test_forward_mode_of_linear_rules(kind, library, around, size):
    x, v, dy = VALUES[:, :size]
    to = LIBRARIES[library]
    (dx,) = rg.vjp(under(STRAIGHT[kind], around), rg.tensor(to(x)))[1](rg.tensor(to(dy)))
    got = tangent(STRAIGHT[kind], library, around, x, v)
    assert (dy * got).sum() == pytest.approx((dx.numpy() * v).sum(), rel=1e-4)
    assert (got * got).sum() > 0


@ways
@pytest.mark.parametrize("kind", BENT)
def test_forward_mode_of_rules_that_are_not_linear(kind, library, around):
    rule, words = BENT[kind]
    try:
        dy = tangent(rule, library, around, *VALUES[:2])
    except GradientError as error:
        assert "forward mode" in str(error)
        assert words in str(error) or (library, around) != ("numpy", "alone"), error
    else:  # of what is traced only the run can tell
        assert around == "jit" or library == "graph"
        assert np.isnan(dy).all()


@ways
def test_an_override_of_what_makes_constants_counts(library, around):
    def rule(dy, x):
        with rg.gradient_override_map({"OnesLike": lambda dy: dy}):
            ones = rg.ones_like(dy)
        return dy * ones

    with pytest.raises(GradientError, match=r"not linear.*'Mul'"):
        tangent(rule, library, around, *VALUES[:2])


def test_forward_mode_of_second_order_in_a_graph():
    x, v = VALUES[:2].astype(np.float64)
    with tf.Graph().as_default(), tf.Session() as session:
        p = tf.placeholder(np.float64, [None])
        found = rg.jvp(rg.grad(lambda x: rg.sin(x).sum()), [p], [rg.asarray(v)])[1]
        np.testing.assert_allclose(session.run(found, {p: x}), -np.sin(x) * v)


# -- forward mode through loops --------------------------------------------------------------------

POINT, SPEED = rg.scalar(0.7), rg.scalar(1.3)


def sines(x):
    """As many steps as the value asks for."""
    return rg.while_loop(lambda c: c[0] > 0.1, lambda c: (c[0] / 2, rg.sin(c[1]) + c[0]), (x, x))[1]


def moved(f):
    return lambda x: rg.jvp(f, [x], [SPEED])[1]


def test_rules_inside_a_loop_of_unknown_length():
    with (
        pytest.raises(GradientError, match="forward mode: the backward pass is not linear"),
        rg.gradient_override_map({"Sin": lambda dy: rg.nn.relu(dy)}),
    ):
        rg.jit(moved(sines))(POINT)
    with rg.gradient_override_map({"Sin": lambda dy: dy + 1}):
        assert np.isnan(rg.jit(moved(sines))(POINT).item())
        with pytest.raises(GradientError, match="even if the incoming gradient is 0"):
            moved(sines)(POINT)


def test_results_that_do_not_move():
    def f(x):
        body = lambda c: (c[0] + 1, c[1] * 0.5, c[2] * x)  # noqa: E731
        return rg.while_loop(lambda c: c[0] < 3, body, (0, rg.scalar(1.0), x))

    for g in (f, rg.jit(f)):
        count, constant, y = [dy.item() for dy in moved(g)(POINT)]
        assert (count, constant, y) == (0, 0, pytest.approx(4 * 0.7**3 * 1.3, rel=1e-5))


def test_variables_assigned_in_the_loop():
    v = rg.Variable(1.0)

    def g(x):
        v.assign(1.0)
        rg.while_loop(lambda c: c < 3, lambda c: (v.assign(v * x), c + 1)[1], 0)
        return v * x

    assert rg.jit(moved(g))(POINT).item() == pytest.approx(4 * 0.7**3 * 1.3, rel=1e-5)


# -- a gradient function that is transposed piece by piece -----------------------------------------
#
# What comes before a region is transposed for its inputs, and once more for what does not lead
# through it, so a gradient function runs twice: in the derivative of a compiled function, by a
# replay of a replay.


def sin_of_a_pair(pair, save):
    y = rg.sin(pair["x"])
    save(x=pair["x"], y=y)
    back = lambda dy, saved: {"x": dy[0] * rg.cos(saved.x) + dy[1] * saved.y, "of": None}  # noqa: E731
    return (y, -rg.cos(pair["x"])), back


SINES = {
    "saved": rg.custom_grad(
        lambda x, save: (save(x=x), rg.sin(x), lambda dy, saved: dy * rg.cos(saved.x))[1:]
    ),
    "closed over": rg.custom_grad(lambda x: (rg.sin(x), lambda dy: dy * rg.cos(x))),
    "of a pair": lambda x: rg.custom_grad(sin_of_a_pair)({"x": x, "of": rg.tensor(1.0)})[0],
}
# A region over another input; c is the sum of the sines.
JAX = SimpleNamespace(scan=jax.lax.scan, vmap=jax.vmap, cond=jax.lax.cond)
OVER_ANOTHER = {
    "scan": lambda lib, c, x: lib.scan(lambda c, r: (c * r, c), c, x)[1],
    "vmap": lambda lib, c, x: lib.vmap(lambda r: r * c * r)(x),
    "cond": lambda lib, c, x: lib.cond(x[0] > 0, lambda: x * x * c, lambda: x),
}
DERIVATIVES = {
    "jvp": lambda lib, g: lib.jvp(g, (P, Q), (Q, P))[1],
    "linearize": lambda lib, g: lib.linearize(g, P, Q)[1](Q, P),
    "jvp of jvp": lambda lib, g: lib.jvp(
        lambda x, w: lib.jvp(g, (x, w), (w, x * w))[1], (P, Q), (Q, P)
    )[1],
    "grad of jvp": lambda lib, g: lib.grad(lambda x: lib.jvp(g, (x, P * 1.0), (x * x, x))[1])(Q),
    "jvp of grad": lambda lib, g: lib.jvp(lib.grad(lambda w: g(P * 1.0, w)), (Q,), (P,))[1],
}
P, Q = np.array([0.3, 0.2], np.float32), np.array([0.1, 0.4], np.float32)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("region", OVER_ANOTHER)
@pytest.mark.parametrize("sine", SINES)
def test_a_gradient_function_that_runs_twice_in_a_replay(sine, region, name):
    def g(x, w):
        t = SINES[sine](w)
        return rg.sum(t) * rg.sum(t) + rg.sum(OVER_ANOTHER[region](rg, rg.sum(t), x))

    def by_jax(x, w):
        t = jnp.sin(w)
        return jnp.sum(t) ** 2 + jnp.sum(OVER_ANOTHER[region](JAX, jnp.sum(t), x))

    due = DERIVATIVES[name](jax, by_jax)
    for f in (rg.jit(g), rg.jit(lambda x, w: rg.jit(g)(x, w))):
        found = [DERIVATIVES[name](rg, f)]
        if name == "jvp of grad":
            found.append(rg.hvp(f, [P, Q], [P * 0, P])[1])
        for y in found:
            np.testing.assert_allclose(y.numpy(), due, 1e-5, 1e-6)


# Rules that return the same whatever arrives, and whether they return 0.
FIXED = {
    "x": (lambda dy, x: x, False), "ones": (lambda dy, x: rg.ones_like(dy), False),
    "a constant": (lambda dy, x: rg.full(dy.shape, 2.0, dtype=dy.dtype), False),
    "zeros like dy": (lambda dy, x: rg.zeros_like(dy), True),
    "zeros": (lambda dy, x: rg.zeros(x.shape, dtype=x.dtype), True),
    "no gradient": (lambda dy, x: rg.rules.no_gradient(dy), True),
}  # fmt: skip
FORWARD = {
    "jvp": lambda f, x: rg.jvp(f, [x], [x])[1],
    "jacfwd": lambda f, x: rg.jacfwd(f)(x).sum(),
    "linearize": lambda f, x: rg.linearize(f, x)[1](x),
}


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("size", [2, 100])  # constants of more than 64 elements are traced
@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.parametrize("name", FIXED)
def test_under_jit_a_rule_that_ignores_dy_is_refused(name, way, size):
    rule, is_zero = FIXED[name]
    x = rg.tensor(np.linspace(0.5, 2, size), dtype="float32")
    custom = rg.custom_grad(lambda x, save: (rg.sin(x), lambda dy: rule(dy, x)))

    def overridden(x):
        with rg.gradient_override_map({"Sin": rule}):
            return rg.sin(x * x)

    arounds = ("alone", "scan", "cond", "vmap") if way == "jvp" else ("alone",)
    for around, f in itertools.product(arounds, (overridden, lambda x: custom(x * x))):
        g = REGIONS[around](f)
        if is_zero:
            assert not rg.jit(lambda x: FORWARD[way](g, x))(x).numpy().any()  # noqa: B023
        else:
            with pytest.raises(GradientError, match="even if the incoming gradient is 0"):
                rg.jit(lambda x: FORWARD[way](g, x))(x)  # noqa: B023


def test_under_jit_a_rule_that_is_affine_in_dy_gives_nan():
    def f(x):
        with rg.gradient_override_map({"Sin": lambda dy, x: 0 * dy + x}):
            return rg.sin(x)

    assert np.isnan(rg.jit(lambda x: rg.jvp(f, [x], [x])[1])([0.5, 2.0]).numpy()).all()

"""`custom_grad` and `from_regrad` of regrad.jax: every order and mode, against hand-made rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RuleError
from tests.helpers.jax_places import PLACES, TRANSFORMS, X, by_hand, unrolled, unrolled_scan

custom_grad, from_regrad = rg.jax.custom_grad, rg.jax.from_regrad


@custom_grad
def closed(x):
    """The gradient function closes over an intermediate."""
    z = 3 + x * x
    return jnp.sin(x), lambda dy: dy * z


@custom_grad
def saving(x, save):
    save([x, x * x])
    return {"value": jnp.sin(x), "grad_func": lambda dy, saved: [dy * (3 + saved[1])]}


bridged = from_regrad(
    rg.custom_grad(lambda x: (rg.sin(x), lambda dy, z=None: dy * (3 + rg.square(x))))
)

DUE = by_hand(jnp.sin, lambda x: 3 + x * x)
HARD = {"scan": unrolled_scan, "fori": unrolled, "map": lambda op: lambda x: op(x) * x}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", [closed, saving, bridged], ids=["closed", "saving", "bridged"])
def test_every_transformation(op, transform):
    run = TRANSFORMS[transform]
    np.testing.assert_allclose(run(lambda x: op(x) * x)(X), run(lambda x: DUE(x) * x)(X))


@pytest.mark.parametrize("place", ["jit", "scan", "fori", "map", "cond", "checkpoint", "vmap"])
@pytest.mark.parametrize("op", [closed, bridged], ids=["closed", "bridged"])
def test_every_place(op, place):
    due = HARD.get(place, PLACES[place])(DUE)
    for name in ("grad", "jvp", "hessian"):
        run = TRANSFORMS[name]
        np.testing.assert_allclose(run(PLACES[place](op))(X), run(due)(X), rtol=1e-6)


def test_third_derivatives_in_mixed_modes():
    def third(a, b, c, f):
        return jax.jit(a(b(c(lambda x: jnp.sum(f(x) * x)))))(X[:1])

    rev, fwd = jax.jacrev, jax.jacfwd
    for op in (closed, bridged):
        for modes in ((rev, rev, rev), (rev, fwd, fwd)):
            np.testing.assert_allclose(third(*modes, op), third(*modes, DUE), atol=1e-9)


def test_the_output_is_differentiated_by_the_rule_at_the_next_order():
    """As in regrad: where grad_func uses y, y's own derivative is the custom one."""

    def ours(xp):
        def f(x, save):
            y = xp.round(x)
            save(y=y)
            return y, lambda dy, saved: dy * (saved.y + y)

        return f

    mine = custom_grad(ours(jnp))
    theirs = rg.custom_grad(ours(rg))
    second = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: mine(x).sum())(x) ** 2))(X)
    due = rg.grad(lambda x: rg.sum(rg.square(rg.grad(lambda x: rg.sum(theirs(x)))(x))))
    np.testing.assert_allclose(second, due(rg.tensor(np.asarray(X))).numpy())


def test_containers_keywords_and_what_passes_through():
    @custom_grad
    def f(params, x, mode, *, factor):
        assert mode == "up"
        value = {"y": params["w"] * x * factor, "n": jnp.arange(3)}
        return value, lambda dy: [{"b": None, "w": dy["y"] * 2}, dy["y"] * 3]

    params = {"w": X, "b": jnp.ones(2)}
    g, dx = jax.grad(lambda p, x: f(p, x, "up", factor=2.0)["y"].sum(), (0, 1))(params, X)
    np.testing.assert_array_equal(g["w"], np.full(3, 2.0))
    np.testing.assert_array_equal(g["b"], np.zeros(2))
    np.testing.assert_array_equal(dx, np.full(3, 3.0))
    np.testing.assert_array_equal(f(params, X, "up", factor=2.0)["n"], np.arange(3))


def test_what_f_closes_over_is_a_constant_or_refused_by_name():
    def loss(weight, x):
        scaled = custom_grad(lambda x: (x * weight, lambda dy: dy * weight))
        return scaled(x).sum()

    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        np.testing.assert_allclose(jax.grad(wrap(loss), 1)(3.0, X), np.full(3, 3.0))
        with pytest.raises(GradientError, match="closes over 'weight'"):
            jax.grad(wrap(loss))(3.0, X)
    by_vmap = jax.vmap(lambda w: jax.grad(loss, 1)(w, X))(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(by_vmap, [[1, 1, 1], [2, 2, 2]])

    @custom_grad
    def keyword(x, *, k):
        return x * k, lambda dy: dy * k

    with pytest.raises(GradientError, match="keyword argument 'k'"):
        jax.grad(lambda k: keyword(X, k=k).sum())(2.0)

    def outer(w):
        return from_regrad(lambda x: rg.sum(x * w))(X)

    with pytest.raises(GradientError, match="closes over an array that JAX is differentiating"):
        jax.grad(outer)(2.0)
    np.testing.assert_allclose(jax.vmap(outer)(jnp.arange(2.0)), jnp.arange(2.0) * X.sum())
    np.testing.assert_allclose(jax.jit(outer)(2.0), 2 * X.sum())
    inner = jax.jit(lambda w: jax.grad(lambda x: from_regrad(lambda x: rg.sum(x * w))(x))(X))
    np.testing.assert_allclose(inner(2.0), np.full(3, 2.0))


@rg.custom_grad
def closing_over_jax(x):
    slope = rg.asarray(jnp.cos(rg.stop_gradient(x).data))
    return rg.sin(x), lambda dy: dy * slope


@rg.custom_grad
def saving_jax(x, save):
    save([rg.asarray(jnp.cos(rg.stop_gradient(x).data))])
    return rg.sin(x), lambda dy, saved: dy * saved[0]


@pytest.mark.parametrize("f", [closing_over_jax, saving_jax])
@pytest.mark.parametrize("in_scan", [False, True])
def test_what_jax_computed_for_a_gradient_function_is_refused(f, in_scan):
    scanned = lambda x: rg.scan(lambda c, x: (f(c) * x, c), rg.ones((), dtype=x.dtype), x)[1]  # noqa: E731
    bridged = from_regrad(scanned if in_scan else f)
    assert jnp.isfinite(bridged(X)).all()
    for way in (jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jacfwd, jax.hessian):
        with pytest.raises(GradientError, match="JAX's own functions, and kept"):
            way(lambda x: bridged(x).sum())(X)


@pytest.mark.parametrize(
    ("grad_func", "error", "words"),
    [
        (lambda dy: [dy, dy], RuleError, r"wrong structure.*expected gradients by x"),
        (lambda dy: dy[:2], RuleError, r"\(2,\).*float64 \(3,\)"),
        (lambda dy: dy.astype("float32"), RuleError, "float32.*float64"),
        (lambda dy: "no", RuleError, "expected an array"),
        (lambda dy: rg.tensor([1.0, 2.0, 3.0]), ArgumentError, "from_regrad"),
    ],
)
def test_wrong_answers(grad_func, error, words):
    with pytest.raises(error, match=words):
        custom_grad(lambda x: (x * 2, grad_func))(X)


def test_other_mistakes():
    for answer in (3, (X,), {"value": X}, (X, 3), ("no", lambda dy: dy), ([], lambda dy: dy)):
        with pytest.raises(ArgumentError, match="custom_grad"):
            custom_grad(lambda x, answer=answer: answer)(X)
    kept = []
    custom_grad(lambda x, save: (kept.append(save), (x, lambda dy: dy))[1])(X)
    with pytest.raises(ArgumentError, match="save was called after"):
        kept[0]([X])
    with pytest.raises(ArgumentError, match="takes one list or keywords"):
        custom_grad(lambda x, save: (save(x), (x, lambda dy: dy))[1])(X)
    with pytest.raises(ArgumentError, match="is a Tensor of regrad"):
        custom_grad(lambda x: (rg.sin(x), lambda dy: dy))(X)
    with pytest.raises(ArgumentError, match=r"expected the function to return Tensors"):
        from_regrad(lambda x: 3)(X)
    clip = custom_grad(lambda x: (x, lambda dy: jnp.clip(dy, -1, 1)))
    with pytest.raises(GradientError, match="not linear"):
        jax.jvp(clip, (X,), (X,))
    np.testing.assert_array_equal(jax.grad(lambda x: clip(x * 5).sum())(X), np.full(3, 5.0))


# -- from_regrad -----------------------------------------------------------------------------------


def test_overrides_in_force_when_it_is_called_count_at_every_order():
    f = from_regrad(lambda x: rg.sum(rg.round(x) * x))
    with rg.gradient_override_map({"Round": lambda dy, x: dy * x}) as used:
        g = jax.grad(f)(X)
        y, pull = jax.vjp(f, X)
        second = jax.hessian(f)(X)
    np.testing.assert_allclose(g, X * X + np.round(X))
    np.testing.assert_allclose(pull(1.0)[0], g)
    np.testing.assert_allclose(second, np.diag(3 * X))
    assert y == jnp.sum(jnp.round(X) * X)
    used.assert_fired()
    np.testing.assert_allclose(jax.grad(f)(X), np.round(X))


def test_containers_and_variables():
    v = rg.Variable([1.0, 2.0, 3.0], dtype="float64")
    t = rg.tensor([2.0, 2.0, 2.0], dtype="float64")
    f = from_regrad(lambda p, k, *, b: {"y": rg.sin(p["w"]) * k * v * t + b, "n": (rg.sum(b),)})
    due = lambda p, k, *, b: {"y": jnp.sin(p["w"]) * k * jnp.arange(1.0, 4) * 2 + b}  # noqa: E731
    y = f({"w": X}, 3, b=X)
    np.testing.assert_allclose(y["y"], due({"w": X}, 3, b=X)["y"])
    np.testing.assert_allclose(y["n"][0], X.sum())
    g = jax.jit(jax.grad(lambda p: f(p, 3, b=X)["y"].sum()))({"w": X})
    np.testing.assert_allclose(g["w"], 6 * np.cos(X) * np.arange(1.0, 4))
    v.assign([0.0, 0.0, 0.0])
    np.testing.assert_allclose(f({"w": X}, 3, b=X)["y"], X)
    with pytest.raises(ArgumentError, match="assigns to the Variable"):
        from_regrad(lambda x: v.assign(x))(X)
    with pytest.raises(GradientError, match="regrad is differentiating"):
        rg.grad(lambda t: rg.sum(rg.tensor(from_regrad(lambda x: x * t)(X))))(rg.tensor([1.0]))


def test_complex_numbers():
    z = jnp.array([0.5 + 1j, -1.0 + 0.3j])
    for ours, jaxs in (
        (lambda z: rg.square(z) * z, lambda z: z * z * z),
        (lambda z: rg.abs(z), jnp.abs),
        (lambda z: rg.sum(rg.real(z) * rg.imag(z)), lambda z: jnp.sum(z.real * z.imag)),
        (lambda z: rg.conj(z) * z, lambda z: jnp.conj(z) * z),
    ):
        f = from_regrad(ours)
        y, pull = jax.vjp(f, z)
        _, due = jax.vjp(jaxs, z)
        dy = y * (2 - 1j) if jnp.iscomplexobj(y) else y * 2
        np.testing.assert_allclose(pull(dy)[0], due(dy)[0])
        np.testing.assert_allclose(
            jax.jvp(f, (z,), (z * 1j,)), jax.jvp(jaxs, (z,), (z * 1j,)), atol=1e-15
        )
    double = custom_grad(lambda z: (z * 2j, lambda dy: dy * np.conj(2j)))  # TensorFlow's way
    np.testing.assert_allclose(jax.vjp(double, z)[1](z)[0], z * 2j)


def test_integers_and_keys_pass():
    f = from_regrad(lambda x, n: x * rg.astype(n, x.dtype))
    g = jax.grad(lambda x: f(x, jnp.arange(3)).sum())(X)
    np.testing.assert_array_equal(g, [0, 1, 2])
    y, n = from_regrad(lambda x: (rg.square(x), rg.argmax(x)))(X)
    np.testing.assert_allclose(y, X * X)
    assert n == 2


def test_scan_over_a_regrad_function_with_state():
    step = from_regrad(lambda c, x: (rg.tanh(c) + x, c * x))

    def f(x, step):
        return lax.scan(step, x * 0, jnp.stack([x, 2 * x, x]))[0].sum()

    due = lambda c, x: (jnp.tanh(c) + x, c * x)  # noqa: E731
    np.testing.assert_allclose(jax.hessian(f)(X, step), jax.hessian(f)(X, due), atol=1e-12)

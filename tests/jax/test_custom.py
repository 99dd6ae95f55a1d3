"""`custom_grad` and `from_regrad` of regrad.jax: every order and mode, against hand-made rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RuleError
from tests.helpers.jax_model import WRAPS, own_slope, slopes
from tests.helpers.jax_places import PLACES, TRANSFORMS, X, unrolled, unrolled_scan
from tests.helpers.rows import refusals, refused

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
OPS = {"closed": closed, "saving": saving, "bridged": bridged}
HAND = own_slope(lambda x: 3 + x * x)(lambda x: jnp.sin(x))
HARD = {"scan": unrolled_scan, "fori": unrolled, "map": lambda op: lambda x: op(x) * x}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OPS)
def test_every_transformation(name, transform):
    run, op = TRANSFORMS[transform], OPS[name]
    assert_allclose(run(lambda x: op(x) * x)(X), run(lambda x: HAND(x) * x)(X))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("place", ["jit", "scan", "fori", "map", "cond", "checkpoint", "vmap"])
@pytest.mark.parametrize("name", ["closed", "bridged"])
def test_every_place(name, place):
    hand = HARD.get(place, PLACES[place])(HAND)
    for run in (TRANSFORMS[name] for name in ("grad", "jvp", "hessian")):
        assert_allclose(run(PLACES[place](OPS[name]))(X), run(hand)(X), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["closed", "bridged"])
@pytest.mark.parametrize("inner", [jax.jacrev, jax.jacfwd])
def test_third_derivatives_in_mixed_modes(inner, name):
    def third(f):
        return jax.jit(jax.jacrev(inner(inner(lambda x: jnp.sum(f(x) * x)))))(X[:1])

    assert_allclose(third(OPS[name]), third(HAND), atol=1e-9)


def test_the_output_is_differentiated_by_the_rule_at_the_next_order():
    """As in regrad: where grad_func uses y, y's own derivative is the custom one."""

    def ours(xp):
        def f(x, save):
            y = xp.round(x)
            save(y=y)
            return y, lambda dy, saved: dy * (saved.y + y)

        return f

    mine, theirs = custom_grad(ours(jnp)), rg.custom_grad(ours(rg))
    found = slopes(lambda x: slopes(mine, x) ** 2, X)
    second = rg.grad(lambda x: rg.sum(rg.square(rg.grad(lambda x: rg.sum(theirs(x)))(x))))
    assert_allclose(found, second(rg.tensor(np.asarray(X))).numpy())


def test_containers_keywords_and_what_passes_through():
    @custom_grad
    def f(params, x, mode, *, factor):
        assert mode == "up"
        value = {"y": params["w"] * x * factor, "n": jnp.arange(3)}
        return value, lambda dy: [{"b": None, "w": dy["y"] * 2}, dy["y"] * 3]

    params = {"w": X, "b": jnp.ones(2)}
    g, dx = jax.grad(lambda p, x: f(p, x, "up", factor=2.0)["y"].sum(), (0, 1))(params, X)
    assert_array_equal([*g["w"], *g["b"], *dx], [2.0] * 3 + [0.0] * 2 + [3.0] * 3)
    assert_array_equal(f(params, X, "up", factor=2.0)["n"], np.arange(3))


def weighted(weight, x):
    return custom_grad(lambda x: (x * weight, lambda dy: dy * weight))(x).sum()


def bridging(w):
    return from_regrad(lambda x: rg.sum(x * w))(X)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_constant_or_a_refusal_by_name_of_what_f_closes_over(wrap):
    f = WRAPS[wrap](weighted)
    assert_allclose(jax.grad(f, 1)(3.0, X), np.full(3, 3.0))
    refused(lambda: jax.grad(f)(3.0, X), GradientError, "closes over 'weight'")


def test_what_f_closes_over_may_be_of_a_batch_or_compiled():
    by_vmap = jax.vmap(lambda w: jax.grad(weighted, 1)(w, X))(jnp.array([1.0, 2.0]))
    assert_allclose(by_vmap, [[1, 1, 1], [2, 2, 2]])
    assert_allclose(jax.vmap(bridging)(jnp.arange(2.0)), jnp.arange(2.0) * X.sum())
    assert_allclose(jax.jit(bridging)(2.0), 2 * X.sum())
    inner = jax.jit(lambda w: jax.grad(lambda x: from_regrad(lambda x: rg.sum(x * w))(x))(X))
    assert_allclose(inner(2.0), np.full(3, 2.0))


@rg.custom_grad
def closing_over_jax(x):
    slope = rg.asarray(jnp.cos(rg.stop_gradient(x).data))
    return rg.sin(x), lambda dy: dy * slope


@rg.custom_grad
def saving_jax(x, save):
    save([rg.asarray(jnp.cos(rg.stop_gradient(x).data))])
    return rg.sin(x), lambda dy, saved: dy * saved[0]


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("f", [closing_over_jax, saving_jax])
@pytest.mark.parametrize("in_scan", [False, True])
def test_what_jax_computed_for_a_gradient_function_is_refused(f, in_scan):
    scanned = lambda x: rg.scan(lambda c, x: (f(c) * x, c), rg.ones((), dtype=x.dtype), x)[1]  # noqa: E731
    bridged = from_regrad(scanned if in_scan else f)
    assert jnp.isfinite(bridged(X)).all()
    for way in (jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jacfwd, jax.hessian):
        with pytest.raises(GradientError, match="JAX's own functions and kept"):
            way(lambda x: bridged(x).sum())(X)


def of(answer):
    """A custom function that returns this answer."""
    return lambda: custom_grad(lambda x: answer)(X)


def by_gradient(grad_func):
    return of((X * 2, grad_func))


def saved_late():
    kept = []
    custom_grad(lambda x, save: (kept.append(save), (x, lambda dy: dy))[1])(X)
    kept[0]([X])


@custom_grad
def keyword(x, *, k):
    return x * k, lambda dy: dy * k


clip = custom_grad(lambda x: (x, lambda dy: jnp.clip(dy, -1, 1)))
MISTAKES = {
    "two gradients": (by_gradient(lambda dy: [dy, dy]), RuleError, "wrong structure.*by x"),
    "a shape": (by_gradient(lambda dy: dy[:2]), RuleError, r"the shape \(2,\), expected \(3,\)"),
    "a dtype": (by_gradient(lambda dy: dy.astype("float32")), RuleError, "float32.*float64"),
    "a string": (by_gradient(lambda dy: "no"), RuleError, "expected an array"),
    "a Tensor": (by_gradient(lambda dy: rg.tensor([1.0, 2.0, 3.0])), ArgumentError, "from_regrad"),
    **{f"answer {i}": (of(answer), ArgumentError, "custom_grad")
       for i, answer in enumerate(
           [3, (X,), {"value": X}, (X, 3), ("no", lambda dy: dy), ([], lambda dy: dy)])},
    "save after": (saved_late, ArgumentError, "save was called after"),
    "save of one": (lambda: custom_grad(lambda x, save: (save(x), (x, abs))[1])(X),
                    ArgumentError, "takes one list or keywords"),
    "regrad's sine": (lambda: custom_grad(lambda x: (rg.sin(x), lambda dy: dy))(X),
                      ArgumentError, "is a Tensor of regrad"),
    "a number": (lambda: from_regrad(lambda x: 3)(X), ArgumentError, "function to return Tensors"),
    "forward mode": (lambda: jax.jvp(clip, (X,), (X,)), GradientError, "not linear"),
    "a keyword": (lambda: jax.grad(lambda k: keyword(X, k=k).sum())(2.0), GradientError,
                  "keyword argument 'k'"),
    "bridging": (lambda: jax.grad(bridging)(2.0), GradientError,
                 "closes over an array that JAX is differentiating"),
    "regrad's gradient": (lambda: rg.grad(lambda t: rg.sum(rg.tensor(from_regrad(
        lambda x: x * t)(X))))(rg.tensor([1.0])), GradientError, "regrad is differentiating"),
}  # fmt: skip


test_mistakes = refusals(MISTAKES)


def test_a_rule_that_is_not_linear_in_reverse():
    assert_array_equal(slopes(lambda x: clip(x * 5), X), np.full(3, 5.0))


# -- from_regrad -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_overrides_in_force_when_it_is_called_count_at_every_order():
    f = from_regrad(lambda x: rg.sum(rg.round(x) * x))
    with rg.gradient_override_map({"Round": lambda dy, x: dy * x}) as used:
        g, (y, pull), second = jax.grad(f)(X), jax.vjp(f, X), jax.hessian(f)(X)
    assert_allclose(g, X * X + np.round(X))
    assert_allclose(pull(1.0)[0], g)
    assert_allclose(second, np.diag(3 * X))
    assert y == jnp.sum(jnp.round(X) * X)
    used.assert_fired()
    assert_allclose(jax.grad(f)(X), np.round(X))


def test_containers_and_variables():
    v, t = (rg.Variable([1.0, 2.0, 3.0], dtype="float64"), rg.tensor([2.0] * 3, dtype="float64"))
    f = from_regrad(lambda p, k, *, b: {"y": rg.sin(p["w"]) * k * v * t + b, "n": (rg.sum(b),)})
    y = f({"w": X}, 3, b=X)
    assert_allclose(y["y"], np.sin(X) * 3 * np.arange(1.0, 4) * 2 + X)
    assert_allclose(y["n"][0], X.sum())
    g = jax.jit(jax.grad(lambda p: f(p, 3, b=X)["y"].sum()))({"w": X})
    assert_allclose(g["w"], 6 * np.cos(X) * np.arange(1.0, 4))
    v.assign([0.0, 0.0, 0.0])
    assert_allclose(f({"w": X}, 3, b=X)["y"], X)
    refused(lambda: from_regrad(lambda x: v.assign(x))(X), ArgumentError, "assigns to the Variable")


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), [
    (lambda z: rg.square(z) * z, lambda z: z * z * z),
    (lambda z: rg.abs(z), jnp.abs),
    (lambda z: rg.sum(rg.real(z) * rg.imag(z)), lambda z: jnp.sum(z.real * z.imag)),
    (lambda z: rg.conj(z) * z, lambda z: jnp.conj(z) * z),
], ids=["cube", "abs", "parts", "conj"])  # fmt: skip
def test_complex_numbers(ours, theirs):
    z, f = jnp.array([0.5 + 1j, -1.0 + 0.3j]), from_regrad(ours)
    y, pull = jax.vjp(f, z)
    dy = y * (2 - 1j) if jnp.iscomplexobj(y) else y * 2
    assert_allclose(pull(dy)[0], jax.vjp(theirs, z)[1](dy)[0])
    assert_allclose(jax.jvp(f, (z,), (z * 1j,)), jax.jvp(theirs, (z,), (z * 1j,)), atol=1e-15)


def test_complex_gradients_are_conjugated_as_in_tensorflow():
    z = jnp.array([0.5 + 1j, -1.0 + 0.3j])
    double = custom_grad(lambda z: (z * 2j, lambda dy: dy * np.conj(2j)))
    assert_allclose(jax.vjp(double, z)[1](z)[0], z * 2j)


def test_integers_and_keys_pass():
    f = from_regrad(lambda x, n: x * rg.astype(n, x.dtype))
    assert_array_equal(slopes(lambda x: f(x, jnp.arange(3)), X), [0, 1, 2])
    y, n = from_regrad(lambda x: (rg.square(x), rg.argmax(x)))(X)
    assert_allclose(y, X * X)
    assert n == 2


@pytest.mark.slow
def test_scan_over_a_regrad_function_with_state():
    def f(x, step):
        return lax.scan(step, x * 0, jnp.stack([x, 2 * x, x]))[0].sum()

    ours = from_regrad(lambda c, x: (rg.tanh(c) + x, c * x))
    theirs = lambda c, x: (jnp.tanh(c) + x, c * x)  # noqa: E731
    assert_allclose(jax.hessian(f)(X, ours), jax.hessian(f)(X, theirs), atol=1e-12)

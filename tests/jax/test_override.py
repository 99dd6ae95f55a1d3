"""Overrides in JAX programs: where no rule can be put, what stays as it was, what the report says.

`tests/samples/rules.py` has the forms of rules.
"""

from __future__ import annotations

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from numpy.testing import assert_allclose, assert_array_equal

import regrad as rg
from regrad.errors import ArgumentError, GradientError, NotFiredError
from tests.helpers import jax_model
from tests.helpers.jax_model import WRAPS, model, own_slope, own_vjp, seven, slopes, times
from tests.helpers.jax_places import X
from tests.helpers.rows import refused
from tests.helpers.sharded_checks import Compilations

override = rg.jax.override


@pytest.mark.slow
def test_a_rule_in_regrads_words_is_differentiated_by_regrad():
    odd = rg.custom_grad(lambda x: (rg.square(x), lambda dy: dy * 100))
    f = override(lambda x: jnp.tanh(x).sum(), {"Tanh": lambda dy, x: dy * odd(x)})
    assert_allclose(jax.grad(f)(X), X * X)
    for second in (jax.hessian(f), jax.jacrev(jax.jacrev(f)), jax.jit(jax.jacfwd(jax.jacfwd(f)))):
        assert_allclose(second(X), 100 * np.eye(3))


def test_complex_gradients_are_regrads():
    z, dy, seen = jnp.array([0.3 + 0.5j, -1.0 + 2j]), np.array([1 - 2j, 3 + 0j]), []
    f = override(jnp.sin, {"Sin": lambda dy: seen.append(dy) or dy * 1j})
    (dz,) = jax.vjp(f, z)[1](jnp.conj(dy))
    assert_allclose(seen[-1], dy)  # the conjugate of JAX's
    assert_allclose(dz, np.conj(dy * 1j))
    with rg.gradient_override_map({"Sin": times(1j)}):
        expected = rg.grad(rg.sin)(rg.tensor(np.asarray(z)), rg.tensor(dy))
    assert_allclose(np.conj(dz), expected.numpy())


# -- where no rule can be put ----------------------------------------------------------------------


@own_vjp(lambda dy, x: (dy * x,))
def bent(x):
    return jnp.sin(x)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("key", ["Relu", "Tanh", bent], ids=["Relu", "Tanh", "bent"])
def test_a_function_that_differentiates_itself_is_refused(key, wrap):
    loss = lambda x: jnp.sum(jnp.tanh(jax.nn.relu(x)) + bent(x))  # noqa: E731
    with pytest.raises(GradientError, match="Put the override inside"):
        override(lambda x: jax.grad(wrap(loss))(x).sum(), {key: seven})(X)
    beside = override(lambda x: slopes(lambda x: x**3, x).sum() + loss(x), {key: seven})
    jax.grad(beside)(X)
    beside.assert_fired()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_other_functions_that_are_differentiated_inside_do_no_harm(wrap):
    inner = wrap(lambda x: jnp.sum(jax.nn.relu(x) ** 2))

    @own_slope(lambda x: 3 * x * x)
    def cubed(x):
        return x**3

    for key in (bent, cubed):
        f = override(lambda x, k=key: jax.grad(inner)(x) + k(x), {key: seven})
        assert_allclose(slopes(f, X), 7 + 2 * (X > 0))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rule", [
    lambda dy: dy / jnp.linalg.norm(dy),
    lambda dy: dy * jnp.arange(3.0),
    lambda dy, x: dy * rg.mean(x),
    lambda dy: jnp.cumsum(dy, axis=-1),
])  # fmt: skip
def test_examples_of_a_vmap_never_mix(rule):
    xs = jnp.stack([X, X + 1])
    outside = override(model, {"Relu": rule})
    inside = override(lambda xs: jnp.sum(jax.vmap(model)(xs)), {"Relu": rule})
    expected = jnp.stack([jax.grad(outside)(x) for x in xs])
    assert_allclose(slopes(jax.vmap(outside), xs), expected)
    assert_allclose(jax.grad(inside)(xs), expected)


def test_a_body_that_jax_does_not_open_may_be_kept():
    root = lambda x: lax.custom_root(lambda y: jnp.tanh(y) - x, x, lambda f, y: y, lambda f, y: y)  # noqa: E731
    f = lambda x: root(x) * jnp.tanh(x)  # noqa: E731
    refused(lambda: override(f, {"Tanh": seven})(X), GradientError, "custom_root")
    ours = override(f, {"Tanh": lambda dy: dy}, keep=["_custom_root"])
    assert_allclose(ours(X), root(X) * jnp.tanh(X))


def test_a_primitive_with_a_derivative_and_a_body_of_its_own_is_refused_by_name():
    """As JAX 0.11 and later make of `custom_root` and others: `call_hi_primitive`."""
    primitive = Primitive("call_hi_primitive")
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    theirs = type("CustomRoot", (), {"__module__": "jax.lax", "params": {"f": abs}})()
    f = lambda x: jnp.tanh(primitive.bind(x, _prim=theirs))  # noqa: E731
    with pytest.raises(GradientError, match=r"calls jax.lax.custom_root .*keep=\['_custom_root'\]"):
        override(f, {"Tanh": seven})(X)
    assert_array_equal(override(f, {"Tanh": seven}, keep=["_custom_root"])(X), f(X))


def test_what_a_function_closes_over():
    @own_slope(jnp.ones_like)
    def scaled(x):
        return x * 2

    f = lambda w: override(lambda x: scaled(x * w) + w, {scaled: times(10)})(X).sum()  # noqa: E731
    assert_allclose(jax.grad(f)(3.0), 10 * X.sum() + 3)
    inner = override(lambda x, w: jax.jit(lambda x: jnp.tanh(x) * w)(x), {"Tanh": seven})
    assert_allclose(jax.grad(lambda w: inner(X, w).sum())(2.0), np.tanh(X).sum())


@pytest.mark.parametrize(
    "make", [jax.jit, own_slope(jnp.ones_like), own_vjp(lambda dy, x: (dy,))],
    ids=["jit", "custom_jvp", "custom_vjp"],
)  # fmt: skip
def test_a_key_that_closes_over_what_is_differentiated_is_refused(make):
    def f(w):
        def twice(x):
            return x * w

        key = make(twice)
        return override(lambda x: key(x), {key: lambda dy, x: dy * x})(X).sum()

    assert_allclose(jax.jit(f)(3.0), 3 * X.sum())
    refused(lambda: jax.grad(f)(3.0), GradientError, "closes over")


# -- what stays as it was --------------------------------------------------------------------------


@pytest.mark.slow
def test_programs_inside_stay_and_nothing_is_compiled_again():
    untouched, touched = jax.jit(lambda x: jnp.cos(x) * 2), jax.jit(lambda x: jnp.tanh(x) * 2)
    f = override(lambda x: untouched(x) + touched(x), {"Tanh": seven})
    g = override(lambda x: untouched(x), {"Tanh": seven})
    closed = jax.make_jaxpr(lambda x: untouched(x))(X)
    assert g._surgery.program(closed)[0] is closed
    untouched(X), touched(X), f(X), jax.grad(lambda x: f(x).sum())(X)
    compiled = Compilations()
    jax.jit(lambda x: x * 5.5)(X)
    assert compiled  # it can hear
    compiled.clear()
    for _ in range(3):
        f(X), untouched(X), touched(X)
        jax.grad(lambda x: f(x).sum())(X)
    assert compiled == []


def test_arguments_are_what_they_were():
    def f(x, n, mode, *, table, scale=1.0):
        assert (type(n), mode, type(table), scale) == (int, "up", np.ndarray, 2.0)
        for _ in range(n):
            x = jnp.tanh(x) * table[0] * scale
        return {"x": x, "n": n, "none": None, "f": jnp.tanh}

    ours, given = override(f, {"Tanh": lambda dy: dy}), {"table": np.array([2.0]), "scale": 2.0}
    y = ours(X, 2, "up", **given)
    assert (y["n"], y["none"], y["f"]) == (2, None, jnp.tanh)
    assert_allclose(slopes(lambda x: ours(x, 2, "up", **given)["x"], X), np.full(3, 16.0))


def test_wrappers_cannot_reach_past_an_override():
    class Wrapper:
        def __init__(self, f):
            self.f = f
            functools.update_wrapper(self, f)

    ours = override(model, {"Relu": seven})
    assert Wrapper(ours).f is ours
    assert not hasattr(ours, "__wrapped__") and ours.__name__ == "model"
    jax.jit(ours)(x=X)


def test_programs_are_not_kept_alive():
    ours, closed = override(model, {"Relu": seven}), jax.make_jaxpr(lambda x: model(x))(X)
    ours._surgery.program(closed)
    gone = weakref.ref(closed)
    del closed
    assert gone() is None


# -- scopes inside scopes --------------------------------------------------------------------------


def test_the_inner_rule_wins():
    inner = override(lambda x: jnp.tanh(x) * jnp.sin(x), {"Tanh": times(2)})
    outer = override(lambda x: jnp.sum(inner(x)), {"Tanh": times(5), "Sin": times(7)})
    assert_allclose(jax.grad(outer)(X), 2 * np.sin(X) + 7 * np.tanh(X))
    outer.assert_fired("Sin")
    refused(lambda: outer.assert_fired("Tanh"), NotFiredError, "no gradient passed")
    assert "kept its own rule" in repr(outer)


def test_custom_grad_keeps_its_rule():
    f = rg.jax.custom_grad(lambda x: (jnp.tanh(x), times(2)))
    ours = override(lambda x: f(x), {"Tanh": times(5)})
    assert_allclose(slopes(ours, X), np.full(3, 2.0))
    assert "custom_grad" in str(ours.table())


# -- the report ------------------------------------------------------------------------------------


def test_the_report():
    ours = override(model, {"Relu": lambda dy: dy, "Tanh": lambda dy: dy})
    refused(lambda: ours.assert_fired("Relu"), NotFiredError, "no call of the function")
    ours(X)
    refused(lambda: ours.assert_fired("Relu"), NotFiredError, "no gradient passed")
    jax.grad(ours)(X)
    ours.assert_fired("Relu", jax.nn.relu, "Tanh")
    hit = ours.hits[0]
    assert (hit.op_type, hit.count, hit.ran, list(hit.shapes)) == ("Relu", 2, 1, ["3"])
    assert hit.where == f"{jax_model.__file__}:{model.__code__.co_firstlineno + 1}"
    assert [row[0] for row in ours.untouched().rows] == ["add", "integer_pow", "max", "reduce_sum"]
    assert "Relu <- <lambda>: 2 created, rule ran 1 times" in repr(ours)
    rows = [("Relu", "<lambda>", "2", "1"), ("Tanh", "<lambda>", "2", "1")]
    assert [row[:4] for row in ours.table().rows] == rows
    refused(lambda: ours.assert_fired("Sin"), ArgumentError, "does not override")


@pytest.mark.parametrize("around", WRAPS.values(), ids=WRAPS)
def test_a_constant_of_the_program_in_a_loop(around):
    """It is an operand of the rule's, and no value of the trace in which the rule was put there."""

    def f(w, x):
        step = jax.checkpoint(lambda h, v: (jnp.tanh(h * v * 2.0), None))
        return jax.lax.scan(step, x, w)[0].sum()

    w, x = jnp.linspace(0.1, 0.6, 6).reshape(2, 3), jnp.ones(3)
    found = around(jax.grad(override(f, {"Mul": lambda dy, a, b: (dy * b, dy * a)})))(w, x)
    assert_allclose(found, jax.grad(f)(w, x), rtol=1e-6)


CONSTANT = jnp.array([2.0, 2.0, 2.0])
WRITTEN = {"times": times(3), "regrad": lambda dy: rg.multiply(dy, CONSTANT), "jnp": jnp.sin}


@pytest.mark.versions
@pytest.mark.parametrize("written", [*WRITTEN.values(), rg.sin], ids=[*WRITTEN, "rg.sin"])
def test_a_rule_runs_once_for_each_gradient_that_arrives(written):
    ran = []
    ours = override(jnp.sign, {"Sign": lambda dy: ran.append(1) or written(dy)})
    for turn in (1, 2, 3):
        slopes(ours, X)
        assert len(ran) == turn == sum(hit.ran for hit in ours.hits)

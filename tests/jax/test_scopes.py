"""Functions of `from_regrad` in JAX's own constructs, which keep traces by function object."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import regrad as rg
from regrad.core import promotion, state
from regrad.errors import GradientError
from regrad.jax import scopes
from tests.helpers.jax_model import slopes, times
from tests.helpers.rows import in_thread

# (ops are created where JAX traces; in a scope in which it uses what it has kept, there are none)
pytestmark = pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")

VALUES = np.array([0.5, -1.0], np.float32)
TANH = rg.jax.from_regrad(rg.tanh)
A, B = {"Tanh": times(5.0)}, {"Tanh": times(7.0)}
FACTORS = {id(A): 5.0, id(B): 7.0}


def step(c, _):
    return TANH(c), None


def other(x):
    return -TANH(-x)


JITTED, CHECKPOINTED = jax.jit(TANH), jax.checkpoint(TANH)
CONSTRUCTS = {
    "call": (TANH, 1),
    "jit": (JITTED, 1),
    "scan": (lambda x: lax.scan(step, x, None, length=2)[0], 2),
    "cond": (lambda x: lax.cond(x.sum() > -10, TANH, other, x), 1),
    "switch": (lambda x: lax.switch(jnp.int32(1), [other, TANH], x), 1),
    "fori_loop": (lambda x: lax.fori_loop(0, 2, lambda i, c: TANH(c), x), 2),
    "map": (lambda x: lax.map(TANH, x), 1),
    "vmap": (jax.vmap(TANH), 1),
    "checkpoint": (CHECKPOINTED, 1),
    "jit in scan": (lambda x: lax.scan(lambda c, _: (JITTED(c), None), x, None, length=2)[0], 2),
}
ROADS = {
    "grad": jax.grad,
    "jit of grad": lambda total: jax.jit(jax.grad(total)),
    "grad of jit": lambda total: jax.grad(jax.jit(total)),
    "jit of jit": lambda total: jax.jit(lambda x: jax.jit(jax.grad(total))(x)),
    "forward mode": jax.jacfwd,
}


def derivative(times):
    """The derivative of tanh of itself, by differences."""
    up, down = VALUES.astype(np.float64) + 1e-4, VALUES.astype(np.float64) - 1e-4
    for _ in range(times):
        up, down = np.tanh(up), np.tanh(down)
    return (up - down) / 2e-4


def gradient():
    return jax.jit(lambda x: slopes(TANH, x))


def under(rules):
    return nullcontext() if rules is None else rg.gradient_override_map(rules)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_one_function_under_one_map_and_another(name, road):
    f, times = CONSTRUCTS[name]
    gradient = ROADS[road](lambda x: f(x).sum())
    for rules in (A, B, None, A, A, None, B):
        with under(rules):
            dx = gradient(VALUES)
        expected = derivative(times) if rules is None else FACTORS[id(rules)] ** times
        np.testing.assert_allclose(dx, np.broadcast_to(expected, 2), rtol=1e-3)


def test_a_trace_is_made_once_for_rules_that_do_the_same():
    runs = []
    f = jax.jit(jax.grad(lambda x: runs.append(0) or TANH(x).sum()))
    for _ in range(3):
        with rg.gradient_override_map({"Tanh": lambda dy: dy * 3.0}):  # a new function in each turn
            f(VALUES)
        with rg.gradient_override_map(A):
            f(VALUES)
            f(VALUES)
    assert len(runs) == 2


@pytest.mark.parametrize("key", ["Tanh", rg.at(parameter="w")])
@pytest.mark.parametrize("road", [lambda f: f, rg.grad], ids=["call", "grad"])
def test_a_program_of_jit_is_made_once_for_tensors_that_rules_read(key, road):
    """Its key has the rules, and the Tensors are its inputs; JAX's own key has their identities."""
    jax.jit(TANH)(VALUES)  # (from now on, JAX has the rules)
    w = rg.Variable([0.5, -1.0], name="w")
    compiled = rg.jit(lambda: rg.variable_grads(lambda: rg.tanh(w).sum())[1]["w"].sum())

    def scaled(factor):
        with rg.gradient_override_map({key: lambda dy: dy * factor}):
            return compiled()

    inside = 2.0 if key == "Tanh" else (1 - np.tanh([0.5, -1.0]) ** 2).sum()
    for factor in (2.0, 3.0, 4.0):
        expected = factor * inside if road is not rg.grad else inside
        np.testing.assert_allclose(road(scaled)(rg.scalar(factor)).item(), expected, rtol=1e-6)
    assert compiled.cache_info()[:3] == (2, 1, 1)


@pytest.mark.slow
def test_scopes_within_scopes_and_within_traces():
    f = gradient()

    @jax.jit
    def inside(x):
        with rg.gradient_override_map(B):
            return f(x), x

    with rg.gradient_override_map(A):
        assert f(VALUES)[0] == 5.0
        assert inside(VALUES)[0][0] == 7.0
        with rg.gradient_override_map(B), pytest.raises(ZeroDivisionError):
            assert f(VALUES)[0] == 7.0
            raise ZeroDivisionError
        assert f(VALUES)[0] == 5.0
    assert inside(VALUES)[0][0] == 7.0
    np.testing.assert_allclose(f(VALUES), derivative(1), rtol=1e-3)


def test_a_rule_runs_under_no_override():
    """Also where it calls what the forward pass calls: JAX keeps a trace for each."""
    f = gradient()
    twice = {"Tanh": lambda dy: dy * 2.0 * rg.tensor(f(VALUES))}
    for _ in range(2):
        with rg.gradient_override_map(twice):
            dx = rg.grad(lambda x: rg.sum(rg.tanh(x)))(rg.tensor(VALUES))
            np.testing.assert_allclose(dx, 2 * derivative(1), rtol=1e-3)
            np.testing.assert_allclose(f(VALUES), 2 * derivative(1), rtol=1e-3)


def test_the_default_dtype_is_part_of_the_key():
    ones = jax.jit(rg.jax.from_regrad(lambda x: rg.ones((2,)) * rg.sum(x)))
    made = jax.jit(rg.jax.from_regrad(lambda x: rg.ones((2,))))
    for dtype in ("float32", "float64", "float32", "float64"):
        with rg.default_dtype(dtype):
            assert made(VALUES).dtype == ones(VALUES).dtype == dtype
    try:
        in_thread(lambda: made(VALUES))
        rg.set_default_dtype("float64")
        assert made(VALUES).dtype == in_thread(lambda: made(VALUES).dtype) == "float64"
    finally:
        rg.set_default_dtype("float32")
    assert made(VALUES).dtype == "float32"


@pytest.mark.slow
def test_jobs_and_threads():
    f = gradient()
    found = []
    with ThreadPoolExecutor(1) as pool:
        for rules in (A, None, B, A, None):
            with under(rules):
                found.append(pool.submit(f, VALUES).result()[0])
                thread = threading.Thread(target=lambda: found.append(f(VALUES)[0]))
                thread.start()
                thread.join()
    plain = derivative(1)[0]
    np.testing.assert_allclose(found, np.repeat([5.0, plain, 7.0, 5.0, plain], 2), rtol=1e-3)


def test_overrides_that_jax_does_not_know_of_are_refused():
    f = gradient()
    with rg.gradient_override_map(A):
        context = contextvars.copy_context()
    with pytest.raises(GradientError, match="brought here from another thread or task"):
        context.run(f, VALUES)
    np.testing.assert_allclose(f(VALUES), derivative(1), rtol=1e-3)


def gradient_in_a_context_with(rules):
    """Take a gradient in a task that outlives the scope in which it was started."""
    with rg.gradient_override_map(rules):
        rg.tanh(1.0)
        context = contextvars.copy_context()
    context.run(rg.grad(rg.tanh), 1.0)


def held_back(rules):
    """Take a gradient in a gradient function that was made under the rules."""
    custom = rg.custom_grad(lambda x: (x, lambda dy: dy * rg.grad(rg.tanh)(x)))
    with rg.gradient_override_map(rules):
        pull = rg.vjp(custom, 1.0)[1]
    pull(rg.scalar(1.0))


def in_a_gradient_function(use):
    custom = rg.custom_grad(lambda x: (x, lambda dy: use() or dy))
    with under(A):
        pull = rg.vjp(custom, 1.0)[1]
    with under(B):
        pull(rg.scalar(1.0))


def in_a_walk(use):
    with rg.gradient_override_map({**A, "Sin": lambda dy: use() or dy}):
        rg.grad(rg.sin)(1.0)


def in_a_scope(use):
    with under(A), rg.default_dtype("float64"):
        use()


@pytest.mark.parametrize("block", [in_a_scope, in_a_walk, in_a_gradient_function])
def test_jax_may_be_first_used_in_a_block(monkeypatch, block):
    """The blocks that are open then tell JAX when they end."""
    for module in (state, promotion):
        monkeypatch.setattr(module, "FOLLOWERS", [])
    seen = []
    block(lambda: seen.append(rg.jax.from_regrad(rg.tanh)(VALUES)))
    assert seen and not scopes.is_behind()
    made = jax.jit(rg.jax.from_regrad(lambda x: rg.ones((2,))))
    assert made(VALUES).dtype == "float32"
    np.testing.assert_allclose(gradient()(VALUES), derivative(1), rtol=1e-3)


@pytest.mark.parametrize("use", [gradient_in_a_context_with, held_back])
def test_jax_takes_back_what_it_was_told(use):
    """A trace that JAX keeps under rules which are not in force would be used where they are."""
    f = gradient()
    use(A)
    np.testing.assert_allclose(f(VALUES), derivative(1), rtol=1e-3)
    with under(A):
        np.testing.assert_allclose(f(VALUES), 5.0, rtol=1e-6)

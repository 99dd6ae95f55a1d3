"""Programs with known gradients, which must also hold on a JAX newer than all tested versions.

`Host.check` runs them once, before a feature is first used. Their rules are three times the
derivative, so a gradient shows how many rules it has passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import regrad.ops.elementwise as elementwise
from regrad.core.hosts import Feature
from regrad.core.overrides import gradient_override_map
from regrad.core.places import at
from regrad.errors import GradientError, PassedOverError
from regrad.jax.bridge import from_regrad
from regrad.jax.custom import custom_grad
from regrad.jax.drawing import draw
from regrad.jax.host import FUNCTION_KEYS, GRADIENTS, OVERRIDES, SIGHT, VMAPS
from regrad.jax.override import override
from regrad.jax.tools import find_nan, trace_gradients

X = np.array([[0.3, 0.7], [0.6, 0.2]], "float32")
TANH: Any = {"Tanh": lambda dy, y: 3 * dy * (1 - y * y)}
MATMUL: Any = {"MatMul": lambda dy, a, b: [3 * d for d in jax.vjp(jnp.matmul, a, b)[1](dy)]}
Program = Callable[[], None]
SETTINGS: list[tuple[Any, Any]] = [
    (jax.debug_nans, False),
    (jax.debug_infs, False),
    (jax.disable_jit, False),
    (jax.check_tracer_leaks, False),
    (jax.transfer_guard, "allow"),
    (jax.numpy_rank_promotion, "allow"),
    (jax.numpy_dtype_promotion, "standard"),
    (jax.default_matmul_precision, "highest"),
]


def promise(feature: Feature) -> Callable[[Program], Program]:
    """Register a program, which runs with JAX's default settings, whatever the process has set."""

    def register(program: Program) -> Program:
        @wraps(program)
        def run() -> None:
            with contextlib.ExitStack() as settings:
                for setting, value in SETTINGS:
                    settings.enter_context(setting(value))
                program()

        return feature.promise(run)

    return register


def threefold(f: Callable[..., Any], rules: Any = TANH) -> None:
    """Raise unless the gradient of a function under rules is three times its own gradient."""
    same(jax.grad(override(f, rules))(X), 3 * jax.grad(f)(X))


def same(found: Any, expected: Any) -> None:
    """Raise unless two arrays are the same."""
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-4)


def refused(f: Callable[..., Any], rules: Any = TANH) -> None:
    """Raise unless a function whose rules could not fire raises an error."""
    try:
        jax.grad(override(f, rules))(X)
    except (GradientError, PassedOverError):
        return
    raise AssertionError("a rule was silently ignored")


@jax.custom_vjp
def own(x: jax.Array) -> Any:
    """Return tanh, with a custom derivative that is not the derivative of tanh."""
    return jnp.tanh(x)


own.defvjp(lambda x: (jnp.tanh(x), x), lambda x, dy: (5 * dy,))


@promise(OVERRIDES)
def _a_function() -> None:
    threefold(lambda x: jnp.tanh(x).sum())


@promise(OVERRIDES)
def _the_sum_of_the_gradients_of_a_parameter() -> None:
    rules = {at(parameter="w"): lambda dy: dy * dy}
    ours = override(lambda p: (p["w"] + 2 * p["w"]).sum(), rules, model={"w": X})
    same(jax.grad(ours)({"w": jnp.asarray(X)})["w"], np.full_like(X, 9))


@promise(OVERRIDES)
def _a_compiled_function() -> None:
    threefold(jax.jit(lambda x: jnp.tanh(x).sum()))
    same(jax.jit(jax.grad(override(lambda x: jnp.tanh(x).sum(), TANH)))(X), 3 - 3 * np.tanh(X) ** 2)


@promise(OVERRIDES)
def _loops_and_branches() -> None:
    threefold(lambda x: lax.scan(lambda c, y: (c + jnp.tanh(y), None), jnp.zeros(2), x)[0].sum())
    threefold(lambda x: lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x).sum())
    threefold(lambda x: jax.checkpoint(jnp.tanh)(x).sum())


@promise(OVERRIDES)
def _products() -> None:
    w = X + 1
    for product in (jnp.matmul, jnp.dot, lambda a, b: jnp.einsum("ij,jk->ik", a, b)):
        threefold(lambda x, product=product: product(x, w).sum(), MATMUL)


@promise(OVERRIDES)
def _functions_with_a_derivative_of_their_own() -> None:
    refused(lambda x: own(x).sum())
    f = lambda x: own(x).sum() + jnp.tanh(x).sum()  # noqa: E731
    same(jax.grad(override(f, TANH, keep=["own"]))(X), 5 + 3 * (1 - np.tanh(X) ** 2))
    threefold(lambda x: lax.map(jnp.tanh, x).sum())


@promise(OVERRIDES)
def _derivatives_inside() -> None:
    refused(lambda x: jax.grad(lambda x: jnp.tanh(x).sum())(x).sum() + jnp.tanh(x).sum())
    refused(lambda x: jax.grad(jax.jit(lambda x: own(x).sum()))(x).sum() + own(x).sum(), {own: id})


@promise(OVERRIDES)
def _second_order() -> None:
    f = override(lambda x: jnp.tanh(x).sum(), TANH)
    found = jax.grad(lambda x: jax.grad(f)(x).sum())(X)
    same(found, 3 * -2 * np.tanh(X) * 3 * (1 - np.tanh(X) ** 2))


@promise(OVERRIDES)
def _forward_mode() -> None:
    f = override(lambda x: jnp.tanh(x).sum(), TANH)
    same(jax.jvp(f, (X,), (X,))[1], (3 * X * (1 - np.tanh(X) ** 2)).sum())


@promise(FUNCTION_KEYS)
def _functions_as_keys() -> None:
    same(jax.grad(override(lambda x: own(x).sum(), {own: lambda dy: 3 * dy}))(X), 3 + 0 * X)
    keys: Any = ("Relu", jax.nn.relu), (jax.nn.silu, jax.nn.silu), ("Softmax", jax.nn.softmax)
    for key, f in keys:
        same(jax.grad(override(lambda x, f=f: f(x).sum(), {key: lambda dy: 3 * dy}))(X), 3 + 0 * X)


@promise(VMAPS)
def _vmap_inside() -> None:
    threefold(lambda x: jax.vmap(lambda row: row @ row)(x).sum(), MATMUL)
    threefold(lambda x: jax.vmap(lambda row: jnp.tanh(row).sum())(x).sum())


@promise(VMAPS)
def _vmap_outside() -> None:
    f = override(lambda row: jnp.tanh(row).sum(), TANH)
    same(jax.vmap(jax.grad(f))(X), 3 * (1 - np.tanh(X) ** 2))


@promise(GRADIENTS)
def _gradients_of_regrad() -> None:
    cube = custom_grad(lambda x: (x**3, lambda dy: 7 * dy))
    for f in (cube, jax.jit(cube), jax.vmap(cube), jax.checkpoint(cube)):
        same(jax.grad(lambda x, f=f: f(x).sum())(X), 7 + 0 * X)
    same(jax.grad(lambda x: from_regrad(elementwise.exp)(x).sum())(X), np.exp(X))


@promise(GRADIENTS)
def _traces_under_overrides() -> None:
    f = jax.jit(jax.grad(lambda x: from_regrad(elementwise.tanh)(x).sum()))
    for factor in (3, 5):
        with gradient_override_map({"Tanh": lambda dy, k=factor: k * dy}):
            same(f(X), factor + 0 * X)


@promise(SIGHT)
def _tools() -> None:
    f = lambda x: lax.fori_loop(0, 2, lambda i, c: jnp.sqrt(c), x).sum()  # noqa: E731
    steps = trace_gradients(f)(jnp.asarray(X)).steps
    assert [step.op_type for step in steps].count("sqrt") == 2
    found = find_nan(f)(jnp.zeros(2))
    assert found is not None and found.op_type == "sqrt"
    assert any(box.lines[0] == "sqrt" for box in draw(f, X).boxes)

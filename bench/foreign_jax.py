"""A jitted training step in JAX with an overridden op, against a hand-written `custom_vjp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import regrad as rg
from bench.contestants import Contestants
from bench.jit import alike
from bench.measures import Speed
from bench.report import Measure


@jax.custom_vjp
def by_hand(x: Any) -> Any:
    return jnp.maximum(x, 0)


by_hand.defvjp(
    lambda x: (jnp.maximum(x, 0), x), lambda x, dy: (jnp.where(x > 0, jnp.maximum(dy, 0), 0),)
)


def loss(relu: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a network of four layers of 256 whose loss is the mean square of the output."""

    def f(weights: list[Any], x: Any) -> Any:
        for w in weights:
            x = relu(x @ w)
        return jnp.mean(x * x)

    return f


def step(f: Callable[..., Any]) -> Callable[[], Any]:
    """Return a compiled step of gradient descent."""
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(k, (256, 256)) / 16 for k in keys[1:]]
    x = jax.random.normal(keys[0], (128, 256))

    @jax.jit
    def run(weights: list[Any], x: Any) -> Any:
        gradients = jax.grad(f)(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    run(weights, x)
    return lambda: jax.block_until_ready(run(weights, x))


def steps() -> Contestants:
    guided = rg.jax.override(loss(jax.nn.relu), {"Relu": rg.rules.guided_relu})
    return alike({"regrad": step(guided), "custom_vjp": step(loss(by_hand))})


def by_builtin() -> Contestants:
    """The same rule through JAX's own gradient (`builtin`), and as a formula."""
    net = loss(jnp.tanh)
    builtin = rg.jax.override(net, {"Tanh": lambda dy, builtin: 0.5 * builtin(dy)})
    formula = rg.jax.override(net, {"Tanh": lambda dy, y: 0.5 * dy * (1 - y * y)})
    return alike({"regrad": step(builtin), "formula": step(formula)})


def traces() -> Contestants:
    """The time until the first result: tracing and compiling."""
    guided = loss(jax.nn.relu)

    def fresh(make: Callable[[], Callable[..., Any]]) -> Callable[[], Any]:
        return lambda: step(make())

    rules = {"Relu": rg.rules.guided_relu}
    return {
        "regrad": fresh(lambda: rg.jax.override(guided, rules)),
        "custom_vjp": fresh(lambda: loss(by_hand)),
    }


MEASURES: dict[str, Measure] = {
    "jax-step": Speed("a jitted step, guided ReLU in JAX", steps, {"custom_vjp": 1.2}),
    "jax-builtin": Speed("a jitted step in JAX, rule by builtin", by_builtin, {"formula": 1.2}),
    "jax-trace": Speed("the same, traced and compiled", traces, {"custom_vjp": 2.0}, rounds=5),
}

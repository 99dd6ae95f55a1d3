"""Guided backprop and quantization on unedited models of Flax and Equinox.

Each model is written as in its own library's documentation. Guided backprop is a rule for the op
type "Relu", which passes only positive gradients. Quantization to a few levels trains through
`round` with the straight-through estimator, a rule for "Round". Both wrap the model from outside.

Run:     python examples/foreign_jax.py [--quick]
Prints:  for Flax and for Equinox: the cosine between the guided and the plain saliency; the loss
         of quantized training without and with the straight-through estimator.
Needs:   pip install '.[jax]' flax equinox
Source:  Springenberg et al., 2014, arXiv 1412.6806. Bengio et al., 2013, arXiv 1308.3432.
"""

import sys

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp

import regrad as rg

STRAIGHT_THROUGH = {"Round": lambda dy: dy}


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32)(x)
        x = nn.relu(x)
        x = nn.Dense(32)(x)
        x = nn.relu(x)
        return nn.Dense(1)(x)


class NeuralNetwork(eqx.Module):
    layers: list

    def __init__(self, key):
        first, second, third = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Linear(2, 32, key=first),
            jax.nn.relu,
            eqx.nn.Linear(32, 32, key=second),
            jax.nn.relu,
            eqx.nn.Linear(32, 1, key=third),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def cosine_of_guided(model, x) -> float:
    """Return the cosine between the guided and the plain saliency."""
    guided = rg.jax.override(model, {"Relu": rg.rules.guided_relu})
    a, b = (jax.grad(lambda x, f=f: f(x).sum())(x).ravel() for f in (model, guided))
    guided.assert_fired()
    return float(a @ b / jnp.sqrt((a @ a) * (b @ b)))


def trained(loss, params, x, y, steps: int) -> float:
    """Return the loss after some steps of gradient descent."""

    @jax.jit
    def step(params):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return value, jax.tree.map(lambda p, g: p - 0.02 * g, params, gradients)

    value = jnp.inf
    for _ in range(steps):
        value, params = step(params)
    return float(value)


def quantised(apply):
    """Return the loss of a model whose weights are rounded to multiples of 1/8."""

    def loss(params, x, y):
        coarse = jax.tree.map(lambda p: jnp.round(p * 8) / 8, params)
        return jnp.mean((apply(coarse, x) - y) ** 2)

    return loss


def main(quick: bool = False) -> dict[str, tuple[float, float, float]]:
    """Run both experiments on both models. Return the cosine and the two losses."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (256, 2))
    y = jnp.sin(2 * x[:, :1]) * x[:, 1:]

    flax_model = MLP()
    flax_params = flax_model.init(key, x)
    network = NeuralNetwork(key)
    arrays, static = eqx.partition(network, eqx.is_array)
    models = {
        "Flax": (flax_params, flax_model.apply),
        "Equinox": (arrays, lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x)),
    }
    answers = {}
    for name, (params, apply) in models.items():
        cosine = cosine_of_guided(lambda x, p=params, f=apply: f(p, x), x)
        plain = quantised(apply)
        ours = rg.jax.override(plain, STRAIGHT_THROUGH)
        losses = [trained(f, params, x, y, 120 if quick else 300) for f in (plain, ours)]
        ours.assert_fired()
        answers[name] = (cosine, *losses)
        print(f"{name}: cosine of guided backprop with the gradient {cosine:.2f}")
        print(f"    loss of quantised training {losses[0]:.3f}, straight-through {losses[1]:.3f}")
    return answers


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)

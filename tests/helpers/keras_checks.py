"""Checks of overrides in Keras: `test_at_scale.py` and `test_models.py` run them.

    KERAS_BACKEND=torch python tests/helpers/keras_checks.py REPORT

Keras chooses its backend when it is imported, so each has a process of its own. A model is fitted
under a rule, and compared with one that has the rule in it, written by hand with the backend's own
functions. REPORT gets a JSON object with the name of each check that holds.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.layers import Activation, Dense

import regrad as rg

STEPS = 8  # two epochs of four batches


def fitted(activation: Any, change: Any = lambda model: None, **options: Any) -> Any:
    """The losses and the weights of a small model after two epochs."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), Dense(8), Activation(activation), Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", **options)
    change(model)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    history = model.fit(x, abs(x[:, :1]), epochs=2, batch_size=8, shuffle=False, verbose=0)
    return [np.array(history.history["loss"]), *model.get_weights()]


def assert_equal(found: Any, by_hand: Any) -> None:
    """Equal to the weights by hand, and not to those without the rule."""
    for a, b in zip(found, by_hand, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    plain = fitted("relu")
    assert max(abs(a - b).max() for a, b in zip(found, plain, strict=True)) > 1e-3


def torch_fit_in_a_scope() -> None:
    import regrad.torch
    from tests.helpers.networks import RELU, Leaky

    with regrad.torch.gradient_override_map(RELU) as used:
        found = fitted("relu")
    (hit,) = used.hits
    assert hit.ran == STEPS, hit  # (Keras calls the model once more, to learn its shapes)
    assert_equal(found, fitted(Leaky.apply))


def jax_fit_of_an_overridden_loss() -> None:
    import jax
    import jax.numpy as jnp

    def leaky(dy: Any, x: Any) -> Any:
        return dy * jnp.where(x > 0, 1.0, 0.25)

    @jax.custom_vjp
    def by_hand(x: Any) -> Any:
        return jnp.maximum(x, 0)

    by_hand.defvjp(lambda x: (by_hand(x), x), lambda x, dy: (leaky(dy, x),))
    overridden = []

    def override(model: Any) -> None:
        loss = rg.jax.override(model.compute_loss_and_updates, {"Relu": leaky})
        model.compute_loss_and_updates = loss
        overridden.append(loss)

    for options in ({}, {"run_eagerly": True}):
        found = fitted("relu", override, **options)
        overridden[-1].assert_fired()
        assert_equal(found, fitted(by_hand, **options))


def main(report: str) -> None:
    warnings.simplefilter("error", rg.errors.UnusedOverrideWarning)
    prefix = f"{keras.backend.backend()}_"
    checks = {name: f for name, f in globals().items() if name.startswith(prefix)}
    for check in checks.values():
        check()
    Path(report).write_text(json.dumps(dict.fromkeys(checks)))


if __name__ == "__main__":
    main(*sys.argv[1:])

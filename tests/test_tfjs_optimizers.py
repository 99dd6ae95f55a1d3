"""TensorFlow.js's optimizers, their updates written out over `variable_grads`.

The steps were recorded from the original (`golden/tfjs_optimizer.json` says how). Users take
optax's optimizers; here the formulas only exercise gradients by Variables and assignment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regrad as rg
from tests.helpers.tfjs_cases import cases, check, chosen, loss_of, variables_of

EPSILON = 1e-7
Updates = dict[str, Any]


def sgd(g: Any, state: Updates, learningRate: float) -> Any:
    return g * learningRate


def momentum(
    g: Any, state: Updates, learningRate: float, momentum: float, useNesterov: bool = False
) -> Any:
    state["a"] = a = momentum * state.get("a", 0.0) + g
    return (g + momentum * a if useNesterov else a) * learningRate


def adagrad(
    g: Any, state: Updates, learningRate: float, initialAccumulatorValue: float = 0.1
) -> Any:
    state["a"] = a = state.get("a", initialAccumulatorValue) + g * g
    return learningRate * g / rg.sqrt(a + EPSILON)


def rmsprop(
    g: Any,
    state: Updates,
    learningRate: float,
    decay: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = EPSILON,
    centered: bool = False,
) -> Any:
    state["s"] = s = decay * state.get("s", 0.0) + (1 - decay) * g * g
    if centered:
        state["mean"] = mean = decay * state.get("mean", 0.0) + (1 - decay) * g
        s = s - mean * mean - 2 * epsilon
    root = rg.sqrt(s + epsilon)
    state["m"] = momentum * state.get("m", 0.0) + learningRate * g / root
    return state["m"]


def adam(g: Any, state: Updates, learningRate: float, beta1: float, beta2: float) -> Any:
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = m = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["u"] = u = beta2 * state.get("u", 0.0) + (1 - beta2) * g * g
    return learningRate * (m / (1 - beta1**t)) / (rg.sqrt(u / (1 - beta2**t)) + EPSILON)


def adamax(
    g: Any, state: Updates, learningRate: float, beta1: float, beta2: float, decay: float = 0.0
) -> Any:
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = m = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["u"] = u = rg.maximum(beta2 * state.get("u", rg.zeros_like(g)), rg.abs(g))
    return learningRate / (1 + decay * (t - 1)) / (1 - beta1**t) * m / (u + EPSILON)


def adadelta(g: Any, state: Updates, learningRate: float, rho: float = 0.95) -> Any:
    a, du = state.get("a", 0.0), state.get("du", 0.0)
    update = (du + EPSILON) ** 0.5 / (a + EPSILON) ** 0.5 * g
    state["a"] = rho * a + (1 - rho) * g * g
    state["du"] = rho * du + (1 - rho) * update * update
    return learningRate * update


OPTIMIZERS = {f.__name__: f for f in (sgd, momentum, adagrad, rmsprop, adam, adamax, adadelta)}


def step(optimizer: str, config: Any, states: Any, variables: Any, grads: Any) -> None:
    for name, g in grads.items():
        if g is not None:
            state = states.setdefault(name, {})
            variables[name].assign_sub(OPTIMIZERS[optimizer](g, state, **config))


@pytest.mark.parametrize("case", cases("optimizer"), ids=lambda case: case["id"])
def test_optimizers_agree(case: dict[str, Any]) -> None:
    variables, states = variables_of(case), {}
    f, var_list = loss_of(case, variables), chosen(case, variables)
    for cost, after in zip(case["expected_costs"], case["expected_variables"], strict=True):
        value, grads = rg.variable_grads(f, var_list)
        step(case["optimizer"], case["config"], states, variables, grads)
        check(value, cost, case)
        for name, due in after.items():
            check(variables[name].value, due, case)


# From optimizer_test.ts: two steps towards the minimum of sum(x²).
STEPS = [
    ("sgd", {}, [1, 2], [0.8, 1.6], [0.64, 1.28]),
    ("momentum", {"momentum": 0.5}, [1, 2], [0.8, 1.6], [0.54, 1.08]),
    ("momentum", {"momentum": 0.5, "useNesterov": True}, [1, 2], [0.7, 1.4], [0.44, 0.88]),
    ("adam", {"beta1": 0.8, "beta2": 0.9}, [2, 4], [1.9, 3.9], [1.8, 3.8002]),
    (
        "adamax",
        {"beta1": 0.8, "beta2": 0.9, "decay": 0.1},
        [2, 4],
        [1.9, 3.9],
        [1.80697, 3.8086],
    ),
]


@pytest.mark.parametrize(("optimizer", "config", "start", "first", "second"), STEPS)
def test_optimizers_of_the_original_tests(optimizer, config, start, first, second):
    variables, states = {"x": rg.Variable(rg.tensor1d(start), name="x")}, {}
    for due in (first, second):
        grads = rg.variable_grads(lambda: variables["x"].square().sum()).grads
        step(optimizer, {"learningRate": 0.1} | config, states, variables, grads)
        np.testing.assert_allclose(variables["x"].value.numpy(), due, atol=1e-3)

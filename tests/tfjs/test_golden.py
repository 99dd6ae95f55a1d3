"""What TensorFlow.js itself answered, replayed: values, gradients, second derivatives, training.

The cases in `golden/tfjs_*.json` were recorded from the original (each file says how). Its
optimizers are written out over `variable_grads`: users take optax's; here the formulas only
exercise gradients by Variables and assignment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regrad as rg
import regrad.linalg
import regrad.losses
import regrad.nn
from regrad.errors import GradientError
from tests.helpers import tfjs_cases
from tests.helpers.paths import DOCS
from tests.helpers.tfjs_cases import cases, check, chosen, function_of, loss_of, tensor


@np.errstate(all="ignore")  # some cases are about infinities
def replay(case: dict[str, Any]) -> None:
    f, dy = function_of(case), tensor(case["dy"])
    xs = [tensor(case["inputs"][i]) for i in case["wrt"]]
    if not xs:
        check(f(), case["expected_value"], case)
    elif case.get("order") == 2 or "first_wrt" in case:
        replay_second_order(case, f, xs, dy)
    else:
        value, grads = rg.value_and_grads(f)(xs, dy)
        check(value, case["expected_value"], case)
        check_grads(grads, case)


def replay_second_order(case: dict[str, Any], f: Any, xs: Any, dy: Any) -> None:
    place = case["wrt"].index(case["first_wrt"])
    first, grads = rg.value_and_grads(lambda *xs: rg.grads(f)(list(xs))[place])(xs, dy)
    check(f(*xs), case["expected_value"], case)
    check(first, case["expected_first_grad"], case)
    check_grads(grads, case)


def check_grads(grads: Any, case: dict[str, Any]) -> None:
    for i, dx in zip(case["wrt"], grads, strict=True):
        check(dx, case["expected_grads"][i], case)


def replay_variables(case: dict[str, Any]) -> None:
    variables = tfjs_cases.variables_of(case)
    value, grads = rg.variable_grads(loss_of(case, variables), chosen(case, variables))
    check(value, case["expected_value"], case)
    assert list(grads) == list(case["expected_grads"])
    for name, due in case["expected_grads"].items():
        check(grads[name], due, case)


# -- where regrad answers otherwise (docs/tfjs_differences.md) -----------------------------------

NO_INTEGERS = "integers and bools have no gradient: an error says so before f runs"
SHARED = "max and min share the gradient of a tie equally"
ABS = "the gradient of |x| at 0 is 0"
INTEGERS = "081_cast 101_square 135_div 161_mul 186_sum 187_mean 298_reshape 359_oneHot"

# Case → why, and what regrad answers: an error, or the gradients by input.
DIFFERENT: dict[str, tuple[str, Any]] = {
    **{f"op_{case}": (NO_INTEGERS, GradientError) for case in INTEGERS.split()},
    "op_082_abs": (ABS, {0: [-1, 0, 1]}),
    "op_142_pow": ("the gradient of 0**0 by the base is 0", {0: [0, np.inf, 1, 0]}),
    "op_193_max": (SHARED, {0: [0.5, 0, 0.5, 0]}),
    "op_194_max": (SHARED, {0: [-0.008, -0.008, 0, 0.5 / 3, 0.5 / 3, 0.5 / 3]}),
    "op_201_min": (SHARED, {0: [0, 0, 1.014, 1.325 / 3, 1.325 / 3, 1.325 / 3]}),
    "op_406_absoluteDifference": (ABS, {0: [0, -0.5], 1: [0, 0.5]}),
    "custom_035_customGrad": (
        "a cast to integers ends the path, and an integer result has no gradient", GradientError),
    "variable_015_variableGrads": (SHARED, {"a": [0.5, 0.5, 0]}),
}  # fmt: skip


def with_ours(case: dict[str, Any], ours: dict[Any, Any]) -> dict[str, Any]:
    """The case as regrad answers it."""
    due = case["expected_grads"]
    for key, values in ours.items():
        assert due[key]["values"] != values
    grads = due.copy()
    for key, values in ours.items():
        grads[key] = due[key] | {"values": values}
    return case | {"expected_grads": grads}


def parametrized(*kinds: str, different: bool = False) -> Any:
    rows = [row for row in cases(*kinds) if (row["id"] in DIFFERENT) is different]
    return pytest.mark.parametrize("case", rows, ids=lambda case: case["id"])


@parametrized("op", "second_order", "custom")
def test_agrees(case: dict[str, Any]) -> None:
    replay(case)


@parametrized("variable")
def test_variable_grads_agree(case: dict[str, Any]) -> None:
    replay_variables(case)


@parametrized("op", "second_order", "custom", "variable", different=True)
def test_differs_as_decided(case: dict[str, Any]) -> None:
    _, ours = DIFFERENT[case["id"]]
    run = replay_variables if "variables" in case else replay
    if isinstance(ours, type):
        with pytest.raises(ours):
            run(case)
    else:
        with pytest.raises(AssertionError):
            run(case)
        run(with_ours(case, ours))


def test_every_difference_is_documented() -> None:
    text = (DOCS / "tfjs_differences.md").read_text()
    known = {case["id"] for case in cases("op", "second_order", "custom", "variable")}
    assert DIFFERENT.keys() <= known
    assert [name for name in DIFFERENT if name not in text] == []


# -- optimizers ----------------------------------------------------------------------------------

EPSILON = 1e-7


def sgd(g, state, learningRate):
    return g * learningRate


def momentum(g, state, learningRate, momentum, useNesterov=False):
    state["a"] = a = momentum * state.get("a", 0.0) + g
    return (g + momentum * a if useNesterov else a) * learningRate


def adagrad(g, state, learningRate, initialAccumulatorValue=0.1):
    state["a"] = a = state.get("a", initialAccumulatorValue) + g * g
    return learningRate * g / rg.sqrt(a + EPSILON)


def rmsprop(g, state, learningRate, decay=0.9, momentum=0.0, epsilon=EPSILON, centered=False):
    state["s"] = s = decay * state.get("s", 0.0) + (1 - decay) * g * g
    if centered:
        state["mean"] = mean = decay * state.get("mean", 0.0) + (1 - decay) * g
        s = s - mean * mean - 2 * epsilon
    root = rg.sqrt(s + epsilon)
    state["m"] = momentum * state.get("m", 0.0) + learningRate * g / root
    return state["m"]


def adam(g, state, learningRate, beta1, beta2):
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = m = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["u"] = u = beta2 * state.get("u", 0.0) + (1 - beta2) * g * g
    return learningRate * (m / (1 - beta1**t)) / (rg.sqrt(u / (1 - beta2**t)) + EPSILON)


def adamax(g, state, learningRate, beta1, beta2, decay=0.0):
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = m = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["u"] = u = rg.maximum(beta2 * state.get("u", rg.zeros_like(g)), rg.abs(g))
    return learningRate / (1 + decay * (t - 1)) / (1 - beta1**t) * m / (u + EPSILON)


def adadelta(g, state, learningRate, rho=0.95):
    a, du = state.get("a", 0.0), state.get("du", 0.0)
    update = (du + EPSILON) ** 0.5 / (a + EPSILON) ** 0.5 * g
    state["a"] = rho * a + (1 - rho) * g * g
    state["du"] = rho * du + (1 - rho) * update * update
    return learningRate * update


OPTIMIZERS = {f.__name__: f for f in (sgd, momentum, adagrad, rmsprop, adam, adamax, adadelta)}


def step(optimizer, config, states, variables, grads):
    for name, g in grads.items():
        if g is not None:
            state = states.setdefault(name, {})
            variables[name].assign_sub(OPTIMIZERS[optimizer](g, state, **config))


@pytest.mark.parametrize("case", cases("optimizer"), ids=lambda case: case["id"])
def test_optimizers_agree(case: dict[str, Any]) -> None:
    variables, states = tfjs_cases.variables_of(case), {}
    f, var_list = loss_of(case, variables), chosen(case, variables)
    for cost, after in zip(case["expected_costs"], case["expected_variables"], strict=True):
        value, grads = rg.variable_grads(f, var_list)
        step(case["optimizer"], case["config"], states, variables, grads)
        check(value, cost, case)
        for name, due in after.items():
            check(variables[name].value, due, case)


# From optimizer_test.ts: two steps towards the minimum of sum(x²).
BETAS = {"beta1": 0.8, "beta2": 0.9}
STEPS = [
    ("sgd", {}, [1, 2], [0.8, 1.6], [0.64, 1.28]),
    ("momentum", {"momentum": 0.5}, [1, 2], [0.8, 1.6], [0.54, 1.08]),
    ("momentum", {"momentum": 0.5, "useNesterov": True}, [1, 2], [0.7, 1.4], [0.44, 0.88]),
    ("adam", BETAS, [2, 4], [1.9, 3.9], [1.8, 3.8002]),
    ("adamax", {**BETAS, "decay": 0.1}, [2, 4], [1.9, 3.9], [1.80697, 3.8086]),
]


@pytest.mark.parametrize(("optimizer", "config", "start", "first", "second"), STEPS)
def test_optimizers_of_the_original_tests(optimizer, config, start, first, second):
    variables, states = {"x": rg.Variable(rg.tensor1d(start), name="x")}, {}
    for due in (first, second):
        grads = rg.variable_grads(lambda: variables["x"].square().sum()).grads
        step(optimizer, {"learningRate": 0.1} | config, states, variables, grads)
        np.testing.assert_allclose(variables["x"].value.numpy(), due, atol=1e-3)

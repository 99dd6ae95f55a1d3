"""The gradients that arrive at an op of several outputs, in rules: they scale and add."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import RuleError

X = np.cos(np.arange(16.0).reshape(4, 4)) + np.diag([3.0, 4.0, 5.0, 6.0])
OURS = {
    "Split": lambda x: rg.sum(rg.split(x, 2)[0] ** 2),
    "Svd": lambda x: rg.sum(rg.linalg.svd(x)[1] ** 2),
    "Unpack": lambda x: rg.sum(rg.unstack(x)[0] ** 2),
    "Qr": lambda x: rg.sum(rg.linalg.qr(x)[1] ** 3),
}
TWICE = {
    "builtin(2 dy)": lambda dy, builtin: builtin(2 * dy),
    "builtin(dy + dy)": lambda dy, builtin: builtin(dy + dy),
    "builtin(dy / 0.5)": lambda dy, builtin: builtin(dy / 0.5),
    "2 builtin(dy)": lambda dy, builtin: 2 * builtin(dy),
    "None": lambda dy, builtin: builtin([None if not np.any(d) else 2 * d for d in dy]),
}
WRONG = [lambda dy: [*dy, *dy], lambda dy: dy[0], lambda dy: dy[:1]]
MODES = {"eager": lambda f: f, "jit": rg.jit}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("rule", TWICE)
@pytest.mark.parametrize("key", OURS)
def test_regrad(key, rule, mode):
    if rule == "None" and mode is rg.jit:
        rule = "2 builtin(dy)"  # (numbers are not known there)
    due = rg.grad(OURS[key])(rg.tensor(X)).numpy()
    with rg.gradient_override_map({key: TWICE[rule]}):
        found = mode(rg.grad(OURS[key]))(rg.tensor(X)).numpy()
    np.testing.assert_allclose(found, 2 * due, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("rule", [r for r in TWICE if r != "None"])
def test_jax(rule, mode):
    f = lambda x: jnp.sum(jnp.linalg.qr(x)[1] ** 3)  # noqa: E731
    found = mode(jax.grad(rg.jax.override(f, {jnp.linalg.qr: TWICE[rule]})))(jnp.asarray(X))
    np.testing.assert_allclose(found, 2 * jax.grad(f)(jnp.asarray(X)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("key", OURS)
def test_a_wrong_number_is_refused(key, wrong):
    scope = rg.gradient_override_map({key: lambda dy, builtin: builtin(wrong(dy))})
    with scope, pytest.raises(RuleError, match=r"passed \d gradients, and the op has \d outputs"):
        rg.grad(OURS[key])(rg.tensor(X))

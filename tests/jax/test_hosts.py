"""On a JAX that has changed, rules count or are refused by name. Nothing is passed over."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
import regrad.jax.promises
from regrad.errors import HostError, UntestedHostWarning
from regrad.jax import override
from regrad.jax.host import FUNCTION_KEYS, GRADIENTS, HOST, OVERRIDES, SIGHT, VMAPS
from tests.helpers.host_checks import HostTests
from tests.helpers.jax_model import own_slope
from tests.helpers.rows import refused

RULES = {"Tanh": lambda dy, x: 7 * dy * x}
X = jnp.array([0.5, -0.25])


def f(x):
    return jnp.tanh(x).sum()


class TestJax(HostTests):
    host, overrides, library = HOST, OVERRIDES, "jax"
    at_rest = frozenset({"hidden", "of a library", "derivative", "derivative of a key"})
    roots = r"jax[./]|equation\.|program\.|aval\.|the parameters of |HiPrim|RematTraced"
    features, parts, old = 5, 40, "0.9.2"
    wanted = r"needs JAX 0\.10 or newer \(0\.10 to 0\.\d+ are tested\), and 0\.9\.2 is installed"

    def open(self):
        override(f, RULES)


@own_slope(jnp.ones_like)
def own(x):
    return jnp.tanh(x)


CASES = {
    "overrides": (OVERRIDES, lambda: override(f, RULES)(X)),
    "functions as keys of overrides": (FUNCTION_KEYS, lambda: override(own, {own: lambda dy: dy})),
    "overrides in functions that call jax.vmap": (VMAPS,
         lambda: override(lambda x: jax.vmap(jnp.tanh)(x), RULES)(X)),
    "gradients of regrad in JAX programs": (GRADIENTS, lambda: rg.jax.from_regrad(rg.exp)(X)),
    "traces, comparisons and drawings": (SIGHT, lambda: rg.jax.draw(f, X)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_feature_that_is_lost_is_refused(name, monkeypatch):
    feature, program = CASES[name]
    monkeypatch.setattr(feature, "losses", ["something is gone"])
    wanted = (
        rf"^JAX {HOST.version} does not support {name}: something is gone\. "
        rf"Versions 0\.10 to 0\.\d+ are tested\. {re.escape(feature.instead)}$"
    )
    refused(lambda: program(), HostError, wanted)
    monkeypatch.undo()
    program()


def test_a_parameter_that_has_another_name_is_refused():
    from regrad.jax.host.programs import scan

    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, y: (c, y), 0.0, x))(X).jaxpr.eqns
    params = {"times" if k == "length" else k: v for k, v in eqn.params.items()}
    wanted = r"does not support overrides: 'scan' has no parameter 'length' \(it has .*'times'"
    refused(lambda: scan(eqn.replace(params=params)), HostError, wanted)


# -- a JAX that is newer than all that were tested -------------------------------------------------


@pytest.fixture
def newer(monkeypatch):
    """Take the JAX that is installed for a newer one, which nobody has looked at."""
    monkeypatch.setattr(HOST, "newest", "0.9")
    monkeypatch.setattr(HOST, "_warned", False)
    for feature in HOST.features:
        monkeypatch.setattr(feature, "checked", False)
        monkeypatch.setattr(feature, "losses", [])
        monkeypatch.setattr(feature, "programs", feature.programs[:1])


@pytest.fixture
def settings():
    """Set what makes JAX raise, for the whole process."""
    names = ("jax_debug_nans", "jax_debug_infs", "jax_check_tracer_leaks", "jax_disable_jit")
    for name in names:
        jax.config.update(name, True)
    yield names
    for name in names:
        jax.config.update(name, False)


def test_a_newer_jax_is_looked_at_in_a_state_of_its_own(newer, settings):
    with (
        pytest.warns(UntestedHostWarning, match=r"0\.10 to 0\.9 .*regrad hosts") as w,
        jax.disable_jit(),
    ):
        override(f, RULES)
        assert len(w) == 1 and w[0].filename == __file__
        assert all(getattr(jax.config, name) for name in settings)
    assert (OVERRIDES.losses, GRADIENTS.losses) == ([], [])


def test_a_newer_jax_is_looked_at_once(newer):
    with pytest.warns(UntestedHostWarning) as w:
        np.testing.assert_allclose(jax.grad(override(f, RULES))(X), 7 * X)
    assert len(w) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(jax.grad(override(f, RULES))(X), 7 * X)
        override(lambda x: jax.vmap(jnp.tanh)(x), RULES)(X)
        override(own, {own: lambda dy: dy})(X)
        rg.jax.draw(f, X)
    assert [f.name for f in HOST.features if not f.checked or f.losses] == []


TRANSFORMED = {
    "jit": jax.jit,
    "grad": lambda g: jax.grad(lambda x: g(x).sum()),
    "vmap": jax.vmap,
    "checkpoint": jax.checkpoint,
    "scan": lambda g: lambda x: jax.lax.scan(lambda c, y: (c, g(y)), 0.0, x)[1],
    "jvp": lambda g: lambda x: jax.jvp(g, (x,), (x,))[1],
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made outside"])
def test_a_newer_jax_is_looked_at_while_it_traces(newer, name, inside):
    def due(x):
        return TRANSFORMED[name](jax.grad(lambda x: 3.5 * (x * x).sum()))(x)

    with pytest.warns(UntestedHostWarning) as w:
        ours = None if inside else jax.grad(override(f, RULES))
        g = TRANSFORMED[name](lambda x: (ours or jax.grad(override(f, RULES)))(x))
        y = g(X)
    assert [each.filename for each in w] == [__file__]
    np.testing.assert_allclose(y, due(X))
    assert OVERRIDES.checked and not OVERRIDES.losses and not GRADIENTS.losses


def test_a_custom_gradient_warns_at_the_users_line(newer):
    cube = rg.jax.custom_grad(lambda x: (x**3, lambda dy: 7 * dy))
    with pytest.warns(UntestedHostWarning) as w:
        jax.grad(lambda x: cube(x).sum())(X)
    assert [each.filename for each in w] == [__file__]

"""Keys of a map that match nothing: named with what ran in their place, unless they are marked."""

import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.core.state import current
from regrad.errors import NotFiredError, UnusedOverrideWarning
from regrad.rules import optional
from tests.helpers.rows import plain, refused

X = [0.5, 0.7]
TANH, RELU, GELU = {"Tanh": "Identity"}, {"Relu": "Identity"}, {"Gelu": "Identity"}
MARKED = {key: optional("Identity") for key in ("Relu", "Gelu")}
MARKED_TANH = {"Tanh": optional("Identity")}
REASON = "'Relu' never ran; 'Relu6' did, 3 times"
override = rg.gradient_override_map


def model(x):
    return rg.sum(rg.tanh(rg.nn.relu6(x)) * rg.nn.relu6(x) * rg.nn.relu6(x))


def torch_model(x):
    return (torch.tanh(F.relu6(x)) * F.relu6(x) * F.relu6(x)).sum()


def jax_model(x):
    return jnp.sum(jnp.tanh(jax.nn.relu6(x)) * jax.nn.relu6(x) * jax.nn.relu6(x))


def under(rules, f=model, differentiated=True):
    with override(rules) as used:
        (rg.grad(f) if differentiated else f)(rg.tensor(X))
    return used


def under_torch(rules, differentiated=True):
    with regrad.torch.gradient_override_map(rules) as used:
        y = torch_model(torch.tensor(X, requires_grad=True))
        y.backward() if differentiated else None
    return used


def under_jax(rules, differentiated=True):
    used = rg.jax.override(jax_model, rules)
    (jax.grad(used) if differentiated else used)(jnp.array(X))
    return used


SIDES = {"core": under, "compiled": lambda rules, **o: under(rules, rg.jit(model), **o),
         "torch": under_torch, "jax": under_jax}  # fmt: skip
sides = pytest.mark.parametrize("side", SIDES)


@sides
def test_a_key_that_matched_nothing_is_named_although_another_matched(side):
    reason = REASON.replace("Relu6", "relu6") if side == "jax" else REASON
    with pytest.warns(UnusedOverrideWarning, match="a key of the map matched nothing") as caught:
        used = SIDES[side]({**TANH, **RELU, "Conv2D": "Identity"})
    (one,) = caught
    assert f"nothing. {reason}. 'Conv2D' never ran. (rg.rules.optional(rule)" in str(one.message)
    assert "Tanh" not in str(one.message)
    used.assert_fired("Tanh")
    error = refused(used.assert_fired, NotFiredError)
    first, second = str(error).splitlines()
    assert "'Relu' never ran: " in first and reason in first
    assert "'Conv2D' never ran: " in second


@sides
def test_keys_that_are_marked_may_match_nothing(side):
    used = SIDES[side]({**TANH, **MARKED})
    used.assert_fired()
    SIDES[side](MARKED).assert_fired()
    refused(lambda: used.assert_fired("Relu"), NotFiredError, "'Relu' never ran")
    marked = SIDES[side](MARKED_TANH)
    marked.assert_fired("Tanh")
    assert [hit.rule for hit in marked.hits] == ["Identity"]
    idle = SIDES[side](MARKED_TANH, differentiated=False)
    refused(idle.assert_fired, NotFiredError, "no gradient passed")


WARNINGS = [(rg.sum, "matched nothing(?!.*never ran)"), (model, f"matched nothing: .*{REASON}"),
            (lambda x: rg.sum(rg.nn.relu6(x)), "'Relu6' did, once")]  # fmt: skip


def test_a_scope_that_handles_an_error_warns_too():
    try:
        raise ValueError
    except ValueError:
        with pytest.warns(UnusedOverrideWarning, match="matched nothing"):
            under(RELU, rg.sin, rg.scalar(1.0))


@pytest.mark.parametrize(("f", "words"), WARNINGS)
def test_where_nothing_matched_the_reason_is_told_too(f, words):
    with pytest.warns(UnusedOverrideWarning, match=words):
        under(RELU, f)


def test_an_error_in_the_scope_is_the_only_news():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(lambda: under({**TANH, **RELU}, lambda x: 1 / 0), ZeroDivisionError)


def test_looking_on_changes_nothing():
    """Ops that are counted keep their rule, alone, in inner scopes and on tapes of any kind."""
    x = rg.tensor(X)
    all_kinds = lambda: [rg.grad(model)(x), rg.hessian(model)(x), rg.jvp(model, [x], [x])]  # noqa: E731
    expected = plain(all_kinds())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedOverrideWarning)
        with override(RELU), override(GELU):
            assert "Relu6" in {str(key) for key in current().overrides}
            found, trace = plain(all_kinds()), rg.trace_gradients(model)(x)
    assert found == expected
    assert "override" not in str(trace)
    with override({"Relu6": lambda dy: dy * 7}), override(MARKED):
        assert rg.grad(lambda x: rg.sum(rg.nn.relu6(x)))(x).tolist() == [7.0, 7.0]


def test_the_calls_of_a_decorated_function_are_one():
    scope = override({**TANH, **RELU, "Gelu": optional("Identity")})
    f = scope(lambda x, flag: rg.sum(rg.tanh(x) if flag else rg.nn.relu(x)))
    with pytest.warns(UnusedOverrideWarning, match="'Relu' never ran"):
        rg.grad(lambda x: f(x, True))(1.0)
    rg.grad(lambda x: f(x, False))(1.0)  # by now both have matched
    rg.grad(lambda x: f(x, True))(1.0)
    scope.assert_fired()


def test_jax_names_a_key_once():
    used = rg.jax.override(jax_model, {**TANH, **RELU})
    with pytest.warns(UnusedOverrideWarning, match="'Relu' never ran"):
        jax.grad(used)(jnp.array([0.5]))
    jax.grad(used)(jnp.array(X))


@pytest.mark.slow
def test_compiled_by_torch():
    torch._dynamo.reset()
    f = torch.compile(lambda x: (torch.tanh(x) * torch.sin(x)).sum(), backend="aot_eager")
    for first in (True, False):  # the second time there is nothing to trace
        words = "a key of the map|matched nothing"
        with pytest.warns(UnusedOverrideWarning, match=words) as caught:  # noqa: SIM117
            with regrad.torch.gradient_override_map({**TANH, **RELU}) as used:
                f(torch.tensor(X, requires_grad=True)).backward()
        assert "'Tanh'" not in str(caught[0].message)
        if first:
            used.assert_fired("Tanh")


def test_programs_of_tensorflow_are_told_nothing_new():
    with tf.Graph().as_default() as graph:
        x = tf.constant([0.5])

        def built(rules, f):
            with graph.gradient_override_map(rules) as used:
                y = f(x)
            tf.gradients(y, x)
            return used

        used = built({**TANH, **RELU}, lambda x: tf.tanh(tf.nn.relu6(x)))
        refused(used.assert_fired, NotFiredError, "'Relu6' did, once")
        built({**TANH, "Relu": optional("Identity")}, tf.tanh).assert_fired()
        with graph.gradient_override_map(MARKED):
            pass
        with pytest.warns(UnusedOverrideWarning), graph.gradient_override_map(RELU):
            pass

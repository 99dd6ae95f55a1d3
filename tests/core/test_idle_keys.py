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

X = rg.tensor([0.5, 0.7])
TANH, RELU, GELU = {"Tanh": "Identity"}, {"Relu": "Identity"}, {"Gelu": "Identity"}
MARKED = {key: optional("Identity") for key in ("Relu", "Gelu")}
REASON = "'Relu' never ran; 'Relu6' did, 3 times"


def model(x):
    y = rg.tanh(rg.nn.relu6(x)) * rg.nn.relu6(x)
    return rg.sum(y * rg.nn.relu6(x))


def under(rules, f=model):
    with rg.gradient_override_map(rules) as used:
        rg.grad(f)(X)
    return used


def torch_model(x):
    return (torch.tanh(F.relu6(x)) * F.relu6(x) * F.relu6(x)).sum()


def under_torch(rules, f=torch_model):
    x = torch.tensor([0.5, 0.7], requires_grad=True)
    with regrad.torch.gradient_override_map(rules) as used:
        f(x).backward()
    return used


def jax_model(x):
    return jnp.sum(jnp.tanh(jax.nn.relu6(x)) * jax.nn.relu6(x) * jax.nn.relu6(x))


def under_jax(rules, f=jax_model):
    used = rg.jax.override(f, rules)
    jax.grad(used)(jnp.array([0.5, 0.7]))
    return used


SIDES = {"core": under, "compiled": lambda rules: under(rules, rg.jit(model)),
         "torch": under_torch, "jax": under_jax}  # fmt: skip


@pytest.mark.parametrize("side", SIDES)
def test_a_key_that_matched_nothing_is_named_although_another_matched(side):
    reason = REASON.replace("Relu6", "relu6") if side == "jax" else REASON
    with pytest.warns(UnusedOverrideWarning, match="a key of the map matched nothing") as caught:
        used = SIDES[side]({**TANH, **RELU, "Conv2D": "Identity"})
    (one,) = caught
    assert f"nothing. {reason}. 'Conv2D' never ran. (rg.rules.optional(rule)" in str(one.message)
    assert "Tanh" not in str(one.message)
    used.assert_fired("Tanh")
    with pytest.raises(NotFiredError) as error:
        used.assert_fired()
    first, second = str(error.value).splitlines()
    assert "'Relu' never ran: " in first
    assert reason in first
    assert "'Conv2D' never ran: " in second


@pytest.mark.parametrize("side", SIDES)
def test_keys_that_are_marked_may_match_nothing(side):
    used = SIDES[side]({**TANH, **MARKED})
    used.assert_fired()
    SIDES[side](MARKED).assert_fired()
    with pytest.raises(NotFiredError, match="'Relu' never ran"):
        used.assert_fired("Relu")
    marked = SIDES[side]({"Tanh": optional("Identity")})
    marked.assert_fired("Tanh")
    assert [hit.rule for hit in marked.hits] == ["Identity"]


@pytest.mark.parametrize("side", SIDES)
def test_an_op_of_a_marked_key_has_to_be_differentiated_all_the_same(side):
    if side == "jax":
        used = rg.jax.override(jax_model, {"Tanh": optional("Identity")})
        used(jnp.array([0.5, 0.7]))
    elif side == "torch":
        with regrad.torch.gradient_override_map({"Tanh": optional("Identity")}) as used:
            torch_model(torch.tensor([0.5, 0.7], requires_grad=True))
    else:
        with rg.gradient_override_map({"Tanh": optional("Identity")}) as used:
            (rg.jit(model) if side == "compiled" else model)(X)
    with pytest.raises(NotFiredError, match="no gradient passed"):
        used.assert_fired()


def test_where_nothing_matched_the_reason_is_told_too():
    with pytest.warns(UnusedOverrideWarning, match=f"matched nothing: .*{REASON}"):
        under(RELU)
    with pytest.warns(UnusedOverrideWarning, match="matched nothing") as caught:
        under(RELU, rg.sum)
    assert "never ran" not in str(caught[0].message)


def test_once_is_once():
    with pytest.warns(UnusedOverrideWarning, match="'Relu6' did, once"):
        under(RELU, lambda x: rg.sum(rg.nn.relu6(x)))


def test_an_error_in_the_scope_is_the_only_news():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError):
            under({**TANH, **RELU}, lambda x: 1 / 0)


def test_looking_on_changes_nothing():
    """Ops that are counted keep their rule, alone, in inner scopes and on tapes of any kind."""
    plain = [rg.grad(model)(X), rg.hessian(model)(X), rg.jvp(model, [X], [X])[1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedOverrideWarning)
        with rg.gradient_override_map(RELU), rg.gradient_override_map(GELU):
            assert {"Relu6"} <= {str(key) for key in current().overrides}
            found = [rg.grad(model)(X), rg.hessian(model)(X), rg.jvp(model, [X], [X])[1]]
            trace = rg.trace_gradients(model)(X)
    assert [a.tolist() for a in found] == [a.tolist() for a in plain]
    assert "override" not in str(trace)
    with rg.gradient_override_map({"Relu6": lambda dy: dy * 7}), rg.gradient_override_map(MARKED):
        inner = rg.grad(lambda x: rg.sum(rg.nn.relu6(x)))(X)
    assert inner.tolist() == [7.0, 7.0]


def test_the_calls_of_a_decorated_function_are_one():
    scope = rg.gradient_override_map({**TANH, **RELU, "Gelu": optional("Identity")})
    f = scope(lambda x, flag: rg.sum(rg.tanh(x) if flag else rg.nn.relu(x)))
    with pytest.warns(UnusedOverrideWarning, match="'Relu' never ran"):
        rg.grad(lambda x: f(x, True))(X)
    rg.grad(lambda x: f(x, False))(X)  # by now both have matched
    rg.grad(lambda x: f(x, True))(X)
    scope.assert_fired()


def test_jax_names_a_key_once():
    used = rg.jax.override(jax_model, {**TANH, **RELU})
    with pytest.warns(UnusedOverrideWarning, match="'Relu' never ran"):
        jax.grad(used)(jnp.array([0.5]))
    jax.grad(used)(jnp.array([0.5, 0.7]))


def test_compiled_by_torch():
    used = []

    def run(f, x):
        with regrad.torch.gradient_override_map({**TANH, **RELU}) as scope:
            f(x).backward()
        used.append(scope)

    torch._dynamo.reset()
    f = torch.compile(lambda x: (torch.tanh(x) * torch.sin(x)).sum(), backend="aot_eager")
    x = torch.tensor([0.5, 0.7], requires_grad=True)
    for _ in range(2):  # the second time there is nothing to trace
        with pytest.warns(
            UnusedOverrideWarning, match="a key of the map|matched nothing"
        ) as caught:
            run(f, x)
        assert "'Tanh'" not in str(caught[0].message)
    used[0].assert_fired("Tanh")


def test_programs_of_tensorflow_are_told_nothing_new():
    with tf.Graph().as_default() as graph:
        x = tf.constant([0.5])
        with graph.gradient_override_map({**TANH, **RELU}) as used:
            y = tf.tanh(tf.nn.relu6(x))
        tf.gradients(y, x)
        with pytest.raises(NotFiredError, match="'Relu6' did, once"):
            used.assert_fired()
        with graph.gradient_override_map({**TANH, "Relu": optional("Identity")}) as used:
            y = tf.tanh(x)
        tf.gradients(y, x)
        used.assert_fired()
        with graph.gradient_override_map(MARKED):
            pass
        with pytest.warns(UnusedOverrideWarning), graph.gradient_override_map(RELU):
            pass

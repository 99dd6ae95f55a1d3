"""`once_differentiable`: the first derivative of a rule, and an error in place of a second one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.testing
import regrad.torch
import regrad.v1 as tf
from regrad.errors import ArgumentError, GradientError
from regrad.testing import GradientCheckError
from tests.helpers.rows import refused

once = rg.rules.once_differentiable
AT = 0.7
NAMED = GradientError, r"test_once\.py:\d+ is once_differentiable: its grad"


def by_regrad(dy, x):
    return dy * rg.stop_gradient(rg.cos(x))


def by_torch(dy, x):
    return dy * x.detach().cos()


def by_numpy(dy, x):
    return dy * torch.as_tensor(np.cos(x.detach().numpy()))


def by_jax(dy, x):
    return dy * jax.lax.stop_gradient(jnp.cos(x))


def saving(custom, sin, rule):
    """A sine of a library, whose gradient function is the rule of what it saved."""
    gradient = once(lambda dy, saved: rule(dy, *saved))
    return custom(lambda x, save: (save([x]), (sin(x), gradient))[1])


def by_closure(x):
    return torch.sin(x), once(lambda dy: by_torch(dy, x))


ours = saving(rg.custom_grad, rg.sin, by_regrad)
torchs = saving(rg.torch.custom_grad, torch.sin, by_numpy)
torchs_by_closure = rg.torch.custom_grad(by_closure)
jaxs = saving(rg.jax.custom_grad, jnp.sin, by_jax)


def same(f):
    return f


def in_regrad(wrap=same, f=rg.sin):
    def run(order, loss):
        with rg.gradient_override_map({"Sin": rg.rules.optional(once(by_regrad))}):
            g = wrap(rg.grad(lambda x: loss(f(x))))
            return float((g if order == 1 else rg.grad(g))(rg.tensor(AT)))

    return run


def in_torch(f=torch.sin, rule=by_torch, wrap=same):
    def run(order, loss):
        x = torch.tensor(AT, dtype=torch.float64, requires_grad=True)
        with rg.torch.gradient_override_map({"Sin": rg.rules.optional(once(rule))}):
            y = loss(wrap(f)(x))
            if order == 1:
                y.backward()
                return x.grad.item()
            (dx,) = torch.autograd.grad(y, x, create_graph=True)
            return torch.autograd.grad(dx, x)

    return run


def in_jax(wrap=same, f=jnp.sin, rule=by_jax):
    def run(order, loss):
        made = rg.jax.override(f, {"Sin": once(rule)}) if f is jnp.sin else f
        g = wrap(jax.grad(lambda x: loss(made(x))))
        return float((g if order == 1 else jax.grad(g))(AT))

    return run


def in_v1(build):
    def run(order, loss):
        with tf.Graph().as_default() as graph, tf.Session() as session:
            x = tf.constant(AT)
            (dx,) = tf.gradients(loss(build(graph, x)), x)
            return float(session.run(dx if order == 1 else tf.gradients(dx, x)[0]))

    return run


def under_a_map(graph, x):
    rule = once(lambda op, dy: dy * tf.stop_gradient(tf.cos(op.inputs[0])))
    with graph.gradient_override_map({"Sin": rule}):
        return tf.sin(x)


def custom_of_tensorflow(graph, x):
    gradient = once(lambda dy: dy * tf.stop_gradient(tf.cos(x)))
    return tf.custom_gradient(lambda x: (tf.sin(x), gradient))(x)


WAYS = {
    "regrad": in_regrad(), "jit": in_regrad(rg.jit), "custom_grad": in_regrad(f=ours),
    "torch": in_torch(), "torch, by NumPy": in_torch(rule=by_numpy),
    "torch, by regrad": in_torch(rule=by_regrad),
    "torch, checkpoint": in_torch(wrap=lambda f: lambda x: checkpoint(f, x, use_reentrant=False)),
    "torch, custom_grad": in_torch(torchs),
    "torch, custom_grad, a closure": in_torch(torchs_by_closure), "jax": in_jax(),
    "jax, jit": in_jax(jax.jit), "jax, by regrad": in_jax(rule=by_regrad),
    "jax, custom_grad": in_jax(f=jaxs), "v1": in_v1(under_a_map),
    "v1, custom_gradient": in_v1(custom_of_tensorflow),
}  # fmt: skip
LOSSES = [(lambda y: y * 1, np.cos(AT)), (lambda y: y * y, np.sin(2 * AT))]


@pytest.mark.parametrize(("loss", "slope"), LOSSES, ids=["linear", "square"])
@pytest.mark.parametrize("way", WAYS)
def test_a_second_derivative_names_the_rule(way, loss, slope):
    assert WAYS[way](1, loss) == pytest.approx(slope, rel=1e-5)
    refused(lambda: WAYS[way](2, loss), *NAMED)


def decorated(scope, sin):
    return lambda rule: scope({"Sin": rg.rules.optional(rule)})(sin)


# A check, a sine under a rule, the rule, and a tensor.
CHECKS = {
    "regrad": (rg.testing.check_gradients, decorated(rg.gradient_override_map, rg.sin), by_regrad,
               rg.tensor(AT)),
    "torch": (rg.torch.check_gradients, decorated(rg.torch.gradient_override_map, torch.sin),
              by_torch, torch.tensor(AT)),
    "jax": (rg.jax.check_gradients, lambda rule: rg.jax.override(jnp.sin, {"Sin": rule}), by_jax,
            jnp.array(AT)),
}  # fmt: skip


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("check", "under", "rule", "x"), CHECKS.values(), ids=CHECKS)
def test_checks_find_a_rule_that_leaves_the_graph(check, under, rule, x):
    for each, words in ((rule, "gradient of order 2"), (once(rule), "is once_differentiable")):
        check(under(each), [x])
        second = lambda each=each: check(under(each), [x], order=2)  # noqa: E731
        refused(second, (GradientCheckError, GradientError), words)


@pytest.mark.slow
def test_transforms_of_torch_and_programs():
    x = torch.tensor([AT, 2 * AT], dtype=torch.float64)
    each = torch.vmap(torch.func.grad(torchs_by_closure))
    torch.testing.assert_close(each(x), x.cos())
    compiled = torch.compile(lambda x: torchs_by_closure(x * 1).sum(), backend="aot_eager")
    compiled(y := x.clone().requires_grad_()).backward()
    torch.testing.assert_close(y.grad, x.cos())


@pytest.mark.parametrize("rule", [3.0, "Relu", rg.rules.vjp_of(rg.sin)])
def test_what_is_no_function_is_refused(rule):
    refused(lambda: once(rule), ArgumentError, "once_differentiable expected a function, got")

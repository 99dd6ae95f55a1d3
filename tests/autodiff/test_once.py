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

once = rg.rules.once_differentiable
AT = 0.7
FIRST = np.cos(AT)


def by_regrad(dy, x):
    return dy * rg.stop_gradient(rg.cos(x))


def by_torch(dy, x):
    return dy * x.detach().cos()


def by_numpy(dy, x):
    return dy * torch.as_tensor(np.cos(x.detach().numpy()))


def by_jax(dy, x):
    return dy * jax.lax.stop_gradient(jnp.cos(x))


@rg.custom_grad
def ours(x, save):
    save([x])
    return rg.sin(x), once(lambda dy, saved: by_regrad(dy, *saved))


@rg.torch.custom_grad
def torchs(x, save):
    save(x=x)
    return torch.sin(x), once(lambda dy, saved: by_numpy(dy, saved.x))


@rg.torch.custom_grad
def torchs_by_closure(x):
    return torch.sin(x), once(lambda dy: by_torch(dy, x))


@rg.jax.custom_grad
def jaxs(x, save):
    save([x])
    return jnp.sin(x), once(lambda dy, saved: by_jax(dy, *saved))


def in_regrad(wrap, f=rg.sin, rule=by_regrad):
    def run(order, loss):
        with rg.gradient_override_map({"Sin": rg.rules.optional(once(rule))}):
            g = wrap(rg.grad(lambda x: loss(f(x))))
            return float((g if order == 1 else rg.grad(g))(rg.tensor(AT)))

    return run


def in_torch(f=torch.sin, rule=by_torch, wrap=lambda f: f):
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


def in_jax(wrap, f=jnp.sin, rule=by_jax):
    def run(order, loss):
        made = rg.jax.override(f, {"Sin": once(rule)}) if f is jnp.sin else f
        g = wrap(jax.grad(lambda x: loss(made(x))))
        return float((g if order == 1 else jax.grad(g))(AT))

    return run


def in_v1(kind):
    def run(order, loss):
        with tf.Graph().as_default() as graph:
            x = tf.constant(AT)
            if kind == "custom_gradient":
                grad = once(lambda dy: dy * tf.stop_gradient(tf.cos(x)))
                y = tf.custom_gradient(lambda x: (tf.sin(x), grad))(x)
            else:
                tf.RegisterGradient(f"OnceAt{id(graph)}")(
                    once(lambda op, dy: dy * tf.stop_gradient(tf.cos(op.inputs[0])))
                )
                with graph.gradient_override_map({"Sin": f"OnceAt{id(graph)}"}):
                    y = tf.sin(x)
            (dx,) = tf.gradients(loss(y), x)
            dx = dx if order == 1 else tf.gradients(dx, x)[0]
            with tf.Session() as session:
                return float(session.run(dx))

    return run


def plainly(f):
    return f


def checkpointed(f):
    return lambda x: checkpoint(f, x, use_reentrant=False)


WAYS = {
    "regrad": in_regrad(plainly),
    "jit": in_regrad(rg.jit),
    "custom_grad": in_regrad(plainly, ours),
    "torch": in_torch(),
    "torch, by NumPy": in_torch(rule=by_numpy),
    "torch, by regrad": in_torch(rule=by_regrad),
    "torch, checkpoint": in_torch(wrap=checkpointed),
    "torch, custom_grad": in_torch(torchs),
    "torch, custom_grad, a closure": in_torch(torchs_by_closure),
    "jax": in_jax(plainly),
    "jax, jit": in_jax(jax.jit),
    "jax, by regrad": in_jax(plainly, rule=by_regrad),
    "jax, custom_grad": in_jax(plainly, jaxs),
    "v1": in_v1("map"),
    "v1, custom_gradient": in_v1("custom_gradient"),
}


@pytest.mark.parametrize("loss", [lambda y: y * 1, lambda y: y * y])
@pytest.mark.parametrize("way", WAYS)
def test_a_second_derivative_names_the_rule(way, loss):
    expected = FIRST if loss(3) == 3 else 2 * np.sin(AT) * FIRST
    assert WAYS[way](1, loss) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(GradientError, match=r"test_once\.py:\d+ is once_differentiable: its grad"):
        WAYS[way](2, loss)


CHECKS = {
    "regrad": (rg.testing.check_gradients, rg.sin, by_regrad, rg.tensor(AT)),
    "torch": (rg.torch.check_gradients, torch.sin, by_torch, torch.tensor(AT)),
    "jax": (rg.jax.check_gradients, jnp.sin, by_jax, jnp.array(AT)),
}


@pytest.mark.parametrize("library", CHECKS)
def test_checks_find_a_rule_that_leaves_the_graph(library):
    check, sin, rule, x = CHECKS[library]

    def under(rule):
        scope = rg.torch if library == "torch" else rg
        rules = {"Sin": rule}
        return rg.jax.override(sin, rules) if library == "jax" else (
            scope.gradient_override_map({k: rg.rules.optional(r) for k, r in rules.items()})(sin)
        )  # fmt: skip

    check(under(rule), [x])
    with pytest.raises(GradientCheckError, match="gradient of order 2"):
        check(under(rule), [x], order=2)
    check(under(once(rule)), [x])
    with pytest.raises(GradientError, match="is once_differentiable"):
        check(under(once(rule)), [x], order=2)


def test_transforms_of_torch_and_programs():
    x = torch.tensor([AT, 2 * AT], dtype=torch.float64)
    each = torch.vmap(torch.func.grad(torchs_by_closure))
    torch.testing.assert_close(each(x), x.cos())
    compiled = torch.compile(lambda x: torchs_by_closure(x * 1).sum(), backend="aot_eager")
    compiled(y := x.clone().requires_grad_()).backward()
    torch.testing.assert_close(y.grad, x.cos())


def test_what_is_no_function_is_refused():
    for rule in (3.0, "Relu", rg.rules.vjp_of(rg.sin)):
        with pytest.raises(ArgumentError, match="once_differentiable expected a function, got"):
            once(rule)

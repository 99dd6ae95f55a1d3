"""A call on a Tensor that another thread differentiates raises, whatever the call is."""

from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import GradientError

WARM = rg.jit(rg.sin)
CALLS = {
    "jit, cold": lambda x: rg.jit(rg.sin)(x),
    "jit, warm": WARM,
    "jit of what ignores it": rg.jit(lambda x: 1.0),
    "jit of a container": lambda x: rg.jit(lambda d: rg.sin(d["a"]))({"a": x}),
    "jit of a closure": lambda x: rg.jit(lambda a: rg.sin(x) * a)(1.0),
    "jit of grad": rg.jit(rg.grad(rg.sin)),
    "grad": rg.grad(rg.sin),
    "grads": lambda x: rg.grads(rg.sin)([x])[0],
    "value_and_grad": rg.value_and_grad(rg.sin),
    "grad of a closure": lambda x: rg.grad(lambda a: a * x)(2.0),
    "variable_grads of a closure": lambda x: rg.variable_grads(lambda: rg.sin(x))[0],
    "vjp": lambda x: rg.vjp(rg.sin, x)[0],
    "jvp": lambda x: rg.jvp(rg.sin, [x], [1.0]),
    "hvp": lambda x: rg.hvp(rg.sin, [x], [1.0]),
    "linearize": lambda x: rg.linearize(rg.sin, x)[0],
    "jacobian": rg.jacobian(rg.sin),
    "hessian": rg.hessian(rg.sin),
    "checkpoint": rg.checkpoint(rg.sin),
    "custom_grad": rg.custom_grad(lambda x, save: (rg.sin(x), lambda dy: dy)),
    "scan": lambda x: rg.scan(lambda c, _: (rg.sin(c), None), x, None, 2)[0],
    "cond": lambda x: rg.cond(True, rg.sin, rg.cos, x),
    "vmap": lambda x: rg.vmap(rg.sin)(rg.expand_dims(x, axis=0)),
}


def elsewhere(f, x):
    """Return the result of f in another thread, or raise its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f, x).result()


@pytest.mark.parametrize("library", [np, jnp])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_elsewhere_raises(name, library):
    for _ in range(4):
        WARM(rg.scalar(0.5))

    def outer(x):
        with pytest.raises(GradientError, match="another thread is differentiating an input of"):
            elsewhere(CALLS[name], x)
        return x * 3.0

    assert rg.grad(outer)(rg.asarray(library.asarray(0.7, dtype="float32"))).item() == 3.0


def test_reading_a_variable_elsewhere_is_allowed():
    w = rg.Variable(2.0, name="w")
    f = rg.jit(lambda: w * 3.0)
    answers = []

    def loss():
        y = w * w
        answers.extend(elsewhere(lambda _: (w * 3.0).item(), None) for _ in range(2))
        answers.extend(elsewhere(lambda _: f().item(), None) for _ in range(4))
        return y

    assert rg.variable_grads(loss).grads["w"].item() == 4.0
    assert answers == [6.0] * 6

"""What compiled functions hold on to between calls."""

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.state import LIVE
from regrad.tensor import wrap
from tests.quick import full_effort

pytestmark = pytest.mark.usefixtures(full_effort.__name__)


@pytest.mark.parametrize("calls", [1, 3])
def test_arguments_are_let_go(calls):
    step = rg.jit(lambda batch: (batch["x"] * 2).sum())
    held = []
    for _ in range(calls):
        x = jnp.ones(1000) + 1
        held.append(weakref.ref(x))
        step({"x": rg.tensor(x)}).item()
        del x
    gc.collect()
    assert [ref() is None for ref in held] == [True] * calls


def test_arguments_are_let_go_by_the_short_road():
    square = rg.jit(lambda x: x * x)
    x = jnp.ones(1000) + 1
    held = weakref.ref(x)
    square(rg.tensor(x)).numpy()
    del x
    gc.collect()
    assert held() is None


def test_former_values_of_variables_are_let_go():
    w = rg.Variable(jnp.ones(1000))
    total = rg.jit(lambda: (w * w).sum())
    loss = rg.variable_grads(lambda: total())
    held = weakref.ref(w.value.data)
    w.assign(w.value + 1)
    del loss
    gc.collect()
    assert held() is None


def test_a_function_is_traced_once_and_again_for_what_it_takes_from_outside():
    runs = itertools.count()

    def f(x):
        next(runs)
        return x * x

    rg.jit(f)(rg.tensor([1.0]))
    assert next(runs) == 1
    w = rg.Variable([2.0])
    g = rg.jit(lambda x: f(x) * w)
    assert [g(rg.tensor([1.0])).item() for _ in range(2)] == [2.0, 2.0]
    assert next(runs) == 3 and g.cache_info().traces == 1  # (the Variable is an input, for which
    # what was captured is traced again, not the Python)


@pytest.mark.parametrize("u", [2.0, rg.Variable(2.0)], ids=["a number", "a Variable"])
def test_what_a_function_takes_for_other_shapes_only_is_found(u):
    w = rg.Variable(3.0)
    f = rg.jit(lambda x: x * (u if len(x) == 1 else w))
    assert f(rg.tensor([1.0])).tolist() == [2.0]
    assert f(rg.tensor([1.0, 2.0])).tolist() == [3.0, 6.0]
    w.assign(4.0)
    assert f(rg.tensor([1.0, 2.0])).tolist() == [4.0, 8.0]


def looped(w, h, xs):
    def step(h, x):
        y = rg.tanh(w * h + x)
        return y, (x, y)

    last, (_, ys) = rg.scan(step, h, xs, reverse=True)
    return (ys * ys).sum() + last.sum()


def gradients(w, h, xs):
    return rg.grads(looped)([w, h, xs])


GIVEN = (np.float32(0.5), np.ones(3, np.float32), np.linspace(0, 1, 15, dtype="f4").reshape(5, 3))


def test_what_a_loop_gives_out_is_not_kept_a_second_time():
    def traced(*arrays):
        return [dx._data for dx in gradients(*map(wrap, arrays))]

    equations = jax.make_jaxpr(traced)(*map(jnp.asarray, GIVEN)).jaxpr.eqns
    forward, _ = [e for e in equations if e.primitive.name == "scan"]
    stacked = [v for v in forward.outvars if v.aval.shape == (5, 3)]
    assert len(stacked) == 2  # y, which f gives out, and the h of each step (x is there)


def test_its_gradients_are_those_of_eager_mode():
    for ours, due in zip(rg.jit(gradients)(*GIVEN), gradients(*GIVEN), strict=True):
        np.testing.assert_allclose(ours.numpy(), due.numpy(), rtol=1e-5)


# What was made of a function for good (JAX keeps structures and programs) must not keep it alive,
# nor what it closes over: programs made in a loop would fill the memory.

BODIES = {
    "plain": lambda x: rg.sum(rg.sin(x) * x),
    "cond": lambda x: rg.cond(rg.sum(x) > 0.0, lambda: rg.sum(x * x), lambda: rg.sum(x)),
    "scan": lambda x: rg.scan(lambda c, e: (c * rg.sin(e), e), rg.sum(x), x)[0],
    "checkpoint": lambda x: rg.sum(rg.checkpoint(lambda e: rg.sin(e) * e)(x)),
    "jit": lambda x: rg.sum(rg.jit(lambda e: rg.sin(e) * e)(x)),
    "custom": lambda x: rg.sum(
        rg.custom_grad(lambda e: (e * e, lambda dy: rg.grad(lambda z: rg.sum(z * z * dy))(e)))(x)
    ),
}
TRANSFORMED = {
    "jit": rg.jit,
    "jit, verify": lambda f: twice(rg.jit(f, verify=True)),
    "grad of jit": lambda f: rg.grad(rg.jit(f)),
    "jit of grad": lambda f: rg.jit(rg.grad(f)),
    "hessian of jit": lambda f: rg.hessian(rg.jit(f)),
    "jit of vmap": lambda f: rg.jit(rg.vmap(lambda x: f(rg.stack([x])))),
}


def twice(f):
    return lambda x: (f(x), f(x))


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_functions_are_let_go(body, transformed):
    class Held:
        pass

    def used():
        held, errors = Held(), []

        def f(x):
            try:
                rg.matmul(x, held)
            except rg.errors.ArgumentError as error:
                errors.append(error)  # its traceback holds the frames of the trace
            return body(x)

        transformed(f)(rg.tensor([1.0, 2.0]))
        assert errors
        return weakref.ref(held)

    reference = used()
    gc.collect()
    assert reference() is None
    assert not LIVE

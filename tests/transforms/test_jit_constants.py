"""Constants made in a compiled function: large ones are ops of the program, small ones values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from tests.transforms.regions import REGIONS

N = 300
MAKERS = {
    "zeros": lambda: rg.zeros((N, 2)),
    "ones": lambda: rg.ones((N, 2), dtype=rg.bool),
    "arange": lambda: rg.arange(N),
    "arange down": lambda: rg.arange(N, -N, -3),
    "arange of floats": lambda: rg.arange(3, N, 2, dtype=rg.float32),
    "arange by tenths": lambda: rg.arange(0.0, 30.0, 0.1),
    "linspace": lambda: rg.linspace(-1.0, 2.0, N),
    "linspace, open": lambda: rg.linspace(0, 3, N, endpoint=False),
    "eye": lambda: rg.eye(N // 10),
    "eye, wide": lambda: rg.eye(9, N, k=2, dtype=rg.int32),
    "tril": lambda: rg.tril(rg.ones((N // 10, N // 10))),
    "one_hot": lambda: rg.one_hot(rg.arange(N) % 4, 4),
    "full": lambda: rg.full((N,), 2.5),
    "wide integers": lambda: rg.arange(2**40, 2**40 + N) - 2**40,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("x64", [False, True])
def test_their_values_are_those_of_eager_mode(name, x64):
    make = MAKERS[name]
    with jax.enable_x64(x64):
        got = rg.jit(make)()
    due = make()
    np.testing.assert_allclose(got.numpy(), due.numpy(), rtol=2e-6, atol=1e-6)
    assert got.dtype == due.dtype or (not x64 and due.dtype == np.int64)


@pytest.mark.parametrize("name", ["arange", "linspace", "eye", "tril", "one_hot"])
def test_no_literal_is_built_in(name):
    make = MAKERS[name]
    jaxpr = jax.make_jaxpr(lambda a: rg.jit(lambda x: rg.sum(make() * x))(rg.asarray(a)).data)
    consts = jax.tree.leaves(jaxpr(jnp.ones(())).consts)
    assert sum(np.size(c) for c in consts) <= 64
    assert "iota" in str(jaxpr(jnp.ones(())))


def test_small_ones_are_read():
    f = rg.jit(lambda x: sum(x * float(i) for i in rg.arange(4)))
    assert f(2.0).item() == 12.0


LINE = lambda y: rg.sin(y) * rg.linspace(0.0, 1.0, N)  # noqa: E731
REPLAYED = {
    **{name: REGIONS[name](LINE) for name in ("jit", "checkpoint", "cond", "scan", "fori_loop")},
    "cond, closure": lambda x: rg.cond(rg.sum(x) > 0, lambda: x * rg.arange(N), lambda: x * 2),
    "vmap": lambda x: rg.vmap(lambda a: a * rg.ones(N))(x)[0],
    "custom": rg.custom_grad(lambda y: (y * rg.ones(N), lambda dy: dy * rg.arange(N))),
    "grad": rg.grad(lambda y: rg.sum(LINE(y)), argnums=0),
}


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("f", REPLAYED.values(), ids=REPLAYED)
def test_they_are_made_anew_where_a_body_is_replayed(f):
    x = rg.asarray(np.linspace(0.1, 1.0, N).astype(np.float32))
    loss = lambda x: rg.sum(rg.sin(f(x)))  # noqa: E731
    due = rg.grad(loss)(x).numpy()
    second = rg.grad(lambda x: rg.sum(rg.grad(loss)(x) * x))
    for g in rg.jit(rg.grad(loss)), rg.grad(rg.jit(loss)):
        np.testing.assert_allclose(g(x).numpy(), due, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(rg.jit(second)(x).numpy(), second(x).numpy(), rtol=1e-3, atol=1e-2)


def test_waiting():
    y = rg.jit(lambda x: {"a": [x @ x], "b": 3})(rg.ones((2, 2)))
    assert rg.block_until_ready(y) is y
    assert jax.block_until_ready(y["a"][0]) is y["a"][0]
    v = rg.Variable(1.0)
    rg.jit(lambda: v.assign_add(1.0))()
    assert rg.block_until_ready([v, np.ones(2), None, jnp.ones(2)])[0] is v
    assert rg.jit(lambda x: rg.block_until_ready(x) + 1)(1.0).item() == 2.0


def test_it_waits(monkeypatch):
    waited = []
    array = type(jnp.ones(2))
    monkeypatch.setattr(array, "block_until_ready", lambda self: waited.append(self))
    rg.block_until_ready([{"v": rg.Variable(jnp.ones(3))}, rg.asarray(jnp.ones(2))])
    assert [a.shape for a in waited] == [(3,), (2,)]


@pytest.mark.parametrize("f", [rg.sin, lambda x: x, rg.jit(rg.sin)], ids=["op", "lambda", "jit"])
def test_there_is_nothing_to_wait_for_in_a_function(f):
    assert rg.block_until_ready({"f": f, "x": 1.0})["f"] is f

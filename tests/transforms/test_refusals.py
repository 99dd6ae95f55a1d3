"""What is refused, by which error, and with which words: eagerly, under jit, or both."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import ArgumentError, DTypeError, GradientError, RegradError, TraceError
from tests.helpers.rows import refused

ShapeError, StateError = rg.errors.ShapeError, rg.errors.StateError
ZERO, ONE, X = rg.scalar(0.0), rg.scalar(1.0), rg.tensor([1.0, 2.0])
A, B = np.arange(6.0).reshape(3, 2), np.ones((2, 2))
RNG = np.random.default_rng(0)
UNKNOWN = "under jit, a loop of unknown length has no gradient.*max_steps=n"
STATIC, HUGE = "static_argnames", r"2\*\*48"
NO_MATCH = r"jit\(.*missing a required argument: 'y'.*takes x, y"
ANY = (TraceError, ArgumentError, TypeError)


def scanned(body):
    return lambda x: rg.scan(body, ZERO, x)


def chosen(one, other):
    return lambda x: rg.cond(x > 0, one, other, x)


def halved(x):
    return rg.while_loop(lambda x: x > 1, lambda x: x / 2, x)


def add(a, b):
    return a + b


async def later(x):
    return x


def one_by_one(x):
    yield x


async def one_by_one_later(x):
    yield x


def torch_ones():
    import torch

    return torch.ones(2)


def closing(w, inner):
    return rg.custom_grad(lambda x: (inner(x, w), lambda dy: dy))(w * 1.0)


# An error, some of its words, a function, and arguments (of VMAP: one, a function to JAX or NumPy).
VMAP = [
    (ShapeError, "different numbers of examples", lambda to: rg.vmap(add)(to(A), to(B))),
    (ArgumentError, "in_axes has 1 entries, and there are 2 arguments",
     lambda to: rg.vmap(add, in_axes=(0,))(to(A), to(A))),
    (ArgumentError, "None for every Tensor",
     lambda to: rg.vmap(add, in_axes=None)(to(A), to(A))),
    ((ShapeError, IndexError), ".", lambda to: rg.vmap(add, in_axes=(0, 5))(to(A), to(A))),
    ((ShapeError, IndexError), ".", lambda to: rg.vmap(add)(to(np.ones(())), to(A))),
    (ArgumentError, "Generator 'RNG'", lambda to: rg.vmap(lambda x: x * RNG.normal())(to(A))),
    (ArgumentError, "NumPy Generator cannot be used under vmap",
     lambda to: rg.vmap(lambda x: x * rg.random.normal(RNG, ()))(to(A))),
]  # fmt: skip
BOTH = [
    (ShapeError, r"float32 \(\) came out as float32 \(2,\)", scanned(lambda c, x: (X * c, x)), X),
    (ShapeError, "came out as int32", scanned(lambda c, x: (rg.astype(c, "int32"), x)), X),
    (ArgumentError, "keep its structure", scanned(lambda c, x: ((c, c), x)), X),
    (ArgumentError, "must return a pair", scanned(lambda c, x: c), X),
    (ArgumentError, "must return a pair", scanned(lambda c, x: (c, x, c)), X),
    (ShapeError, r"lengths \[2, 3\]", lambda x, y: rg.scan(add, 0.0, (x, y)), X, rg.ones(3)),
    (ShapeError, r"lengths \[2, 5\]", lambda x: rg.scan(add, 0.0, x, length=5), X),
    (ArgumentError, "pass xs, or the number of steps", lambda x: rg.scan(add, x), X),
    (ArgumentError, "must be a function", lambda x: rg.scan(3, 0.0, length=1), X),
    (ArgumentError, "must be a function", lambda x: rg.cond(True, 1, 2), X),
    (Exception, ".", lambda x: rg.cond(x > 0, lambda: x, lambda: -x), X),
    (GradientError, "closes over", rg.grad(lambda w: closing(w, rg.checkpoint(add))), ONE),
    (GradientError, "no path", rg.grad(lambda x: rg.checkpoint(lambda y: y > 0)(x) * 2.0), ONE),
]
JIT = [
    (ArgumentError, r"structure.*\(Tensor\(float32, \(\)\), Tensor\(float32, \(\)\)\) and Tensor",
     chosen(lambda x: (x, x), lambda x: x), ONE),
    (ArgumentError, r"structure.*None and Tensor\(", chosen(lambda x: None, lambda x: x), ONE),
    (ArgumentError, r"same structure.*\('a', 1\) and \('b', 1\)",
     chosen(lambda x: ("a", 1), lambda x: ("b", 1)), ONE),
    (ArgumentError, "same structure", chosen(lambda x: [x], lambda x: (x,)), ONE),
    (ArgumentError, r"\[Tensor\(float32, .*\), 2\]", chosen(lambda x: [x], lambda x: [x, 2]), ONE),
    (ArgumentError, r"same structure.*{'a': Tensor\(float32, \(\)\)} and {'b': 1}",
     chosen(lambda x: {"a": x}, lambda x: {"b": 1}), ONE),
    (ShapeError, r"the shapes.*\(2,\) and \(\)", chosen(lambda x: X, lambda x: x), ONE),
    (ShapeError, r"\(2,\) and \(\)", chosen(lambda x: X, lambda x: 0.0), ONE),
    (DTypeError, "float32 and int32; use astype",
     chosen(lambda x: x, lambda x: rg.astype(x, "int32")), ONE),
    (RegradError, ".", lambda x: rg.cond(x > 0, lambda: x, lambda: -x), X),
    (GradientError, UNKNOWN, rg.grad(halved), ONE * 6),
    (GradientError, UNKNOWN, rg.grad(rg.jit(halved)), ONE * 6),
    (GradientError, UNKNOWN, rg.grad(lambda x: rg.jvp(halved, [x], [x * x])[1]), ONE * 6),
    (GradientError, UNKNOWN,
     rg.grad(lambda w: rg.while_loop(lambda x: x < 10, lambda x: x * w, 1.0)), ONE * 2),
    # values that only the run has
    (ANY, "where", lambda x: x * 2 if x > 0 else x, ONE), (ANY, "float", lambda x: float(x), ONE),
    (ANY, "int", lambda x: int(x), ONE), (ANY, "item|traced", lambda x: x.item(), ONE),
    (ANY, "numpy|traced", lambda x: x.numpy(), ONE), (ANY, "traced", lambda x: np.asarray(x), ONE),
    (ANY, "traced", lambda x: x.tolist(), ONE),
    (ANY, "traced|integer", lambda x: range(rg.astype(x, "int32")), ONE),
    (ANY, "traced|static|shape", lambda x: rg.ones((rg.astype(x, "int32"),)), ONE),
    (ANY, "traced|[Tt]racer", lambda x: np.sort(x.data), ONE),
    (ANY, "traced|index", lambda x: [1.0, 2.0][rg.astype(x, "int32")], ONE),
    (ANY, STATIC, lambda n: rg.zeros(n), 1), (ANY, STATIC, lambda n: rg.full(n, 1.0), 1),
    (ANY, STATIC, lambda n: rg.ones((n, 2)), 1), (ANY, STATIC, lambda n: range(n), 1),
    (ANY, STATIC, lambda n: rg.arange(n), 1), (ANY, STATIC, lambda n: rg.eye(n), 1),
    (ANY, STATIC, lambda n: rg.sum(B, axis=n), 1),
    (TraceError, "traced", lambda x: x * float(rg.arange(300)[3]), ONE),
    (rg.errors.NumberRangeError, ".", lambda: rg.arange(300, dtype=rg.uint8)),
    *[((ShapeError, rg.errors.InvalidValueError), HUGE, lambda x, n=n, f=f: f(n) + x, ONE)
      for n in (10**18, 10**400) for f in (rg.eye, lambda n: rg.linspace(0, 1, n))],
    # what is made or drawn inside
    (ArgumentError, r"a Variable \('w'\) is created inside jit",
     lambda x: x * rg.Variable(1.0, name="w"), ONE),
    (ArgumentError, "Generator cannot be used under jit",
     lambda x: x + rg.random.normal(RNG, (2,)), ONE),
    (ArgumentError, "Generator cannot be used under jit",
     lambda x: x + rg.random.uniform(RNG, (2,)), ONE),
    (ArgumentError, "drew numbers from the NumPy Generator 'RNG'", lambda x: x * RNG.normal(), ONE),
    (ArgumentError, "cannot mix data of jax and torch", lambda x: x * torch_ones(), ONE),
    # arguments
    (ArgumentError, "the argument s is set: expected Tensors", lambda x, s: x, ONE, {1, 2}),
    (ArgumentError, NO_MATCH, lambda x, y: x * y, ONE),
    (ArgumentError, "too many positional arguments", lambda x, y: x * y, ONE, ONE, ONE),
    (AttributeError, "real", lambda x: x + None.real, ONE),  # the user's stays what it is
    *[(TraceError, r"from outside under jit\(<lambda>\)",
       lambda x, read=read: (read(ZERO), x)[1], X)
      for read in (float, bool, rg.Tensor.item, rg.Tensor.tolist, rg.Tensor.numpy, np.asarray,
                   lambda t: t.data)],
]  # fmt: skip
EAGER = [
    (ArgumentError, r"names 'm', and the parameters of .* are x, n",
     lambda: rg.jit(lambda x, n: x, static_argnames="m")),
    (ArgumentError, "donate names 'y'", lambda: rg.jit(lambda x: x, donate=["y"])),
    (ArgumentError, "must be a function", lambda: rg.jit(3)),
    (ArgumentError, "is set, which is static and not hashable",
     lambda: rg.jit(lambda x, s: x, static_argnames="s")(ONE, {1, 2})),
    *[(ArgumentError, r"static_argnums holds -?\d.*has 2 parameters: x, n",
       lambda n=n: rg.jit(lambda x, n: x, static_argnums=n)) for n in (2, -3, (0, 5))],
    (ArgumentError, "got PyTorch's", lambda: rg.jit(lambda x: x * 2)(torch_ones())),
    (ArgumentError, NO_MATCH, lambda: rg.jit(lambda x, y: x * y).lower(ONE)),
    (ArgumentError, "too many positional", lambda: rg.jit(lambda x: x).lower(ONE, ONE)),
    (ArgumentError, "expected Tensors", lambda: rg.jit(lambda x: x).lower(object())),
    (AttributeError, "real", lambda: rg.jit(lambda x: x + None.real).lower(ONE)),
    (StateError, "lower a compiled one",
     lambda: rg.grad(lambda x: (rg.jit(rg.sin).lower(x), x)[1])(1.0)),
    (StateError, "lower", lambda: rg.jit(lambda x: (rg.jit(rg.sin).lower(x), x)[1])(1.0)),
    *[(ArgumentError, "block_until_ready: expected the result of a function",
       lambda f=f: rg.block_until_ready(f)) for f in (rg.sin, lambda x: x, rg.jit(rg.sin))],
    (GradientError, UNKNOWN, lambda: rg.grad(rg.jit(halved))(ONE * 6)),
    (ArgumentError, "still holds after 2 steps",
     lambda: rg.while_loop(lambda x: x > 1, lambda x: x / 2, ONE * 64, max_steps=2)),
    *[(ArgumentError, "an async or a generator function", lambda f=f: rg.checkpoint(f))
      for f in (later, one_by_one, one_by_one_later)],
    # vmap
    (ArgumentError, "Generator 'RNG'", lambda: rg.vmap(lambda r: r * RNG.normal())(torch_ones())),
    (ArgumentError, "must be a function", lambda: rg.vmap(3)),
    (TypeError, ".", lambda: rg.vmap(lambda x, *, k: x * k)(A, k=2.0)),
    (ShapeError, "no examples", lambda: rg.vmap(rg.sin)(np.zeros((0, 2)))),
    (TraceError, "vmap", lambda: rg.vmap(lambda x: x if x > 2 else -x)(jnp.ones(3))),
    # derivatives
    (ArgumentError, r"vjp.*must be a function", lambda: rg.vjp(3, 1.0)),
    (ArgumentError, "no inputs to differentiate by", lambda: rg.vjp(lambda: 1)),
    (ArgumentError, "no inputs to differentiate by", lambda: rg.linearize(lambda: 1)),
    (ShapeError, r"expected the shape \(2,\), got \(3,\)",
     lambda: rg.vjp(lambda x: x * 1.0, X)[1](rg.ones(3))),
    (ArgumentError, "xs and dxs must be lists", lambda: rg.jvp(lambda x: x, 1.0, 1.0)),
    (ArgumentError, "xs and dxs must be lists", lambda: rg.hvp(rg.sin, X, X)),
    (ShapeError, "dxs of a linearized function", lambda: rg.linearize(rg.sin, X)[1](A)),
    (ShapeError, r"hessian\(f\) must return a scalar", lambda: rg.hessian(lambda x: x * 1.0)(X)),
    (ShapeError, r"hvp\(f.* must return a scalar", lambda: rg.hvp(lambda x: x, [X], [X])),
    (ArgumentError, "must return a Tensor or a container",
     lambda: rg.jacobian(lambda x: "text")(1.0)),
]  # fmt: skip


def name(row):
    return row[1].replace("\\", "")[:60]


@pytest.mark.parametrize("to", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("row", VMAP, ids=name)
def test_by_vmap(row, to):
    error, words, f = row
    refused(lambda: f(to), error, words)


@pytest.mark.parametrize("row", [*BOTH, *EAGER], ids=name)
def test_eagerly(row):
    error, words, f, *xs = row
    refused(lambda: f(*xs), error, re.compile(words, re.DOTALL))
    assert current() is None


@pytest.mark.parametrize("row", [*BOTH, *JIT], ids=name)
def test_under_jit(row):
    error, words, f, *xs = row
    refused(lambda: rg.jit(f)(*xs), error, re.compile(words, re.DOTALL))
    assert current() is None

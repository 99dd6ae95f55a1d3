"""Where an op may stand in a JAX program, and how that program may be transformed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

X = jnp.array([0.3, -1.2, 2.4])


# Where a function may stand: each is the same function again.
AROUND = {
    "plain": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1][0],
    "cond": lambda f: lambda x: lax.cond(x.sum() < 1e9, f, lambda x: 0 * f(x), x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}  # fmt: skip


# -- where the op stands; each takes it and gives a function of a vector ---------------------------


def in_scan(op):
    return lambda x: lax.scan(lambda c, y: (op(c) * 0.5 + y, op(y)), x * 0, jnp.stack([x, x]))[0]


def in_while(op):
    def f(x):
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, op(c[1]) * 0.5), (0, x))[1]

    return f


def in_custom_jvp(op):
    f = jax.custom_jvp(lambda x: op(x) * x)
    f.defjvps(lambda dx, y, x: dx * 1e6)
    return f


def in_custom_vjp(op):
    f = jax.custom_vjp(lambda x: op(x) * x)
    f.defvjp(lambda x: (op(x) * x, None), lambda _, dy: (dy * 1e6,))
    return f


def in_solve(op):
    def f(x):
        return lax.custom_linear_solve(
            lambda v: v * (2 + op(x) ** 2), x, lambda _, b: b / (2 + op(x) ** 2), symmetric=True
        )

    return f


PLACES = {
    "plain": lambda op: lambda x: op(x) * x, "jit": lambda op: jax.jit(lambda x: op(x) * x),
    "jit in jit": lambda op: jax.jit(lambda x: jax.jit(op)(x) * x), "scan": in_scan,
    "fori": lambda op: lambda x: lax.fori_loop(0, 2, lambda i, c: op(c) * 0.5, x),
    "map": lambda op: lambda x: lax.map(op, x) * x, "while": in_while,
    "cond": lambda op: lambda x: lax.cond(x[0] > 0, op, jnp.sin, x),
    "switch": lambda op: lambda x: lax.switch(1, [jnp.sin, op, jnp.cos], x),
    "checkpoint": lambda op: jax.checkpoint(lambda x: op(x) * x),
    "vmap": lambda op: lambda x: jax.vmap(op)(x) * x,
    "vmap of jit": lambda op: lambda x: jax.vmap(jax.jit(op))(jnp.stack([x, 2 * x])).sum(0),
    "custom_jvp": in_custom_jvp, "custom_vjp": in_custom_vjp, "custom_linear_solve": in_solve,
    "associative_scan": lambda op: lambda x: lax.associative_scan(lambda a, b: op(a) + b, x),
}  # fmt: skip


def unrolled_scan(op):
    def f(x):
        c = x * 0
        for _ in range(2):
            c = op(c) * 0.5 + x
        return c

    return f


def unrolled(op):
    return lambda x: op(op(x) * 0.5) * 0.5


# -- what is done with it --------------------------------------------------------------------------


def total(f):
    return lambda x: jnp.sum(f(x) * jnp.arange(1.0, 4.0))


TRANSFORMS = {
    "grad": lambda f: jax.grad(total(f)),
    "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(total(f))(x) ** 2)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](x)[0],
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "vmap(grad)": lambda f: lambda x: jax.vmap(jax.grad(total(f)))(jnp.stack([x, -x])),
    "grad(vmap)": lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, -x])) ** 2)),
    "jacrev": jax.jacrev, "jacfwd": jax.jacfwd, "hessian": lambda f: jax.hessian(total(f)),
    "jit(grad)": lambda f: jax.jit(jax.grad(total(f))),
    "grad(jit)": lambda f: jax.grad(jax.jit(total(f))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(total(f))),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
}  # fmt: skip

"""One program under rules on each host: its values, its gradients, and whether the rules ran."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

import regrad as rg


class Functions:
    """A host's functions by NumPy's names, looked for in several modules."""

    def __init__(self, *modules: Any, **others: Any) -> None:
        self._modules, self._others = modules, others

    def __getattr__(self, name: str) -> Any:
        if name in self._others:
            return self._others[name]
        return next(getattr(m, name) for m in self._modules if hasattr(m, name))


def listed(y: Any) -> list[Any]:
    return list(y) if isinstance(y, tuple | list) else [y]


def weights(ys: list[Any]) -> list[np.ndarray]:
    """Gradients that arrive, none like another."""
    shapes = [tuple(map(int, y.shape)) for y in ys]
    return [np.linspace(i + 1, i + 2, int(np.prod(s))).reshape(s) for i, s in enumerate(shapes)]


def zeros_for_none(dxs: Any, xs: Any) -> list[Any]:
    return [x * 0 if dx is None else dx for dx, x in zip(dxs, xs, strict=True)]


def derived(first: Any, grads: Any, nth: int) -> Any:
    """Return a function of the n-th derivatives: the gradients of sums of those before."""
    if nth == 1:
        return first
    before = derived(first, grads, nth - 1)
    return lambda *xs: (None, grads(lambda *xs: sum(dx.sum() for dx in before(*xs)[1]), xs))


def within(scope: Any, rules: Any, o: Functions, f: Any, used: list[Any]) -> Any:
    """Return a function that opens its scope itself: parameters of rules are among its inputs."""

    def run(*xs: Any) -> Any:
        with scope(rules(o, *xs)) as each:
            used[:] = [each]
            return f(*xs)

    return run


def by_regrad(program: Any, rules: Any, xs: Any, nth: int = 1, jit: bool = False,
              inside: bool = False, **options: Any) -> Any:  # fmt: skip
    o, scope = Functions(rg, rg.nn), partial(rg.gradient_override_map, **options)
    f, used = (lambda *xs: listed(program(o, *xs))), [None]
    f = within(scope, rules, o, f, used) if inside else f

    def first(*xs: Any) -> Any:
        ys, back = rg.vjp(f, *xs)
        return ys, zeros_for_none(back([rg.tensor(w) for w in weights(ys)]), xs)

    run = derived(first, lambda f, xs: rg.grads(f, unconnected="zero")(xs), nth)
    with nullcontext() if inside else scope(rules(o)) as around:
        found = (rg.jit(run) if jit else run)(*[rg.tensor(x) for x in xs])
    return *found, around or used[0]


def by_graph(program: Any, rules: Any, xs: Any, nth: int = 1, **options: Any) -> Any:
    import regrad.v1 as tf

    functions = Functions(tf, tf.nn, sum=tf.reduce_sum)
    with tf.Graph().as_default() as graph, tf.Session() as session:
        given = [tf.placeholder(tf.float64, x.shape) for x in xs]
        scope = rg.gradient_override_map if options else graph.gradient_override_map
        with scope(rules(functions), **options) as used:
            ys = listed(program(functions, *given))
        found = zeros_for_none(tf.gradients(ys, given, list(map(tf.constant, weights(ys)))), given)
        for _ in range(1, nth):
            found = tf.gradients(found, given)
        ys, found = session.run([ys, found], dict(zip(given, xs, strict=True)))
    return ys, found, used


def by_torch(
    program: Any, rules: Any, xs: Any, nth: int = 1, inside: bool = False, **options: Any
) -> Any:
    import torch

    import regrad.torch

    functions = Functions(torch, torch.nn.functional)
    leaves = [torch.tensor(x, requires_grad=True) for x in xs]
    given = rules(functions, *leaves) if inside else rules(functions)
    with regrad.torch.gradient_override_map(given, **options) as used:
        ys = listed(program(functions, *leaves))
    found, arriving = ys, [torch.tensor(w) for w in weights(ys)]
    for n in range(1, nth + 1):
        more = {"create_graph": n < nth, "materialize_grads": True}
        found = torch.autograd.grad(found, leaves, arriving, **more)
        if n < nth:  # (constants are differentiated, too)
            found = [dx + 0 * sum(map(torch.sum, leaves)) for dx in found]
        arriving = [torch.ones_like(dx) for dx in found]
    return [y.detach() for y in ys], [dx.detach() for dx in found], used


def by_jax(program: Any, rules: Any, xs: Any, nth: int = 1, jit: bool = False,
           inside: bool = False, **options: Any) -> Any:  # fmt: skip
    import jax
    import jax.numpy as jnp

    functions = Functions(jnp, jax.nn, name_scope=jax.named_scope)
    f = lambda *xs: listed(program(functions, *xs))  # noqa: E731
    scopes = [] if inside else [rg.jax.override(f, rules(functions), **options)]

    def overridden(*xs: Any) -> Any:
        if inside:
            scopes[:] = [rg.jax.override(lambda *xs: f(*xs), rules(functions, *xs), **options)]
        return scopes[0](*xs)

    def first(*xs: Any) -> Any:
        ys, back = jax.vjp(overridden, *xs)
        return ys, back([jnp.asarray(w) for w in weights(ys)])

    run = derived(first, lambda f, xs: jax.grad(f, tuple(range(len(xs))))(*xs), nth)
    with jax.enable_x64(True):
        return *(jax.jit(run) if jit else run)(*map(jnp.asarray, xs)), scopes[0]


# -- three times an op's own gradient, in any library ----------------------------------------------


def scaled(dy: Any, builtin: Any) -> Any:
    return 3 * builtin(dy)


def scaled_by_regrad(dy: Any, builtin: Any) -> Any:
    def times(dx: Any) -> Any:
        if isinstance(dx, tuple):
            return [times(part) for part in dx]
        return None if dx is None else rg.multiply(3.0, dx)

    return times(builtin(dy))


HOSTS = {
    "regrad": by_regrad, "regrad, jit": partial(by_regrad, jit=True), "v1": by_graph,
    "torch": by_torch, "jax": by_jax, "jax, jit": partial(by_jax, jit=True),
}  # fmt: skip

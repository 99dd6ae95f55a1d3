"""One list of the roads on which users reach a gradient.

A road is a way to ask for a gradient (`APIS`), a region around the function (`REGIONS`), and a way
to call the result (`CALLS`). Each road returns the gradients of a scalar function by all of its
arguments, which must be the plain eager gradients, times a factor that the road states. Every
region returns a second, unused result, whose gradient is infinite.

`tests/ops/test_roads.py` runs each sample of the op table on a few of the roads, chosen by a hash
of the name of the sample, and in `make proof` on all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
from tests.helpers import choices
from tests.helpers.choices import choose

Function = Callable[..., Any]
Gradients = Sequence[Any]


# -- ways to ask: a scalar function of n arguments -> a function that returns n gradients ----------


def by_argnums(gradient: Function, **options: Any) -> Function:
    return lambda g, n: gradient(g, argnums=tuple(range(n)), **options)


def by_variables(g: Function, n: int) -> Function:
    """Differentiate by copies of Variables, whose originals were given something else since."""

    def run(*xs: Any) -> Gradients:
        originals = [rg.Variable(x, name=f"v{i}") for i, x in enumerate(xs)]
        variables = copy.deepcopy(originals)
        for v in originals:
            v.assign(rg.zeros_like(v))
        found = rg.variable_grads(lambda: g(*variables), variables).grads
        return [or_zeros(found[v.name], v) for v in variables]

    return run


def by_keyword(g: Function, i: int, xs: Sequence[Any]) -> Any:
    """Return the gradient by one argument, with the others as keywords, the last one first."""

    def f(x: Any, **others: Any) -> Any:
        return g(*[others.get(f"x{k}", x) for k in range(len(xs))])

    others = {f"x{k}": x for k, x in reversed(list(enumerate(xs))) if k != i}
    return rg.grad(f, unconnected="zero")(xs[i], **others)


def or_zeros(dx: Any, x: Any) -> Any:
    return rg.zeros_like(x) if dx is None else dx


def by_names(g: Function, n: int) -> Function:
    """Differentiate by a dict, whose keys were inserted in another order than the arguments."""
    names = [f"x{i}" for i in range(n)]
    gradient = rg.grad(lambda d: g(*[d[k] for k in names]), unconnected="zero")

    def run(*xs: Any) -> Gradients:
        found = gradient(dict(reversed(list(zip(names, xs, strict=True)))))
        return [found[k] for k in names]

    return run


def with_aux(g: Function, n: int) -> Function:
    both = lambda *xs: (g(*xs), rg.sqrt(0 * total(xs)))  # noqa: E731
    gradient = rg.grad(both, argnums=tuple(range(n)), has_aux=True, unconnected="zero")
    return lambda *xs: gradient(*xs)[0]


APIS: dict[str, Callable[[Function, int], Function]] = {
    "grads": lambda g, n: lambda *xs: rg.grads(g, unconnected="zero")(list(xs)),
    "grad(argnums)": by_argnums(rg.grad, unconnected="zero"),
    "grad(argnums), one by one": lambda g, n: (
        lambda *xs: [rg.grad(g, argnums=i, unconnected="zero")(*xs) for i in range(n)]
    ),
    "grad, the rest by keyword": lambda g, n: lambda *xs: [by_keyword(g, i, xs) for i in range(n)],
    "value_and_grads": lambda g, n: (
        lambda *xs: rg.value_and_grads(g, unconnected="zero")(list(xs)).grads
    ),
    "value_and_grad(argnums)": lambda g, n: (
        lambda *xs: by_argnums(rg.value_and_grad, unconnected="zero")(g, n)(*xs)[1]
    ),
    "grad of a tuple": lambda g, n: (
        lambda *xs: rg.grad(lambda each: g(*each), unconnected="zero")(xs)
    ),
    "grad of a dict": by_names,
    "has_aux": with_aux,
    "vjp": lambda g, n: lambda *xs: rg.vjp(g, *xs)[1](1.0),
    "jacobian(argnums)": by_argnums(rg.jacobian),
    "variable_grads": by_variables,
}


# -- regions: a scalar function -> the same inside of a region, beside a result of no use ----------


def total(xs: Sequence[Any]) -> Any:
    return sum((rg.sum(rg.abs(x)) for x in xs), rg.scalar(0.0))


def with_figure(g: Function) -> Function:
    return lambda *xs: (g(*xs), rg.sqrt(0 * total(xs)))


def in_while_loop(g: Function) -> Function:
    def run(*xs: Any) -> Any:
        one = with_figure(g)
        first = [rg.zeros_like(rg.stop_gradient(y)) for y in one(*xs)]

        def body(carry: Any) -> Any:
            y, figure = one(*xs)
            return y + 0 * carry[0], figure + 0 * carry[1], carry[2] + 1

        counter = rg.tensor(0, dtype="int32")
        return rg.while_loop(lambda c: c[2] < 1, body, (*first, counter), max_steps=2)[0]

    return run


def in_vmap(g: Function) -> Function:
    return lambda *xs: rg.vmap(with_figure(g))(*[rg.expand_dims(x, axis=0) for x in xs])[0][0]


def in_cond(g: Function) -> Function:
    one = with_figure(g)
    holds = lambda xs: total([rg.stop_gradient(x) for x in xs]) >= 0  # noqa: E731
    return lambda *xs: rg.cond(holds(xs), one, lambda *xs: tuple(2 * y for y in one(*xs)), *xs)[0]


REGIONS: dict[str, Callable[[Function], Function]] = {
    "plain": lambda g: lambda *xs: with_figure(g)(*xs)[0],
    "checkpoint": lambda g: lambda *xs: rg.checkpoint(with_figure(g))(*xs)[0],
    "scan": lambda g: (
        lambda *xs: rg.scan(lambda c, _: (c, with_figure(g)(*xs)), 0.0, None, 1)[1][0][0]
    ),
    "cond": in_cond,
    "while_loop": in_while_loop,
    "vmap": in_vmap,
    "jit": lambda g: lambda *xs: rg.jit(with_figure(g))(*xs)[0],
}


# -- calls: values that the function reads from outside, which change between two calls -----------


class Changes(NamedTuple):
    """A factor that a function reads from outside, and how it changes from 1 to 3."""

    factor: Callable[[Any], Any]
    change: Callable[[Any], None]


def redefined(world: Any) -> None:
    world.function = lambda: 3.0


def renamed(world: Any) -> None:
    world.rule = lambda dy: 3 * dy


def in_rule(world: Any) -> Any:
    return lambda y: rg.custom_grad(lambda y, save: (y, lambda dy: world.rule(dy)))(y)


def strengthened(world: Any) -> None:
    world.strength = 3.0


def under_a_rule(world: Any) -> Any:
    def scaled(y: Any) -> Any:
        with rg.gradient_override_map({"Identity": lambda dy: world.strength * dy}):
            return rg.identity(y)

    return scaled


CHANGES: dict[str, Changes] = {
    "a number": Changes(lambda w: w.number[0], lambda w: w.number.__setitem__(0, 3.0)),
    "a Tensor": Changes(lambda w: w.tensor, lambda w: setattr(w, "tensor", rg.scalar(3.0))),
    "an array": Changes(lambda w: rg.asarray(w.array), lambda w: w.array.fill(3.0)),
    "a Variable": Changes(lambda w: w.variable, lambda w: w.variable.assign(3.0)),
    "a function": Changes(lambda w: w.function(), redefined),
    "a rule": Changes(in_rule, renamed),
    "the strength of a rule in force": Changes(under_a_rule, strengthened),
}


def world() -> Any:
    return SimpleNamespace(
        number=[1.0], tensor=rg.scalar(1.0), array=np.ones((), "float32"),
        variable=rg.Variable(1.0), function=lambda: 1.0, rule=lambda dy: dy, strength=1.0,
    )  # fmt: skip


def times(g: Function, changes: Changes, outside: Any) -> Function:
    def scaled(*xs: Any) -> Any:
        y, factor = g(*xs), changes.factor(outside)
        return factor(y) if callable(factor) else y * factor

    return scaled


def after_a_change(kind: str) -> Function:
    def call(g: Function, ask: Function, xs: Sequence[Any]) -> Gradients:
        outside = world()
        f = rg.jit(ask(times(g, CHANGES[kind], outside), len(xs)))
        for _ in range(3):
            f(*xs)
        CHANGES[kind].change(outside)
        return f(*xs)

    return call


def in_another_order(g: Function, ask: Function, xs: Sequence[Any]) -> Gradients:
    """A compiled function of a dict, which reads the order of its keys, in a second order."""
    names = [*[f"x{i}" for i in range(len(xs))], "unit"]

    def f(d: Any) -> Any:
        place = 1 if next(iter(d)) == "unit" else 2
        gradient = ask(lambda *xs: g(*xs) * d["unit"], len(xs))
        return [place * dx for dx in gradient(*[d[k] for k in names[:-1]])]

    given = [*zip(names, [*xs, rg.scalar(1.0)], strict=True)]
    compiled = rg.jit(f)
    for _ in range(3):
        compiled(dict(given))
    return compiled(dict([given[-1], *given[:-1]]))


def in_a_pool(g: Function, ask: Function, xs: Sequence[Any]) -> Gradients:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask(g, len(xs)), *xs).result()


def by_jax_data(g: Function, ask: Function, xs: Sequence[Any]) -> Gradients:
    import jax.numpy as jnp

    return ask(g, len(xs))(*[rg.asarray(jnp.asarray(x.numpy())) for x in xs])


CALLS: dict[str, Callable[[Function, Function, Sequence[Any]], Gradients]] = {
    "eager": lambda g, ask, xs: ask(g, len(xs))(*xs),
    "compiled": lambda g, ask, xs: rg.jit(ask(g, len(xs)))(*xs),
    "in a pool": in_a_pool,
    "by JAX's data": by_jax_data,
    "compiled, in another order": in_another_order,
    **{f"compiled, and {kind} changes": after_a_change(kind) for kind in CHANGES},
}


class Road(NamedTuple):
    """A way to ask, a region, and a way to call; the gradients come out times `factor`."""

    api: str
    region: str
    call: str

    @property
    def factor(self) -> float:
        return 3.0 if self.call.endswith("changes") else 1.0

    @property
    def compiles(self) -> bool:
        return self.call.startswith("compiled") or self.region == "jit"

    def __str__(self) -> str:
        return f"{self.api}, {self.region}, {self.call}"

    def gradients(self, g: Function, xs: Sequence[Any]) -> Gradients:
        """Return the gradients of a scalar function of Tensors by each of them."""
        return CALLS[self.call](REGIONS[self.region](g), APIS[self.api], xs)


def _all() -> list[Road]:
    quick = [c for c in CALLS if not c.startswith("compiled")]
    roads = [Road(a, r, "eager") for a in APIS for r in REGIONS]
    roads += [Road(a, r, "compiled") for a in APIS for r in REGIONS if r != "jit"]
    apis, regions = list(APIS), list(REGIONS)
    others = [c for c in CALLS if c not in ("eager", "compiled")]
    for i, call in enumerate(others):
        of_variables = call in quick  # (a compiled function makes no Variables)
        asked = apis if of_variables else [a for a in apis if a != "variable_grads"]
        roads += [Road(a, regions[(i + k) % len(regions)], call) for k, a in enumerate(asked)]
    makes = ("variable_grads", "compiled")
    return [r for r in roads if (r.api, r.call) != makes]


ROADS = _all()
EAGER = [road for road in ROADS if not road.compiles]
COMPILED = [road for road in ROADS if road.compiles]


def roads_for(name: str) -> list[Road]:
    """Return the roads of a sample: eager ones of one sample in three, compiled of one in twenty.

    (In `make test`; twice as many samples have them in `make test-all`, and all in `make proof`.)
    """
    chosen = []
    if True in choose(f"{name}: eager", [True, False, False]):
        chosen += choose(f"{name}: eager road", EAGER)
    if True in choose(f"{name}: compiles", [True, *[False] * 19]):
        calls = dict.fromkeys(road.call for road in COMPILED)
        for call in choose(f"{name}: call", calls):
            of_call = [road for road in COMPILED if road.call == call]
            count = None if choices.level == "proof" else 1
            chosen += choose(f"{name}: compiled road", of_call)[:count]
    return chosen

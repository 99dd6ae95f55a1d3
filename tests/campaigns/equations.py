"""An experiment: bodies in which every op is one equation of JAX that carries regrad's rule.

`install` replaces what regrad's transforms make of a traced body (of `scan`, `while_loop`, `cond`,
`vmap`, `checkpoint` and `from_regrad`). Today the body's Python runs once and leaves steps, which
are replayed for each gradient. Here the body becomes one jaxpr. Each of its ops is a `regrad_op`,
whose derivative is the op's rule, so a loop is `lax.scan` of that jaxpr, and its gradient is what
`jax.vjp` makes of it, at any order. Rules of a user and gradient functions of `custom_grad` are
traced when the op is created, because they may close over values of the body.

`docs/decisions/ops_as_equations.md` has the figures that this module made, and the decision.
`equations_timed` takes the times; these are tests that judge it:

    REGRAD_EQUATIONS=1 python -m pytest -p tests.campaigns.equations tests/transforms
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend import core as jax_core

from regrad.autodiff.variables import assign_all
from regrad.core import dispatch
from regrad.core.backends import is_inexact
from regrad.core.containers import replaced
from regrad.core.sharding import to_jax
from regrad.core.state import current
from regrad.core.tensor import Tensor, wrap
from regrad.jax import bridge as bridging
from regrad.jax.bridge import conjugate
from regrad.jax.host import extending
from regrad.transforms import (
    branches,
    checkpoint,
    conditionals,
    control_flow,
    derivatives,
    directions,
    vmap,
    whiles,
)
from regrad.transforms.bodies import BodyRun
from regrad.transforms.region import (
    Flat,
    Passage,
    Region,
    RegionRule,
    RegionTape,
    check_guard,
    read_source,
    record_region,
    results,
    run_inside,
    tape_for,
    watched_places,
)
from tests.campaigns.equation_ops import (
    Arrays,
    Equations,
    dispatch_masked,
    run_as_equation,
)

# -- bodies ----------------------------------------------------------------------------------------

source_p: Any = jax_core.Primitive("regrad_source")
extending.define(source_p, lambda x, **_: [x], lambda aval, **_: ([aval], jax_core.no_effects))


class BodyRegion(Region):
    """The region of a body that becomes a jaxpr: what it takes from outside is marked in there."""

    trace: Any = None  # JAX's, in which the body runs

    def _stand_in(self, x: Tensor) -> Tensor:
        y = super()._stand_in(x)
        with extending.set_trace(self.trace):
            (y._data,) = source_p.bind(to_jax(y._data), index=len(self.captured))
        return y


class BodyJaxpr:
    """A body as a function of arrays: those of its arguments, and of what it takes from outside."""

    def __init__(self, kind: str, flat: Flat, xs: Sequence[Tensor], shapes: Arrays) -> None:
        self.run = BodyRun(kind, xs, traced=True)
        self.run.region = BodyRegion(kind, tapes=self.run.tapes, traced=True)
        self.run.inner = [self.run.region.make_stand_in(x) for x in self.run.xs]
        region = self.run.region
        region.capture = Equations()

        def body(*arrays: Any) -> list[Any]:
            region.trace = extending._context.trace
            inner = self.run.stand_ins(arrays)
            self.run.watched.update(x._id for x in inner if is_inexact(x.dtype))
            ys = self.run.run(flat, inner)
            self.assigned = list(region.assigned)
            self.count = len(ys)
            ys = [*ys, *[region.values[v] for v in self.assigned]]
            self.run.outputs[-1] = [y._id for y in ys]
            return [to_jax(y._data) for y in ys]

        self.closed = jax.make_jaxpr(body)(*shapes)
        self.sources = list(region.captured)

    def __call__(self, arrays: Arrays, captured: Arrays) -> list[Any]:
        """The results, then the new values of Variables."""
        jaxpr = self.closed.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env.update(zip(jaxpr.invars, arrays, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, jax_core.Literal) else env[v]

        for eqn in jaxpr.eqns:
            if eqn.primitive is source_p:
                ys = [captured[eqn.params["index"]]]
            else:
                bound = eqn.primitive.get_bind_params(eqn.params)
                functions, params = bound if type(bound) is tuple else ((), bound)
                ys = eqn.primitive.bind(*functions, *map(read, eqn.invars), **params)
                ys = ys if eqn.primitive.multiple_results else [ys]
            env.update(zip(eqn.outvars, ys, strict=True))
        return [read(v) for v in jaxpr.outvars]


def shape_of(x: Tensor, entry: bool = False) -> Any:
    array = to_jax(x._data)
    return jax.ShapeDtypeStruct(array.shape[1:] if entry else array.shape, array.dtype)


# -- regions as functions of JAX -------------------------------------------------------------------

Function = Callable[..., Sequence[Any]]


def region_of(
    kind: str, function: Function, inputs: Sequence[Tensor], passage: Passage | None = None,
    refuse: Callable[[], None] | None = None,
) -> list[Tensor]:  # fmt: skip
    """A function of JAX's arrays as one record; its gradient is what `jax.vjp` makes of it."""
    inputs = [dispatch.in_region(x) for x in inputs]
    check_guard(inputs)
    arrays = [to_jax(x._data) for x in inputs]
    wanted = [i for i in watched_places(inputs) if is_inexact(inputs[i].dtype)]
    if passage is not None:
        wanted = [i for i in wanted if i in passage.edges]
    first = bool(wanted) and tape_for(inputs) is RegionTape and refuse is None
    pull: Any = None
    with dispatch_masked():
        if first:
            run = lambda *moving: tuple(function(*replaced(arrays, wanted, moving)))  # noqa: E731
            ys, pull = jax.vjp(run, *[arrays[i] for i in wanted])
        else:
            ys = function(*arrays)
    outs = list(map(wrap, ys))
    if not wanted:
        return outs
    if passage is None:
        reached = [i for i, y in enumerate(outs) if is_inexact(y.dtype)]
        passage = Passage(wanted, reached)
    else:
        edges = {i: [j for j in passage.edges[i] if is_inexact(outs[j].dtype)] for i in wanted}
        edges = {i: places for i, places in edges.items() if places}
        passage = Passage([*edges], sorted(set().union(*edges.values())), edges)
    whole = passage
    named = kind if kind.startswith("the ") else f"the gradient of {kind}"

    def answer(given: Sequence[Tensor], passage: Passage, dys: Sequence[Tensor]) -> Sequence[Any]:
        if refuse is not None:
            refuse()
        if pull is not None and passage is whole and not watched_places([*given, *dys]):
            cotangents: list[Any] = [
                jax.numpy.zeros(y.shape, jax.typeof(y).to_tangent_aval().dtype) for y in ys
            ]
            for i, dy in zip(passage.reached, dys, strict=True):
                cotangents[i] = conjugate(to_jax(dy._data).astype(ys[i].dtype))
            with dispatch_masked():
                dxs = dict(zip(wanted, pull(tuple(cotangents)), strict=True))
            return [wrap(conjugate(dxs[i])) for i in passage.wanted]
        n = len(given)

        def back(*all_: Any) -> list[Any]:
            xs, dys = list(all_[:n]), all_[n:]
            run = lambda *moving: [  # noqa: E731
                function(*replaced(xs, passage.wanted, moving))[i] for i in passage.reached
            ]
            ys, pull = jax.vjp(run, *[xs[i] for i in passage.wanted])
            dys = [conjugate(dy.astype(y.dtype)) for dy, y in zip(dys, ys, strict=True)]
            return [conjugate(dx) for dx in pull(dys)]

        return region_of(named, back, [*given, *dys])

    def push(given: Sequence[Tensor], passage: Passage, dxs: Sequence[Tensor]) -> Sequence[Any]:
        n = len(given)

        def forward(*all_: Any) -> list[Any]:
            xs, dxs = list(all_[:n]), all_[n:]
            run = lambda *moving: [  # noqa: E731
                function(*replaced(xs, passage.wanted, moving))[i] for i in passage.reached
            ]
            return list(jax.jvp(run, tuple(xs[i] for i in passage.wanted), tuple(dxs))[1])

        return region_of(f"the derivative of {kind}", forward, [*given, *dxs])

    rule = RegionRule(kind, inputs, passage, answer, push)
    record_region(rule, outs)
    return outs


def finished(
    kind: str, body: BodyJaxpr, function: Function, loops: Sequence[tuple[int, int]] = (),
    refuse: Any = None,
) -> list[Tensor]:  # fmt: skip
    """The results of a body's region, recorded; Variables get their values by the caller."""
    inputs = [*body.run.xs, *map(read_source, body.sources)]
    passage = None
    if body.run.tapes:
        wanted = watched_places(inputs)
        passage = body.run.passage(wanted, loops)
    return region_of(kind, function, inputs, passage, refuse)


def scanned(
    flat: Flat, carry: Sequence[Tensor], xs: Sequence[Tensor], length: int, reverse: bool,
    checkpoint: bool, kind: str = "scan",
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:  # fmt: skip
    n = len(carry)
    shapes = [*map(shape_of, carry), *[shape_of(x, entry=True) for x in xs]]
    body = BodyJaxpr(kind, flat, [*carry, *xs], shapes)
    assigned, sources, k = body.assigned, body.sources, n + len(xs)
    places = [k + sources.index(v) if v in sources else None for v in assigned]
    first = [to_jax(v._read()._data) for v in assigned]

    def loop(*inputs: Any) -> list[Any]:
        captured = list(inputs[k:])
        start = [inputs[i] if i is not None else a for i, a in zip(places, first, strict=True)]

        def step(state: Any, entry: Any) -> Any:
            for i, value in zip(places, state[n:], strict=True):
                if i is not None:
                    captured[i - k] = value
            ys = body([*state[:n], *entry], captured)
            return [*ys[:n], *ys[body.count :]], ys[n : body.count]

        step = jax.checkpoint(step) if checkpoint else step
        state = [*inputs[:n], *start]
        last, ys = jax.lax.scan(step, state, list(inputs[n:k]), length, reverse)
        return [*last[:n], *ys, *last[n:]]

    loops = [(i, i) for i in range(n)]
    loops += [(body.count + j, i) for j, i in enumerate(places) if i is not None]
    ys = finished(kind, body, loop, loops)
    assign_all(assigned, ys[body.count :])
    return ys[:n], ys[n : body.count]


def repeated(test: Flat, flat: Flat, carry: Sequence[Tensor]) -> Sequence[Tensor]:
    n = len(carry)
    shapes = [*map(shape_of, carry)]
    body = BodyJaxpr("while_loop", flat, carry, shapes)
    tested = BodyJaxpr("while_loop", test, carry, shapes)
    if tested.assigned:
        raise NotImplementedError("the condition of a while_loop assigns to Variables")
    assigned = body.assigned
    k = n + len(body.sources)
    sources = [*body.sources, *tested.sources]
    values = [v._read() for v in assigned]
    m = n + len(sources)

    def at(state: Arrays, captured: Arrays, places: Sequence[Any]) -> list[Any]:
        """What a body takes from outside, with the Variables as they are by now."""
        now = dict(zip(assigned, state[n:], strict=True))
        return [now.get(s, a) if s in assigned else a
                for s, a in zip(places, captured, strict=True)]  # fmt: skip

    def loop(*inputs: Any) -> list[Any]:
        def goes_on(state: Arrays) -> Any:
            return tested(state[:n], at(state, inputs[k:m], tested.sources))[0].reshape(())

        def step(state: Arrays) -> Arrays:
            return body(state[:n], at(state, inputs[n:k], body.sources))

        return list(jax.lax.while_loop(goes_on, step, [*inputs[:n], *inputs[m:]]))

    inputs = [*body.run.xs, *map(read_source, sources), *values]
    passage = None
    if body.run.tapes:
        loops = [(i, i) for i in range(n)]
        loops += [(n + j, n + body.sources.index(v)) for j, v in enumerate(assigned)
                  if v in body.sources]  # fmt: skip
        passage = body.run.passage(watched_places(inputs[:k]), loops)
        edges = dict(passage.edges)
        for j, v in enumerate(assigned):  # (the first value, where no step is made)
            edges[m + j] = [*edges.pop(n + body.sources.index(v), ()), n + j] \
                if v in body.sources else [n + j]  # fmt: skip
        passage = Passage([*edges], sorted({j for p in edges.values() for j in p}), edges)
    ys = region_of("while_loop", loop, inputs, passage, whiles._refuse)
    assign_all(assigned, ys[n:])
    return ys[:n]


def conditional(pred: Tensor, flats: Sequence[Flat], xs: Sequence[Tensor]) -> Sequence[Tensor]:
    bodies = []
    for flat in flats:
        shapes = [*map(shape_of, xs)]
        bodies.append(BodyJaxpr("cond", flat, xs, shapes))
    assigned = list(dict.fromkeys(v for b in bodies for v in b.assigned))
    a, b = bodies
    specs = [[(str(v.aval.dtype), v.aval.shape) for v in body.closed.jaxpr.outvars[: body.count]]
             for body in bodies]  # fmt: skip
    conditionals._check_alike(*specs)
    n, m = len(xs), len(a.sources)
    given = [pred, *a.run.xs, *map(read_source, [*a.sources, *b.sources])]
    values = [v._read() for v in assigned]
    inputs = [*given, *values]
    k = len(given)

    def choose(*inputs: Any) -> list[Any]:
        now = dict(zip(assigned, inputs[k:], strict=True))

        def way(body: BodyJaxpr, captured: Arrays) -> Callable[[], list[Any]]:
            def run() -> list[Any]:
                ys = body(inputs[1 : 1 + n], captured)
                new = {**now, **dict(zip(body.assigned, ys[body.count :], strict=True))}
                return [*ys[: body.count], *[new[v] for v in assigned]]

            return run

        ways = way(a, inputs[1 + n : 1 + n + m]), way(b, inputs[1 + n + m : k])
        return list(jax.lax.cond(inputs[0], *ways))

    passage = None
    if a.run.tapes:
        edges: dict[int, list[int]] = {}
        for body, offset in ((a, 0), (b, m)):
            to = [1 + i for i in range(n)] + [1 + n + offset + i for i in range(len(body.sources))]
            own = [inputs[i] for i in to]
            found = body.run.passage(watched_places(own))
            place = {j: j for j in range(body.count)}
            place.update({body.count + j: a.count + assigned.index(v)
                          for j, v in enumerate(body.assigned)})  # fmt: skip
            for i, outs in found.edges.items():
                edges.setdefault(to[i], []).extend(place[j] for j in outs)
        for j in range(len(assigned)):
            if k + j in watched_places(inputs):
                edges[k + j] = [a.count + j]
        edges = {i: sorted(set(places)) for i, places in edges.items()}
        passage = Passage([*edges], sorted({j for p in edges.values() for j in p}), edges)
    ys = region_of("cond", choose, inputs, passage)
    assign_all(assigned, ys[a.count :])
    return ys[: a.count]


def at_once(flat: Flat, xs: Sequence[Tensor], along: Sequence[bool], kind: str) -> Sequence[Tensor]:
    shapes = [shape_of(x, entry=a) for x, a in zip(xs, along, strict=True)]
    body = BodyJaxpr(kind, flat, xs, shapes)
    vmap._refuse_assignments(body.run.region, kind)
    n = len(xs)
    axes = tuple(0 if a else None for a in along)

    def mapped(*inputs: Any) -> list[Any]:
        run = lambda *arrays: body(arrays, inputs[n:])  # noqa: E731
        return list(jax.vmap(run, in_axes=axes)(*inputs[:n]))

    return finished(kind, body, mapped)


recomputed_plainly = checkpoint.recomputed


def recomputed(flat: Flat, xs: Sequence[Tensor], rule: Any = None) -> Sequence[Tensor]:
    state = current()
    traced = state is not None and state.region is not None and state.region.traced
    if rule is not None or not traced:
        return recomputed_plainly(flat, xs, rule)
    body = BodyJaxpr("checkpoint", flat, xs, [*map(shape_of, xs)])
    n = len(xs)
    run = jax.checkpoint(lambda *inputs: body(inputs[:n], inputs[n:]))
    ys = finished("checkpoint", body, run)
    assign_all(body.assigned, ys[body.count :])
    return ys[: body.count]


def bridge(flat: Flat, arrays: Sequence[Any], name: str) -> list[Any]:
    """A flat function of Tensors, run on JAX's arrays: its ops are equations of the trace."""
    state = current()
    overrides = None if state is None else state.overrides

    def run(*xs: Any) -> list[Any]:
        region = Region(name, traced=True)
        region.capture = Equations()
        given = [region.make_stand_in(wrap(x)) for x in xs]
        ys = run_inside(partial(results, flat, given, region), region, overrides)
        if region.assigned:
            raise bridging.ArgumentError(
                f"{name} assigns to the Variable {region.assigned[0].name!r}; a JAX function has "
                "no side effects. Return the new value."
            )
        return [to_jax(y._data) for y in ys]

    closed = jax.make_jaxpr(run)(*arrays)
    return jax_core.jaxpr_as_fun(closed)(*arrays)


# -- the switch ------------------------------------------------------------------------------------


def install() -> None:
    """Let regrad's transforms make equations."""
    dispatch.run = run_as_equation
    control_flow.scanned = scanned
    control_flow.repeated = repeated
    branches.conditional = conditional
    for module in (vmap, directions, derivatives):
        module.at_once = at_once
    checkpoint.recomputed = recomputed
    bridging.bridge = bridge


if os.environ.get("REGRAD_EQUATIONS"):
    install()

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
import numpy as np
from jax.extend import core as jax_core

from regrad.autodiff.variables import assign_all
from regrad.core import containers, dispatch
from regrad.core.backends import is_inexact, is_traced
from regrad.core.registry import Op
from regrad.core.reports import counted_later
from regrad.core.rule import Rule
from regrad.core.sharding import to_jax
from regrad.core.state import LIVE, State, current, in_state
from regrad.core.tape import (
    Layout,
    cuts,
    effective,
    kept_of,
    positions,
    put,
    record_of,
    rule_in_force,
)
from regrad.core.tensor import Tensor, wrap
from regrad.core.walk import UNUSED, check_gradient, leaf_gradients
from regrad.jax import bridge as bridging
from regrad.jax.bridge import conjugate
from regrad.jax.host import extending
from regrad.jax.primitives import EquationGradient, fit, is_float, run_op
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
from regrad.transforms.arguments import is_key, replaced
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

Arrays = Sequence[Any]
run_plainly = dispatch.run


# -- an op as an equation --------------------------------------------------------------------------


class Equations:
    """What a region has in the place of a capture: its ops are equations."""

    patchy = False
    expected = None

    def __init__(self) -> None:
        self.passages: set[Any] = set()
        self.assigned: dict[Any, Tensor] = {}

    def custom(self, call: Any, run: Callable[[], Any], state: State) -> Any:
        """Run a custom function; its gradient function is traced at once."""
        xs = call.inputs
        outputs = call.recorded(run(), state)
        ys = containers.flatten(outputs)[0]
        if not any(is_traced(x._data) and is_inexact(x.dtype) for x in xs):
            return outputs
        made = [jax.lax.stop_gradient(to_jax(y._data)) for y in ys]
        for y, array in zip(ys, made, strict=True):
            y._data = array

        def pull(dys: Arrays) -> Arrays:
            given = tuple(wrap(conjugate(dy)) for dy in dys)
            found = call.pulled(given if len(ys) > 1 else given[0], [True] * len(xs))
            return [conjugate(dx._data) if isinstance(dx, Tensor) else None for dx in found]

        floats = [i for i, x in enumerate(xs) if is_inexact(x.dtype)]
        if not all(is_inexact(y.dtype) for y in ys):
            raise NotImplementedError("outputs of integers of a custom function")
        attached = fixed(call.name, [x._data for x in xs], made, pull, floats, False)
        for y, array in zip(ys, attached, strict=True):
            y._data = array
        return outputs

    def ignored(self, *given: Any, **more: Any) -> None:
        """Steps are not kept."""

    did = region = pulled = foreign = body = read = source = reach = went = made = ignored

    def assign(self, variable: Any, value: Tensor) -> None:
        self.assigned[variable] = value

    def let_go(self) -> dict[float, Tensor]:
        return {}


def in_equations() -> Any:
    """The open region, if its ops are equations."""
    state = current() if LIVE else None
    region = None if state is None else state.region
    return region if region is not None and type(region.capture) is Equations else None


def run_as_equation(op: Op, xs: tuple[Tensor, ...], attrs: Any, layout: Layout = None) -> Any:
    """`dispatch.run`, in a region whose ops are equations."""
    if in_equations() is None:
        return run_plainly(op, xs, attrs, layout)
    state: Any = current()
    xs = tuple(map(state.region.enter, xs))
    if not any(is_traced(x._data) and not is_key(x._data) and is_inexact(x.dtype) for x in xs):
        return run_plainly(op, xs, attrs, layout)
    rule = rule_in_force(state, op, xs)
    if state.overrides is not None and rule.bare.replaces:
        y = dispatch.computed(op, xs, attrs, layout)
        return rule.bare.run(rule, xs, attrs, y, layout)  # pyright: ignore
    y = equation(op, rule, xs, attrs, layout)
    if state.tapes:
        put(state, op, rule, xs, attrs, y, layout)
    return y


KERNELS: dict[Any, Any] = {}
OWN: dict[Any, Any] = {}
# Whether equations of one op, rule, attributes and avals share their jaxprs.
shared = True


def equation(op: Op, rule: Rule, xs: tuple[Tensor, ...], attrs: Any, layout: Layout) -> Any:
    """The result of an op, as that of one equation."""
    if cuts(rule, attrs, xs):
        stopped = tuple(wrap(jax.lax.stop_gradient(to_jax(x._data))) for x in xs)
        return dispatch.computed(op, stopped, attrs, layout)
    arrays = [to_jax(x._data) for x in xs]
    avals = tuple(map(jax.typeof, arrays))
    key = op, avals, tuple(attrs.items()), layout, bool(jax.config.jax_enable_x64)
    try:
        hash(key)
    except TypeError:
        key = None
    known = KERNELS.get(key) if shared and key is not None else None
    if known is None:
        several: list[bool] = []

        def kernel(*arrays: Any) -> Any:
            y = dispatch.computed(op, tuple(map(wrap, arrays)), attrs, layout)
            several[:] = [isinstance(y, tuple)]
            return [one._data for one in (y if isinstance(y, tuple) else (y,))]

        closed = jax.make_jaxpr(kernel)(*arrays)
        known = closed, several[0]
        if key is not None:
            KERNELS[key] = known
    closed, is_several = known
    floats = [i for i, a in enumerate(avals) if is_float(a)]
    specs = [(a.shape, a.dtype) for a in avals]
    outs = [wrap(np.zeros((), aval.dtype)) for aval in closed.out_avals]
    rule = effective(op, rule, specs, tuple(outs))
    if rule is op.rule or rule.bare.is_ours:
        own = None if key is None else (*key, id(rule))
        gradient = OWN.get(own) if shared and own is not None else None
        if gradient is None or gradient.rule is not rule:
            gradient = OwnGradient(op, rule, attrs, avals, layout, closed.out_avals, is_several)
            if own is not None:
                OWN[own] = gradient
        ys = run_op(arrays, closed, gradient)
    else:
        state: Any = current()
        if state.tapes:  # the rule is for what is differentiated by
            watched = [i for i in floats if any(xs[i]._id in t.watched for t in state.tapes)]
        else:
            watched = floats
        own = OwnGradient(op, rule, attrs, avals, layout, closed.out_avals, is_several)
        made = [jax.lax.stop_gradient(y) for y in jax_core.jaxpr_as_fun(closed)(*arrays)]
        pull = lambda dys: own.found(xs, [wrap(y) for y in made], dys, watched)  # noqa: E731
        ys = fixed(op.type, arrays, made, pull, watched, rule.once)
    tensors = tuple(map(wrap, ys))
    return tensors if is_several else tensors[0]


class OwnGradient(EquationGradient):
    """The gradient of an op under a rule that closes over nothing."""

    def __init__(
        self, op: Op, rule: Rule, attrs: Any, avals: Arrays, layout: Layout, outs: Arrays,
        several: bool,
    ) -> None:  # fmt: skip
        self.op, self.rule, self.attrs, self.layout = op, rule, attrs, layout
        self.avals, self.outs, self.several = avals, outs, several
        self.name = f"the rule for {op.type!r}"
        self.once = rule.once
        self.pulls: dict[Any, Any] = {}

    def keeps(self, wanted: Sequence[int]) -> tuple[Sequence[int], bool]:
        layout = self.layout
        if layout is None:
            kept, y = self.rule.keeps(frozenset(wanted))
            return sorted(kept), y
        parameters = frozenset(
            p for p, place in enumerate(layout) if {*positions(place)} & {*wanted}
        )
        kept, y = self.rule.keeps(parameters)
        return sorted({i for p in kept for i in positions(layout[p])}), y

    def pull(self, xs: Arrays, ys: Arrays | None, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        """Evaluate the rule's own jaxpr, which is traced once for these inputs (`shared`)."""
        kept = [i for i, x in enumerate(xs) if x is not None]
        given = [*[xs[i] for i in kept], *(ys or ()), *dys]
        key = tuple(wanted), tuple(kept), ys is None
        program = self.pulls.get(key) if shared else None
        if program is None:
            n = len(kept)
            m = n + len(ys or ())

            def run(*arrays: Any) -> list[Any]:
                region = Region(self.name, traced=True, around=None)
                region.capture = Equations()
                tensors: list[Any] = replaced([None] * len(xs), kept, map(wrap, arrays[:n]))
                outs = None if ys is None else [wrap(y) for y in arrays[n:m]]
                found = partial(self.found, tensors, outs, arrays[m:], wanted)
                dxs = run_inside(found, region, None)
                return [fit(dx, self.avals[i]) for i, dx in zip(wanted, dxs, strict=True)]

            if not shared:
                return run(*given)
            program = self.pulls[key] = jax.make_jaxpr(run)(*given)
        return jax_core.jaxpr_as_fun(program)(*given)

    def found(
        self, xs: Sequence[Any], ys: Sequence[Tensor] | None, dys: Arrays, wanted: Sequence[int]
    ) -> list[Any]:
        """The gradients by the wanted inputs, in the open state; None where there is none."""
        n = len(self.avals)
        specs = [(a.shape, np.dtype(a.dtype)) for a in self.avals]
        kept, keeps_y = self.keeps(wanted)
        saved = kept_of(tuple(xs), frozenset(kept))
        grouped = self.several or self.layout is not None
        outputs = tuple(range(n + 1, n + 1 + len(self.outs)))
        y: Any = None
        if keeps_y and ys is not None:
            y = tuple(ys) if self.several else ys[0]
        record = record_of(
            self.op, self.rule, self.attrs, tuple(range(1, n + 1)), specs, saved,
            outputs if self.several else outputs[0], y, self.layout,
            [(a.shape, np.dtype(a.dtype)) for a in self.outs] if grouped else None,
        )  # fmt: skip
        given = iter(dys)
        arriving: list[Any] = []
        for i, aval in enumerate(self.outs):
            dy = next(given) if is_float(aval) else None
            if dy is not None:
                arriving.append(wrap(conjugate(dy)))
            else:
                arriving.append(None if self.rule.sparse else record.unused(i))  # pyright: ignore
        dy = tuple(arriving) if self.several else arriving[0]
        with dispatch_masked():
            found = leaf_gradients(record, dy, {i + 1 for i in wanted})
            dxs: list[Any] = []
            for i in wanted:
                dx = found.get(i, None)
                if dx is UNUSED or dx is None:
                    dxs.append(None)
                    continue
                dx = check_gradient(record, i, dx, dy)
                dxs.append(None if dx is None else conjugate(to_jax(dx._data)))
        return dxs


def dispatch_masked() -> Any:
    """No override, tape or guard; the region stays."""
    state = current()
    return in_state(State((), None, None, None if state is None else state.region))


def fixed(
    name: str, arrays: Arrays, made: Arrays, pull: Callable[[Arrays], Arrays],
    wanted: Sequence[int], once: bool,
) -> list[Any]:  # fmt: skip
    """Results that were made, with a gradient that is traced now.

    What it closes over (residuals) are further inputs of the equation.
    """
    arrays = [to_jax(a) for a in arrays]
    avals = [jax.typeof(a) for a in arrays]
    outs = [jax.typeof(y) for y in made]
    none: list[int] = []

    def traced(*dys: Any) -> list[Any]:
        with dispatch_masked():
            found = pull(list(dys))
        picked = []
        none.clear()
        found = found if len(found) == len(wanted) else [found[i] for i in wanted]
        for i, dx in zip(wanted, found, strict=True):
            if dx is None:
                none.append(i)
            else:
                picked.append(fit(dx, avals[i]))
        return picked

    floats = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outs if is_float(a)]
    with counted_later() as hits:
        program = jax.make_jaxpr(traced)(*floats)
    inputs = {id(a): i for i, a in reversed([*enumerate(arrays)])}
    outputs = {id(y): i for i, y in enumerate(made)}
    places: list[tuple[str, Any]] = []
    residuals: list[Any] = []
    for const in program.consts:
        if id(const) in inputs:
            places.append(("x", inputs[id(const)]))
        elif id(const) in outputs:
            places.append(("y", outputs[id(const)]))
        elif isinstance(const, jax.core.Tracer):
            places.append(("x", len(arrays) + len(residuals)))
            residuals.append(const)
        else:
            places.append(("constant", const))
    count = len(arrays) + len(residuals)
    given = [*arrays, *residuals, *made]
    attach = jax.make_jaxpr(lambda *xs: list(xs[count:]))(*given)
    kept = [i for i in wanted if i not in none]
    gradient = FixedGradient(
        name, [jax.typeof(x) for x in given], program, places, kept, hits, once
    )
    return run_op(given, attach, gradient)


class FixedGradient(EquationGradient):
    """A gradient whose program is known: of the residuals, the outputs and the cotangents."""

    def __init__(
        self, name: str, avals: Arrays, program: Any, places: Any, wanted: Sequence[int],
        hits: Any, once: bool,
    ) -> None:  # fmt: skip
        self.name, self.avals, self.program = f"the rule for {name!r}", avals, program
        self.places, self.by, self.hits, self.once = places, wanted, hits, once

    def keeps(self, wanted: Sequence[int]) -> tuple[Sequence[int], bool]:
        kept = sorted({i for pool, i in self.places if pool == "x"})
        return kept, any(pool == "y" for pool, _ in self.places)

    def pull(self, xs: Arrays, ys: Arrays | None, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        for hit in self.hits:
            hit.pulled()
        pools: dict[str, Any] = {"x": lambda i: xs[i], "y": lambda i: ys and ys[i]}
        consts = [pools[p](i) if p in pools else i for p, i in self.places]
        found = jax_core.jaxpr_as_fun(self.program.replace(consts=consts))(*dys)
        by = dict(zip(self.by, found, strict=True))
        return [fit(by.get(i), self.avals[i]) for i in wanted]


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

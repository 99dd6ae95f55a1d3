"""Ops as equations of JAX, each with its rule of regrad: see `equations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import core as jax_core

from regrad.core import containers, dispatch
from regrad.core.backends import is_inexact, is_traced
from regrad.core.containers import replaced
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
from regrad.jax.bridge import conjugate
from regrad.jax.primitives import EquationGradient, fit, is_float, run_op
from regrad.transforms.arguments import is_key
from regrad.transforms.region import (
    Region,
    run_inside,
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

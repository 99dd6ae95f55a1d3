"""Loops of known length inside a JAX trace: flat functions under `lax.scan`.

The idea: a loop is a region with one record outside, and its gradient is a loop in the opposite
direction. For a step `(c, x) -> (c * w + x, c)`, with `w` of the closure, the backward step is

    (dc, dw), (dc', dy, residuals) -> (dc * w + dy, dw + dc * c), dx = dc

The backward loop carries the gradients by the carry, stacks the gradients by entries of `xs`, and
adds up the gradients by values that all steps share (`w`). There are two backward loops:

* `_back`: used unless a tape needs the gradient of the gradient. The forward step is traced once
  together with its backward pass. The forward loop stacks the values that the rules keep of each
  step (here `c`), and the backward loop runs the equations of the walk.
* `_back_as_loop`: for higher orders. It recomputes the carries, and the gradient of the step
  becomes the step of another loop of this module, which can be differentiated again.

Invariants:

* The user's Python runs once, for any number of traces, orders and steps (`Captured`).
* The watched carries are a fixed point: a carry that is watched after a step is watched before the
  next. The step is traced until nothing changes (`_settled`): at most as often as there are
  carries, and mostly once or twice.
* A residual that is the same in every step is kept once. A residual that is an entry of `xs` or a
  result is not kept again.
* The record of a loop keeps the inputs of the backward loop, and not the run that found them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.autodiff.variables import Variable, assign_all
from regrad.core import dispatch
from regrad.core.backends import is_inexact
from regrad.core.promotion import gradient_dtype, widest
from regrad.core.pullback import Run, pull_loop, run_watched
from regrad.core.reports import Hit, counted_later
from regrad.core.sharding import to_jax, to_jax_as
from regrad.core.state import current
from regrad.core.tape import Tape
from regrad.core.tensor import Tensor, wrap
from regrad.core.walk import walk_from
from regrad.ops.binary import add
from regrad.ops.creation_like import zeros_like
from regrad.transforms.bodies import (
    BodyRun,
    carries_that_move,
    dual,
    pullback,
    until_all_are_known,
)
from regrad.transforms.region import (
    Flat,
    Passage,
    Region,
    RegionTape,
    run_inside,
    tape_for,
    watched_places,
)
from regrad.transforms.replay import Captured
from regrad.transforms.steps import evaluate, kept_for
from regrad.transforms.trail import capturing

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

    from regrad.core.backends import Array


def as_jax(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the same Tensors with JAX data, whose dtypes a loop will keep."""
    ys = []
    for x in xs:
        if type(x._data) is np.ndarray:
            data, x = to_jax(x._data), dispatch.alias(x)
            x._data = data
        ys.append(x)
    return ys


# -- scan ----------------------------------------------------------------------------------------


def scanned(
    flat: Flat, carry: Sequence[Tensor], xs: Sequence[Tensor], length: int, reverse: bool,
    checkpoint: bool, kind: str = "scan",
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:  # fmt: skip
    """Return the last carry, and the ys stacked."""
    flat = Captured(flat, kind)
    assigned: list[Variable] = []  # Variables that the step assigns; the loop carries them as well
    tape = tape_for([*carry, *xs])

    def run() -> tuple[BodyRun, Any]:
        loop = Scan(flat, carry, xs, length, reverse, checkpoint, kind, assigned, tape)
        results = loop.run()
        return loop.body_run, (loop, results)

    loop, results = until_all_are_known(assigned, run)
    if tape is not (needed := tape_for(loop.inputs)):
        tape = needed  # it captures watched values: keep the values that the rules need
        loop, results = until_all_are_known(assigned, run)
    ys = loop.recorded(results)
    n, m = len(carry), len(loop.carry)
    assign_all(assigned, ys[n:m])
    return ys[:n], ys[m:]


class BackwardStep:
    """The backward step of a loop, for some of its results; places count as in a `Scan`.

    * `kept`: for each constant of `jaxpr`, the pool in which it is found, and its place there: "x"
      (entries of xs), "y" (of ys), or "step" (residuals). For "constant", the place is the array.
    * `hits`: the hits of rules that ran while the step was traced.
    """

    jaxpr: Any = None
    hits: Sequence[Hit] = ()

    def __init__(
        self, carried: Sequence[int], wanted: Sequence[int], active: Sequence[int]
    ) -> None:
        self.carried = carried
        self.wanted = wanted
        self.active = active
        self.kept: list[Any] = []


class Scan:
    """One loop: its forward pass, the values that this pass keeps, and its backward pass.

    Each list of places counts in one of two rows. The first `m` places of a row are the places of
    the carry, whose last entries are the Variables in `assigned`:

        inputs     0 … m - 1: the carry     up to k: entries of xs     from k on: captured
        results    0 … m - 1: the carry     up to n: ys                from n on: residuals

    * `carried`: the carries that the main tape watches. Their gradients are the backward carry.
    * `wanted` (inputs): `carried`, and the other inputs that this tape watches. The backward step
      returns their gradients, in this order.
    * `active` (results): `carried`, and the ys that depend on a watched value. The backward step
      receives their gradients, in this order.
    * `flow`: which of `wanted` reach which results, in any number of steps.
    * `back`: the backward step for all of these (see `BackwardStep`).

    A backward pass needs some of `wanted`, and has gradients of some of `active`: its `passage`. A
    carry takes part if any step uses it for them (`_part_of`); the backward step for a part of the
    results is in `parts`.
    """

    def __init__(
        self, flat: Flat, carry: Sequence[Tensor], xs: Sequence[Tensor], length: int,
        reverse: bool, checkpoint: bool, kind: str, assigned: Sequence[Variable],
        tape: type[RegionTape],
    ) -> None:  # fmt: skip
        self.length = length
        self.reverse = reverse
        self.checkpoint = checkpoint
        self.kind = kind
        self.assigned: list[Variable] = list(assigned)
        self.tape = tape
        self.count: int = len(carry)
        self.carry: list[Tensor] = [*carry, *[v._read() for v in assigned]]
        # (A partial and not a method, so that objects that keep the step do not keep this run.)
        self.step: partial[Sequence[Tensor]] = partial(
            stepped, flat, self.count, len(self.carry), self.assigned
        )
        self.xs: list[Tensor] = list(xs)
        self.body_run: BodyRun = BodyRun(kind, [*self.carry, *self.xs], traced=True, tape=tape)
        # The carries that each tape watches. The main tape begins with all floats, so that a trace
        # shows to which of them watched outside values lead.
        self.watched: list[set[int]] = [set(self._seeds(t)) for t in self.body_run.tapes]
        for places in self.watched[:1]:
            places.update(i for i, x in enumerate(self.carry) if is_inexact(x.dtype))
        self.parts: dict[Sequence[int], BackwardStep | None] = {}

    @property
    def inputs(self) -> list[Tensor]:
        """Return all inputs, as Tensors outside."""
        return self.body_run.inputs

    @property
    def carried(self) -> list[int]:
        """Return the places of the carries whose gradients the backward loop carries."""
        return sorted(self.watched[0])

    def _seeds(self, tape: RegionTape) -> list[int]:
        ids = [x._id for x in self.body_run.inner[: len(self.carry)]]
        return [i for i, key in enumerate(ids) if key in tape.watched]

    # -- forward ---------------------------------------------------------------------------------

    def run(self) -> list[Any]:
        """Return the results as arrays, followed by the values for the backward pass."""
        import jax

        while True:
            arrays = [to_jax(x._data) for x in self.body_run.xs]
            m = len(self.carry)
            entry = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in arrays[m:]]
            closed = jax.make_jaxpr(self._body)(arrays[:m], entry)
            if not self.changed:
                return self._run(closed, arrays[:m], arrays[m:])

    def _run(self, closed: ClosedJaxpr, first: list[Array], along: list[Array]) -> list[Any]:
        """Run the loop over the traced step; keep a value that all steps share only once."""
        import jax

        n = self.outputs
        # Otherwise a weight that a rule keeps would be stacked once per step. So `same` has the
        # residuals that all steps share (None for the others), and `steps` the places of the
        # others.
        same = invariant(closed, n)
        steps = [i for i, array in enumerate(same) if array is None]
        kept = self.back.kept if self.tape is RegionTape else []
        for place, (pool, i) in enumerate(kept):  # places of residuals that are still stacked
            if pool == "step" and same[i] is None:
                kept[place] = "step", steps.index(i)
            elif pool == "step":
                kept[place] = "constant", same[i]

        def body(carry: list[Array], x: list[Array]) -> Any:
            ys = evaluate(closed.jaxpr, closed.consts, [*carry, *x])
            return ys[: len(first)], ys[len(first) : n] + [ys[n + i] for i in steps]

        last, ys = jax.lax.scan(body, first, along, self.length, self.reverse)
        return [*last, *ys]

    def _settled(self) -> bool:
        """Return whether the tapes watch the right carries; update the carries otherwise."""
        m, before = len(self.carry), [set(seeds) for seeds in self.watched]
        for seeds, tape in zip(self.watched, self.body_run.tapes, strict=True):
            seeds.update(i for i in range(m) if self.body_run.outputs[-1][i] in tape.watched)
        if self.tape is RegionTape:
            # The main tape began with all floats, so that the first trace already has every needed
            # gradient. Carries to which no watched outside value leads need no gradient.
            self.watched[0] &= self._reached()
        return self.watched == before

    def _reached(self) -> set[int]:
        """Return the carries to which any watched outside value leads, in any number of steps."""
        body_run, m = self.body_run, len(self.carry)
        wanted = watched_places(body_run.inputs)
        passage = body_run.passage(wanted, [(i, i) for i in range(m)])
        return {i for i in (*wanted, *passage.reached) if i < m}

    def _body(self, carry: list[Array], x: list[Array]) -> list[Any]:
        """Trace one step: carry and ys, followed by the values for the backward step."""
        # Each trace has its own run: the last run belongs to tracers of a finished trace.
        self.body_run = body_run = BodyRun(self.kind, self.body_run.xs, traced=True, tape=self.tape)
        inner = body_run.stand_ins([*carry, *x])
        for tape, watched in zip(body_run.tapes, self.watched, strict=True):
            tape.watched.update(inner[i]._id for i in watched)
        ys = body_run.run(self.step, inner)
        arrays = [to_jax(y._data) for y in ys]
        self.outputs: int = len(arrays)
        self.changed: bool = not self._settled()
        if self.tape is RegionTape and not self.changed:
            arrays += run_inside(
                lambda: self._linearized(inner, ys, arrays), body_run.region, body_run.overrides
            )
        return arrays

    def _linearized(
        self, inner: Sequence[Tensor], ys: Sequence[Tensor], results: Sequence[Array]
    ) -> list[Any]:
        """Trace the backward step; return the values that it takes from the forward step.

        As for programs (`Variant._linearized`), JAX lists the values that the inner trace closes
        over.
        """
        body_run, m = self.body_run, len(self.carry)
        tape, region = body_run.tapes[0], body_run.region
        stand_ins = [region.stand_in_for(s) for s in body_run.sources]
        given = [*inner, *stand_ins]
        keys = [x._id for x in given]
        # All carried gradients are both inputs and outputs of the backward step, even if the trace
        # finds none: the carry of a loop must keep its structure.
        wanted = [i for i, key in enumerate(keys) if i in self.carried or key in body_run.watched]
        active = [
            i for i, y in enumerate(ys) if i in self.carried or (i >= m and y._id in tape.watched)
        ]
        self.flow: Passage = body_run.passage(wanted, [(i, i) for i in range(m)])
        self.wide: np.dtype = widest((*given, *ys))
        self.back: BackwardStep = BackwardStep(self.carried, wanted, active)
        consts = self._walked(self.back, tape, given, ys, tape.close(), body_run.as_function)
        self.back.kept = self._sorted(consts, inner, stand_ins, results[m:])
        return self.stacked

    def _walked(
        self, back: BackwardStep, tape: Tape, given: Sequence[Tensor], ys: Sequence[Tensor],
        watched: set[int], as_function: Callable[[Flat], Flat],
    ) -> list[Array]:  # fmt: skip
        """Trace a backward step along a tape of `ys`; return the values that it closes over."""
        import jax

        sources = [ys[i] for i in back.active]

        def run(*dys: Array) -> list[Any]:
            arriving = [wrap(dy) for dy in dys]
            if self.checkpoint:  # it closes over the carry and the entry alone
                passage = Passage(back.wanted, back.active)
                recompute = pullback(as_function(self.step), len(given), passage)
                dxs = recompute([*given, *arriving])
            else:
                found = walk_from(
                    reversed(tape.entries), [y._id for y in sources], arriving, watched
                )
                dxs = [found.get(given[i]._id) for i in back.wanted]
            return [
                jax.numpy.zeros(given[i].shape, dtype) if dx is None else to_jax_as(dx._data, dtype)
                for dx, i, dtype in zip(dxs, back.wanted, dtypes, strict=True)
            ]

        dtypes = [gradient_dtype(given[i], self.wide) for i in back.wanted]
        specs = [jax.ShapeDtypeStruct(y.shape, gradient_dtype(y, self.wide)) for y in sources]
        with counted_later() as back.hits:
            closed = jax.make_jaxpr(run)(*specs)
        back.jaxpr = closed.jaxpr
        return closed.consts

    def _sorted(
        self, consts: Sequence[Array], inner: Sequence[Tensor], stand_ins: Sequence[Tensor],
        ys: Sequence[Array],
    ) -> list[tuple[str, Any]]:  # fmt: skip
        """Return the places of the values that the backward step closes over.

        See `BackwardStep.kept`. `stacked` lists the values to keep for each step.
        """
        # Tracers are identified by identity: JAX makes one tracer for each value.
        places: dict[int, tuple[str, Any]] = {id(y): ("y", i) for i, y in enumerate(ys)}
        # captured: one value for all steps
        places |= {id(x._data): ("constant", x._data) for x in stand_ins}
        places |= {id(x._data): ("x", i) for i, x in enumerate(inner[len(self.carry) :])}
        self.stacked: list[Any] = []
        return kept_for(consts, places, self.stacked, "step")

    # -- backward --------------------------------------------------------------------------------

    def recorded(self, results: Sequence[Array]) -> list[Tensor]:
        """Return the results as Tensors, on the tapes."""
        m, n = len(self.carry), self.outputs
        ys, stacked = results[m:n], results[n:]

        def answer(
            inputs: Sequence[Tensor], passage: Passage, dys: Sequence[Tensor]
        ) -> Sequence[Any]:
            capture = capturing()
            # If an active capture does not contain this loop (for example in a gradient function
            # that was called later), it has no step to which a PullStep could refer.
            inside = capture is None or passage.whole in capture.passages
            back = None
            if inside and not watched_places([*inputs, *dys]):
                back = self._part_traced(inputs, passage)
            if back is None:
                return self._back_as_loop(inputs, passage, dys)
            dxs = self._back(back, stacked, ys, passage, dys)
            if capture is not None:
                capture.pulled(passage, dys, dxs)
            return dxs

        return self.body_run.finish(
            results[:n], answer, self._push, self._repeated(), [(i, i) for i in range(m)]
        )

    def _repeated(self) -> Flat:
        """Return the loop as a function of all its inputs, without references to this run."""
        m, k = len(self.carry), len(self.carry) + len(self.xs)
        step = self.body_run.as_function(self.step)
        how = self.length, self.reverse, self.checkpoint, self.kind

        def repeated(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            flat = lambda tensors: step([*tensors, *inputs[k:]])  # noqa: E731
            last, ys = scanned(flat, inputs[:m], inputs[m:k], *how)
            return [*last, *ys]

        return repeated

    def _part_of(self, passage: Passage) -> BackwardStep:
        """Return the places of the backward step of a walk that has gradients of some results.

        A carry takes part if it is used at the end or leads, in any number of steps, to a result
        that is used. Other carries have no gradient in any step, and regrad makes no zeros for
        them.
        """
        m, used = len(self.carry), set(passage.reached)
        leading = {i for i, places in self.flow.edges.items() if not used.isdisjoint(places)}
        carried = [i for i in self.carried if i in used or i in leading]
        wanted = [i for i in self.back.wanted if i in carried or (i >= m and i in leading)]
        return BackwardStep(carried, wanted, [*carried, *_from(m, passage.reached)])

    def _part_traced(self, inputs: Sequence[Tensor], passage: Passage) -> BackwardStep | None:
        """Return the backward step of a walk, on the values that the forward loop has kept."""
        part = self._part_of(passage)
        if part.active == self.back.active:
            return self.back
        key = tuple(part.active)
        if key not in self.parts:
            region = Region(self.kind, traced=True)
            self.parts[key] = run_inside(partial(self._traced_again, part, inputs), region, None)
        return self.parts[key]

    def _traced_again(self, part: BackwardStep, inputs: Sequence[Tensor]) -> BackwardStep | None:
        """Trace the step again, with the walk from all results and the walk from a part.

        The second walk closes over a subset of the first walk's values, which the loop has kept.
        Returns None if it does not.
        """
        import jax.core

        m, k = len(self.carry), len(self.carry) + len(self.xs)
        function = self.body_run.as_function(self.step)
        whole = BackwardStep(self.back.carried, self.back.wanted, self.back.active)

        def both(*arrays: Array) -> tuple[()]:
            tape, given = Tape(), [*map(wrap, arrays), *inputs[k:]]
            given, ys = run_watched(tape, function, given, whole.wanted)
            walked = given, ys, tape.close(), lambda _: function
            # kept, because an id() could be reused otherwise
            known = self._walked(whole, tape, *walked)
            places = dict(zip(map(id, known), self.back.kept, strict=False))
            for array in self._walked(part, tape, *walked):
                fixed = None if isinstance(array, jax.core.Tracer) else ("constant", array)
                part.kept.append(places.get(id(array), fixed))
            return ()

        arrays = [to_jax(x._data) for x in inputs[:k]]
        shapes = [a.shape if i < m else a.shape[1:] for i, a in enumerate(arrays)]
        jax.make_jaxpr(both)(*map(jax.ShapeDtypeStruct, shapes, [a.dtype for a in arrays]))
        # then both close over the same values, in order
        same = str(whole.jaxpr) == str(self.back.jaxpr)
        return part if same and None not in part.kept else None

    def _back(
        self, back: BackwardStep, stacked: Sequence[Array], ys: Sequence[Array], passage: Passage,
        dys: Sequence[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """Run the backward loop over the values that the forward loop kept."""
        import jax

        for hit in back.hits:
            hit.pulled()
        expected = dict(zip(back.active, back.jaxpr.invars, strict=True))
        by_input = dict(zip(back.wanted, back.jaxpr.outvars, strict=True))
        pairs = zip(passage.reached, dys, strict=True)
        arriving = {i: to_jax_as(dy._data, expected[i].aval.dtype) for i, dy in pairs}

        def pull(dcarry: Sequence[Array], entry: Any) -> Sequence[Any]:
            pools, dys = entry
            consts = [i if pool == "constant" else pools[pool][i] for pool, i in back.kept]
            return evaluate(back.jaxpr, consts, [*dcarry, *dys])

        known = {i: ys[i] for pool, i in back.kept if pool == "y"}
        along = [to_jax(x._data) for x in self.xs]
        dxs = self._pulled(
            back, passage, arriving, lambda i: _zeros(by_input[i]), pull,
            {"step": list(stacked), "y": known, "x": along},
            partial(jax.lax.scan, length=self.length, reverse=not self.reverse),
        )  # fmt: skip
        return [wrap(dx) for dx in dxs]

    def _back_as_loop(
        self, inputs: Sequence[Tensor], passage: Passage, dys: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run the backward loop as a separate loop, which can be differentiated again."""
        m, k = len(self.carry), len(self.carry) + len(self.xs)
        carry, xs, captured = inputs[:m], inputs[m:k], inputs[k:]
        step = self.body_run.as_function(self.step)
        kind = f"the gradient of {self.kind}"

        def forward(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [*step([*tensors, *captured])[:m], *tensors[:m]]

        # The carry at the beginning of each step, as ops that the current tapes record.
        _, carries = scanned(forward, carry, xs, self.length, self.reverse, False, kind)
        back = self._part_of(passage)
        pulls = pullback(step, len(inputs), Passage(back.wanted, back.active))

        def pull(dcarry: Sequence[Tensor], entry: Any) -> Sequence[Tensor]:
            return pulls([*entry[0], *captured, *dcarry, *entry[1]])

        def run(step: Any, state: Any, entries: Any) -> Any:
            n, f = len(entries[0]), len(state[0])
            s = f + len(state[1])

            def flat(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
                entry = tensors[s : s + n], tensors[s + n :]
                (dcarry, sums), dxs = step((tensors[:f], tensors[f:s]), entry)
                return [*dcarry, *sums, *dxs]

            first, along = [*state[0], *state[1]], [*entries[0], *entries[1]]
            how = self.length, not self.reverse, self.checkpoint, kind
            last, dxs = scanned(flat, first, along, *how)
            return (last[:f], last[f:]), dxs

        dtype = lambda i: gradient_dtype(inputs[i], self.wide)  # noqa: E731
        arriving = dict(zip(passage.reached, dys, strict=True))
        arriving |= {i: dispatch.as_dtype(arriving[i], dtype(i)) for i in arriving if i < m}
        zeros = lambda i: zeros_like(inputs[i], dtype=dtype(i))  # noqa: E731
        return self._pulled(back, passage, arriving, zeros, pull, [*carries, *xs], run, add)

    def _pulled(
        self, back: BackwardStep, passage: Passage, arriving: dict[int, Any],
        zeros: Callable[[int], Any], pull: Callable[..., Any], entries: Any, run: Run,
        add: Callable[[Any, Any], Any] = operator.add,
    ) -> list[Any]:  # fmt: skip
        """Run the backward pass of the loop: over its entries, and the gradients by its ys."""
        m, k = len(self.carry), len(self.carry) + len(self.xs)
        first = [arriving[i] if i in arriving else zeros(i) for i in back.carried]
        sums = [zeros(i) for i in _from(k, back.wanted)]
        entries = entries, [arriving[i] for i in _from(m, passage.reached)]
        dcarry, dshared, dxs = pull_loop(pull, first, len(sums), entries, run, sums, add)
        # `wanted` is in order of places, and so are its three kinds: carries, entries, shared.
        by_input = dict(zip(back.wanted, [*dcarry, *dxs, *(dshared or ())], strict=True))
        return [by_input[i] for i in passage.wanted]

    # -- tangents --------------------------------------------------------------------------------

    def _push(
        self, inputs: Sequence[Tensor], passage: Passage, dxs: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the tangents of the results: the loop again, with tangents in the carry."""
        m, k = len(self.carry), len(self.carry) + len(self.xs)
        step = self.body_run.as_function(self.step)
        how = self.length, self.reverse, False, f"the derivative of {self.kind}"
        run = lambda step, carry, xs: scanned(step, carry, xs, *how)  # noqa: E731
        return push_loop(step, m, k, inputs, passage, dxs, run)


def push_loop(
    step: Flat, m: int, k: int, inputs: Sequence[Tensor], passage: Passage, dxs: Sequence[Tensor],
    run: Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]],
) -> Sequence[Tensor]:  # fmt: skip
    """Return the tangents of a loop's results.

    The inputs are `m` carries, the entries up to `k`, and the captured values.
    `run(step, carry, xs)` runs a loop like this one.
    """
    given = dict(zip(passage.wanted, dxs, strict=True))
    moving = carries_that_move(passage, inputs[:m])
    entries, shared = [i for i in _from(m, passage.wanted) if i < k], _from(k, passage.wanted)
    outputs = _from(m, passage.reached)
    # Each tangent is passed like its value: carried, along the entries, or shared by all steps. The
    # carry of this loop is (carry, dcarry of `moving`); its entries are (xs, dxs).
    both = dual(step, len(inputs), [*moving, *entries, *shared], [*moving, *outputs])
    f, dshared = len(moving), [given[i] for i in shared]

    def step_of_both(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        carry, dcarry, rest = tensors[:m], tensors[m : m + f], tensors[m + f :]
        x, dx = rest[: k - m], rest[k - m :]
        found = both([*carry, *x, *inputs[k:], *dcarry, *dx, *dshared])
        ys, dys = found[: -f - len(outputs)], found[-f - len(outputs) :]
        return [*ys[:m], *dys]

    first = [given[i] if i in given else zeros_like(inputs[i]) for i in moving]
    xs = [*inputs[m:k], *[given[i] for i in entries]]
    last, dys = run(step_of_both, [*inputs[:m], *first], xs)
    found = dict(zip([*moving, *outputs], [*last[m:], *dys], strict=True))
    return [found[i] for i in passage.reached]


def _from(first: int, places: Sequence[int]) -> list[int]:
    return [i for i in places if i >= first]


def stepped(
    flat: Flat, n: int, m: int, assigned: Sequence[Variable], tensors: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Run one step: `n` Tensors of the carry come first, then up to `m` the assigned Variables."""
    region = current().region  # pyright: ignore[reportOptionalMemberAccess]
    region.values.update(zip(assigned, tensors[n:m], strict=True))
    ys = list(flat([*tensors[:n], *tensors[m:]]))
    return [*ys[:n], *[region.read(v) for v in assigned], *ys[n:]]


def invariant(closed: ClosedJaxpr, first: int) -> list[Any]:
    """Return the results of a traced step, from `first` on, that are the same in every step.

    Other results are None. XLA moves such computations out of a loop by itself, but a stacked
    result would still take the memory of all steps.
    """
    from jax.extend.core import Literal

    jaxpr = closed.jaxpr
    varying = set(jaxpr.invars)

    def varies(variable: Any) -> bool:
        return not isinstance(variable, Literal) and variable in varying

    for eqn in jaxpr.eqns:  # in order of dependence, so one pass is enough
        if any(map(varies, eqn.invars)):
            varying.update(eqn.outvars)
    wanted = jaxpr.outvars[first:]
    if all(map(varies, wanted)):
        return [None] * len(wanted)
    # Run the step once more, on zeros: values that do not depend on them are right, and XLA drops
    # the rest.
    ys = evaluate(jaxpr, closed.consts, [_zeros(v) for v in jaxpr.invars])[first:]
    return [None if varies(v) else y for v, y in zip(wanted, ys, strict=True)]


def _zeros(variable: Any) -> Any:
    import jax

    return jax.numpy.zeros(variable.aval.shape, variable.aval.dtype)

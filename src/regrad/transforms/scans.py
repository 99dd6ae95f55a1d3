"""Loops of known length inside what JAX traces: flat functions under `lax.scan`.

The idea: a loop is a region with one record outside, and its gradient is a loop in the opposite
direction. For a step `(c, x) -> (c * w + x, c)`, with `w` of the closure, the backward step is

    (dc, dw), (dc', dy, residuals) -> (dc * w + dy, dw + dc * c), dx = dc

The gradients by the carry are carried, those by entries of `xs` are stacked, and those by what all
steps share (`w`) are added up. There are two backward loops:

* `_back`: where nobody asks for a gradient of the gradient. The forward step is traced once
  together with its walk back. What the rules keep of each step (here `c`) is stacked by the forward
  loop, and the backward loop runs the equations of the walk.
* `_back_as_loop`: at higher orders. The carries are computed again, and the gradient of the step is
  the step of another loop of this module, which can be differentiated in its turn.

Invariants:

* The user's Python runs once, whatever the number of traces, of orders and of steps (`Captured`).
* Which carries tapes watch is a fixed point: a carry that is watched after a step is watched before
  the next. The step is traced until nothing changes (`_settled`): at most as often as there are
  carries, and mostly once or twice.
* A residual that is the same in every step is kept once. One that is an entry of `xs` or a result
  is not kept again.
* The record of a loop keeps what the backward loop needs, and not the run that found it out.
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
from regrad.core.pullback import Run, pull_loop, pull_through
from regrad.core.sharding import to_jax, to_jax_as
from regrad.core.state import current
from regrad.core.tensor import Tensor, wrap
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
    RegionTape,
    run_inside,
    tape_for,
    watched_places,
)
from regrad.transforms.replay import Captured
from regrad.transforms.steps import evaluate
from regrad.transforms.trail import capturing

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

    from regrad.core.backends import Array


def as_jax(xs: Sequence[Tensor]) -> list[Tensor]:
    """The same Tensors with JAX data, whose dtypes a loop will keep."""
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
    assigned: list[Variable] = []  # Variables that the step assigns to: they are carried as well
    tape = tape_for([*carry, *xs])

    def run() -> tuple[BodyRun, Any]:
        loop = Scan(flat, carry, xs, length, reverse, checkpoint, kind, assigned, tape)
        results = loop.run()
        return loop.body_run, (loop, results)

    loop, results = until_all_are_known(assigned, run)
    if tape is not (needed := tape_for(loop.inputs)):
        tape = needed  # it takes in something watched: what the rules name is kept
        loop, results = until_all_are_known(assigned, run)
    ys = loop.recorded(results)
    n, m = len(carry), len(loop.carry)
    assign_all(assigned, ys[n:m])
    return ys[:n], ys[m:]


class Scan:
    """One loop: its forward pass, what that keeps, and its backward pass.

    The lists of places count in one of two rows. Their first `m` places are those of the carry,
    whose last ones are the Variables in `assigned`:

        inputs     0 … m - 1: the carry     up to k: entries of xs     from k on: captured
        results    0 … m - 1: the carry     up to n: ys                from n on: residuals

    * `carried`: the carries that the main tape watches. Their gradients are the backward carry.
    * `wanted` (inputs): `carried`, and the other inputs that this tape watches. The backward step
      returns their gradients, in this order.
    * `active` (results): `carried`, and the ys that depend on something watched. The backward step
      is given their gradients, in this order.
    * `kept`: for each constant of the backward step, the pool in which it is found, and its place
      there: "x" (entries of xs), "y" (of ys), or "step" (residuals). For "same" it is the array.

    A walk back asks for some of `wanted`, and has gradients of some of `active`: its `passage`.
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
        # (no method: what is kept of it for later must not keep this run)
        self.step: partial[Sequence[Tensor]] = partial(
            stepped, flat, self.count, len(self.carry), self.assigned
        )
        self.xs: list[Tensor] = list(xs)
        self.body_run: BodyRun = BodyRun(kind, [*self.carry, *self.xs], traced=True, tape=tape)
        # The carries that each tape watches. The main tape begins with all floats: a trace then
        # tells which of them what is watched outside comes round to.
        self.watched: list[set[int]] = [set(self._seeds(t)) for t in self.body_run.tapes]
        for places in self.watched[:1]:
            places.update(i for i, x in enumerate(self.carry) if is_inexact(x.dtype))
        self.kept: list[tuple[str, Any]] = []

    @property
    def inputs(self) -> list[Tensor]:
        """Return all that it takes in, as Tensors outside."""
        return self.body_run.inputs

    @property
    def carried(self) -> list[int]:
        """Return the places of the carries whose gradients are carried by the backward loop."""
        return sorted(self.watched[0])

    def _seeds(self, tape: RegionTape) -> list[int]:
        ids = [x._id for x in self.body_run.inner[: len(self.carry)]]
        return [i for i, key in enumerate(ids) if key in tape.watched]

    # -- forward ---------------------------------------------------------------------------------

    def run(self) -> list[Any]:
        """Return the results as arrays, and after them what the backward pass takes."""
        import jax

        while True:
            arrays = [to_jax(x._data) for x in self.body_run.xs]
            m = len(self.carry)
            entry = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in arrays[m:]]
            closed = jax.make_jaxpr(self._body)(arrays[:m], entry)
            if not self.changed:
                return self._run(closed, arrays[:m], arrays[m:])

    def _run(self, closed: ClosedJaxpr, first: list[Array], along: list[Array]) -> list[Any]:
        """Run the loop over the traced step; what is the same in every step is kept once."""
        import jax

        n = self.outputs
        # A weight that a rule keeps would else be stacked as often as there are steps. So `same`
        # has the residuals that all steps share (None for the others), `steps` the other places.
        same = invariant(closed, n)
        steps = [i for i, array in enumerate(same) if array is None]
        for place, (pool, i) in enumerate(self.kept):  # places of steps that are still stacked
            if pool == "step" and same[i] is None:
                self.kept[place] = "step", steps.index(i)
            elif pool == "step":
                self.kept[place] = "same", same[i]

        def body(carry: list[Array], x: list[Array]) -> Any:
            ys = evaluate(closed.jaxpr, closed.consts, [*carry, *x])
            return ys[: len(first)], ys[len(first) : n] + [ys[n + i] for i in steps]

        last, ys = jax.lax.scan(body, first, along, self.length, self.reverse)
        return [*last, *ys]

    def _settled(self) -> bool:
        """Return whether the tapes watch the right carries; if not, they will in the next trace."""
        m, before = len(self.carry), [set(seeds) for seeds in self.watched]
        for seeds, tape in zip(self.watched, self.body_run.tapes, strict=True):
            seeds.update(i for i in range(m) if self.body_run.outputs[-1][i] in tape.watched)
        if self.tape is RegionTape:
            # The main tape began with all floats, for the first trace to be right already; those
            # that nothing watched outside comes round to need no gradient.
            self.watched[0] &= self._reached()
        return self.watched == before

    def _reached(self) -> set[int]:
        """The carries that anything watched outside comes round to, by whichever steps."""
        body_run, m = self.body_run, len(self.carry)
        wanted = watched_places(body_run.inputs)
        passage = body_run.passage(wanted, [(i, i) for i in range(m)])
        return {i for i in (*wanted, *passage.reached) if i < m}

    def _body(self, carry: list[Array], x: list[Array]) -> list[Any]:
        """Trace one step: carry and ys, and after them what the backward step takes."""
        # a run for each trace: the one before belongs to tracers that JAX has done with
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
        """Trace the backward step; what it takes from the forward one is returned.

        As for programs (`Variant._linearized`), JAX lists what the inner trace has closed over.
        """
        import jax

        body_run, m = self.body_run, len(self.carry)
        tape, region = body_run.tapes[0], body_run.region
        stand_ins = [region.stand_in_for(s) for s in body_run.sources]
        given = [*inner, *stand_ins]
        keys = [x._id for x in given]
        # All carried gradients are both inputs and outputs of the backward step, found or not: the
        # carry of a loop must keep its structure.
        self.wanted: list[int] = [
            i for i, key in enumerate(keys) if i in self.carried or key in body_run.watched
        ]
        self.active: list[int] = [
            i for i, y in enumerate(ys) if i in self.carried or (i >= m and y._id in tape.watched)
        ]
        function = body_run.as_function(self.step)
        recompute = pullback(function, len(given), Passage(self.wanted, self.active))

        def back(*dys: Array) -> list[Any]:
            arriving = [wrap(dy) for dy in dys]
            if self.checkpoint:  # it closes over the carry and the entry alone
                dxs = recompute([*given, *arriving])
            else:
                found = pull_through(tape, [ys[i] for i in self.active], arriving)
                dxs = [found.get(keys[i]) for i in self.wanted]
            return [
                jax.numpy.zeros(given[i].shape, dtype) if dx is None else to_jax_as(dx._data, dtype)
                for dx, i, dtype in zip(dxs, self.wanted, dtypes, strict=True)
            ]

        self.wide: np.dtype = widest((*given, *ys))
        dtypes = [gradient_dtype(given[i], self.wide) for i in self.wanted]
        outputs = [results[i] for i in self.active]
        specs = [jax.ShapeDtypeStruct(y.shape, gradient_dtype(y, self.wide)) for y in outputs]
        closed = jax.make_jaxpr(back)(*specs)
        self.jaxpr: Any = closed.jaxpr
        return self._sorted(closed.consts, inner, stand_ins, results[m:])

    def _sorted(
        self, consts: Sequence[Array], inner: Sequence[Tensor], stand_ins: Sequence[Tensor],
        ys: Sequence[Array],
    ) -> list[Any]:  # fmt: skip
        """Return the inputs of the backward step: entries of xs or ys, constants, and the rest.

        The rest is returned, to be kept of each step.
        """
        import jax.core

        m = len(self.carry)
        # of tracers the identity is all there is: JAX makes one for each value
        same = {id(x._data) for x in stand_ins}  # captured: one value for all steps
        along = {id(x._data): i for i, x in enumerate(inner[m:])}  # entries of xs
        given_out = {id(y): i for i, y in enumerate(ys)}
        self.kept, stacked = [], []
        for array in consts:
            if id(array) in along:
                self.kept.append(("x", along[id(array)]))
            elif id(array) in same or not isinstance(array, jax.core.Tracer):
                self.kept.append(("same", array))
            elif id(array) in given_out:
                self.kept.append(("y", given_out[id(array)]))
            else:
                self.kept.append(("step", len(stacked)))
                stacked.append(array)
        return stacked

    # -- backward --------------------------------------------------------------------------------

    def recorded(self, results: Sequence[Array]) -> list[Tensor]:
        """Return the results as Tensors, on the tapes."""
        m, n = len(self.carry), self.outputs
        ys, stacked = results[m:n], results[n:]

        def answer(
            inputs: Sequence[Tensor], passage: Passage, dys: Sequence[Tensor]
        ) -> Sequence[Any]:
            capture = capturing()
            # A body that is captured now, but in which this loop did not run (a gradient function
            # that was called later, say), has no step to which a PullStep could refer.
            inside = capture is None or passage in capture.passages
            if watched_places([*inputs, *dys]) or not inside:
                return self._back_as_loop(inputs, passage, dys)
            dxs = self._back(stacked, ys, passage, dys)
            if capture is not None:
                capture.pulled(passage, dys, dxs)
            return dxs

        return self.body_run.finish(
            results[:n], answer, self._push, self._repeated(), [(i, i) for i in range(m)]
        )

    def _repeated(self) -> Flat:
        """Return the loop as a function of all that it takes in; it holds nothing of this run."""
        m, k = len(self.carry), len(self.carry) + len(self.xs)
        step = self.body_run.as_function(self.step)
        how = self.length, self.reverse, self.checkpoint, self.kind

        def repeated(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            flat = lambda tensors: step([*tensors, *inputs[k:]])  # noqa: E731
            last, ys = scanned(flat, inputs[:m], inputs[m:k], *how)
            return [*last, *ys]

        return repeated

    def _back(
        self, stacked: Sequence[Array], ys: Sequence[Array], passage: Passage, dys: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run the backward loop over what the forward loop kept."""
        import jax

        reached = [*self.carried, *_from(len(self.carry), passage.reached)]
        expected = dict(zip(self.active, self.jaxpr.invars, strict=True))
        by_input = dict(zip(self.wanted, self.jaxpr.outvars, strict=True))
        # `reached` are the outputs with a gradient in this walk; the other `active` ones get zeros
        pairs = zip(passage.reached, dys, strict=True)
        arriving = {i: to_jax_as(dy._data, expected[i].aval.dtype) for i, dy in pairs}

        def pull(dcarry: Sequence[Array], entry: Any) -> Sequence[Any]:
            pools, dys = entry
            given = dict(zip(reached, [*dcarry, *dys], strict=True))
            consts = [i if pool == "same" else pools[pool][i] for pool, i in self.kept]
            arriving = [given[i] if i in given else _zeros(expected[i]) for i in self.active]
            return evaluate(self.jaxpr, consts, arriving)

        known = {i: ys[i] for pool, i in self.kept if pool == "y"}
        along = [to_jax(x._data) for x in self.xs]
        dxs = self._pulled(
            self.wanted, passage, arriving, lambda i: _zeros(by_input[i]), pull,
            {"step": list(stacked), "y": known, "x": along},
            partial(jax.lax.scan, length=self.length, reverse=not self.reverse),
        )  # fmt: skip
        return [wrap(dx) for dx in dxs]

    def _back_as_loop(
        self, inputs: Sequence[Tensor], passage: Passage, dys: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run the backward loop as a loop of its own, which can be differentiated in its turn."""
        m, k = len(self.carry), len(self.carry) + len(self.xs)
        carry, xs, captured = inputs[:m], inputs[m:k], inputs[k:]
        step = self.body_run.as_function(self.step)
        kind = f"the gradient of {self.kind}"

        def forward(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [*step([*tensors, *captured])[:m], *tensors[:m]]

        # the carry with which each step began, as ops that today's tapes record
        _, carries = scanned(forward, carry, xs, self.length, self.reverse, False, kind)
        wanted = [*self.carried, *_from(m, passage.wanted)]
        reached = [*self.carried, *_from(m, passage.reached)]
        pulls = pullback(step, len(inputs), Passage(wanted, reached))

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
        return self._pulled(wanted, passage, arriving, zeros, pull, [*carries, *xs], run, add)

    def _pulled(
        self, wanted: Sequence[int], passage: Passage, arriving: dict[int, Any],
        zeros: Callable[[int], Any], pull: Callable[..., Any], entries: Any, run: Run,
        add: Callable[[Any, Any], Any] = operator.add,
    ) -> list[Any]:  # fmt: skip
        """Go back through the loop: over its entries, and the gradients by its ys."""
        m, k = len(self.carry), len(self.carry) + len(self.xs)
        first = [arriving[i] if i in arriving else zeros(i) for i in self.carried]
        sums = [zeros(i) for i in _from(k, wanted)]
        entries = entries, [arriving[i] for i in _from(m, passage.reached)]
        dcarry, dshared, dxs = pull_loop(pull, first, len(sums), entries, run, sums, add)
        # `wanted` is in order of places, and so are its three kinds: carries, entries, shared
        by_input = dict(zip(wanted, [*dcarry, *dxs, *(dshared or ())], strict=True))
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

    The inputs are `m` carries, the entries up to `k`, and what is captured. `run(step, carry, xs)`
    runs a loop like this one.
    """
    given = dict(zip(passage.wanted, dxs, strict=True))
    moving = carries_that_move(passage, inputs[:m])
    entries, shared = [i for i in _from(m, passage.wanted) if i < k], _from(k, passage.wanted)
    outputs = _from(m, passage.reached)
    # Tangents go the way of the values: carried, along the entries, or shared by all steps. The
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
    """One step: `n` Tensors of the carry come first, then up to `m` the Variables assigned to."""
    region = current().region  # pyright: ignore[reportOptionalMemberAccess]
    region.values.update(zip(assigned, tensors[n:m], strict=True))
    ys = list(flat([*tensors[:n], *tensors[m:]]))
    return [*ys[:n], *[region.read(v) for v in assigned], *ys[n:]]


def invariant(closed: ClosedJaxpr, first: int) -> list[Any]:
    """Return the results of a traced step, from `first` on, that are the same in every step.

    None stands for the others. XLA moves such computations out of a loop by itself, but a result
    that is stacked takes the memory of all steps all the same.
    """
    from jax.extend.core import Literal

    jaxpr = closed.jaxpr
    varying = set(jaxpr.invars)

    def varies(variable: Any) -> bool:
        return not isinstance(variable, Literal) and variable in varying

    for eqn in jaxpr.eqns:  # in order of dependence, so once through is enough
        if any(map(varies, eqn.invars)):
            varying.update(eqn.outvars)
    wanted = jaxpr.outvars[first:]
    if all(map(varies, wanted)):
        return [None] * len(wanted)
    # the step once more, on zeros: what does not depend on them is right, and XLA drops the rest
    ys = evaluate(jaxpr, closed.consts, [_zeros(v) for v in jaxpr.invars])[first:]
    return [None if varies(v) else y for v, y in zip(wanted, ys, strict=True)]


def _zeros(variable: Any) -> Any:
    import jax

    return jax.numpy.zeros(variable.aval.shape, variable.aval.dtype)

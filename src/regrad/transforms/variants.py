"""Variants of a program: one for each set of watched inputs, compiled by XLA.

A variant traces the body in a `Region`, then the backward pass; `program` explains why. The values
of the forward pass that the backward pass closes over become further results of the forward
program.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.autodiff.variables import Variable
from regrad.core.promotion import gradient_dtype, widest
from regrad.core.pullback import pull_through
from regrad.core.sharding import layout, to_jax
from regrad.core.state import current
from regrad.core.tensor import Tensor, wrap
from regrad.transforms import verification
from regrad.transforms.arguments import argument
from regrad.transforms.donation import compile_donating, set_apart
from regrad.transforms.region import (
    Region,
    RegionTape,
    inner_tapes,
    passage_between,
    results,
    run_inside,
    tape_for,
    watched_by,
)
from regrad.transforms.steps import evaluate, kept_for
from regrad.transforms.traces import Mark, SourceFound, Trace

if TYPE_CHECKING:
    from regrad.core.backends import Array
    from regrad.core.tape import Tape
    from regrad.transforms.region import CapturedValue


class Variant:
    """A program for one set of watched inputs.

    Its function takes the arrays that are `kept`, and then the donated arrays: `donated` are the
    places of Variables that it updates, and `lent` the places of donated arguments.

    `kept` and `places` together contain each place of an input once. Take three arguments, of which
    argument 1 was named in `donate`, and two sources: a Variable `w` (3), which the body assigns,
    and a Tensor (4). Then

        kept       0, 2, 4    the arrays that come first, in this order
        places     3, 1       the donated arrays: `donated` (3), then `lent` (1)

    `wanted` are the inputs that tapes watch. If there are any, the variant donates nothing: `kept`
    has all places.
    """

    def __init__(self, program: Any, n: int, wanted: tuple[int, ...], donates: bool) -> None:
        self.program: Any = program  # (a Program)
        self.n = n
        self.wanted = wanted
        variables = [(i, s) for i, s in enumerate(program.sources, n) if isinstance(s, Variable)]
        donates = donates and not wanted
        self.donated: list[int] = (
            [i for i, v in variables if v in program.assigned] if donates else []
        )
        self.lent: list[int] = list(program.donated) if donates else []
        self.threads: bool = bool(variables or program.assigned)
        self.donates = donates
        places = {*self.donated, *self.lent}
        self.places: list[int] = [*self.donated, *self.lent]
        self.kept: list[int] = [i for i in range(n + len(program.sources)) if i not in places]
        self.converted: dict[int, tuple[Tensor, Any]] = {}
        self.written: dict[int, tuple[bytes, Any]] = {}  # converted arrays, with their content
        self.given: Sequence[Tensor] = ()
        self.traces: list[Trace] = []  # the traces of the compiled programs
        self.complete = False  # a trace has found no new input
        self.news = False
        self.verifying: list[Trace] | None = None  # the trace that is compared with the program
        self.usual: Trace | None = None  # the trace to which results without a mark belong
        self.compiled: Any = self._compile()

    def _compile(self) -> Any:
        donated = range(n := len(self.kept), n + len(self.places))
        return compile_donating(self.program.jax, self._results, donated)

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        return self._run(inputs, [self._donate(i, inputs[i]) for i in self.places], self.compiled)

    def split(self, results: Any) -> tuple[Trace, Sequence[Any]]:
        """Return the trace to which the results of a call belong, and the results without a mark.

        JAX chose the trace among several, by shapes and dtypes.
        """
        if type(results) is tuple:
            return results[0].trace(), results[1:]
        assert self.usual is not None
        return self.usual, results if type(results) is list else [results]

    def lower(self, inputs: Sequence[Tensor]) -> Any:
        """Return JAX's `Lowered` for these inputs; it does not run, so it overwrites nothing."""
        given = [to_jax(inputs[i]._data) for i in self.places]
        return self._run(inputs, given, lambda *xs: self.compiled.trace(*xs).lower())

    def _run(self, inputs: Sequence[Tensor], donated: Sequence[Array], compiled: Any) -> Any:
        """Trace, unless a trace exists, and call `compiled`."""
        kept = [
            argument(inputs[i]) if i < self.n else self.convert(i, inputs[i]) for i in self.kept
        ]
        arrays = [*kept, *donated]
        self.given = inputs  # the Tensors that tapes watch, in case this call traces
        try:
            if not self.complete:
                self._find(arrays)
            elif self.program.verify:
                self._verify(arrays)
            return compiled(*arrays)
        except (TypeError, ValueError, NotImplementedError) as error:
            self.program.check_inputs(error, inputs)
            raise
        finally:
            self.given = ()

    def _find(self, arrays: list[Array]) -> None:
        """Trace to the end, and only then raise SourceFound for new inputs.

        JAX never frees a trace that ends with an exception, nor the arrays that it captured.
        """
        self.compiled.trace(*arrays)  # the following call finds this trace
        if self.news:
            raise SourceFound
        self.complete: bool = True

    def _verify(self, arrays: list[Array]) -> None:
        """Trace once more, and compare with the program; the trace has no other effect."""
        known = self.compiled.trace(*arrays)
        self.verifying = []
        try:
            second = self._compile().trace(*arrays)
            verification.compare(self.program.name, known, second)
        finally:
            self.verifying = None

    def convert(self, i: int, x: Tensor) -> Any:
        """Return a source as a JAX array, converted once for as long as it stays the same."""
        if type(x._data) is not np.ndarray:
            return x._data
        known = self.converted.get(i)
        if known is None or known[0] is not x:
            known = self.converted[i] = x, to_jax(x._data)
        elif self.program.verify:
            verification.check_memory(self.program.name, np.asarray(known[1]), x._data)
        return known[1]

    def convert_array(self, i: int, array: np.ndarray) -> Any:
        """Return a small array as a JAX array, converted again if its owner has written to it."""
        content = array.tobytes()
        known = self.written.get(i)
        if known is None or known[0] != content:
            known = self.written[i] = content, to_jax(np.array(array))
        return known[1]

    def _donate(self, i: int, x: Tensor) -> Any:
        """Return an array that the program may overwrite: a copy, if another object may hold it."""
        if i < self.n:  # an argument named in `donate`, which the caller has given up
            return to_jax(argument(x))
        variable: Variable = self.program.sources[i - self.n]
        data = to_jax(x._data)
        # from now on, other threads that read it wait; earlier readers have it
        variable._away = True
        return data.copy() if variable._lent or data is not x._data else data

    # -- tracing -----------------------------------------------------------------------------

    def _results(self, *given: Array) -> Any:
        """Trace the body, and the backward pass if tapes watch; JAX compiles this function.

        Returns, in a tuple, the mark, the results, the new values of Variables, and the values that
        the rules keep. A mark takes time at each call. So the usual trace, and traces that return
        the same structure, return no mark: they return a list, or a single array itself.
        """
        program = self.program
        arrays = dict(zip([*self.kept, *self.places], given, strict=True))
        kind = tape_for(self.given)
        tapes = inner_tapes(kind, current()) if self.wanted else ()
        region = Region(program.name, tapes=tapes, traced=True, around=None)
        region.lasting = True
        inputs = [region.make_stand_in(wrap(arrays[i])) for i in range(len(arrays))]
        for source, x in zip(program.sources, inputs[self.n :], strict=True):
            self._stand_in(region, program.source(source), x)
        # A trace that ended with new inputs is continued here: it is replayed with all inputs.
        shapes = self.wanted, *[(a.shape, a.dtype) for a in [arrays[i] for i in range(self.n)]]
        trace = program.begun.pop(shapes, None)
        if trace is None or not trace.flat.complete:  # (Its Python will run, with hits.)
            trace = program.begin(trace)
        for n, tape in enumerate(tapes):
            places = watched_by(tape.outer[0], self.given) if n else self.wanted
            tape.watched.update(inputs[i]._id for i in places)
        with nullcontext() if program.closure is None else program.closure.undrawn(program.name):
            body = partial(results, trace.flat, inputs[: self.n], region)
            ys = run_inside(body, region, trace.bindings, tapes)
        trace.count, trace.assigned = len(ys), self._assigned(region)
        ys = [*ys, *[region.values[v] for v in trace.assigned]]
        outputs = [to_jax(y._data) for y in ys]
        # Rules that have run by now run in each forward pass; the others, in each backward pass.
        trace.ran = {(key, hit.where, hit.path): hit.ran for key, hit in trace.hits()}
        if tapes:
            ids, reached = [x._id for x in inputs], [y._id for y in ys]
            trace.passage = passage_between(tapes[0], ids, self.wanted, [reached])
        if tapes and kind is RegionTape:
            linearize = partial(self._linearized, tapes[0], inputs, ys, outputs, arrays, trace)
            run_inside(linearize, region, trace.bindings)
        if self.verifying is not None:
            program.check_sources(region)
            self.verifying.append(trace)  # JAX has only a weak reference to it (see `Mark`)
            return Mark(trace), *outputs
        self.news: bool = program.find(region)
        if self.news:
            trace.rewind()
            program.begun[shapes] = trace
            if self.complete:  # JAX traces for other shapes, in a call that `_find` does not see
                raise SourceFound
            return Mark(trace), *outputs
        plainly = program.plainly(region)
        program.reads = program.reads or bool(plainly)
        program.traces([arrays[i] for i in range(self.n)], plainly)
        lax = program.jax.lax
        self.traces.append(trace)
        if not tapes:  # (Tapes identify assigned Tensors, so these are not donated.)
            n = trace.count
            outputs[n:] = set_apart(outputs[n:], [*arrays.values(), *outputs[:n]])
        for i, variable in enumerate(trace.assigned, trace.count):
            if (sharding := layout(variable._tensor._data)) is not None:
                outputs[i] = lax.with_sharding_constraint(outputs[i], sharding)
        if trace.is_plain and not program.verify:
            self.usual = self.usual or trace
            if trace.returns_like(self.usual):
                return outputs[0] if len(outputs) == 1 else outputs
        return Mark(trace), *outputs

    def _assigned(self, region: Region) -> Sequence[Variable]:
        """Return the Variables that a trace assigns, including all that it may overwrite.

        For other shapes the body may assign fewer Variables: the others are returned unchanged.
        """
        donated = [self.program.sources[i - self.n] for i in self.donated]
        return tuple(dict.fromkeys([*region.assigned, *donated]))

    def _stand_in(self, region: Region, source: CapturedValue | Array, x: Tensor) -> None:
        if isinstance(source, Variable):
            region.values[source] = x
        else:
            region.stand_ins[id(source)] = x
            region.alive.append(source)

    def _linearized(
        self, tape: Tape, inputs: Sequence[Tensor], ys: Sequence[Tensor], results: list[Array],
        arrays: dict[int, Array], trace: Trace,
    ) -> None:  # fmt: skip
        """Trace the backward program; its captured forward values become results.

        The walk runs in a nested trace. JAX then lists the values that the inner trace closes over:
        exactly the tracers of the forward pass that the rules use.
        """
        jax = self.program.jax
        passage, zeros = trace.passage, jax.numpy.zeros_like

        def back(*dys: Array) -> list[Any]:
            arriving = [wrap(dy) for dy in dys]
            grads = pull_through(tape, [ys[i] for i in passage.reached], arriving)
            dxs = [(x, grads.get(x._id)) for x in [inputs[i] for i in passage.wanted]]
            return [zeros(x._data) if dx is None else to_jax(dx._data) for x, dx in dxs]

        outputs = [results[i] for i in passage.reached]
        # (Other inputs may be arrays that only code of the user's op types reads.)
        wide = widest((*[inputs[i] for i in passage.wanted], *ys))
        specs = [jax.ShapeDtypeStruct(y.shape, gradient_dtype(y, wide)) for y in outputs]
        trace.dtypes = [spec.dtype for spec in specs]
        closed = jax.make_jaxpr(back)(*specs)
        # An input or a result need not be returned a second time. The call of the backward pass
        # finds it at its own place (`_record`).
        places: dict[int, Any] = {id(array): ("input", i) for i, array in arrays.items()}
        places.update((id(array), ("result", i)) for i, array in enumerate(results))
        trace.kept, trace.jaxpr = kept_for(closed.consts, places, results, "result"), closed
        trace.backward = jax.jit(partial(evaluate, closed.jaxpr))

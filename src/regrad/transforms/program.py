"""Programs: flat functions of Tensors, compiled by XLA through JAX.

The idea: regrad's own engine traces the body, with JAX tracers inside the Tensors. So rules,
overrides and custom gradients have the same meaning as in eager mode, because the same code binds
them. As a short version of `docs/how_jit_works.py`, take

    step = rg.jit(lambda x: w.assign_add(x) * b)    # w: a Variable, b: a Tensor of the closure
    rg.grad(step)(x)

1. `Program.__call__` finds the values that its body captures. Tensors and arrays of the closure are
   available before (`closure.tensors`). The first trace finds the Variable `w`; it ends with
   `SourceFound` and is repeated with one more input. (The Python still runs once: the second trace
   replays the first, see `replay`.)
2. A `Variant` is the XLA program for one set of watched inputs: here, `x` is watched. Its trace
   runs the body in a `Region`, then the backward pass (`_linearized`). The rules keep the tracers
   that the backward pass has closed over; these tracers become further results of the forward
   program.
3. The call assigns `w` and puts one record on the tape. In the backward pass, this record calls the
   backward program with the kept values, or, at a higher order, a program of the gradient
   (`_derivative`).

Invariants:

* A program has no side effects. Variables are read before the call and assigned after it, under
  `UPDATES`, so that threads never see half of an update.
* Every value on which the body's Python depends is an input, or a part of the key under which `jit`
  finds the program; otherwise the trace raises.
* An array is donated (XLA may overwrite it) only if no other object can hold it. Between the
  donation and the assignment no signal handler runs (`Deferred`), because an exception there would
  lose the Variable. Deferring signals takes longer than allocating a little memory: Variables with
  less than `WORTH` bytes in total are not overwritten.
* Hits of overrides are counted in the trace, and reported to the scopes that are open at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.autodiff.variables import UPDATES, Variable
from regrad.core.interrupts import Deferred
from regrad.core.kernel_errors import LEAKED
from regrad.core.promotion import get_default_dtype
from regrad.core.sharding import layout, to_jax, to_jax_as, trouble
from regrad.core.state import OPEN, State, current, refuse_elsewhere, unfollowed
from regrad.core.tensor import Tensor, wrap
from regrad.errors import DeviceError, DTypeError, StaleError, TraceError
from regrad.transforms.arguments import can_go_in, private
from regrad.transforms.bodies import BodyFunction, pullback, pushforward, with_assigned
from regrad.transforms.closures import Closure
from regrad.transforms.donation import may_donate
from regrad.transforms.region import (
    Flat,
    Overrides,
    Passage,
    Region,
    RegionRule,
    check_guard,
    in_region,
    listed,
    record_region,
    tape_for,
    watched_by,
    watched_places,
)
from regrad.transforms.traces import Body, SourceFound, Trace, find_jax
from regrad.transforms.variants import Variant

if TYPE_CHECKING:
    from regrad.core.backends import Array
    from regrad.transforms.region import CapturedValue

WORTH = 2**18  # bytes of Variables; fewer are replaced, not overwritten
EACH = 2**15  # bytes whose allocation takes as long as passing one more array


class Program:
    """A compiled body, for one state of its closure and of the active overrides.

    JAX distinguishes shapes and dtypes. `sources` are the values that the body captures besides its
    arguments: Tensors, Variables, or places of the closure (ints).

    Places count in one of two lists (`n` is the number of arguments):

        inputs     0 … n - 1: the arguments    from n on: the sources, in their order
        results    0 … trace.count - 1: the body's    then: the new values of `trace.assigned`,
                   then: values that the rules keep, unless a row has them already

    JAX has a trace for each combination of shapes and dtypes; `Variant.split` returns the trace to
    which some results belong.
    """

    def __init__(
        self,
        body: Body,
        name: str,
        *,
        donated: Sequence[int] = (),
        traces: Callable[[Sequence[Array], Sequence[int]], None] = lambda arrays, plainly: None,
        derived: bool = False,
        verify: bool = False,
    ) -> None:
        self.jax: Any = find_jax()
        self.body = body
        self.name = name
        self.donated = donated
        self.traces = traces
        self.verify = verify  # trace again at each call, and compare
        self.derived = derived  # the gradient of another program; its ops are not new hits
        self.reads = False  # a trace may have read arrays of the closure as plain arrays
        self.closure: Closure | None = None
        self.overrides: Overrides = None
        self.sources: list[Any] = []
        self.assigned: list[Variable] = []
        self.overwrites: bool = bool(donated)  # its arrays are large enough to overwrite
        self.variants: dict[Any, Variant] = {}
        self.begun: dict[Any, Trace] = {}  # traces to repeat with more inputs
        self.quick: Variant | None = None  # for calls without active scopes or tapes

    def __call__(
        self, xs: Sequence[Tensor], closure: Closure | None = None, overrides: Overrides = None
    ) -> tuple[list[Tensor], Any]:
        """Return the results as Tensors, and their structure; make assignments and records.

        (JAX does not distinguish overrides here: the key under which `jit` found the program does.)
        """
        with UPDATES, unfollowed() if overrides else nullcontext():
            self._prepare(closure, overrides)
            # Each iteration finds more sources than the one before. Their number is finite, because
            # the body runs once and later iterations replay it.
            while True:
                try:
                    return self._call(xs, current())
                except SourceFound:
                    self.forget()

    @property
    def size(self) -> int:
        """Return the number of traces; at least 1, since a failed trace takes a place as well."""
        return sum(len(variant.traces) for variant in list(self.variants.values())) or 1

    def free(self) -> None:
        """Free the compiled code at once: a Variant and its function refer to each other."""
        for variant in self.variants.values():
            variant.compiled = None
        self.forget()

    def forget(self) -> None:
        """Drop the compiled code, to compile again with more inputs."""
        self.variants.clear()
        self.quick = None

    def call_plainly(self, arrays: Sequence[Any], closure: Closure) -> Any:
        """Return the result of a call without active scopes or tapes, for these arrays."""
        ys, note = self([*map(wrap, arrays)], closure)
        return note(ys)

    def check_quick(self, error: Exception, arrays: Sequence[Any]) -> None:
        """Raise regrad's error for inputs that JAX cannot take; `arrays` are the arguments."""
        self.check_inputs(error, [*map(wrap, arrays), *map(self._value, self.sources)])

    def take(self, variant: Variant, results: Any) -> Any:
        """Assign the Variables and return the results of a generated call."""
        trace, found = variant.split(results)
        for variable, data in zip(trace.assigned, found[trace.count :], strict=False):
            variable._tensor, variable._lent = wrap(data), False
        return trace.note([*map(wrap, found[: trace.count])])

    def _call(self, xs: Sequence[Tensor], state: State | None) -> tuple[list[Tensor], Any]:
        """Collect the inputs, and find out which of them the open tapes watch."""
        if OPEN:
            tensors = [self._value(s) for s in self.sources if not isinstance(s, Variable)]
            refuse_elsewhere(self.name, [*xs, *tensors])
        wanted: tuple[int, ...] = ()
        # For each tape that does not admit every op, take its class and the inputs that it watches:
        # the trace checks each op with such a tape, so the tape is part of the key of the program.
        strict: tuple[Any, ...] = ()
        if state is None or not (state.tapes or state.guard or state.region):
            inputs = [*xs, *[self._value(s) for s in self.sources]]
        else:
            inputs = [in_region(x) for x in (*xs, *map(self._read, self.sources))]
            check_guard(inputs)
            wanted = watched_places(inputs)
            if wanted:
                strict = tuple(watched_by(t, inputs) for t in state.tapes if not t.plain)
                strict = tape_for(inputs), *strict
        if not self.assigned:
            return self._finish(inputs, len(xs), wanted, strict)
        # A signal between the overwriting of a Variable and its assignment would lose the Variable.
        with Deferred():
            try:
                return self._finish(inputs, len(xs), wanted, strict)
            finally:
                for variable in self.assigned:
                    variable._away = False

    def _finish(
        self, inputs: list[Tensor], n: int, wanted: tuple[int, ...], strict: tuple[Any, ...]
    ) -> tuple[list[Tensor], Any]:
        """Run the program, report its hits, record it, and assign its Variables, in this order."""
        variant, layouts = self._variant(n, wanted, strict)
        trace, results = variant.split(variant(inputs))
        if not (wanted or variant.lent or any(layouts)):
            self.quick = variant  # the next such call takes the quick path
        if trace.bindings:
            trace.report(self.overrides, self.derived)
        ys = [wrap(array) for array in results[: trace.count + len(trace.assigned)]]
        if wanted:
            self._record(inputs, n, ys, results, trace)
        for variable, y in zip(trace.assigned, ys[trace.count :], strict=True):
            variable._set(y, lent=bool(wanted))
        return ys[: trace.count], trace.note

    def _variant(
        self, n: int, wanted: tuple[int, ...], strict: tuple[Any, ...]
    ) -> tuple[Variant, tuple[Any, ...]]:
        """Return the variant for a call, and the layouts of the Variables that it assigns."""
        layouts = tuple([layout(v._tensor._data) for v in self.assigned])
        key = self._key(wanted, strict, layouts)
        variant = self.variants.get(key)
        if variant is None:
            variant = self.variants[key] = Variant(self, n, wanted, key[-1])
        return variant, layouts

    def _key(self, wanted: tuple[int, ...], strict: tuple[Any, ...], layouts: Any) -> Any:
        """Return everything except the body on which a variant depends.

        The key is complete. Tapes that admit every op enter it by the inputs that they watch, other
        tapes by themselves. A variant has the layouts of its assigned Variables in its key, because
        JAX's cache of traces does not distinguish them. The key also has whether the variant
        overwrites its inputs.
        """
        return wanted, strict, layouts, self._donates()

    def lower(self, xs: Sequence[Tensor], closure: Closure, overrides: Overrides) -> Any:
        """Return JAX's `Lowered` of the program for these inputs, which is traced but not run."""
        with UPDATES, unfollowed() if overrides else nullcontext():
            self._prepare(closure, overrides)
            while True:
                inputs = [*xs, *map(self._value, self.sources)]
                try:
                    variant, _ = self._variant(len(xs), (), ())
                    lowered = variant.lower(inputs)
                    break
                except SourceFound:
                    self.forget()
            trace = variant.traces[-1]
            if trace.bindings:
                trace.report(overrides, self.derived)
            return lowered

    def _prepare(self, closure: Closure | None, overrides: Overrides) -> None:
        """Add the sources that are active at this call."""
        self.closure, self.overrides = closure, overrides
        # Arrays are sources from the start: unlike Tensors, arrays may be read by functions that no
        # trace sees (`np.sum(array)`). Then their values are compared; see `plainly`.
        if closure is not None and not self.variants and not self.sources:
            self.sources = [i for i in closure.arrays if can_go_in(closure.tensors[i]())]

    def _donates(self) -> bool:
        """Return whether a variant overwrites its inputs: the key of donation.

        The key is complete: donation is worth it (`find`), and JAX does not call the program twice.
        A variant donates no array that a tape watches (`Variant`). The call copies an array that
        other objects may hold (`Variable._lent`), and the program copies a result that occurs twice
        (`set_apart`).
        """
        return self.overwrites and may_donate(self.jax)

    def check_inputs(self, error: Exception, inputs: Sequence[Tensor]) -> None:
        """Raise regrad's error for inputs that JAX cannot take: by kind, dtype or place."""
        if type(error).__name__ == "UnexpectedTracerError":
            raise TraceError(f"{self.name}: {LEAKED}") from None
        if "Unsupported dtype" in str(error):
            raise DTypeError(
                f"{self.name}: JAX has no compiled kernel of this dtype for an op of the function "
                f"({error.args[-1]}) Cast before and after the op, with astype."
            ) from error
        for x in inputs:
            to_jax(x._data)
        sources = [self.source(s) for s in self.sources]
        names = [f"argument {i}" for i in range(len(inputs) - len(sources))]
        for source in sources:
            variable = isinstance(source, Variable)
            names.append(f"the Variable {source.name!r}" if variable else "a Tensor of its closure")
        if (where := trouble(error, inputs, names)) is not None:
            raise DeviceError(f"{self.name}: {where}") from None

    def source(self, source: CapturedValue | int) -> Any:
        """Return the value at a place of the closure, or the source itself."""
        if type(source) is not int:
            return source
        assert self.closure is not None
        return self.closure.tensors[source]()

    def _read(self, source: CapturedValue | int) -> Tensor:
        """Return a source as the open tapes see it."""
        value = self.source(source)
        if isinstance(value, Variable):
            return value._read()
        # (Later writes to the array affect only the next call.)
        return value if isinstance(value, Tensor) else wrap(private(np.asarray(value)))

    def _value(self, source: CapturedValue | int) -> Tensor:
        """Return a source where no tape is open: a Variable's Tensor stays unshared."""
        return source._tensor if isinstance(source, Variable) else self._read(source)

    def begin(self, former: Trace | None) -> Trace:
        """Return a new trace of the body, which counts its own hits."""
        bindings = {k: b.copy() for k, b in (self.overrides or {}).items()} or None
        expected = None if former is None else former.flat.first
        return Trace(self.body, self.name, bindings, expected)

    def find(self, region: Region) -> bool:
        """Record the sources that a trace found, and return whether there are new ones."""
        news = [v for v in region.assigned if v not in self.assigned]
        self.assigned += news
        size = sum(v.size * v.dtype.itemsize + EACH for v in self.assigned)
        self.overwrites = self.overwrites or size >= WORTH
        if region.captured:
            # A value at a place of the closure is identified by the place, not by itself: the next
            # call may find another Tensor there, which is the input then.
            tensors = self.closure.tensors if self.closure is not None else ()
            places = {id(read()): i for i, read in enumerate(tensors)}
            self.sources += [places.get(id(source), source) for source in region.captured]
        return bool(news or region.captured)

    def check_sources(self, region: Region) -> None:
        """Raise if a trace captured a value that the program does not have as an input."""
        if region.captured:
            raise StaleError(
                f"{self.name} is stale: a new trace uses {listed(region.captured)}, which its "
                "program does not have"
            )

    def plainly(self, region: Region) -> list[int]:
        """Return the places of arrays that no op of a trace used; the trace may have read them."""
        if self.closure is None:
            return []
        arrays = [(i, self.source(i)) for i in self.closure.arrays]
        return [i for i, array in arrays if id(array) not in region.operands]

    # -- gradients ---------------------------------------------------------------------------

    def _record(
        self, inputs: list[Tensor], n: int, ys: list[Tensor], results: Sequence[Array],
        trace: Trace,
    ) -> None:  # fmt: skip
        """Put the program on the tapes; its backward pass is the program's own backward program.

        `trace.kept` lists where each constant of the backward program is found: in which pool, and
        at which place there (for "constant", the array itself).
        """
        closure, overrides = self.closure, self.overrides
        pools = {
            "input": lambda i: to_jax(inputs[i]._data),
            "result": lambda i: results[i],
            "constant": lambda array: array,
        }
        kept = [pools[pool](i) for pool, i in trace.kept]

        def answer(
            inputs: Sequence[Tensor], passage: Passage, dys: Sequence[Tensor]
        ) -> Sequence[Tensor]:
            given = [*inputs, *dys]
            # A tape that watches the inputs needs the derivative of this walk. The kept values are
            # plain numbers by now, so a separate program computes the gradient from the inputs. The
            # same program is used if a result has no gradient, because the backward program is for
            # all results.
            if watched_places(given) or passage is not trace.passage:
                derivative = self._derivative(trace, n, passage, pullback, "the gradient of")
                return derivative(given, closure, overrides)[0]
            trace.report(overrides, self.derived, forward=False)
            pairs = zip(dys, trace.dtypes, strict=True)
            dxs = trace.backward(kept, [to_jax_as(dy._data, dtype) for dy, dtype in pairs])
            return [wrap(dx) for dx in dxs]

        def push(
            inputs: Sequence[Tensor], passage: Passage, dxs: Sequence[Tensor]
        ) -> Sequence[Tensor]:
            derivative = self._derivative(trace, n, passage, pushforward, "the derivative of")
            return derivative([*inputs, *dxs], closure, overrides)[0]

        record_region(RegionRule(self.name, inputs, trace.passage, answer, push), ys)

    def _derivative(
        self, trace: Trace, n: int, passage: Passage, way: Callable[..., Flat], what: str
    ) -> Program:
        """Return the program of a gradient (by `pullback`) or of tangents (by `pushforward`).

        It is an ordinary Program, so it can be differentiated again, to any order.
        """
        key = way, n, tuple(passage.wanted), tuple(passage.reached), get_default_dtype()
        if key not in trace.derivatives:
            trace.derivatives[key] = made = Program(
                lambda xs: (run(xs), None), f"{what} {self.name}", derived=True
            )
            known = list(self.sources)

            def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
                sources = [made.source(s) for s in known]
                overrides = current().overrides  # pyright: ignore[reportOptionalMemberAccess]
                body = BodyFunction(
                    with_assigned(trace.flat, trace.assigned), n, sources, overrides, self.name
                )
                return way(body, n + len(sources), passage)(tensors)

        return trace.derivatives[key]

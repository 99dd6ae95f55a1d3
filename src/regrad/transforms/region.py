"""Regions: bodies that are compiled, batched, repeated, or run again.

The idea: a user's body (of `jit`, `scan`, `cond`, `vmap`, `checkpoint`) becomes *one* record of the
tapes outside, whatever it does inside. Take

    w = rg.Variable(2.0)
    b = rg.tensor(1.0)
    rg.scan(lambda carry, x: (carry * w + b, None), init, xs)

The step receives `carry` and `x`, but it also uses `w` and `b`. While it runs, a `Region` is open.
Every op calls `Region.enter` to get the stand-ins of its operands inside, and every Variable calls
`Region.read` to get its value inside. In this way the region finds that the loop has four inputs
(`init`, `xs`, `w`, `b`) and not two. Assignments to Variables in the body become further outputs.
Then `record_region` puts one record on the tapes, `(init, xs, w, b)` to `(carry, ys)`, whose rule
(`RegionRule`) gets the gradient from the code that made the region.

Invariants:

* Tapes outside record nothing of the inside. They are suspended. The region's own `RegionTape`s
  watch the same values and find out which inputs lead to which outputs (`Passage`).
* Ids only grow. A Tensor is from outside exactly if its id is smaller than the region's `mark`.
* The stand-in for an outside object has an id just above `mark` (`_early_id`). The region finds it
  by the `id()` of the outside object, which the region keeps alive.
* Regions nest. An inner region captures through the outer region, which captures the same value
  first.
* The gradient of a region is the gradient of its body under the overrides that were active when it
  ran: a traced body is replayed (see `replay`), and the Python of an eager `checkpoint` runs again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import repeat
from operator import or_
from typing import TYPE_CHECKING, Any, Literal

from regrad.autodiff.variables import Variable
from regrad.core.backends import BACKENDS, JAX, is_traced
from regrad.core.bindings import Overrides
from regrad.core.containers import replaced
from regrad.core.dispatch import in_region
from regrad.core.registry import Input, Op
from regrad.core.rule import Rule
from regrad.core.state import OPEN, State, current, in_state, next_id, open_tapes
from regrad.core.tape import Tape, record_of
from regrad.core.tensor import Tensor, wrap
from regrad.core.walk import UNUSED
from regrad.errors import ArgumentError, GraphError, TraceError
from regrad.graph.graph import is_symbolic
from regrad.transforms.trail import capturing

if TYPE_CHECKING:
    import numpy as np

    from regrad.core.backends import Array, Namespace
    from regrad.core.protocols import VariableLike
    from regrad.core.tape import Record
    from regrad.transforms.trail import Reached, Trail

Flat = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # a body without containers
CapturedValue = Tensor | Variable  # a value that a body captures

# The ids of stand-ins are mark + STEP, mark + 2 * STEP, …. They lie between two whole numbers, so
# they differ from the ids of all Tensors. They are exact, because ids use far fewer than 52 bits.
#
#     0 … mark - 1         mark         mark + STEP, …         mark + 1, …
#     made before it:      the region   its stand-ins:         made later: inside, or
#     from outside                      inside                 the mark of a region in it
#
# For an inner region, the stand-ins are from outside: their ids are smaller than its mark.
STEP = 2.0**-20


class Region:
    """One run of a body: the values that it captures, and the Variables that it assigns.

    `stand_ins` maps outer Tensors, by `id()`, to their stand-ins inside; `values` are the values of
    Variables inside. The region adds missing entries as it finds them, and lists them in
    `captured`. The region's tapes watch the same values as the suspended tapes.
    """

    draws = True  # a Generator may be used where nothing is traced

    def __init__(
        self,
        kind: str,
        stand_ins: Mapping[int, Tensor] | None = None,
        values: Mapping[Variable, Tensor] | None = None,
        tapes: Sequence[RegionTape] = (),
        traced: bool = False,
        around: State | Literal["here"] | None = "here",
    ) -> None:
        self.kind = kind
        self.around: State | None = current() if around == "here" else around
        self.traced: bool = traced or ((outer := self.outer) is not None and outer.traced)
        self.tapes = tapes
        self.mark: int = next_id()
        self.count: int = 0
        self.stand_ins: dict[int, Tensor] = dict(stand_ins or {})
        self.values: dict[Variable, Tensor] = dict(values or {})
        self.captured: list[CapturedValue] = []
        self.assigned: list[Variable] = []
        self.entries: dict[int, Tensor] = {}  # the first stand-in of each of `captured`
        self.drawn: dict[int, tuple[Any, Any]] = {}  # Generators, with their states
        self.alive: list[Any] = []  # keeps objects alive, so that no id() in `stand_ins` is reused
        self.capture: Any = None  # the capture or trail of the running body
        self.lasting = False  # the run makes a program for many calls
        self.operands: set[int] = set()  # arrays used as operands of ops, by id()

    def swap(self, capture: Trail | None) -> Any:
        """Activate a capture, or none, and return the previous one."""
        self.capture, before = capture, self.capture
        return before

    def did(self, *step: Any) -> None:
        """Record an op that ran: its type, rule, inputs, attributes, result, and layout."""
        if self.capture is not None:
            self.capture.did(*step)

    def _reached(self, source: Reached, inner: Tensor) -> Tensor:
        """Report a value from outside to the capture."""
        if self.capture is not None:
            self.capture.source(source, inner)
        return inner

    @property
    def outer(self) -> Region | None:
        """Return the enclosing region, or None."""
        return None if self.around is None else self.around.region

    def enter(self, x: Tensor) -> Tensor:
        """Return the stand-in for a Tensor, or the Tensor itself if it was made inside."""
        if not 0 <= x._id < self.mark:  # (regrad's own constants have negative ids.)
            return x
        inner = self.stand_ins.get(id(x))
        if inner is None:
            # Enclosing regions capture it first, so that it is an input of each of them as well.
            outside = x if self.outer is None else self.outer.enter(x)
            inner = self.stand_ins[id(x)] = self.entries[id(x)] = self._stand_in(outside)
            self.captured.append(x)
        return self._reached(x, inner)

    def first(self, source: Reached, number: float) -> Any:
        """Return where a replayed body looks up a value from outside (see `ReplayRegion`)."""
        return source

    def read(self, variable: Variable) -> Tensor:
        """Return the value of a Variable at this point of the body."""
        if variable not in self.values:
            # Read in the state outside: the enclosing region captures it, and outer tapes watch it.
            with in_state(self.around):
                value = variable._read()
            if self.traced or self.tapes:
                value = self._stand_in(value)
            else:  # the tapes outside go on, and identify the value by its id
                # so that it does not become a second, permanent input
                self.stand_ins[id(value)] = value
                self.alive.append(value)
            self.values[variable] = self.entries[id(variable)] = value
            self.captured.append(variable)
        if self.capture is not None:
            self.capture.read(variable, self.values[variable])
        return self.values[variable]

    def assign(self, variable: Variable, value: Tensor) -> None:
        """Assign a Variable; the new value leaves the region as an output."""
        # The Variable itself is untouched: if the body fails or is traced again, nothing has
        # changed.
        self.values[variable] = value
        if variable not in self.assigned:
            self.assigned.append(variable)
        if self.capture is not None:
            self.capture.assign(variable, value)

    def array(self, value: Array) -> Tensor:
        """Return the stand-in for an array that the body uses, or a copy of its current content.

        It must be a copy, because the owner may write to the array before the backward pass.
        """
        inner = self.stand_ins.get(id(value))
        if inner is not None:
            self.operands.add(id(value))
            return self._reached(value, inner)
        if self.outer is not None:
            return self._reached_if_traced(value, self.outer.array(value))
        return self._reached_if_traced(value, wrap(BACKENDS[type(value)].own(value)))

    def _reached_if_traced(self, value: Array, inner: Tensor) -> Tensor:
        """Report an array without values to the capture; any other array is a constant."""
        return self._reached(value, inner) if is_traced(inner._data) else inner

    def stand_in_for(self, source: CapturedValue) -> Tensor:
        """Return the stand-in for a captured value, as it was before any assignment."""
        return self.entries[id(source)]

    def refuse_read(self, x: Tensor) -> None:
        """Raise if a program would depend on the values of a Tensor from outside."""
        # The outermost region decides: a `cond` inside a `jit` is called as often as the `jit`.
        root = self
        while root.outer is not None:
            root = root.outer
        if root.lasting and 0 <= x._id < root.mark:
            raise TraceError(
                "bool(), float(), .numpy(), an if or the like read the values of a Tensor "
                f"({x.dtype}, shape {x.shape}) from outside under {root.kind}. The program would "
                "have these values built in, and would not see another Tensor in its place. "
                "Compute with regrad's functions, or keep a Python number there instead."
            )

    def generator(self, generator: np.random.Generator) -> None:
        """Record the state of a NumPy Generator, for when this body runs again.

        Raises if its numbers would be drawn once for many calls.
        """
        if self.traced or not self.draws:
            raise ArgumentError(
                f"a NumPy Generator cannot be used under {self.kind}: its numbers would be drawn "
                "once for all calls and examples. Draw them outside and pass them in, or pass a "
                "JAX key (jax.random.key(0)) as an argument, and split it for each draw."
            )
        self.drawn.setdefault(id(generator), (generator, generator.bit_generator.state))

    def make_stand_in(self, x: Tensor) -> Tensor:
        """Return a stand-in for a value from outside, watched by the tapes that watch the value."""
        y = type(x)()
        y._data = x._data
        y._id = self._early_id()  # pyright: ignore[reportAttributeAccessIssue]
        for tape in self.tapes:
            tape.watch(y, x)
        return y

    def _stand_in(self, x: Tensor) -> Tensor:
        if not (self.tapes or self.traced):
            return x  # no tape needs to distinguish the inside from the outside
        if is_symbolic(x):
            raise GraphError(
                f"{self.kind}: the function uses {x._data.name!r}, a tensor of a graph, through "
                "its closure, and none of its arguments belongs to the graph. Pass the tensor as "
                "an argument; the function then becomes a part of the graph."
            )
        y = self.make_stand_in(x)
        return self._without_values(y) if self.lasting else y

    def _without_values(self, x: Tensor) -> Tensor:
        """Trace a future input of a program, so that no Python can depend on its values."""
        import jax

        library = BACKENDS[type(x._data)].name
        if library != "torch":  # the program rejects PyTorch data later
            data = JAX.from_numpy(x._data) if library == "numpy" else x._data
            # This is JAX's cheapest op whose result is a tracer; XLA removes it.
            x._data = jax.lax.optimization_barrier(data)
        return x

    def _early_id(self) -> float:
        """Return an id as old as the region: for inner regions, it comes from outside."""
        self.count += 1
        return self.mark + self.count * STEP

    def refuse_variable(self, name: str | None) -> None:
        """Raise for a Variable that the body creates."""
        raise ArgumentError(
            f"a Variable{f' ({name!r})' if name else ''} is created inside {self.kind}, where the "
            "body may run any number of times, or be traced once for many calls. Create "
            "Variables outside, once, and assign to them inside."
        )


class OpenRegion(Region):
    """A region in which the tapes outside go on: they identify Tensors by their ids."""

    def __init__(self, kind: str, *stand_ins: Any) -> None:
        super().__init__(kind, *stand_ins)
        self.capture: Any = capturing()

    def _stand_in(self, x: Tensor) -> Tensor:
        return x


def is_watched(x: Tensor, state: State) -> bool:
    """Return whether a tape of this state watches a Tensor."""
    return any(x._id in tape.watched for tape in state.tapes)


class RegionTape(Tape):
    """The tape of a body: it watches everything that a suspended tape watches."""

    __slots__ = ("levels", "outer")

    def __init__(self, outer: Sequence[Tape]) -> None:
        super().__init__()
        self.outer: Sequence[Tape] = outer
        self.levels: int = 0

    def walks_back(self) -> bool:
        return any(tape.walks_back() for tape in self.outer)

    def wants(self, variable: VariableLike) -> bool:
        return any(tape.wants(variable) for tape in self.outer)

    def watch(self, stand_in: Tensor, x: Tensor) -> None:
        """Watch the stand-in for x, if a tape outside watches x."""
        if any(x._id in tape.watched for tape in self.outer):
            self.watched.add(stand_in._id)


class DependenceTape(RegionTape):
    """A tape that only records which ids lead to which, and keeps no value.

    It is enough if the body will be replayed for its gradient. Each Tensor of the body can be freed
    after its last use in the body.
    """

    __slots__ = ()

    def __init__(self, outer: Sequence[Tape]) -> None:
        super().__init__(outer)
        self.entries: Any = Dependences(self.watched)


class ForwardingTape(DependenceTape):
    """The tape inside for a suspended tape that does not admit every op.

    A tape of forward mode, for example, rejects rules that are not linear. It checks op by op here;
    outside, it would have to check one region without any details.
    """

    __slots__ = ()

    plain = False

    def admit(self, op: Op, rule: Rule, wanted: frozenset[int]) -> bool:
        admitted = [tape.admit(op, rule, wanted) for tape in self.outer]
        return any(admitted)  # every tape checks the op first

    def read_plainly(self) -> None:
        for tape in self.outer:
            tape.read_plainly()


class Dependences(list[Any]):
    """The inputs on which each id depends; replaces the records of a tape that keeps none.

    The masks have a bit for each id in `inputs` that no op has made (for example watched ids). For
    the inputs `a` and `b` and the step `c = a * b, d = exp(b)` they are
    `a: 01, b: 10, c: 11, d: 10`.
    """

    def __init__(self, inputs: set[Any], records: Iterable[Record] = ()) -> None:
        super().__init__()
        self.inputs = inputs
        self.masks: dict[Any, int] = {}
        self.bit: int = 1  # the bit of the next input
        for record in records:
            self.append(record)

    def append(self, record: Record) -> None:
        for inputs, outputs in links_of(record):
            mask = reduce(or_, map(self.of, inputs), 0)
            for key in outputs:
                self.masks[key] = self.masks.get(key, 0) | mask

    def of(self, key: Any) -> int:
        """Return the mask of an id."""
        if key not in self.masks:
            if key not in self.inputs:
                return 0
            self.masks[key], self.bit = self.bit, self.bit << 1
        return self.masks[key]


def links_of(record: Record) -> Iterable[tuple[Sequence[Any], Sequence[Any]]]:
    """Return which ids lead to which through a record, per output if its rule can separate them."""
    inputs, outputs = record.inputs, record.outputs
    if not isinstance(outputs, tuple):
        return ((inputs, (outputs,)),)
    if isinstance(record.rule, RegionRule):
        edges = record.rule.passage.edges.items()
        return [((inputs[i],), [outputs[j] for j in places]) for i, places in edges]
    if record.rule.each:
        return [((i,), (o,)) for i, o in zip(inputs, outputs, strict=True)]
    return ((inputs, outputs),)


def inner_tapes(kind: type[RegionTape], state: State | None) -> tuple[RegionTape, ...]:
    """Return the tapes of a body: one of this class, and one for each strict tape outside."""
    outer = () if state is None else state.tapes
    if state is None or not outer:
        return ()
    main = kind(outer)
    main.levels = sum(tape.levels for tape in open_tapes(state))
    return main, *[ForwardingTape((t,)) for t in outer if not t.plain]


def run_inside(
    body: Callable[[], Any], region: Region, overrides: Overrides, tapes: tuple[Tape, ...] = ()
) -> Any:
    """Run a body in a region, with only these tapes."""
    new = [tape for tape in tapes if tape not in OPEN]
    close = partial(deque, map(OPEN.pop, new, repeat(None)), 0)
    try:
        OPEN.update(dict.fromkeys(new))
        with in_state(State(tapes, overrides, None, region)):
            return body()
    finally:
        close()  # close in a single call: a signal handler may raise after any call


def results(flat: Flat, xs: Sequence[Tensor], region: Region) -> list[Tensor]:
    """Return the results of a flat body that runs in a region.

    They enter the region like inputs of ops: a body may return a Tensor from outside unchanged.
    """
    return [region.enter(y) for y in flat(xs)]


# -- the record outside ----------------------------------------------------------------------------


def _no_kernel(xp: Namespace, xs: Sequence[Array]) -> Any:
    raise AssertionError("a region runs its own body")


REGION = Op("_Region", "region", _no_kernel, [Input("xs", "many")], several=True)


class Passage:
    """The wanted inputs of a region and the outputs that they reach, as places.

    `edges` maps each input to the outputs that it reaches: `{input: outputs}`. Without edges, each
    input is assumed to reach all outputs. With `(w, x, i) -> (w * x, i + 1)`, where tapes watch `w`
    and `x`, the edges are `{0: [0], 1: [0]}`, `wanted` is [0, 1], and `reached` is [0].

    A backward pass uses only the part that leads to outputs with a gradient (`narrowed`).
    """

    def __init__(
        self,
        wanted: Sequence[int],
        reached: Sequence[int],
        edges: Mapping[int, Sequence[int]] | None = None,
        whole: Passage | None = None,
    ) -> None:
        self.wanted: list[int] = list(wanted)
        self.reached: list[int] = list(reached)
        self.edges: dict[int, list[int]] | Mapping[int, Sequence[int]] = (
            dict.fromkeys(self.wanted, self.reached) if edges is None else edges
        )
        self.whole: Passage = whole or self

    def narrowed(self, used: Collection[int]) -> Passage:
        """Return the part that leads to some of the outputs; its `whole` is the full passage."""
        if len(used) == len(self.reached):
            return self
        edges = {i: [y for y in places if y in used] for i, places in self.edges.items()}
        edges = {i: places for i, places in edges.items() if places}
        return Passage([*edges], [*used], edges, self.whole)


Answer = Callable[[Sequence[Tensor], Passage, Sequence[Tensor]], Sequence[Any]]


class RegionRule(Rule):
    """The rule for gradients and tangents of a region.

    `answer(inputs, passage, dys)` maps the gradients of the reached outputs to the gradients by the
    wanted inputs. `push(inputs, passage, dxs)` maps the tangents of the wanted inputs to the
    tangents of the reached outputs. `inputs` are all Tensors outside.

    An unused output has no gradient. The passage is narrowed then: zeros for this output would run
    rules that are on no path.
    """

    sparse = True

    def __init__(
        self, name: str, inputs: Sequence[Tensor], passage: Passage, answer: Answer, push: Answer
    ) -> None:
        self.name = name
        self.inputs: list[Tensor] = list(inputs)
        self.passage = passage
        self.answer = answer
        self.push = push

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return True  # its body was checked op by op; see RegionTape

    def pull(self, record: Record, dy: Any, wanted: Sequence[int]) -> Any:
        passage = self.passage.narrowed([i for i in self.passage.reached if dy[i] is not None])
        given = self.answer(self.inputs, passage, [dy[i] for i in passage.reached])
        return [(0, replaced([UNUSED] * len(self.inputs), passage.wanted, given))]


def record_region(rule: RegionRule, ys: Sequence[Tensor]) -> None:
    """Put a region on the open tapes that watch an input of it."""
    state = current()
    passage = rule.passage
    if state is None or not passage.wanted or not passage.reached:
        return
    # No tape watches the id 0. It marks inputs that lead to no output, and outputs to which no
    # input leads; the backward pass skips both.
    keys = {i: rule.inputs[i]._id for i in passage.wanted}
    ids = tuple(keys.get(i, 0) for i in range(len(rule.inputs)))
    specs = [(x._data.shape, x._data.dtype) for x in rule.inputs]
    reached = set(passage.reached)
    out = tuple(y._id if i in reached else 0 for i, y in enumerate(ys))
    layout = (tuple(range(len(ids))),)
    output_specs = [(y._data.shape, y.dtype) for y in ys]
    entry = record_of(REGION, rule, {}, ids, specs, (), out, None, layout, output_specs)
    for tape in state.tapes:
        leading = [i for i, key in keys.items() if key in tape.watched]
        if leading:
            tape.admit(REGION, rule, frozenset({0}))
            tape.entries.append(entry)
            # Watch only the reached outputs: a loop may carry an index next to the weights.
            tape.watched.update(ys[j]._id for i in leading for j in passage.edges[i])


def check_guard(inputs: Sequence[Tensor]) -> None:
    """Raise if the region captures a value that the surrounding custom function did not receive."""
    state = current()
    if state is not None and state.guard is not None:
        state.guard.check(REGION, inputs)


def passage_between(
    tape: Tape, ids: Sequence[Any], wanted: Sequence[int],
    outputs: Sequence[Sequence[Any]], loops: Sequence[tuple[int, int]] = (),
) -> Passage:  # fmt: skip
    """Return which of the wanted inputs of a body reach which of its outputs.

    `ids` are the ids of the inputs inside. `outputs` has the ids of the results, once for each body
    of which one will count. `loops` are pairs (result, input) that connect a carry to its next
    step.
    """
    found: Any = tape.records
    if not isinstance(found, Dependences):
        found = Dependences(set(ids), found)
    masks = [reduce(or_, map(found.of, of_bodies), 0) for of_bodies in zip(*outputs, strict=True)]
    # (One pass over the pairs is enough for chains of carries as well: Warshall's algorithm.)
    for y, x in loops:
        bit = found.of(ids[x])
        masks = [mask | masks[y] if mask & bit else mask for mask in masks]
    edges = {i: [y for y, mask in enumerate(masks) if mask & found.of(ids[i])] for i in wanted}
    edges = {i: places for i, places in edges.items() if places}
    return Passage([*edges], sorted(set().union(*edges.values())), edges)


def tape_for(inputs: Sequence[Tensor]) -> type[RegionTape]:
    """Return the class of tape for a body: one that keeps values, if gradients need them."""
    state = current()
    tapes = () if state is None else state.tapes
    back = [tape for tape in tapes if not tape.watched.isdisjoint([x._id for x in inputs])]
    return RegionTape if any(tape.walks_back() for tape in back) else DependenceTape


def listed(sources: Sequence[CapturedValue]) -> str:
    """Return the names of the values that a body captures, for messages."""
    names = [f"the Variable {s.name!r}" for s in sources if isinstance(s, Variable)]
    return ", ".join(names) or "a Tensor of its closure"


def watched_places(inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Return which of these Tensors the open tapes watch."""
    state = current()
    if state is None or not state.tapes:
        return ()
    return tuple(i for i, x in enumerate(inputs) if is_watched(x, state))


def in_trace(xs: Iterable[Tensor]) -> bool:
    """Return whether a body that JAX compiles is open, or one of these Tensors is traced."""
    state = current()
    inside = state is not None and state.region is not None and state.region.traced
    return inside or any(is_traced(x._data) for x in xs)


def watched_by(tape: Tape, xs: Sequence[Tensor]) -> tuple[int, ...]:
    """Return which of these Tensors one tape watches."""
    return tuple(i for i, x in enumerate(xs) if x._id in tape.watched)


def read_source(source: CapturedValue) -> Tensor:
    """Return the Tensor that a body takes from a source, as the tapes outside see it."""
    return source._read() if isinstance(source, Variable) else in_region(source)

"""Runs of bodies in regions, and bodies as functions of everything that they use.

`BodyRun` is a run that becomes one record outside. Its gradient needs the body as a function: a
traced body is replayed, and the Python of an eager checkpoint runs again (see `replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from regrad.autodiff.variables import Variable
from regrad.core.backends import is_inexact
from regrad.core.dispatch import alias, in_region
from regrad.core.name_scopes import PATH, Path, in_path
from regrad.core.promotion import gradient_dtype, widest
from regrad.core.pullback import or_zeros, pulled
from regrad.core.state import current
from regrad.core.tensor import Tensor, wrap
from regrad.transforms.forward import pushed
from regrad.transforms.region import (
    Answer,
    CapturedValue,
    DependenceTape,
    Flat,
    OpenRegion,
    Overrides,
    Passage,
    Region,
    RegionRule,
    RegionTape,
    check_guard,
    inner_tapes,
    passage_between,
    read_source,
    record_region,
    results,
    run_inside,
    watched_places,
)
from regrad.transforms.steps import distinct, replaying
from regrad.transforms.trail import capturing

if TYPE_CHECKING:
    from regrad.core.backends import Array
    from regrad.core.state import State


class BodyRun:
    """One run of a body: the values that it captured, and which inputs lead to which outputs.

    `xs` are its arguments as Tensors outside. Branches call `run` for several bodies, of which only
    one will count. `finish` puts the record on the tapes.
    """

    def __init__(
        self,
        kind: str,
        xs: Sequence[Tensor],
        *,
        traced: bool,
        tape: type[RegionTape] = DependenceTape,
    ) -> None:
        self.state: State | None = current()
        self.kind = kind
        self.xs: list[Tensor] = [in_region(x) for x in xs]
        self.overrides: Overrides = None if self.state is None else self.state.overrides
        self.tapes: tuple[RegionTape, ...] = inner_tapes(tape, self.state)
        self.region: Region = Region(kind, tapes=self.tapes, traced=traced)
        self.inner: list[Tensor] = [self.region.make_stand_in(x) for x in self.xs]
        self.watched: set[Any] | set[int] = set() if not self.tapes else self.tapes[0].watched
        self.outputs: list[list[int]] = []  # ids by place; one list per run

    def stand_ins(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return the arguments inside the region, with these arrays; stand-ins keep their ids."""
        made = [wrap(array) for array in arrays]
        for y, x in zip(made, self.inner, strict=True):
            y._id = x._id
        return made

    def run(self, flat: Flat, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a body in the region."""
        body = partial(results, flat, xs, self.region)
        ys = run_inside(body, self.region, self.overrides, self.tapes)
        self.outputs.append([y._id for y in ys])
        return ys

    @property
    def inputs(self) -> list[Tensor]:
        """Return all inputs of the body as Tensors outside: its arguments and its sources."""
        return [*self.xs, *map(read_source, self.sources)]

    @property
    def sources(self) -> list[CapturedValue]:
        """Return the Tensors and Variables that the body captured."""
        return self.region.captured

    def as_function(self, flat: Flat, assigned: Sequence[Variable] = ()) -> BodyFunction:
        """Return the body as a function of everything it used; it also returns its assignments."""
        return BodyFunction(
            with_assigned(flat, assigned), len(self.xs), self.sources, self.overrides, self.kind
        )

    def finish(
        self,
        ys: Sequence[Array],
        answer: Answer,
        push: Answer,
        repeat: Flat,
        loops: Sequence[tuple[int, int]] = (),
        opaque: bool = False,
    ) -> list[Tensor]:
        """Record the results, and return them as Tensors outside.

        `answer` and `push` have the same meaning as in `RegionRule`. `repeat` runs the region on
        other inputs. `loops` are pairs (result, argument) that connect a carry to its next step. In
        an `opaque` region, each input may lead to each output, because a rule replaces the gradient
        of the body.
        """
        results = [wrap(y) for y in ys]
        inputs = self.inputs
        check_guard(inputs)
        wanted = watched_places(inputs) if self.tapes else ()
        rule = None
        if wanted:
            passage = self.passage(wanted, loops)
            passage = Passage(passage.wanted, passage.reached) if opaque else passage
            rule = RegionRule(self.kind, inputs, passage, replaying(answer), replaying(push))
        capture = capturing()
        if capture is not None:
            capture.region(self.kind, inputs, results, replaying(repeat), rule)
        if rule is not None:
            record_region(rule, results)
        return results

    def passage(self, wanted: Sequence[int], loops: Sequence[tuple[int, int]] = ()) -> Passage:
        """Return which of the wanted inputs reach which outputs, over all runs that count."""
        return passage_between(self.tapes[0], self.ids, wanted, self.outputs, loops)

    @property
    def ids(self) -> list[Any]:
        """Return the ids of the stand-ins for all that the body used, in the order of `inputs`."""
        stand_ins = [self.region.stand_in_for(s) for s in self.sources]
        return [x._id for x in (*self.inner, *stand_ins)]


def with_assigned(flat: Flat, assigned: Sequence[Variable]) -> Flat:
    """Return a body that also returns the values that it leaves in these Variables."""

    def with_values(xs: Sequence[Tensor]) -> Sequence[Tensor]:
        ys = list(flat(xs))
        region = current().region  # pyright: ignore[reportOptionalMemberAccess]
        return [*ys, *[region.read(v) for v in assigned]]

    return with_values if assigned else flat


def until_all_are_known(assigned: list[Variable], run: Callable[[], tuple[BodyRun, Any]]) -> Any:
    """Run a body until it assigns only these Variables, to which new ones are added.

    A loop or branch carries the Variables that its body assigns, and only a run can find them.
    """
    while True:
        body_run, result = run()
        news = [v for v in body_run.region.assigned if v not in assigned]
        if not news:
            return result
        assigned += news


# -- running again ---------------------------------------------------------------------------------


class BodyFunction:
    """A body that ran once, as a function of everything that it used: `f([*xs, *captured])`.

    It runs under the overrides that were active in the first run. Its assignments to Variables are
    not repeated.
    """

    def __init__(
        self,
        f: Flat,
        count: int,
        captured: Sequence[CapturedValue],
        overrides: Overrides,
        kind: str,
    ) -> None:
        self.f = f
        self.count = count
        self.captured: list[CapturedValue] = list(captured)
        self.overrides: Overrides = overrides_for_replay(overrides)
        self.path: Path = PATH.get()
        self.kind = kind

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        # A Tensor that comes twice (for example an argument that is also captured) is two inputs.
        tensors = distinct([in_region(x) for x in tensors])
        pairs = list(zip(self.captured, tensors[self.count :], strict=True))
        stand_ins = {id(s): x for s, x in pairs if not isinstance(s, Variable)}
        # An argument without a gradient, or the value of a Variable, may be the same object as a
        # captured Tensor that has a gradient.
        own = lambda x: alias(x) if id(x) in stand_ins else x  # noqa: E731
        values = {s: own(x) for s, x in pairs if isinstance(s, Variable)}
        xs = [own(x) for x in tensors[: self.count]]
        region = OpenRegion(self.kind, stand_ins, values)
        tapes = () if (state := current()) is None else state.tapes
        body = partial(results, self.f, xs, region)
        with in_path(self.path):
            return run_inside(body, region, counted_now(self.overrides), tapes)


def overrides_for_replay(overrides: Overrides) -> Overrides:
    """Return the same overrides for ops that are created again; these ops are not new hits."""
    return overrides and {key: binding.repeat() for key, binding in overrides.items()}


def counted_now(overrides: Overrides) -> Overrides:
    """Return the same overrides, whose rules count in an active scope that has them as well.

    The derivative of a program is a program with its own hits, and it replays bodies of the first
    program.
    """
    now = (state := current()) and state.overrides
    if not now or not overrides:
        return overrides
    shared = {k: (now[k], b) for k, b in overrides.items() if k in now}
    same = {k: a for k, (a, b) in shared.items() if a.rule is b.rule and a.once == b.once}
    return {**overrides, **(overrides_for_replay(same) or {})}


def pullback(f: Flat, count: int, passage: Passage) -> Flat:
    """Return the gradient of a flat function: it maps (xs…, dys…) to gradients by the wanted xs.

    dys are the gradients of the reached outputs, in order. Unconnected inputs get zeros. The dtypes
    are `gradient_dtype`, with the widest dtype of xs and ys.
    """
    wanted, reached = passage.wanted, passage.reached

    def pull(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        xs = tensors[:count]
        ys, dxs = pulled(f, xs, wanted, tensors[count:], reached)
        wide = widest((*xs, *ys))
        return [
            or_zeros(dx, xs[i], gradient_dtype(xs[i], wide))
            for i, dx in zip(wanted, dxs, strict=True)
        ]

    return pull


def dual(f: Flat, count: int, wanted: Sequence[int], reached: Sequence[int]) -> Flat:
    """Return a flat function with its forward derivative: (xs…, dxs…) to (ys…, dys…).

    dxs are the tangents of the inputs at the places `wanted`. dys are the tangents of the outputs
    `reached`: zeros where an output is not connected.
    """

    def push(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        ys, dys = pushed(f, tensors[:count], wanted, tensors[count:])
        return [*ys, *[or_zeros(dys[i], ys[i], ys[i].dtype) for i in reached]]

    return push


def pushforward(f: Flat, count: int, passage: Passage) -> Flat:
    """Return the forward derivative of a flat function: (xs…, dxs…) to the reached tangents."""
    both = dual(f, count, passage.wanted, passage.reached)
    return lambda tensors: both(tensors)[-len(passage.reached) :]


def both_ways(derivative: Callable[..., Sequence[Tensor]]) -> tuple[Answer, Answer]:
    """Return the `answer` and `push` of a region whose derivative is a region of the same kind.

    `derivative(way, inputs, passage, given)` runs this derivative: of the body's `pullback` or of
    its `pushforward`.
    """
    return partial(derivative, pullback), partial(derivative, pushforward)


def carries_that_move(passage: Passage, carry: Sequence[Tensor]) -> list[int]:
    """Return the carries of a loop (its first inputs and outputs) with tangents in some step."""
    places = {*passage.wanted, *chain.from_iterable(passage.edges.values())}
    return [i for i, x in enumerate(carry) if i in places and is_inexact(x.dtype)]

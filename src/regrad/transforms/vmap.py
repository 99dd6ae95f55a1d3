"""`vmap`: apply a function of single examples to many examples at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from regrad.autodiff.gradients import callable_or_raise
from regrad.core import containers
from regrad.core.backends import BACKENDS
from regrad.core.made import remade
from regrad.core.placed import Counting
from regrad.core.places import Counts
from regrad.core.pytrees import NAMESPACE
from regrad.core.shapes import normalized_axis
from regrad.core.sharding import to_jax
from regrad.core.signatures import helpful
from regrad.core.state import current, masked
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError, TraceError, kind
from regrad.ops.array import moveaxis
from regrad.ops.getitem import getitem
from regrad.ops.joining import stack
from regrad.ops.reduction import sum as sum_of
from regrad.transforms.arguments import Body, OpenedArguments
from regrad.transforms.bodies import BodyRun, both_ways, pullback
from regrad.transforms.closures import Closure
from regrad.transforms.region import (
    Flat,
    OpenRegion,
    Passage,
    Region,
    check_guard,
    in_trace,
    read_source,
    results,
    run_inside,
)
from regrad.transforms.replay import Captured

if TYPE_CHECKING:
    from regrad.core.backends import Array
    from regrad.transforms.trail import Reached

Axes: TypeAlias = Any  # an int, None, or containers of these

P = ParamSpec("P")
R = TypeVar("R")


@remade
@helpful("vmap")
def vmap(f: Callable[P, R], in_axes: Axes = 0, out_axes: Axes = 0) -> Callable[P, R]:
    """Return a function of batches that applies `f`, a function of single examples, to each.

    Args:
        f: A function of Tensors (or containers of them) that returns Tensors or containers of them.
        in_axes: The axis along which each argument is split, or None for an argument that all
            examples share: one entry for all arguments, or a tuple with one entry for each (an
            entry may be a container, like the argument).
        out_axes: The axis of examples in the results, in the same form.

    With JAX data (and under `jit`), the ops of f run on all examples at once, through `jax.vmap`.
    With data of NumPy or PyTorch, f is called for each example, with the same results. In both
    cases, rules see single examples, and every active rule applies.

    Raises:
        ShapeError: The arguments have different numbers of examples, or none.
        ArgumentError: `in_axes` does not fit the arguments, or f assigns to a Variable.

    Source: `jax.vmap`.

    >>> import regrad as rg
    >>> x = rg.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> rg.vmap(rg.grad(lambda row: row.square().sum()))(x).print()
    Tensor
        [[2, 4],
         [6, 8]]
    """
    callable_or_raise(f, "vmap")
    if getattr(in_axes, "ndim", 0):
        raise ArgumentError(
            f"vmap: in_axes must be integers, got {kind(in_axes)}. Write vmap(f)(x)."
        )

    @helpful("vmap(f)")
    @wraps(f)
    def batched(*args: Any) -> R:
        each = in_axes if isinstance(in_axes, list | tuple) else [in_axes] * len(args)
        for i, (x, axis) in enumerate(zip(args, each, strict=False)):
            if axis is not None:
                containers.refuse_closed(x, f"arguments[{i}]", "vmap")
        given = OpenedArguments(args, {})
        axes = axes_of(in_axes, args, given)
        body = Body(f, given, stacked=True)
        with Closure(f).undrawn("vmap"):
            ys = mapped(body, given.tensors, axes, "vmap")
        result = body.note(ys)
        return placed_along(result, out_axes) if out_axes != 0 else result

    return batched  # pyright: ignore[reportReturnType] (it refuses keywords)


def axes_of(in_axes: Axes, args: tuple[Any, ...], given: OpenedArguments) -> list[int | None]:
    """Return the axis for each Tensor among the arguments."""
    if isinstance(in_axes, list | tuple) and len(in_axes) != len(args):
        raise ArgumentError(
            f"vmap: in_axes has {len(in_axes)} entries, and there are {len(args)} arguments"
        )
    each = in_axes if isinstance(in_axes, list | tuple) else [in_axes] * len(args)
    leaves = [axis for axis, arg in zip(each, args, strict=True) for axis in _spread(axis, arg)]
    axes = [a for a, leaf in zip(leaves, given.places(), strict=True) if leaf]
    if all(axis is None for axis in axes):
        raise ArgumentError(
            "vmap: in_axes is None for every Tensor, so there is no axis to map over"
        )
    return [
        a if a is None else normalized_axis(a, x.ndim)
        for a, x in zip(axes, given.tensors, strict=True)
    ]


def _spread(axis: Axes, arg: Any) -> list[Any]:
    """Return one axis for each leaf of an argument."""
    leaves = containers.flatten(arg)[0]
    if axis is None or isinstance(axis, int):
        return [axis] * len(leaves)
    if type(axis) in (str, float, bool) or callable(axis):
        raise ArgumentError(f"vmap: an axis must be an int or None, got {kind(axis)}: {axis!r:.60}")
    import optree

    found: list[Any] = []
    structure = optree.tree_structure(axis, none_is_leaf=True, namespace=NAMESPACE)
    leaves = optree.tree_leaves(axis, none_is_leaf=True, namespace=NAMESPACE)
    for a, part in zip(leaves, structure.flatten_up_to(arg), strict=True):
        found += _spread(a, part)
    return found


def placed_along(result: Any, out_axes: Axes) -> Any:
    """Return the results with the axis of examples at the requested place."""
    leaves, rebuild = containers.flatten(result)
    moved = []
    for y, axis in zip(leaves, _spread(out_axes, result), strict=True):
        if not isinstance(y, Tensor) or axis == 0:
            moved.append(y)
        elif axis is None:
            raise ArgumentError(
                "vmap: out_axes is None; take y[0] of a result that is the same for all examples"
            )
        else:
            with masked():
                moved.append(moveaxis(y, 0, axis))
    return rebuild(moved)


def mapped(
    flat: Flat, xs: Sequence[Tensor], axes: Sequence[int | None], kind: str
) -> Sequence[Tensor]:
    """Map a flat function along axes of its arguments; the results have the examples first."""
    with masked():
        xs = [moveaxis(x, a, 0) if a else x for x, a in zip(xs, axes, strict=True)]
    count = _count([x for x, a in zip(xs, axes, strict=True) if a is not None], kind)
    along = [a is not None for a in axes]
    if in_trace(()) or any(BACKENDS[type(x._data)].name == "jax" for x in xs):
        return at_once(flat, xs, along, kind)
    return one_by_one(flat, xs, along, count, kind)


def _count(xs: Sequence[Tensor], kind: str) -> int:
    counts = {x.shape[0] for x in xs}
    if len(counts) > 1:
        raise ShapeError(
            f"{kind}: the arguments have different numbers of examples: "
            f"{', '.join(str(x.shape) for x in xs)} along the mapped axes"
        )
    return counts.pop()


class Examples(OpenRegion):
    """The region of examples that run one by one, with the results of a single batched run."""

    draws = False

    def _reached(self, source: Reached, inner: Tensor) -> Tensor:
        # (The enclosing region reports to the capture, unless the source was made in there.)
        return inner


def one_by_one(
    flat: Flat, xs: Sequence[Tensor], along: Sequence[bool], count: int, kind: str
) -> Sequence[Tensor]:
    """Run the examples one after another."""
    if not count:
        raise ShapeError(f"{kind}: there are no examples, so the shapes of the results are unknown")
    region = Examples(kind)
    state, rows = current(), []
    overrides, tapes = (None, ()) if state is None else (state.overrides, state.tapes)
    counts = [(b, Counts(b.counts)) for b in (overrides or {}).values() if isinstance(b, Counting)]
    for i in range(count):
        for counting, before in counts:  # (Further examples are not further calls.)
            counting.counts.clear()
            counting.counts.update(before)
        with masked():
            example = [getitem(x, i) if a else x for x, a in zip(xs, along, strict=True)]
        body = partial(results, flat, example, region)
        rows.append(run_inside(body, region, overrides, tapes))
    _refuse_assignments(region, kind)
    check_guard([read_source(s) for s in region.captured])
    with masked():
        return [stack(list(column)) for column in zip(*rows, strict=True)]


def at_once(flat: Flat, xs: Sequence[Tensor], along: Sequence[bool], kind: str) -> Sequence[Tensor]:
    """Run all examples at once, through JAX."""
    import jax

    body_run = BodyRun(kind, xs, traced=True)
    flat = Captured(flat, kind)

    def body(*arrays: Array) -> list[Any]:
        body_run.outputs.clear()
        ys = body_run.run(flat, body_run.stand_ins(arrays))
        return [to_jax(y._data) for y in ys]

    arrays = [to_jax(x._data) for x in body_run.xs]
    ys = jax.vmap(body, in_axes=tuple(0 if a else None for a in along))(*arrays)
    _refuse_assignments(body_run.region, kind)
    function, along = body_run.as_function(flat), [*along, *[False] * len(body_run.sources)]

    def derivative(
        way: Any, inputs: Sequence[Tensor], passage: Passage, given: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        back = way is pullback  # (The incoming gradients then have the axis of examples.)
        more = [True] * len(given) if back else [along[i] for i in passage.wanted]
        f = way(function, len(inputs), passage)
        named = f"the {'gradient' if back else 'derivative'} of {kind}"
        found = at_once(f, [*inputs, *given], [*along, *more], named)
        if not back:
            return found
        pairs = zip(passage.wanted, found, strict=True)
        return [dx if along[i] else sum_of(dx, axis=0) for i, dx in pairs]

    repeat = lambda inputs: at_once(function, inputs, along, kind)  # noqa: E731
    return body_run.finish(ys, *both_ways(derivative), repeat)


def _refuse_assignments(region: Region, kind: str) -> None:
    if region.assigned:
        raise TraceError(
            f"{kind}: the function assigns to the Variable {region.assigned[0].name!r}, which "
            "would get one value per example. Return the values, and assign a reduction of them "
            "(for example their mean) outside."
        )

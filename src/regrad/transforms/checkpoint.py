"""`checkpoint` trades time for memory: the backward pass recomputes the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from regrad.autodiff.gradients import callable_or_raise
from regrad.autodiff.variables import assign_all
from regrad.core import dispatch
from regrad.core.backends import is_traced
from regrad.core.containers import replaced
from regrad.core.made import remade
from regrad.core.registry import Input, Op
from regrad.core.rule import Rule
from regrad.core.signatures import public
from regrad.core.state import current
from regrad.core.tensor import Tensor
from regrad.core.walk import UNUSED
from regrad.errors import ArgumentError
from regrad.graph.graph import is_symbolic
from regrad.transforms.arguments import Body, OpenedArguments, is_key
from regrad.transforms.bodies import BodyRun, both_ways, pullback
from regrad.transforms.region import Flat, Passage
from regrad.transforms.replay import Captured

if TYPE_CHECKING:
    from regrad.core.backends import Array, Namespace
    from regrad.core.rule import Cotangent
    from regrad.core.tape import Record

P = ParamSpec("P")
R = TypeVar("R")


@public
@remade
def checkpoint(f: Callable[P, R]) -> Callable[P, R]:
    """Return `f` such that tapes keep only its inputs; the backward pass runs it again.

    Args:
        f: A function of Tensors, arrays and containers of them that returns Tensors, arrays or
            containers of them. Other arguments are passed through.

    `f` runs again under the overrides that were active in the first run, with the same values of
    Variables and closed-over Tensors, and NumPy Generators draw the same numbers again. Assignments
    to Variables happen once. Values and gradients are the same as without `checkpoint`, at every
    order.

    In eager mode, memory falls from everything that the rules in f keep to the inputs of f, and the
    time rises by one forward pass. For tensors of a graph, f becomes a part of the graph, whose run
    frees values by itself. Under `jit`, regrad asks XLA not to merge the second computation with
    the first. On the CPU, XLA may still merge them where a loop was unrolled; use
    `scan(…, checkpoint=True)` for loops.

    Raises:
        ArgumentError: f is not callable, or an async or generator function.
        GradientError: f behaves differently when it runs again.

    Source: Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016);
    `jax.checkpoint`.

    >>> import regrad as rg
    >>> f = rg.checkpoint(lambda x: rg.sin(rg.sin(x)))
    >>> round(rg.grad(f)(rg.scalar(1.0)).item(), 4)
    0.36
    """
    callable_or_raise(f, "checkpoint")
    for runs_later in (iscoroutinefunction, isgeneratorfunction, isasyncgenfunction):
        if runs_later(f):
            raise ArgumentError(
                "checkpoint(f): f is an async or a generator function, which computes nothing "
                "when it is called; pass a function that returns its result"
            )

    @wraps(f)
    def checkpointed(*args: P.args, **kwargs: P.kwargs) -> R:
        state = current()
        if state is None or not state.tapes or state.inspected:
            return f(*args, **kwargs)
        given = OpenedArguments(args, kwargs)
        if any(map(is_symbolic, given.tensors)):
            return f(*args, **kwargs)
        body = Body(f, given)
        ys = recomputed(body, given.tensors)
        return body.note(ys)

    return checkpointed


def recomputed(flat: Flat, xs: Sequence[Tensor], rule: Any = None) -> Sequence[Tensor]:
    """Return a body of which only the inputs are kept.

    Args:
        rule: A rule that replaces the gradient of the body (see `WholeCall`).
    """
    body_run = BodyRun("checkpoint", xs, traced=False)
    flat = Captured(flat, "checkpoint", steps=body_run.region.traced)
    ys = body_run.run(flat, body_run.inner)
    assigned = list(body_run.region.assigned)
    outputs = [*ys, *[body_run.region.values[v] for v in assigned]]
    body_run.outputs[-1] = [y._id for y in outputs]
    function = body_run.as_function(flat, assigned)
    if rule is not None:
        rule.know(function.captured, [(y.shape, y.dtype) for y in outputs])

    def derivative(
        way: Any, inputs: Sequence[Tensor], passage: Passage, given: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        def derive(given: Sequence[Tensor], passage: Passage = passage) -> Sequence[Tensor]:
            xs = [*inputs, *given]
            return way(function, len(inputs), passage)(apart(xs) if way is pullback else xs)

        if rule is None:
            return derive(given)
        return rule.derive(derive, way is pullback, function, inputs, passage, given)

    arrays = [y._data for y in outputs]
    repeat = lambda xs: recomputed(function, xs, rule)  # noqa: E731
    results = body_run.finish(arrays, *both_ways(derivative), repeat, opaque=rule is not None)
    assign_all(assigned, results[len(ys) :])
    return results[: len(ys)]


def apart(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the same Tensors; XLA must not merge traced ones with earlier computations."""
    places = [i for i, x in enumerate(xs) if is_traced(x._data) and not is_key(x._data)]
    if not places:
        return xs
    traced = tuple([xs[i] for i in places])
    return replaced(xs, places, dispatch.run(APART, traced, {}, (tuple(range(len(traced))),)))


def _barrier(xp: Namespace, xs: Sequence[Array]) -> tuple[Any, ...]:
    import jax

    return tuple(jax.lax.optimization_barrier(list(xs)))


class IdentityRule(Rule):
    """Returns the incoming gradients unchanged."""

    each = True
    sparse = True

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return True

    def pull(
        self, record: Record, dy: Cotangent, wanted: Sequence[int]
    ) -> Iterable[tuple[int, Any]]:
        return [(0, [UNUSED if d is None else d for d in dy])]


APART = Op("_Apart", "apart", _barrier, [Input("xs", "many")], several=True, holomorphic=False)
APART.rule = IdentityRule()

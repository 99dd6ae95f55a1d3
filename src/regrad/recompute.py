"""`checkpoint`: memory for time. The backward pass computes again what the forward pass let go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from regrad import dispatch
from regrad.arguments import Body, Given
from regrad.gradients import callable_or_raise
from regrad.namespaces import is_traced
from regrad.regions import Flat, Once, pullback
from regrad.state import current
from regrad.tensor import Tensor


def checkpoint(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, of which the tapes keep only the inputs; the backward pass runs it again.

    Args:
        f: A function of Tensors, arrays and containers of them (other arguments are passed on),
            that returns the like.

    It runs again under the overrides that were in force at first, on the values that Variables
    and closed-over Tensors had, and NumPy Generators draw the same numbers. What it assigns to
    Variables is assigned once. Values and gradients are those of `f`, at every order.

    In eager mode the memory falls from all that the rules of f keep to the inputs of f, and the
    time rises by one forward pass. Under `jit` XLA is told not to merge the second computation
    with the first; on the CPU it may do so all the same where a loop was unrolled (use
    `scan(…, checkpoint=True)` for loops).

    Source: Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016);
    `jax.checkpoint`.

    >>> import regrad as rg
    >>> f = rg.checkpoint(lambda x: rg.sin(rg.sin(x)))
    >>> round(rg.grad(f)(rg.scalar(1.0)).item(), 4)
    0.36
    """
    callable_or_raise(f, "checkpoint")

    @wraps(f)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is None or not state.tapes or state.inspected:
            return f(*args, **kwargs)
        given = Given(args, kwargs)
        body = Body(f, given)
        ys = recomputed(body, given.tensors)
        return body.note(ys)

    return checkpointed


def recomputed(flat: Flat, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """A body whose inputs alone are kept."""
    once = Once("checkpoint", xs, traced=False)
    ys = once.run(flat, once.inner)
    assigned = list(once.region.assigned)
    outputs = [*ys, *[once.region.values[v] for v in assigned]]
    once.outputs[-1] = [y._id for y in outputs]
    again = once.again(flat, assigned)

    def answer(inputs: Any, found: Any, reached: Any, dys: Any) -> Sequence[Tensor]:
        tensors = apart([*inputs, *dys])
        return pullback(again, len(inputs), found, reached)(tensors)

    results = once.done([y._data for y in outputs], answer)
    for variable, y in zip(assigned, results[len(ys) :], strict=True):
        variable._set(y, lent=True)
    return results[: len(ys)]


def apart(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same Tensors; what is traced is kept from being merged with what was computed before."""
    places = [i for i, x in enumerate(xs) if is_traced(x._data)]
    if not places:
        return xs
    import jax

    ys = list(xs)
    arrays = jax.lax.optimization_barrier([xs[i]._data for i in places])
    for i, array in zip(places, arrays, strict=True):
        ys[i] = dispatch.alias(xs[i])
        ys[i]._data = array
    return ys

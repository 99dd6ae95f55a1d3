"""Branches inside a JAX trace: flat functions under `lax.cond`, with one record outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from regrad.autodiff.variables import Variable, assign_all
from regrad.core.sharding import to_jax
from regrad.errors import DTypeError, ShapeError
from regrad.transforms.bodies import (
    BodyRun,
    both_ways,
    until_all_are_known,
    with_assigned,
)
from regrad.transforms.replay import Captured

if TYPE_CHECKING:
    from regrad.core.backends import Array
    from regrad.core.tensor import Tensor
    from regrad.transforms.region import Flat, Passage


def conditional(pred: Tensor, flats: Sequence[Flat], xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the first function's results if `pred` is true, else the second's."""
    assigned: list[Variable] = []
    bodies = [_Branch(Captured(f, "cond")) for f in flats]

    def run() -> tuple[BodyRun, Any]:
        body_run = BodyRun("cond", [pred, *xs], traced=True)
        flats = [with_assigned(body, assigned) for body in bodies]
        return body_run, (body_run, _branches(body_run, flats))

    body_run, ys = until_all_are_known(assigned, run)
    functions = [body_run.as_function(body, assigned) for body in bodies]

    def derivative(
        way: Callable[..., Flat],
        inputs: Sequence[Tensor],
        passage: Passage,
        given: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        ways = [way(f, len(inputs), passage) for f in functions]
        return conditional(inputs[0], ways, [*inputs, *given])

    results = body_run.finish(
        ys, *both_ways(derivative), lambda xs: conditional(xs[0], functions, xs)
    )
    n = len(results) - len(assigned)
    assign_all(assigned, results[n:])
    return results[:n]


class _Branch:
    """A branch that also takes the predicate as an argument, and ignores it."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat

    def __call__(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.flat(xs[1:])


def _branches(body_run: BodyRun, flats: Sequence[Flat]) -> Sequence[Any]:
    import jax

    ids: dict[int, list[int]] = {}
    specs: dict[int, list[Any]] = {}

    def branch(k: int) -> Callable[..., list[Any]]:
        def run(*arrays: Array) -> list[Any]:
            region = body_run.region
            variables = [s for s in body_run.sources if isinstance(s, Variable)]
            region.values = {v: region.stand_in_for(v) for v in variables}
            ys = body_run.run(flats[k], body_run.stand_ins(arrays))
            ids[k] = body_run.outputs.pop()
            given = [to_jax(y._data) for y in ys]
            specs[k] = [(str(a.dtype), tuple(a.shape)) for a in given]
            if len(specs) == 2:
                _check_alike(specs[0], specs[1])
            return given

        return run

    arrays = [to_jax(x._data) for x in body_run.xs]
    ys = jax.lax.cond(arrays[0], branch(0), branch(1), *arrays)
    body_run.outputs = list(ids.values())
    return ys


def _check_alike(
    a: Sequence[tuple[str, tuple[int, ...]]], b: Sequence[tuple[str, tuple[int, ...]]]
) -> None:
    if len(a) != len(b):
        raise ShapeError(f"cond: the two functions return {len(a)} and {len(b)} Tensors")
    for (dtype, shape), (other, other_shape) in zip(a, b, strict=True):
        if dtype != other:
            raise DTypeError(
                f"cond: the results of the two functions have the dtypes {dtype} and "
                f"{other}; use astype"
            )
        if shape != other_shape:
            raise ShapeError(
                f"cond: the results of the two functions have the shapes {shape} and {other_shape}"
            )

"""Gradients along paths, and the shares that they make: one set of formulas for all libraries.

`regrad.torch.attributing` and `regrad.jax.attributing` run models. This file chooses the runs, and
combines their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from regrad.core.backends import backend_of, placed_like
from regrad.core.containers import flatten, tree_map
from regrad.errors import ArgumentError
from regrad.rules.runs import share

Move = Callable[[int, Any], Any]


class Path(NamedTuple):
    """Places between a reference (0) and the input (1) at which gradients are taken, and weights.

    Args:
        places: The places. An entry is a number, or an array with a place for each example. With
            references, the places are drawn.
        weights: The weight of each gradient.
        noise: The standard deviation of Gaussian noise, as a share of the range of each input.
        seed: The seed of the random numbers.
        statistic: `"mean"`, `"squares"` or `"variance"` of the gradients.
        references: Examples from which each sample takes its reference, or None.
        conducts: Whether each gradient is multiplied by the step of its value along the path.
        batch: How many places run in one batch; see `attribute`.

    >>> from regrad.rules.attribution import Path
    >>> middle = Path(places=(0.5,), weights=(1.0,))
    >>> middle.noise
    0.0
    """

    places: tuple[Any, ...]
    weights: tuple[float, ...]
    noise: float = 0.0
    seed: int = 0
    statistic: str = "mean"
    references: Any = None
    conducts: bool = False
    batch: int = 1


class Ran(NamedTuple):
    """A run of a model.

    Args:
        values: The values whose shares are computed.
        gradients: Their gradients. None is a gradient of zeros.
        total: The explained output.
        made: The run, as the library needs it.
    """

    values: Sequence[Any]
    gradients: Sequence[Any]
    total: Any
    made: Any


class Shares(NamedTuple):
    """The shares of the values of a run, and the averaged gradients."""

    shares: list[Any]
    gradients: list[Any]
    total: Any
    clean: Ran


def follow(
    run: Callable[..., Ran], inputs: Any, path: Path | None, reference: Any, batch_axis: int
) -> Shares:
    """Return the shares of the values of a model in its output, by gradients along a path.

    Args:
        run: Runs the model for inputs, with each explained value moved by a function of its
            number and the value, and the target of a number of copies of the examples.
        inputs: The inputs.
        path: The path, or None for the gradient at the inputs.
        reference: Where the path begins, in the form of `inputs`; None for zeros.
        batch_axis: The axis of the examples.
    """
    clean = run(inputs, lambda n, x: x)
    random = np.random.default_rng(path.seed if path else 0)
    legs: Any = [(path, reference)]
    if path and path.references is not None:
        legs = _sampled(path, inputs, batch_axis, random)
    found: list[Any] = []
    for leg, start in legs:
        if start is None and (leg is None or all(np.all(t == 1) for t in leg.places)):
            rest, zs = None, [0.0] * len(clean.values)
        elif start is None:
            rest = run(inputs, lambda n, x: x * 0)
            zs = rest.values
        else:
            rest = run(start, lambda n, x: x)
            zs = _alike(clean.values, rest.values)
        moves, size = [*_moves(leg, zs, batch_axis, random)] if leg else [], leg.batch if leg else 1
        chunks = [moves[i : i + size] for i in range(0, len(moves), size)]
        rans = [r for c in chunks for r in _together(run, inputs, c, clean, batch_axis)] or [clean]
        ends = enumerate(zip(clean.values, zs, strict=True))
        pairs = [_shared(leg, i, x, z, rans) for i, (x, z) in ends]
        found.append((pairs, clean.total - rest.total if rest else clean.total))
    by_value = [*zip(*[pairs for pairs, _ in found], strict=True)]
    shares, gradients = (
        [sum(p[i] for p in each) / len(found) for each in by_value] for i in (0, 1)
    )
    return Shares(shares, gradients, sum(total for _, total in found) / len(found), clean)


def _together(
    run: Callable[..., Ran], inputs: Any, moves: Sequence[Move], clean: Ran, axis: int
) -> list[Ran]:
    """Return the runs of several moves, from one run of a batch of copies of the examples.

    The first copy is not moved, so its output must be the output of the examples alone.
    """
    if len(moves) == 1:
        return [run(inputs, moves[0])]
    count, xp, total = len(moves) + 1, backend_of(clean.total).xp, clean.total

    def parts(x: Any, like: Any, axis: int = axis) -> list[Any]:
        shape = tuple(like.shape)
        if tuple(x.shape) != (*shape[:axis], count * shape[axis], *shape[axis + 1 :]):
            raise ArgumentError(
                f"attribute: batch= repeats the examples along the axis {axis}, and a value of the "
                f"shape {shape} became {tuple(x.shape)}. Leave batch= out"
            )
        return [*xp.moveaxis(x.reshape((*shape[:axis], count, *shape[axis:])), axis, 0)]

    def repeated(x: Any) -> Any:
        fits = tuple(getattr(x, "shape", ()))[axis : axis + 1] == tuple(total.shape)
        return xp.concat([x] * count, axis=axis) if fits else x

    def moved(n: int, x: Any) -> Any:
        same, *others = parts(x, clean.values[n])
        both = zip(moves, others, strict=True)
        return xp.concat([same, *[move(n, part) for move, part in both]], axis=axis)

    if total.ndim != 1:
        raise ArgumentError("attribute: batch= is for a target with one number for each example")
    one = run(tree_map(repeated, inputs), moved, count)
    alone, eps = parts(one.total, total, 0)[0], float(xp.finfo(total.dtype).eps)
    if (abs(alone - total) > eps**0.5 * abs(total).max()).any():
        raise ArgumentError("attribute: batch= is for models whose examples are independent")
    dxs = map(_or_zeros, one.gradients, one.values)
    values, gradients = (map(parts, each, clean.values) for each in (one.values, dxs))
    by_copy = [*zip(zip(*values, strict=True), zip(*gradients, strict=True), strict=True)]
    return [Ran(xs, dxs, total, None) for xs, dxs in by_copy[1:]]


def _shared(path: Path | None, i: int, x: Any, z: Any, rans: Sequence[Ran]) -> tuple[Any, Any]:
    """Return the share of a value, and its gradient, by the runs along a path."""
    dxs = [_or_zeros(ran.gradients[i], x) for ran in rans]
    weights = path.weights if path else (1.0,)
    mean = sum(w * dx for w, dx in zip(weights, dxs, strict=True))
    if path and path.conducts:
        values = [ran.values[i] for ran in rans]
        steps = zip(dxs, dxs[1:], values, values[1:], strict=False)
        return sum((a + b) / 2 * (v - u) for a, b, u, v in steps), mean
    if path is None or path.statistic == "mean":
        return share(x - z, mean), mean
    found = sum(w * dx * dx for w, dx in zip(weights, dxs, strict=True))
    found = found - mean * mean if path.statistic == "variance" else found
    return share((x - z) * (x - z), found), found


def _or_zeros(dx: Any, x: Any) -> Any:
    return backend_of(x).xp.zeros_like(x) if dx is None else dx


def _alike(xs: Sequence[Any], zs: Sequence[Any]) -> Sequence[Any]:
    shapes = [[tuple(x.shape) for x in each] for each in (xs, zs)]
    if shapes[0] != shapes[1]:
        raise ArgumentError(
            "attribute: a reference has the form and the shapes of the inputs; got values of "
            f"shapes {shapes[0]} and {shapes[1]}"
        )
    return zs


def _moves(
    path: Path, zs: Sequence[Any], batch_axis: int, random: np.random.Generator
) -> Iterator[Move]:
    """Yield the functions that put the values of each run at its place."""

    def moved(place: Any, n: int, x: Any) -> Any:
        if np.ndim(place):
            sizes = [1] * x.ndim
            sizes[batch_axis] = -1
            place = _like(place, x).reshape(sizes)
        y = zs[n] + place * (x - zs[n])
        if path.noise:
            y = y + path.noise * (x.max() - x.min()) * _like(random.normal(size=x.shape), x)
        return y

    for place in path.places:
        yield partial(moved, place)


def _like(numbers: Any, x: Any) -> Any:
    """Return numbers as an array of the library, dtype and device of another one."""
    return backend_of(x).xp.asarray(numbers, dtype=x.dtype, **placed_like(x))


def _sampled(
    path: Path, inputs: Any, batch_axis: int, random: np.random.Generator
) -> Iterator[tuple[Path, Any]]:
    """Yield a random place, and references drawn for each example, for each sample of a path."""
    given, found = (
        [x for x in flatten(each)[0] if getattr(x, "ndim", 0) > batch_axis]
        for each in (inputs, path.references)
    )
    if not given or len(given) != len(found):
        raise ArgumentError(
            "expected: the references should have the form of the inputs, with examples along the "
            f"axis {batch_axis}; got {len(found)} arrays for {len(given)}"
        )
    count, among = given[0].shape[batch_axis], found[0].shape[batch_axis]

    def taken(places: np.ndarray, x: Any) -> Any:
        if getattr(x, "ndim", 0) <= batch_axis:
            return x
        xp = backend_of(x).xp
        return xp.take(x, xp.asarray(places, **placed_like(x)), axis=batch_axis)

    for _ in path.weights:
        t = random.uniform(size=count)
        start = tree_map(partial(taken, random.integers(among, size=count)), path.references)
        yield path._replace(places=(t,), weights=(1.0,), references=None), start

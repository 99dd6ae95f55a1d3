"""Numerical checks of gradients, to any order, that say which op and which input is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from regrad import dispatch
from regrad.errors import ArgumentError, GradientError, kind
from regrad.gradients import callable_or_raise, grads, run_taped
from regrad.namespaces import is_inexact
from regrad.ops.creation import zeros_like
from regrad.ops.elementwise import real
from regrad.registry import OPS
from regrad.tape import GroupedRecord, Record, Tape
from regrad.tensor import Tensor, wrap
from regrad.walk import leaf_gradients, name_of

Method = Literal["central", "complex"]


class GradientCheckError(GradientError, AssertionError):
    """A gradient that differs from its numerical counterpart."""


def check_gradients(
    f: Callable[..., Any],
    args: Sequence[Any],
    order: int = 1,
    *,
    method: Method = "central",
    step: float | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-7,
    seed: int = 0,
) -> None:
    """Check the gradients of `f` at `args` against differences, to the given order.

    Args:
        f: A function of Tensors that returns a Tensor, or a tuple or list of them.
        args: Its arguments. Floats are taken as float64 and differentiated; integers and
            bools are passed on.
        order: 1 checks the gradient, 2 also the gradient of the gradient, and so on.
        method: `"central"`: a five-point central difference. `"complex"`: a complex step
            (exact to rounding, first order only, for functions that are analytic and whose
            ops take complex numbers).
        step: The step of the differences; by default 1e-3 for central, 1e-20 for complex.
        rtol: Tolerance relative to the largest number compared.
        atol: Absolute tolerance.
        seed: Of the random direction and of the weights of the outputs.

    Each order is checked in one random direction; small functions (up to 8 numbers in and
    out) at first order in every direction, which is the full Jacobian.

    Raises GradientCheckError. The message names order, input and numbers, and the op and
    input whose rule disagrees with differences of the op itself, if there is one.

    Source: `check_grads` of HIPS autograd and JAX; the complex step is Squire and Trapp (1998).

    >>> import regrad as rg
    >>> from regrad.testing import check_gradients
    >>> check_gradients(lambda x: rg.sin(x) * x, [[0.5, 1.0]], order=3)
    """
    callable_or_raise(f, "check_gradients")
    if not isinstance(args, list | tuple):
        raise ArgumentError(f"check_gradients(f, args): args is a list, got {kind(args)}")
    if order < 1 or method not in ("central", "complex"):
        raise ArgumentError(
            "check_gradients: order is 1 or more and method 'central' or 'complex', got "
            f"order={order!r}, method={method!r}"
        )
    if method == "complex" and order > 1:
        raise ArgumentError(
            "check_gradients: a complex step needs an analytic function, and a gradient of complex "
            "numbers is conjugated, so it checks order 1 only; use method='central' beyond"
        )
    xs = [_as_float64(a) for a in args]
    places = [i for i, x in enumerate(xs) if is_inexact(x.dtype)]
    if not places:
        raise ArgumentError("check_gradients: no argument is a float, so there is no gradient")
    settings = _Settings(method, step, rtol, atol, np.random.default_rng(seed))

    def of_floats(*floats: Tensor) -> list[Tensor]:
        full = list(xs)
        for i, x in zip(places, floats, strict=True):
            full[i] = x
        return _outputs(f(*full))

    current = of_floats
    for level in range(1, order + 1):
        _check_level(current, [xs[i] for i in places], places, level, settings)
        current = _gradient_of(current, settings.rng.integers(2**31))


class _Settings:
    """Tolerances and steps."""

    def __init__(
        self, method: Method, step: float | None, rtol: float, atol: float, rng: Any
    ) -> None:
        self.method = method
        self.step = step or (1e-3 if method == "central" else 1e-20)
        self.rtol = rtol
        self.atol = atol
        self.rng = rng

    def close(self, a: float, b: float, scale: float) -> bool:
        if np.isnan(a) or np.isnan(b):
            return False
        return abs(a - b) <= self.atol + self.rtol * max(scale, abs(a), abs(b))


def _as_float64(value: Any) -> Tensor:
    x = dispatch.lift(value)
    if not is_inexact(x.dtype):
        return x
    return dispatch.as_dtype(x, np.dtype("complex128" if x.dtype.kind == "c" else "float64"))


def _outputs(y: Any) -> list[Tensor]:
    """What f returned as a list of the Tensors that have gradients."""
    ys = list(y) if isinstance(y, tuple | list) else [y]
    for t in ys:
        if not isinstance(t, Tensor):
            raise ArgumentError(f"check_gradients: f must return Tensors, got {kind(t)}")
    return [t for t in ys if is_inexact(t.dtype)]


def _weights(shapes: Sequence[Tensor], rng: np.random.Generator) -> list[np.ndarray]:
    return [_random(y, rng) for y in shapes]


def _random(x: Tensor, rng: np.random.Generator) -> np.ndarray:
    values = rng.uniform(0.5, 1.5, x.shape) * rng.choice([-1.0, 1.0], x.shape)
    if x.dtype.kind == "c":
        values = values + 1j * rng.uniform(-1.0, 1.0, x.shape)
    return np.asarray(values)


def _scalar(ys: Sequence[Tensor], weights: Sequence[np.ndarray], analytic: bool = False) -> Tensor:
    """`sum(y * w)` over all outputs; its real part for complex ones, unless `analytic`."""
    add, total = OPS["AddV2"].function, None
    for y, w in zip(ys, weights, strict=True):
        if y.dtype.kind != "c":
            term = (y * w.astype(y.dtype)).sum()
        else:
            term = (y * w if analytic else real(y * w)).sum()
        total = term if total is None else add(total, term)
    assert total is not None
    return total


def _gradient_of(f: Callable[..., list[Tensor]], seed: int) -> Callable[..., list[Tensor]]:
    """The gradient of a weighed sum of f's outputs, as the function of the next order."""

    def g(*xs: Tensor) -> list[Tensor]:
        return grads(lambda *a: _weighed(f, a, seed), unconnected="zero")(list(xs))

    return g


def _weighed(f: Callable[..., list[Tensor]], xs: Sequence[Tensor], seed: int) -> Tensor:
    ys = f(*xs)
    return _scalar(ys, _weights(ys, np.random.default_rng(seed)))


def _check_level(
    f: Callable[..., list[Tensor]],
    xs: list[Tensor],
    places: list[int],
    level: int,
    settings: _Settings,
) -> None:
    ys = f(*xs)
    if not ys:
        raise ArgumentError(
            "check_gradients: f returns no floats, so there is no gradient to check"
        )
    sizes = sum(x.size for x in xs), sum(y.size for y in ys)
    small = level == 1 and max(sizes) <= 8
    for weights in _units(ys) if small else [_weights(ys, settings.rng)]:

        def scalar(*a: Tensor, weights: Any = weights, analytic: bool = False) -> Tensor:
            return _scalar(f(*a), weights, analytic)

        analytic = grads(scalar, unconnected="zero")(xs)
        scale = max((float(np.abs(g._values()).max(initial=0)) for g in analytic), default=0.0)
        for direction in _units(xs) if small else [_weights(xs, settings.rng)]:
            slope = sum(
                float(np.real(np.vdot(g._values(), v)))
                for g, v in zip(analytic, direction, strict=True)
            )
            measured = _difference(scalar, xs, direction, settings)
            if not settings.close(slope, measured, scale):
                _fail(f, xs, places, level, direction, slope, measured, settings)


def _units(tensors: Sequence[Tensor]) -> list[list[np.ndarray]]:
    """The unit vectors of the space of these tensors (and i times them for complex ones)."""
    units = []
    for k, t in enumerate(tensors):
        for j in range(t.size):
            for unit in (1.0, 1j) if t.dtype.kind == "c" else (1.0,):
                vectors = [np.zeros(s.shape, s.dtype) for s in tensors]
                vectors[k].flat[j] = unit
                units.append(vectors)
    return units


def _difference(
    f: Callable[..., Tensor],
    xs: Sequence[Tensor],
    direction: Sequence[np.ndarray],
    settings: _Settings,
) -> float:
    """The slope of f at xs in a direction, by differences."""
    h = settings.step

    def at(t: complex) -> complex:
        moved = [wrap(np.asarray(x._values() + t * v)) for x, v in zip(xs, direction, strict=True)]
        moved = [_like(x, m) for x, m in zip(xs, moved, strict=True)]
        return (f(*moved, analytic=True) if isinstance(t, complex) else f(*moved)).item()

    if settings.method == "complex":
        return complex(at(1j * h)).imag / h
    near, far = at(h) - at(-h), at(2 * h) - at(-2 * h)
    return float(np.real(8 * near - far)) / (12 * h)


def _like(x: Tensor, values: Tensor) -> Tensor:
    """The values in the array library of x."""
    return OPS["AddV2"].function(zeros_like(x), values)


def _fail(
    f: Callable[..., list[Tensor]],
    xs: Sequence[Tensor],
    places: Sequence[int],
    level: int,
    direction: Sequence[np.ndarray],
    slope: float,
    measured: float,
    settings: _Settings,
) -> None:
    moving = [k for k, v in enumerate(direction) if np.any(v)]
    names = ", ".join(f"args[{places[k]}]" for k in moving)
    where = ""
    if len(moving) == 1 and np.count_nonzero(direction[moving[0]]) == 1:
        where = str(tuple(int(i[0]) for i in np.nonzero(direction[moving[0]])))
    culprit = culprits(f, xs, settings)
    raise GradientCheckError(
        f"gradient of order {level} by {names}{where}: the rules give {slope:.10g}, differences "
        f"give {measured:.10g}. "
        + (
            f"Wrong: {culprit}."
            if culprit
            else "No single op is wrong by itself; look at custom gradients, overrides, and kinks "
            "near the arguments."
        )
    )


# -- which op it is ----------------------------------------------------------------------------


class _KeepingTape(Tape):
    """A tape whose records keep all inputs and outputs."""

    plain = False
    keeps_all = True


def culprits(f: Callable[..., Any], xs: Sequence[Tensor], settings: _Settings) -> str:
    """The ops on the way from xs to f(xs) whose rules differ from differences of the op alone."""
    aliases = [dispatch.alias(x) for x in xs]
    tape = _KeepingTape([a._id for a in aliases])
    run_taped(tape, f, aliases)
    found = []
    with np.errstate(all="ignore"):
        for record in tape.records:
            found += [s for s in _wrong_inputs(record, tape.watched, settings) if s not in found]
    return "; ".join(found)


def _wrong_inputs(record: Record, watched: set[int], settings: _Settings) -> list[str]:
    """The inputs of one record whose gradient is wrong."""
    if record.op.type not in OPS:
        return []
    layout = record.layout if isinstance(record, GroupedRecord) else None
    dys = [wrap(_random(y, settings.rng)) for y in _outputs(record.y)]
    several = isinstance(record.y, tuple)
    dy = _all_outputs(record.y, dys) if several else _like(record.y, dys[0])

    def scalar(*xs: Tensor, analytic: bool = False) -> Tensor:
        ys = _outputs(dispatch.run(record.op, tuple(xs), record.attrs, layout))
        return _scalar(ys, [np.conj(d._values()) for d in dys], analytic)

    wrong = []
    found = leaf_gradients(record, dy, watched)
    for leaf, key in enumerate(record.inputs):
        x = record.xs[leaf]
        if key not in watched or not is_inexact(x.dtype):
            continue
        dx = found.get(leaf)
        dx = np.zeros(x.shape) if dx is None else dx._values()
        direction = [
            _random(x, settings.rng) if i == leaf else np.zeros(z.shape)
            for i, z in enumerate(record.xs)
        ]
        dx = np.broadcast_to(dx, np.broadcast_shapes(dx.shape, x.shape))
        slope = float(np.real(np.vdot(dx, np.broadcast_to(direction[leaf], dx.shape))))
        measured = _difference(scalar, record.xs, direction, settings)
        if not settings.close(slope, measured, float(np.abs(dx).max(initial=0))):
            wrong.append(
                f"the rule {record.rule.name!r} for the op type {record.op.type!r}, input "
                f"{name_of(record, leaf)!r} ({slope:.6g} against {measured:.6g})"
            )
    return wrong


def _all_outputs(ys: Sequence[Tensor], dys: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A gradient for every output: zeros for those of integers."""
    given = iter(dys)
    return tuple(_like(y, next(given)) if is_inexact(y.dtype) else zeros_like(y) for y in ys)


__all__ = ["GradientCheckError", "check_gradients"]

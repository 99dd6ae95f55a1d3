"""The two primitives that implement regrad's gradients in JAX programs.

`regrad_op` computes the result of a program; its derivative is a tangent. `regrad_tangent` is a
linear map that is defined by its transpose, the pull of a rule. In reverse mode it is the pull
itself, at any order. In forward mode it is the transpose of the pull, if the pull is linear (see
`linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.extend import core

from regrad.core.containers import replaced
from regrad.errors import GradientError
from regrad.jax.host import extending
from regrad.jax.host.programs import varying_axes
from regrad.jax.linear import TRANSPOSING, NotLinear, is_float, transpose

Arrays: TypeAlias = Sequence[Any]


class EquationGradient:
    """The gradient of one op of a JAX program, with cotangents in JAX's convention.

    `name` is for messages, `avals` are the types of the inputs. A gradient that counts `once` is
    for the first derivative alone: for higher derivatives, the op is its own computation.
    """

    name = ""
    once = False
    sparse = False  # outputs without a gradient pass None, not zeros
    avals: Sequence[Any] = ()

    def keeps(self, wanted: Sequence[int]) -> tuple[Sequence[int], bool]:
        """The inputs that the pull reads, in order, and whether it reads the outputs."""
        return range(len(self.avals)), True

    def pull(self, xs: Arrays, ys: Arrays | None, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        """Return the gradients by the wanted inputs, with their shapes and dtypes.

        Inputs that are not kept are None. `dys` are the gradients of the float outputs.
        """
        raise NotImplementedError

    def allow(self, wanted: Sequence[int]) -> None:
        """Raise if there is no gradient by these inputs."""


def fit(dx: Any, aval: Any) -> Any:
    """Return a gradient for an input: zeros for None; over a mesh, the sum over devices."""
    if dx is None:
        return extending.zeros_like_aval(aval)
    dx = jax.numpy.asarray(dx)
    expected, has = varying_axes(aval), varying_axes(jax.typeof(dx))
    if has - expected:
        dx = lax.psum(dx, tuple(has - expected))
    return lax.pcast(dx, tuple(expected - has), to="varying") if expected - has else dx


def map_over(axis: Any, f: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
    """Return `f` mapped along the axis over which JAX is batching."""
    return jax.vmap(
        f, in_axes, 0, axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name
    )


# -- the op ----------------------------------------------------------------------------------------

op_p: Any = core.Primitive("regrad_op")


def run_op(xs: Sequence[Any], jaxpr: core.ClosedJaxpr, gradient: EquationGradient) -> list[Any]:
    """Return the outputs of a program that has this gradient."""
    return op_p.bind(*xs, jaxpr=jaxpr, gradient=gradient)


def _evaluate(*xs: Any, jaxpr: core.ClosedJaxpr, gradient: EquationGradient) -> list[Any]:
    return core.jaxpr_as_fun(jaxpr)(*xs)


def _op_jvp(primals: Arrays, tangents: Arrays, *, jaxpr: Any, gradient: EquationGradient) -> Any:
    ys = core.jaxpr_as_fun(jaxpr)(*primals) if gradient.once else run_op(primals, jaxpr, gradient)
    wanted = tuple(i for i, t in enumerate(tangents) if type(t) is not extending.Zero)
    outs = [jax.typeof(y).to_tangent_aval() for y in ys]
    floats = [i for i, y in enumerate(ys) if is_float(jax.typeof(y))]
    dots: list[Any] = [extending.Zero(aval) for aval in outs]
    if not wanted or not floats:
        return ys, dots
    gradient.allow(wanted)
    tangent = OpTangent(gradient, wanted, len(primals), [outs[i] for i in floats])
    residuals = tangent.residuals(primals, ys)
    found = run_tangent(tangent, residuals, [tangents[i] for i in wanted])
    return ys, replaced(dots, floats, found)


def _op_batched(
    axis: Any, xs: Arrays, dims: Sequence[int | None], *, jaxpr: Any, gradient: EquationGradient
) -> Any:
    if all(d is None for d in dims):
        return run_op(xs, jaxpr, gradient), [None] * len(jaxpr.out_avals)
    xs = [x if not d else jax.numpy.moveaxis(x, d, 0) for x, d in zip(xs, dims, strict=True)]
    along = [d is not None for d in dims]
    run = map_over(axis, core.jaxpr_as_fun(jaxpr), tuple(dims))

    # in the order of axes that JAX would use: another order may round differently
    def body(*xs: Any) -> Any:
        back = [x if not d else jax.numpy.moveaxis(x, 0, d) for x, d in zip(xs, dims, strict=True)]
        return run(*back)

    batched = BatchedGradient(gradient, along, [jax.typeof(x) for x in xs], axis)
    ys = run_op(xs, jax.make_jaxpr(body)(*xs), batched)
    return ys, [0] * len(ys)


def _op_transposed(dys: Arrays, *xs: Any, jaxpr: Any, gradient: EquationGradient) -> Any:
    if not TRANSPOSING.get():
        raise GradientError(
            f"jax.linear_transpose: {gradient.name} has a custom gradient, which differs from the "
            "gradient of the program around it. Use jax.vjp, jax.grad or jax.jvp."
        )
    return _by_transposition(partial(_evaluate, jaxpr=jaxpr, gradient=gradient), dys, xs)


def _by_transposition(f: Callable[..., Any], dys: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """Return the transpose of f by the arguments that are still unknown."""
    places = [i for i, x in enumerate(xs) if extending.is_undefined_primal(x)]

    def inner(*linear: Any) -> Any:
        return f(*replaced(xs, places, linear))

    like = [extending.zeros_like_aval(xs[i].aval) for i in places]
    found = jax.linear_transpose(inner, *like)([*map(extending.instantiate_zeros, dys)])
    return replaced([None] * len(xs), places, found)


def _op_types(*avals: Any, jaxpr: core.ClosedJaxpr, gradient: EquationGradient) -> Any:
    return jaxpr.out_avals, jaxpr.effects


extending.define(
    op_p, _evaluate, _op_types, jvp=_op_jvp, transpose=_op_transposed, batched=_op_batched
)


class WrappedGradient(EquationGradient):
    """A gradient computed through another gradient, with the same inputs and outputs."""

    def __init__(self, one: EquationGradient) -> None:
        self.one = one
        self.name: str = one.name
        self.avals: Arrays = one.avals
        self.once: bool = one.once
        self.sparse: bool = one.sparse
        self.keeps: Callable[..., Any] = one.keeps
        self.allow: Callable[..., Any] = one.allow


class BatchedGradient(WrappedGradient):
    """A gradient under `vmap`: its rule sees single examples."""

    def __init__(
        self, one: EquationGradient, along: Sequence[bool], avals: Arrays, axis: Any
    ) -> None:
        super().__init__(one)
        self.avals: Arrays = avals
        self.along = along
        self.axis = axis

    def pull(self, xs: Arrays, ys: Arrays | None, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        def one(xs: Arrays, ys: Arrays | None, dys: Arrays) -> Any:
            return list(self.one.pull(xs, ys, dys, wanted))

        axes = [0 if a and x is not None else None for a, x in zip(self.along, xs, strict=True)]
        batched = map_over(self.axis, one, (axes, None if ys is None else 0, 0))
        pairs = zip(wanted, batched(list(xs), ys, list(dys)), strict=True)
        return [fit(dx if self.along[i] else dx.sum(0), self.avals[i]) for i, dx in pairs]


# -- the tangent -----------------------------------------------------------------------------------

tangent_p: Any = core.Primitive("regrad_tangent")


class Tangent:
    """A linear map, defined by its transpose: `pull(residuals, dys)`.

    `outs` are the types of its results, and so of the dys. A dy is None if the result is unused.
    """

    name = ""
    outs: Sequence[Any] = ()

    def pull(self, residuals: Sequence[Any], dys: Sequence[Any]) -> Sequence[Any]:
        """Return the results of the transpose, one for each of the inputs."""
        raise NotImplementedError


class OpTangent(Tangent):
    """The tangent of an op, by some of its inputs."""

    def __init__(
        self, gradient: EquationGradient, wanted: Sequence[int], count: int, outs: Arrays
    ) -> None:
        self.gradient = gradient
        self.name: str = gradient.name
        self.wanted = wanted
        self.count = count
        self.outs = outs
        self.kept: Sequence[int]
        self.keeps_outputs: bool
        self.kept, self.keeps_outputs = gradient.keeps(wanted)

    def residuals(self, xs: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
        """Return the inputs and outputs that the pull needs."""
        return [*(xs[i] for i in self.kept), *(ys if self.keeps_outputs else ())]

    def pull(self, residuals: Sequence[Any], dys: Sequence[Any]) -> Sequence[Any]:
        xs = replaced([None] * self.count, self.kept, residuals[: len(self.kept)])
        ys = list(residuals[len(self.kept) :]) if self.keeps_outputs else None
        if not self.gradient.sparse:
            pairs = zip(dys, self.outs, strict=True)
            dys = [extending.zeros_like_aval(aval) if dy is None else dy for dy, aval in pairs]
        return self.gradient.pull(xs, ys, dys, self.wanted)


class DerivedTangent(Tangent):
    """The derivative of a tangent by its residuals; its transpose is the pull's own derivative.

    Its residuals are the other tangent's residuals, then the changes of some of them.
    """

    def __init__(self, base: Tangent, count: int, places: Sequence[int]) -> None:
        self.base = base
        self.name: str = base.name
        self.outs: Sequence[Any] = base.outs
        self.count = count
        self.places = places

    def pull(self, residuals: Sequence[Any], dys: Sequence[Any]) -> Sequence[Any]:
        at, changes = list(residuals[: self.count]), residuals[self.count :]

        def pulled(*moved: Any) -> list[Any]:
            return list(self.base.pull(replaced(at, self.places, moved), dys))

        return jax.jvp(pulled, tuple(at[i] for i in self.places), tuple(changes))[1]


class BatchedTangent(Tangent):
    """A tangent under `vmap`; its inputs and results have the examples first."""

    def __init__(self, one: Tangent, along: Sequence[bool], outs: Sequence[Any], axis: Any) -> None:
        self.one = one
        self.name: str = one.name
        self.outs = outs
        self.along = along
        self.axis = axis

    def pull(self, residuals: Sequence[Any], dys: Sequence[Any]) -> Sequence[Any]:
        def one(residuals: Any, dys: Sequence[Any]) -> Any:
            return list(self.one.pull(residuals, dys))

        axes = [0 if a else None for a in self.along]
        return map_over(self.axis, one, (axes, 0))(list(residuals), list(dys))


def run_tangent(tangent: Tangent, residuals: Sequence[Any], ts: Sequence[Any]) -> list[Any]:
    """Apply the tangent map at some residuals."""
    ts = [extending.instantiate_zeros(t) for t in ts]
    return tangent_p.bind(*residuals, *ts, tangent=tangent, count=len(residuals))


def _push(*args: Any, tangent: Tangent, count: int) -> list[Any]:
    """Run forward mode: apply the transpose of the pull, which exists if the pull is linear."""
    residuals, ts = args[:count], args[count:]
    like = [extending.zeros_like_aval(aval) for aval in tangent.outs]
    try:
        return list(transpose(partial(tangent.pull, residuals), like, ts))
    except NotLinear as error:
        raise GradientError(
            f"forward mode (jvp, jacfwd, linearize): {tangent.name} is not linear in the incoming "
            f"gradient (it takes {error}), so it does not define forward mode. Use reverse mode "
            "(grad, vjp, jacrev), also for second derivatives: jacrev(jacrev(f))."
        ) from None


def _tangent_jvp(primals: Arrays, tangents: Arrays, *, tangent: Tangent, count: int) -> Any:
    residuals, ts = primals[:count], primals[count:]
    ys = run_tangent(tangent, residuals, ts)
    places = [i for i, t in enumerate(tangents[:count]) if type(t) is not extending.Zero]
    parts = []
    if any(type(t) is not extending.Zero for t in tangents[count:]):
        parts.append(run_tangent(tangent, residuals, tangents[count:]))
    if places:
        derived = DerivedTangent(tangent, count, places)
        parts.append(run_tangent(derived, [*residuals, *(tangents[i] for i in places)], ts))
    return ys, [sum(dots[1:], dots[0]) for dots in zip(*parts, strict=True)]


def _tangent_transposed(dys: Sequence[Any], *args: Any, tangent: Tangent, count: int) -> Any:
    if any(map(extending.is_undefined_primal, args[:count])):
        return _by_transposition(partial(_push, tangent=tangent, count=count), dys, args)
    if all(type(dy) is extending.Zero for dy in dys):
        return [None] * len(args)
    arriving = [  # (jax.vjp accepts Python numbers)
        None if type(dy) is extending.Zero else jax.numpy.asarray(dy, aval.dtype)
        for dy, aval in zip(dys, tangent.outs, strict=True)
    ]
    dxs = tangent.pull(args[:count], arriving)
    pairs = zip(args[count:], dxs, strict=True)
    return [None] * count + [dx if extending.is_undefined_primal(t) else None for t, dx in pairs]


def _tangent_batched(
    axis: Any, args: Arrays, dims: Sequence[int | None], *, tangent: Tangent, count: int
) -> Any:
    if all(d is None for d in dims):
        return tangent_p.bind(*args, tangent=tangent, count=count), [None] * len(tangent.outs)
    along = [d is not None for d in dims]
    args = [x if not d else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    ts = [
        t if a else jax.numpy.broadcast_to(t, (axis.size, *t.shape))
        for t, a in zip(args[count:], along[count:], strict=True)
    ]
    zeros = map_over(axis, lambda _: [extending.zeros_like_aval(a) for a in tangent.outs], 0)
    outs = [jax.typeof(z) for z in zeros(jax.numpy.zeros(axis.size))]
    batched = BatchedTangent(tangent, along[:count], outs, axis)
    return run_tangent(batched, args[:count], ts), [0] * len(outs)


def _tangent_types(*avals: Any, tangent: Tangent, count: int) -> Any:
    return list(tangent.outs), core.no_effects


extending.define(
    tangent_p, _push, _tangent_types,
    jvp=_tangent_jvp, transpose=_tangent_transposed, batched=_tangent_batched,
)  # fmt: skip


# -- arrays that move together ---------------------------------------------------------------------

tie_p: Any = core.Primitive("regrad_tie")


class _Still(Tangent):
    """The tangents of tied arrays by the tangents of the other arrays: zeros."""

    name = "an array that moves with others"

    def __init__(self, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        self.ins = ins
        self.outs = outs

    def pull(self, residuals: Sequence[Any], dys: Sequence[Any]) -> Sequence[Any]:
        return [*map(extending.zeros_like_aval, self.ins)]


def tied(xs: Sequence[Any]) -> list[Any]:
    """Return the same arrays, tied: for JAX, all of them move if one does.

    So a derivative by one of them is the first derivative for each op that uses any of them.
    Otherwise JAX would count as first the derivative that reaches the op first, which may be a
    derivative of a gradient by another array.
    """
    places = [i for i, x in enumerate(xs) if extending.trace_of(x) is not None and is_float(x.aval)]
    if len(places) < 2:
        return list(xs)
    return replaced(xs, places, tie_p.bind(*[xs[i] for i in places]))


def _tie_jvp(primals: Arrays, tangents: Arrays) -> Any:
    still = [i for i, t in enumerate(tangents) if type(t) is extending.Zero]
    ts = [t for t in tangents if type(t) is not extending.Zero]
    one = _Still([*map(jax.typeof, ts)], [tangents[i].aval for i in still])
    zeros = run_tangent(one, [], ts) if still else []
    return tie_p.bind(*primals), replaced(tangents, still, zeros)


extending.define(
    tie_p, lambda *xs: list(xs), lambda *avals: (list(avals), core.no_effects), jvp=_tie_jvp,
    transpose=lambda dys, *xs: list(dys), batched=lambda axis, xs, dims: (tie_p.bind(*xs), dims),
)  # fmt: skip

"""`from_regrad`: a regrad function as a JAX function, with its rules active."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import numpy as np

from regrad.autodiff.gradients import callable_or_raise
from regrad.autodiff.variables import Variable
from regrad.core.backends import JAX, is_array
from regrad.core.containers import replaced
from regrad.core.rule import place
from regrad.core.state import current, in_state
from regrad.core.tensor import Tensor, wrap
from regrad.errors import ArgumentError, GradientError, kind
from regrad.jax.host import GRADIENTS, need
from regrad.jax.host.extending import trace_around, trace_of
from regrad.jax.primitives import Arrays, EquationGradient, fit, is_float, run_op
from regrad.jax.scopes import check, follow
from regrad.transforms.bodies import BodyFunction, pullback
from regrad.transforms.region import (
    Flat,
    Passage,
    Region,
    in_region,
    read_source,
    results,
    run_inside,
    watched_places,
)
from regrad.transforms.replay import Captured


def from_regrad(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of regrad's Tensors as a function of JAX arrays.

    Args:
        f: Takes and returns Tensors, or pytrees of them (containers that `jax.tree_util` opens).

    f receives JAX arrays (and NumPy arrays) among the arguments as Tensors, and everything else
    unchanged. The results are JAX arrays, of any shape. Rules apply at every order: the rules of
    f's ops, the overrides that are active when the function is called, and the gradients of
    `custom_grad`. JAX can differentiate the function (forward mode needs rules that are linear in
    the incoming gradient), batch it and compile it. JAX keeps a trace for each map of overrides and
    each default dtype; hits are counted when JAX traces. Tensors and Variables that f reaches
    through its closure are constants. Complex gradients are converted to the convention of each
    side.

    Raises:
        GradientError: f reaches a Tensor or an array that is being differentiated without taking it
            as an argument; forward mode reaches a rule that is not linear; an override is active in
            a context that was copied by hand from another thread or task.
        ArgumentError: f assigns to a Variable, or does not return Tensors.

    Source: PyTorch's `torch2jax` and TensorFlow's `jax2tf.call_tf`, which do the same for these
    libraries.

    >>> import jax, jax.numpy as jnp, regrad as rg
    >>> with rg.gradient_override_map({"Sign": "Identity"}):
    ...     print(jax.grad(rg.jax.from_regrad(lambda x: rg.sum(rg.sign(x) * x)))(jnp.array([3.0])))
    [4.]
    """
    callable_or_raise(f, "from_regrad")
    name = f"from_regrad({getattr(f, '__name__', type(f).__name__)})"
    follow()

    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        notes: list[Any] = []

        def flat(xs: Sequence[Tensor]) -> Sequence[Tensor]:
            args, kwargs = jax.tree_util.tree_unflatten(structure, replaced(leaves, places, xs))
            ys, rebuild = jax.tree_util.tree_flatten(f(*args, **kwargs))
            notes[:] = [rebuild]
            return [_result(y, name) for y in ys]

        check(name)
        flat.function = f  # pyright: ignore[reportFunctionMemberAccess]
        ys = bridge(flat, [_to_jax(leaves[i]) for i in places], name)
        return jax.tree_util.tree_unflatten(notes[0], ys)

    return call


def _to_jax(array: Any) -> Any:
    if isinstance(array, jax.Array):
        return array
    if isinstance(array, np.ndarray | np.generic):
        return JAX.from_numpy(np.asarray(array))
    raise ArgumentError(f"from_regrad: expected a JAX or NumPy array, got {kind(array)}")


def _result(y: Any, name: str) -> Tensor:
    if isinstance(y, Variable):
        y = y._read()
    if not isinstance(y, Tensor):
        raise ArgumentError(
            f"{name}: expected the function to return Tensors (or containers of them), got "
            f"{kind(y)}. Make a Tensor with rg.tensor."
        )
    return y


class Finder(Region):
    """The region of a first run: it records arrays that the body reaches by its closure."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, traced=True)
        self.arrays: list[Any] = []
        self.trace: Any = None  # JAX's trace

    def array(self, value: Any) -> Tensor:
        known = id(value) in map(id, self.arrays)
        # Arrays that the body has computed with JAX functions do not come from outside.
        if isinstance(value, jax.Array) and not known and trace_of(value) is not self.trace:
            self.arrays.append(value)
        return super().array(value)


# traces of first runs, whose arrays can no longer be used
OVER: weakref.WeakSet[Any] = weakref.WeakSet()


def _is_dead(array: Any) -> bool:
    """Return whether an array belongs to a finished first run, or to a loop inside it."""
    trace = trace_of(array)
    while trace is not None and trace not in OVER:
        trace = trace_around(trace)
    return trace is not None


def bridge(flat: Flat, arrays: Sequence[Any], name: str) -> list[Any]:
    """Run a flat function of Tensors on JAX arrays, with its gradient in regrad."""
    need(GRADIENTS)
    state = current()
    overrides = None if state is None else state.overrides
    region = Finder(name)
    flat = Captured(flat, name)

    def first(*xs: Any) -> list[Any]:
        region.trace = trace_of(xs[0] if xs else jax.lax.iota("int32", 1))
        given = [region.make_stand_in(wrap(x)) for x in xs]
        return _data(run_inside(partial(results, flat, given, region), region, overrides))

    closed = jax.make_jaxpr(first)(*arrays)
    OVER.add(region.trace)
    if region.assigned:
        raise ArgumentError(
            f"{name} assigns to the Variable {region.assigned[0].name!r}; a JAX function has no "
            "side effects. Return the new value."
        )
    sources = [read_source(s) for s in region.captured]
    if watched_places(sources):
        raise GradientError(
            f"{name} closes over a Tensor that regrad is differentiating; its gradient would be "
            "lost. Pass it as an argument."
        )
    outside = [*(JAX_data(x) for x in sources), *region.arrays]
    captured = [*region.captured, *region.arrays]
    if any(map(_is_dead, outside)):
        raise GradientError(
            f"{name}: a rule or gradient function uses an array that the function computed with "
            "JAX's own functions and kept (in a closure, or by `save`). regrad cannot compute it "
            "again from the inputs. Compute it with regrad's functions."
        )
    body = BodyFunction(flat, len(arrays), captured, overrides, name)
    inputs = [*arrays, *outside]
    if outside:
        closed = jax.make_jaxpr(_make_runner(body))(*inputs)
    avals = [jax.typeof(x) for x in inputs]
    return run_op(inputs, closed, RegradGradient(name, body, avals, len(arrays), closed.out_avals))


def JAX_data(x: Tensor) -> Any:
    """Return a Tensor's values as a JAX array."""
    return x._data if isinstance(x._data, jax.Array) else JAX.from_numpy(x.numpy())


def _data(ys: Sequence[Tensor]) -> list[Any]:
    return [JAX_data(in_region(y)) for y in ys]


def _make_runner(flat: Flat) -> Callable[..., list[Any]]:
    """Return a flat function on arrays, without active scopes."""

    def run(*xs: Any) -> list[Any]:
        with in_state(None):
            return [JAX_data(y) for y in flat([wrap(x) for x in xs])]

    return run


class RegradGradient(EquationGradient):
    """The gradient of a flat function, by regrad; this gradient is bridged in turn."""

    sparse = True

    def __init__(
        self, name: str, flat: Flat, avals: Sequence[Any], count: int, outs: Sequence[Any]
    ) -> None:
        self.name = name
        self.flat = flat
        self.avals = avals
        self.count = count
        self.reached: list[int] = [i for i, aval in enumerate(outs) if is_float(aval)]

    def keeps(self, wanted: Sequence[int]) -> tuple[Sequence[int], bool]:
        return range(len(self.avals)), False

    def allow(self, wanted: Sequence[int]) -> None:
        if max(wanted) >= self.count:
            where = place(getattr(getattr(self.flat, "f", None), "function", self.flat))
            raise GradientError(
                f"{self.name} ({where}) closes over an array that JAX is differentiating; its "
                "gradient would be lost. Pass it as an argument, or use jax.lax.stop_gradient."
            )

    def pull(self, xs: Arrays, ys: Arrays | None, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        used = [(i, dy) for i, dy in zip(self.reached, dys, strict=True) if dy is not None]
        back = pullback(self.flat, len(xs), Passage(wanted, [i for i, _ in used]))
        with in_state(None):
            given = [*xs, *[conjugate(dy) for _, dy in used]]
            dxs = bridge(back, given, f"the gradient of {self.name}")
        pairs = zip(wanted, dxs, strict=True)
        return [fit(conjugate(dx), self.avals[i]) for i, dx in pairs]


def conjugate(dx: jax.Array | None) -> Any:
    """Return a gradient in the other convention: JAX's is the conjugate of regrad's."""
    return dx.conj() if dx is not None and np.issubdtype(dx.dtype, np.complexfloating) else dx

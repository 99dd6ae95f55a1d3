"""`vmap` inside an overridden function, kept in its program as one equation.

JAX batches while it traces: an op in the program is in batched form, and its axis of examples is no
longer marked. So regrad traces a function that calls `vmap` once more, with each call of `vmap` as
an equation that holds the program of a single example. Rules are put in there, and JAX then batches
the whole as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.extend import core

from regrad.core.blocks import block
from regrad.core.containers import replaced
from regrad.jax.host import VMAPS, extending, need
from regrad.jax.host.programs import as_closed, equations, with_constants_as_inputs

KEEPING: ContextVar[bool] = ContextVar("regrad_keeping_vmaps", default=False)
# JAX traces a compiled function once for each set of named axes, so programs that were traced with
# this axis are never used for a plain call.
AXES = (("regrad.override", 1),)


def trace(f: Callable[..., Any], xs: Sequence[Any]) -> Any:
    """Return the program of a function, with each `vmap` in it as an equation."""
    need(VMAPS)
    with _keep_vmaps(True):
        return jax.make_jaxpr(f, axis_env=AXES)(*xs)


@block
def _keep_vmaps(keep: bool) -> Generator[None]:
    # (It stays installed, because another thread may be tracing; elsewhere it calls JAX's
    # function.)
    if keep:
        extending.batch_by(_batch)
    token = KEEPING.set(keep)
    try:
        yield
    finally:
        KEEPING.reset(token)


def _batch(fun: Any, axis: Any, in_dims: Any, dests: Any, *args: Any, **kwargs: Any) -> Any:
    """Batch like JAX's function of that name, or keep the call while a program is traced."""
    special = any(args) or any(kwargs.values()) or axis.explicit_mesh_axis is not None
    kept = KEEPING.get() and extending.is_staging() and _are_usual(in_dims)
    if not kept or special or axis.spmd_name is not None:
        return extending.batch(fun, axis, in_dims, dests, *args, **kwargs)
    return _Kept(fun, axis, in_dims, dests)


class _Kept:
    """A batched function whose call becomes one equation."""

    def __init__(self, fun: Any, axis: Any, in_dims: Sequence[Any], dests: Any) -> None:
        self.fun = fun
        self.axis = axis
        self.in_dims = in_dims
        self.dests = dests

    def call_wrapped(self, *args: Any) -> Any:
        mapped = [i for i, d in enumerate(self.in_dims) if d is not None]
        avals = [_single_aval(args[i], self.in_dims[i], self.axis) for i in mapped]

        def single(*xs: Any) -> Any:
            return self.fun.call_wrapped(*replaced(args, mapped, xs))

        with extending.with_axes([(self.axis.name, self.axis.size)]):
            run = extending.wrap(single, like=self.fun)
            jaxpr, _, consts = extending.trace_to_jaxpr(run, avals)
        body = as_closed(with_constants_as_inputs(jaxpr))
        in_dims = (*[None] * len(consts), *(self.in_dims[i] for i in mapped))
        dests: Any = self.dests() if callable(self.dests) else self.dests
        params = {"jaxpr": body, "axis": self.axis, "in_dims": in_dims, "dests": tuple(dests)}
        xs = [*consts, *(args[i] for i in mapped)]
        if _can_be_kept(body, dests):
            return vmap_p.bind(*xs, **params), dests
        return _batch_results(xs, **params)


def _single_aval(x: jax.Array, dim: int, axis: Any) -> Any:
    aval = jax.typeof(x)
    return extending.mapped_aval(axis.size, dim % len(aval.shape), aval)


def _can_be_kept(body: Any, dests: Sequence[Any]) -> bool:
    """Return whether the whole body is visible, and its results are batched as usual.

    The ops of a `custom_vmap` are known only when it is batched.
    """
    names = {eqn.primitive.name for eqn in equations(body.jaxpr)}
    return _are_usual(dests) and not extending.assigns(body) and "custom_vmap_call" not in names


def _are_usual(dims: Sequence[Any]) -> bool:
    return all(type(d) is int or d is None for d in dims)


def _batch_results(
    xs: Sequence[Any], *, jaxpr: Any, axis: Any, in_dims: Sequence[int | None], dests: Any
) -> Any:
    """Return the results of a program for all examples, batched by JAX, and their batch axes."""
    fun = extending.wrap(core.jaxpr_as_fun(jaxpr), like=jaxpr)
    return extending.batch(fun, axis, in_dims, dests).call_wrapped(*xs)


def _run(*xs: Any, **params: Any) -> list[Any]:
    with _keep_vmaps(False):
        return list(_batch_results(xs, **params)[0])


class _Vmap(core.Primitive):
    """An equation while a program waits for its rules; otherwise the batched ops."""

    def bind_with_trace(self, trace: Any, args: Sequence[Any], avals: Any, params: Any, /) -> Any:
        with extending.set_trace(trace):
            if KEEPING.get() and extending.is_staging():
                return super().bind_with_trace(trace, args, avals, params)
            return _run(*args, **params)


def _types(*avals: Any, **params: Any) -> Any:
    run = functools.partial(_run, **params)
    jaxpr, outs, _ = extending.trace_to_jaxpr(extending.wrap(run, like=params["jaxpr"]), avals)
    return outs, jaxpr.effects


vmap_p: _Vmap = _Vmap("regrad_vmap")
extending.define(vmap_p, _run, _types)

"""Registration of regrad's primitives in JAX, and interception of `vmap`."""

from __future__ import annotations

from typing import Any

import jax
import jax.core

from regrad.core.hosts import resolve, takes
from regrad.jax.host import GRADIENTS, VMAPS, fields, reads
from regrad.jax.host.programs import notes

# -- primitives ------------------------------------------------------------------------------------


def _interpreter(name: str, probe: Any) -> Any:
    why = "JAX documents no API to define the rules of a primitive"
    return GRADIENTS.part(f"jax.interpreters.{name}", why, probe)


_JVPS = _interpreter("ad.primitive_jvps", fields("__setitem__"))
_TRANSPOSES = _interpreter("ad.primitive_transposes", fields("__setitem__"))
_BATCHERS = _interpreter("batching.fancy_primitive_batchers", fields("__setitem__"))
_register_lowering = _interpreter("mlir.register_lowering", takes("prim", "rule"))
_lower = _interpreter("mlir.lower_fun", takes("fun", "multiple_results"))
Zero: Any = _interpreter("ad.Zero", takes("aval"))
instantiate_zeros: Any = _interpreter("ad.instantiate_zeros", takes("tangent"))
zeros_like_aval: Any = _interpreter("ad.zeros_like_aval", takes("aval"))
is_undefined_primal: Any = _interpreter("ad.is_undefined_primal", takes("x"))
dce: Any = GRADIENTS.part(
    "jax.interpreters.partial_eval.dce_jaxpr",
    "no public API removes unused equations from a program",
    takes("jaxpr", "used_outputs", "instantiate"),
)  # fmt: skip


def define(
    p: Any, run: Any, types: Any, *, jvp: Any = None, transpose: Any = None, batched: Any = None
) -> None:
    """Define the rules of a primitive: execution, types, effects, and transformations."""
    p.multiple_results = True
    # (for JAX 0.11 and later: it needs no separate lowering, for any content)
    p.is_high = _never
    p.def_impl(run)
    p.def_effectful_abstract_eval(types)
    if GRADIENTS.losses:
        return
    _register_lowering(p, _lower(run, multiple_results=True))
    for table, rule in ((_JVPS, jvp), (_TRANSPOSES, transpose), (_BATCHERS, batched)):
        if rule is not None:
            table[p] = rule


def _never(*avals: Any, **params: Any) -> bool:
    return False


def primitives() -> set[str]:
    """Return the names of the primitives that JAX can differentiate or batch."""
    return {p.name for p in (*_JVPS, *_BATCHERS)}


GRADIENTS.part("jax.core.Tracer", "as `trace_of`", fields("_trace"))


@reads(GRADIENTS, "jax.core.Tracer._trace", "no public API returns the trace of an array")
def trace_of(array: Any) -> Any:
    """Return JAX's trace to which a tracer belongs; None for an array with values."""
    return array._trace if isinstance(array, jax.core.Tracer) else None


def trace_around(trace: Any) -> Any:
    """Return the trace in which another one was opened, if JAX exposes it."""
    return getattr(trace, "parent_trace", None)


# -- vmap ------------------------------------------------------------------------------------------

_BATCHING = "jax._src.interpreters.batching"
batch: Any = VMAPS.part(
    f"{_BATCHING}.batch", "no public API intercepts calls of jax.vmap",
    takes("fun", "axis_data", "in_dims", "out_dim_dests"),
)  # fmt: skip
VMAPS.part(
    f"{_BATCHING}.AxisData", "as `batch`",
    fields("name", "size", "spmd_name", "explicit_mesh_axis"),
)  # fmt: skip
_context: Any = VMAPS.part(
    "jax._src.core.trace_ctx", "no public API shows how a call is processed", fields("trace")
)
_Staging: Any = VMAPS.part(
    "jax._src.interpreters.partial_eval.DynamicJaxprTrace", "as `trace_ctx`",
    lambda found: isinstance(found, type),
)  # fmt: skip
_Assignment: Any = VMAPS.part(
    "jax._src.effects.JaxprInputEffect", "no public API shows what assigns to a Ref",
    lambda found: isinstance(found, type),
)  # fmt: skip
with_axes: Any = VMAPS.part(
    "jax._src.core.extend_axis_env_nd", "jax.make_jaxpr drops the names of axes",
    takes("name_size_pairs"),
)  # fmt: skip
trace_to_jaxpr: Any = VMAPS.part(
    "jax.interpreters.partial_eval.trace_to_jaxpr_dynamic", "as `extend_axis_env_nd`",
    takes("fun", "in_avals"),
)  # fmt: skip
_wrap: Any = VMAPS.part(
    "jax.extend.linear_util.wrap_init", "as `extend_axis_env_nd`", takes("f", "params")
)
set_trace: Any = VMAPS.part(
    "jax.extend.core.set_current_trace", "a primitive is bound to a trace", takes("trace")
)
mapped_aval: Any = VMAPS.part(
    "jax.extend.core.mapped_aval", "no other API returns the type of one example",
    takes("size", "axis", "aval"),
)  # fmt: skip
VMAPS.part(
    "jax.extend.core.Primitive.bind_with_trace", "as `trace_ctx`",
    takes("self", "trace", "args", "avals", "params"),
)  # fmt: skip


def batch_by(replacement: Any) -> None:
    """Make `jax.vmap` call this function where it calls `batch`."""
    resolve(_BATCHING).batch = replacement


def is_staging() -> bool:
    """Return whether a call now becomes an equation, and is not differentiated or batched."""
    return isinstance(_context.trace, _Staging)


def open_traces() -> list[Any]:
    """Return the open traces, innermost first, if JAX exposes them."""
    found = [_context.trace]
    while found[-1] is not None:
        found.append(trace_around(found[-1]))
    return found[:-1]


def wrap(f: Any, like: Any) -> Any:
    """Wrap a function as JAX does, with the notes of a wrapped function or of a program."""
    return _wrap(f, debug_info=notes(like))


def assigns(program: Any) -> bool:
    """Return whether a program assigns to a Ref among its inputs."""
    return any(isinstance(effect, _Assignment) for effect in program.effects)

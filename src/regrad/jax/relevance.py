"""Relevance of a JAX function: its linear maps and products as ops of their own, under rules.

JAX has one product for dense layers and for attention, and adds a bias apart. Which operand is a
weight follows from the program: the one that does not depend on the inputs. So the program is
traced, and each linear map of one value, with its bias, each product of two values, becomes a call
of a function whose name is a key: those in `MAPS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from regrad.core.foreign import nonzero
from regrad.core.places import at, entries
from regrad.errors import ArgumentError, kind
from regrad.inspection.relevances import Relevance
from regrad.jax.equations import find_line
from regrad.jax.host import programs
from regrad.jax.modules import module_types
from regrad.jax.override import override
from regrad.jax.where import JITS
from regrad.rules.lrp import MAPS

PRODUCTS = ("dot_general", "conv_general_dilated", "mul")


def explain(model: Any, inputs: Any, target: Any, rules: Any, reference: Any) -> Relevance:
    """Return the relevance of the inputs of a JAX function; see `regrad.rules.lrp.relevance`."""
    if not callable(model):
        raise ArgumentError(f"relevance expected a torch.nn.Module or a callable, got {kind(model)}")
    values, others = _by_name(inputs), None if reference is None else _by_name(reference)
    xs = {name: x for name, x in values.items() if _is_float(x)}
    if not xs or (others is not None and others.keys() != xs.keys()):
        raise ArgumentError(
            "relevance: in JAX it comes to arrays of floats, the embedded tokens of a text, and a "
            f"reference is for each of them; got {[kind(x) for x in values.values()]}"
        )
    half = None
    if others is not None:
        half = len(next(iter(xs.values())))
        both = {n: (x, jnp.broadcast_to(jnp.asarray(others[n], x.dtype), x.shape)) for n, x in xs.items()}
        xs = {n: jnp.concatenate(pair) for n, pair in both.items()}

    def run(*given: Any) -> Any:
        held = values | dict(zip(xs, given, strict=True))
        named = {k: v for k, v in held.items() if isinstance(k, str)}
        y = model(*[v for k, v in held.items() if k not in named], **named)
        if half is None:
            return (_chosen(y, target),) * 2
        chosen = _chosen(y[:half], target)
        return chosen, chosen - _chosen(y[half:], target)

    found = {e.params.get("name") for e in _equations(_with_maps(run, xs.values()))}
    there = {name for name in MAPS if name in found}
    module = model if isinstance(model, module_types("flax.nnx", "equinox", "flax.linen")) else None
    used = override(
        lambda *given: core.jaxpr_as_fun(_with_maps(run, given))(*given),
        _present(rules, there), model=module,
    )  # fmt: skip
    (value, total), pull = jax.vjp(used, *xs.values())
    dxs = pull([jnp.ones_like(value), jnp.zeros_like(total)])
    known = [_share(x, dx, half) for x, dx in zip(xs.values(), dxs, strict=True)]
    alike = total.ndim == 1 and all(r.shape[:1] == total.shape for r in known)
    total = total if alike else total.sum()
    missing = total - sum(r.reshape(*total.shape, -1).sum(-1) for r in known)
    by_name = dict.fromkeys(values) | dict(zip(xs, known, strict=True))
    if not isinstance(inputs, Mapping):
        by_name = tuple(by_name.values()) if isinstance(inputs, tuple) else by_name[0]
    return Relevance(by_name, {}, total, missing, (), used)


def _by_name(inputs: Any) -> dict[Any, Any]:
    given = inputs if isinstance(inputs, Mapping) else dict(
        enumerate(inputs if isinstance(inputs, tuple) else (inputs,))
    )  # fmt: skip
    return {name: jnp.asarray(x) if hasattr(x, "__array__") else x for name, x in given.items()}


def _is_float(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def _share(x: Any, dx: Any, half: int | None) -> Any:
    if half is not None:
        x, dx = x[:half] - x[half:], dx[:half]
    return jnp.where(dx == 0, 0, nonzero(x) * dx)


def _chosen(y: Any, target: Any) -> Any:
    """Return the outputs that are explained."""
    if callable(target):
        return target(y)
    if not _is_float(y) or y.ndim != 2:
        raise ArgumentError(
            f"relevance: the target {target!r:.40} is a class, so the model should return an array "
            f"of (examples, classes), got {kind(y)}. Give a function of the output as target"
        )
    places = jnp.asarray(target)
    if places.dtype.kind not in "iu" or bool(((places < -y.shape[1]) | (places >= y.shape[1])).any()):
        raise ArgumentError(
            f"relevance: target expected a function, or classes among {y.shape[1]}, got {target!r:.40}"
        )
    return jnp.take_along_axis(y, jnp.broadcast_to(places, len(y))[:, None] % y.shape[1], 1)[:, 0]


def _present(rules: Mapping[Any, Any], there: set[str]) -> dict[Any, Any]:
    """Return a map without the maps and products that the program lacks."""
    made: dict[Any, Any] = {}
    for key, rule in rules.items():
        what = key.what if isinstance(key, at) else key
        kept = tuple(e for e in entries(what) if e not in MAPS or e in there)
        if kept == entries(what):
            made[key] = rule
        elif kept:
            made[replace(key, what=kept) if isinstance(key, at) else kept[0]] = rule
    return made


# -- maps and products as calls --------------------------------------------------------------------


def _equations(closed: Any) -> Iterator[Any]:
    return programs.equations(closed.jaxpr)


def _with_maps(run: Callable[..., Any], xs: Any) -> Any:
    """Return the program of a function, with calls for its linear maps and products."""
    closed = jax.make_jaxpr(run)(*xs)
    return closed.replace(jaxpr=_rewritten(closed.jaxpr, [True] * len(closed.jaxpr.invars))[0])


def _rewritten(jaxpr: Any, given: list[bool]) -> tuple[Any, list[bool]]:
    """Return a program with such calls, and which of its results depend on the inputs."""
    active = {v for v, is_active in zip(jaxpr.invars, given, strict=True) if is_active}
    depends = lambda v: not isinstance(v, core.Literal) and v in active  # noqa: E731
    reads = Counter(v for e in jaxpr.eqns for v in e.invars if not isinstance(v, core.Literal))
    reads.update(v for v in jaxpr.outvars if not isinstance(v, core.Literal))
    made: list[Any] = []
    pending: dict[Any, Any] = {}  # linear maps that wait for their bias, by their result
    for eqn in jaxpr.eqns:
        flags = [depends(v) for v in eqn.invars]
        bias = [v for v in eqn.invars if not isinstance(v, core.Literal) and v in pending]
        if not any(flags):
            made.append(eqn)
            continue
        name, results = eqn.primitive.name, [True] * len(eqn.outvars)
        if name in JITS:
            body = programs.called(eqn)
            inner, results = _rewritten(body.jaxpr, flags)
            new = body.replace(jaxpr=inner)
            made.append(eqn.replace(params={**eqn.params, "jaxpr": new}) if inner is not body.jaxpr else eqn)
        elif name in PRODUCTS[:2] and sum(flags) == 1:
            x, w = eqn.invars if flags[0] else eqn.invars[::-1]
            y = eqn.outvars[0]
            if reads[y] == 1 and _adds_bias(jaxpr, y, depends):
                pending[y] = eqn, x, w
            else:
                made.append(_call(eqn, [x, w], [y], _map(eqn, flags[0])))
        elif name == "add" and len(bias) == 1 and sum(flags) == 1:
            of, x, w = pending[bias[0]]
            b = eqn.invars[1] if eqn.invars[0] is bias[0] else eqn.invars[0]
            made.append(_call(of, [x, w, b], eqn.outvars, _map_with_bias(of, of.invars[0] is x)))
        elif name in PRODUCTS and all(flags):
            made.append(_call(eqn, eqn.invars, eqn.outvars, _product(eqn)))
        else:
            _check(eqn, name)
            made.append(eqn)
        active |= {v for v, is_active in zip(eqn.outvars, results, strict=True) if is_active}
    same = len(made) == len(jaxpr.eqns) and all(a is b for a, b in zip(made, jaxpr.eqns, strict=True))
    new = jaxpr if same else jaxpr.replace(eqns=made)
    return new, [depends(v) for v in jaxpr.outvars]


def _adds_bias(jaxpr: Any, y: Any, depends: Callable[[Any], bool]) -> bool:
    """Return whether what reads the result of a linear map adds a constant along one axis to it."""
    (reader,) = [e for e in jaxpr.eqns if y in [v for v in e.invars if not isinstance(v, core.Literal)]] or [None]
    if reader is None or reader.primitive.name != "add":
        return False
    (other,) = [v for v in reader.invars if v is not y]
    if isinstance(other, core.Literal) or depends(other) or other.aval.shape != y.aval.shape:
        return False
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    while other in made and made[other].primitive.name in ("broadcast_in_dim", "reshape"):
        other = made[other].invars[0]
    return max(other.aval.shape, default=1) == other.aval.size


def _check(eqn: Any, name: str) -> None:
    """Refuse linear maps and products of two values where no rule would see them."""
    for body in programs.bodies(eqn.params.values()):
        for inner in programs.equations(body):
            if inner.primitive.name in PRODUCTS[:2]:
                raise ArgumentError(
                    f"relevance: a {inner.primitive.name} runs in the body of a {name} "
                    f"({find_line(eqn, 'unknown')}), in which rules of linear maps have no place. "
                    "Write the loop in Python, without a checkpoint or a derivative of its own"
                )


def _call(eqn: Any, xs: Any, ys: Any, function: Callable[..., Any]) -> Any:
    """Return an equation that calls a compiled function, where another one stood."""
    like = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in xs]
    (call,) = jax.make_jaxpr(jax.jit(function))(*like).eqns
    return eqn.replace(
        primitive=call.primitive, params=call.params, invars=list(xs), outvars=list(ys)
    )


def _run(eqn: Any, xs: Any) -> Any:
    return eqn.primitive.bind(*xs, **eqn.params)


def _map(eqn: Any, first: bool) -> Callable[..., Any]:
    def lrp_dense(x: Any, w: Any) -> Any:
        return _run(eqn, (x, w) if first else (w, x))

    def lrp_convolution(x: Any, w: Any) -> Any:
        return _run(eqn, (x, w) if first else (w, x))

    return lrp_dense if eqn.primitive.name == "dot_general" else lrp_convolution


def _map_with_bias(eqn: Any, first: bool) -> Callable[..., Any]:
    def lrp_dense_bias(x: Any, w: Any, bias: Any) -> Any:
        return _run(eqn, (x, w) if first else (w, x)) + bias

    def lrp_convolution_bias(x: Any, w: Any, bias: Any) -> Any:
        return _run(eqn, (x, w) if first else (w, x)) + bias

    return lrp_dense_bias if eqn.primitive.name == "dot_general" else lrp_convolution_bias


def _product(eqn: Any) -> Callable[..., Any]:
    def lrp_matmul(a: Any, b: Any) -> Any:
        return _run(eqn, (a, b))

    def lrp_mul(a: Any, b: Any) -> Any:
        return _run(eqn, (a, b))

    return lrp_mul if eqn.primitive.name == "mul" else lrp_matmul

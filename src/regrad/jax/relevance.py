"""Relevance of a JAX function: its linear maps and products as separate ops, under rules.

JAX uses one product for dense layers and for attention, and adds a bias separately. The program
shows which operand is a weight: the operand that does not depend on the inputs. So regrad traces
the program. Each linear map of one value (with its bias) and each product of two values becomes a
call of a function whose name is a key; `MAPS` in `rules.lrp` has these names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from regrad.core.builtin import own_rule
from regrad.core.containers import tree_map
from regrad.core.scopes import optional
from regrad.errors import ArgumentError, kind
from regrad.inspection.relevances import Loss, Relevance
from regrad.jax.boundaries import was_running
from regrad.jax.closed import name_and_place
from regrad.jax.equations import find_line, operands_of
from regrad.jax.host import programs
from regrad.jax.host.extending import trace_of
from regrad.jax.keys import key_for
from regrad.jax.modules import copied, module_types
from regrad.jax.override import override
from regrad.jax.primitives import is_float
from regrad.jax.running import ProgramRun
from regrad.rules import runs
from regrad.rules.runs import relevance_of

LAYER = "lrp_layer"
MAPS_OF = {"dot_general": "dense", "conv_general_dilated": "convolution"}
SHAPES = ("squeeze", "reshape", "transpose", "broadcast_in_dim")
VMAP = "regrad_vmap"  # (of `vmaps`, while a program waits for its rules)
OPENED = programs.JITS | programs.REMATS | {"closed_call", VMAP, "scan", programs.REMAT}


class JaxRun(runs.RelevanceRun):
    """A run of a JAX function."""

    def __init__(
        self, model: Any, inputs: Any, target: Any, reference: Any = None, batch_axis: int = 0
    ) -> None:
        arrays = tree_map(lambda x: jnp.asarray(x) if hasattr(x, "__array__") else x, inputs)
        super().__init__(model, arrays, target, reference, batch_axis)

    def is_float(self, x: Any) -> bool:
        return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)

    def call(self, *args: Any, **named: Any) -> Any:
        return copied(self.model)(*args, **named)


def explain(
    model: Any, inputs: Any, rules: Any, layers: Any, check: Any, batch_axis: int, target: Any,
    reference: Any,
) -> Relevance:  # fmt: skip
    """Return the relevance of the inputs of a JAX function; see `regrad.rules.lrp.relevance`."""
    if batch_axis and reference is not None:
        raise ArgumentError(
            "relevance: in JAX, a reference is for batches along axis 0, got batch_axis="
            f"{batch_axis}. Move the batch to the first axis"
        )
    run = JaxRun(model, inputs, target, reference, batch_axis)
    xs = run.floats
    if run.half and xs and all(trace_of(x) is None for x in xs.values()):
        runs.check_halves(run.explained(run.values)[1], run.apart())
    total, dxs, ops, used = differentiated(run, xs, rules, layers, bool(check))
    triples = zip(xs.items(), dxs, strict=True)
    found = [(name, relevance_of(x, dx, run.half)) for (name, x), dx in triples]
    rows = [_loss(*op) for op in ops if op[0].op_type != LAYER] if check else None
    by_layer = {
        path: relevance_of(y, dy, run.half) for path, (y, dy) in by_path(layers, ops).items()
    }
    answer = run.answer(total, found, by_layer, rows, used)
    if run.half and trace_of(total) is None and runs.is_incomplete(answer):
        _check_batches(run, rules, used)
    return answer


def differentiated(
    run: JaxRun, xs: Mapping[Any, Any], rules: Any, layers: Any, by_op: bool, tap: Any = None
) -> tuple[Any, Sequence[Any], list[Any], Any]:
    """Return the total of a run, the gradients by its inputs, its ops, and the scope of overrides.

    Args:
        run: The run.
        xs: The inputs that are differentiated, by name.
        rules: The map of overrides.
        layers: Paths or patterns of modules whose outputs are ops of their own.
        by_op: Whether the ops are returned even without layers.
        tap: Returns what replaces the output of a module, by its path and output.
    """
    used = _overridden(run, xs, rules, layers, tap)
    total, dxs, ops = _differentiated(used, list(xs.values()), bool(by_op or layers))
    return total, dxs, ops, used


def _overridden(
    run: JaxRun, xs: Mapping[Any, Any], rules: Any, layers: Any = (), tap: Any = None
) -> Any:
    """Return a function of the inputs that are differentiated: a run under rules."""
    model = run.model
    if not xs:
        raise ArgumentError(
            "relevance: JAX functions have relevance for arrays of floats, for example the "
            f"embedded tokens of a text; got {[kind(x) for x in run.values.values()]}"
        )
    module = model if isinstance(model, module_types("flax.nnx", "equinox", "flax.linen")) else None
    if layers and module is None:
        raise ArgumentError(
            f"relevance: layers are paths in a model of Flax or Equinox, got {kind(model)}"
        )

    def of_floats(*given: Any) -> tuple[Any, Any]:
        return run.explained(run.values | dict(zip(xs, given, strict=True)))

    def program(*given: Any) -> Any:
        closed = jax.make_jaxpr(of_floats)(*given)
        if run.half and any(e.primitive.name == VMAP for e in programs.equations(closed.jaxpr)):
            raise ArgumentError(
                "relevance: a reference is compared in one batch, and under jax.vmap rules see "
                "one example of it. Write the model for batches"
            )
        jaxpr, _ = _rewritten(closed.jaxpr, [True] * len(given))
        return core.jaxpr_as_fun(closed.replace(jaxpr=jaxpr))(*given)

    layers = paths_of(layers)
    used = override(
        program, {**rules, LAYER: optional(own_rule)} if layers else rules, model=module
    )
    if layers:
        used._surgery.where.naming.tap = partial(_tapped, layers, tap)  # pyright: ignore
    return used


def _check_batches(run: JaxRun, rules: Any, used: Any) -> None:
    """Raise if a rule of pairs compared other values than an input and its reference.

    The inputs alone have half of the size along the axis of the batch. So a second run shows where
    this axis is. (An op that is linear loses nothing in any order, so a run without missing
    relevance is right.)
    """
    alone = run.parts()[0]
    traced = _overridden(alone, alone.floats, rules)
    jax.eval_shape(traced, *alone.floats.values())
    before = {(h.op_type, h.path, h.where): h.sizes for h in traced.hits}
    for hit in used.hits:
        sizes = before.get((hit.op_type, hit.path, hit.where), ())
        for shape, one in zip(hit.sizes, sizes, strict=False) if hit.rule in runs.PAIRED else ():
            if isinstance(shape, tuple) and shape != one and shape[0] != 2 * one[0]:
                raise ArgumentError(
                    f"relevance: {hit.op_type} ({hit.where}) has inputs of the shape {one} for the "
                    f"inputs, and {shape} for inputs and references, so the batch is not the first "
                    f"axis, where {hit.rule} reads it. Move the batch there"
                )


def paths_of(layers: Any) -> Sequence[Any]:
    """Return paths or patterns of modules as a sequence."""
    return [layers] if isinstance(layers, str) else layers


# -- op by op --------------------------------------------------------------------------------------


def _differentiated(used: Any, xs: list[Any], by_op: bool) -> tuple[Any, Sequence[Any], list[Any]]:
    """Return the total of a function, the gradients by its inputs, and its ops if run op by op.

    (Each op has the gradients of its outputs and of its inputs.)
    """
    if not by_op:
        (value, total), pull = jax.vjp(used, *xs)
        return total, pull([jnp.ones_like(value), jnp.zeros_like(total)]), []
    run = ProgramRun(jax.make_jaxpr(used)(*xs), xs, range(len(xs)), [0], keeps=True)
    ops = [*run.backward()][::-1]
    return run.values[1], run.gradients, ops


def _loss(op: Any, dys: Sequence[Any], dxs: Sequence[Any]) -> Loss:
    ys = [y for y in op.outs if is_float(jax.typeof(y))]
    ends = zip(ys, dys, strict=True), zip(op.xs, dxs, strict=True)
    return runs.loss_of(op.path, op.op_type, op.line, *ends)


def lrp_layer(x: Any) -> Any:
    """Return the output of a module, as a separate op."""
    return jnp.copy(x)


def _tapped(layers: Sequence[Any], tap: Any, path: str, y: Any) -> Any:
    """Return the result of a module, the first array of it by an op that is found again.

    Args:
        layers: Paths or patterns of modules.
        tap: Returns what replaces that array, or None.
        path: The path of the module.
        y: The result.
    """
    if not any(runs.names(layer, path) for layer in layers):
        return y
    leaves, structure = jax.tree.flatten(y)
    if not leaves or not isinstance(leaves[0], jax.Array) or not is_float(leaves[0]):
        raise ArgumentError(
            f"relevance: the module {path!r} returned {kind(y)}, expected an array of floats"
        )
    first = leaves[0] if tap is None else tap(path, leaves[0])
    return jax.tree.unflatten(structure, [jax.jit(lrp_layer)(first), *leaves[1:]])


def by_path(layers: Any, ops: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
    """Return the outputs of modules and their gradients, by path."""
    found: dict[str, Any] = {}
    for op, (dy, *_), _ in ops:
        if op.op_type == LAYER:
            if op.path in found:
                raise ArgumentError(f"relevance: the module {op.path!r} ran more than once")
            found[op.path] = op.outs[0], dy
    named = [x for x in paths_of(layers) if not any(runs.names(x, path) for path in found)]
    if named:
        raise ArgumentError(f"relevance: no module {named[0]!r} ran and contributed to the target")
    return found


# -- maps and products as calls --------------------------------------------------------------------


def _rewritten(jaxpr: Any, given: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Return a program with these calls, and which of its results depend on the inputs.

    Args:
        jaxpr: The program.
        given: Which of its inputs depend on the explained inputs.
    """
    active = {v for v, is_active in zip(jaxpr.invars, given, strict=True) if is_active}
    readers: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for v in operands_of(eqn):
            readers.setdefault(v, []).append(eqn)
    for v in jaxpr.outvars:
        readers.setdefault(v if isinstance(v, core.Var) else None, []).append(None)
    made: list[Any] = []
    maps: dict[int, list[Any]] = {}  # the equations of each map, by the last of them
    within: set[int] = set()  # the other equations of the maps
    for eqn in jaxpr.eqns:
        flags = [isinstance(v, core.Var) and v in active for v in eqn.invars]
        name, new, results = eqn.primitive.name, eqn, [any(flags)] * len(eqn.outvars)
        if any(flags) and programs.name_of(eqn) in OPENED:
            new, results = _opened(eqn, flags)
        elif name in MAPS_OF and sum(flags) == 1:
            chain = _chain(eqn, readers, active, {v: e for e in jaxpr.eqns for v in e.outvars})
            maps[id(chain[-1])] = chain
            within |= {id(each) for each in chain[:-1]}
        elif all(flags) and (name in MAPS_OF or (name == "mul" and not _is_of_jax(jaxpr, eqn))):
            new = _call(eqn, eqn.invars, eqn.outvars, _product(eqn))
        elif any(flags):
            _check(eqn, name)
        if id(eqn) in maps:
            new = _map_call(maps[id(eqn)], active)
        made += [] if id(eqn) in within else [new]
        active |= {v for v, is_active in zip(eqn.outvars, results, strict=True) if is_active}
    depends = [isinstance(v, core.Var) and v in active for v in jaxpr.outvars]
    return programs.with_equations(jaxpr, made), depends


def _opened(eqn: Any, flags: list[bool]) -> tuple[Any, list[bool]]:
    """Return a runner of a program with calls in it, and which of its results depend."""
    name = programs.name_of(eqn)
    body = programs.remat_body(eqn) if name == programs.REMAT else programs.called(eqn)
    fixed, carried = programs.scan(eqn)[-2:] if name == "scan" else (len(flags), 0)
    while True:  # an iteration of a scan passes dependence on to the next iteration
        inner, results = _rewritten(jaxpr := getattr(body, "jaxpr", body), flags)
        end = fixed + carried
        carry = [*map(operator.or_, flags[fixed:end], results)]
        if carry == flags[fixed:end]:
            break
        flags = [*flags[:fixed], *carry, *flags[end:]]
    if inner is jaxpr:
        return eqn, results
    new = inner if body is jaxpr else body.replace(jaxpr=inner)
    if name == programs.REMAT:
        return programs.with_remat_body(eqn, new), results
    params = {key: new if value is body else value for key, value in eqn.params.items()}
    return eqn.replace(params=params), results


def _is_of_jax(jaxpr: Any, eqn: Any) -> bool:
    """Return whether a JAX activation makes a product, which is one op for its users."""
    return name_and_place(jaxpr)[1].startswith(programs.JAX) or was_running(key_for("Gelu"), eqn)  # pyright: ignore


def _chain(eqn: Any, readers: Any, active: set[Any], makers: Any) -> list[Any]:
    """Return the equations of a linear map: itself, and its bias, if one is added to the result.

    A bias is constant except along one axis. Shapes may change in between.
    """
    chain = [eqn]
    while True:
        y = chain[-1].outvars[0]
        (reader, *others) = readers.get(y, [None])
        if reader is None or others:
            return [eqn]
        chain.append(reader)
        if reader.primitive.name not in SHAPES:
            break
    rest = [v for v in reader.invars if v is not y]
    if reader.primitive.name != "add" or len(rest) != 1 or not isinstance(rest[0], core.Var):
        return [eqn]
    (bias,) = rest
    if bias in active or reader.outvars[0].aval.shape != y.aval.shape:
        return [eqn]
    while bias in makers and makers[bias].primitive.name in SHAPES:
        bias = makers[bias].invars[0]
    return chain if max(bias.aval.shape, default=1) == bias.aval.size else [eqn]


def _map_call(chain: Sequence[Any], active: set[Any]) -> Any:
    """Return the call of a linear map, and of its bias."""
    eqn, last = chain[0], chain[-1]
    first = eqn.invars[0] in active
    x, w = eqn.invars if first else eqn.invars[::-1]

    def linear(x: Any, w: Any, bias: Any) -> Any:
        y = _run(eqn, (x, w) if first else (w, x))
        for each in chain[1:-1]:
            y = _run(each, (y,))
        return y + bias

    linear.__name__ = f"lrp_{MAPS_OF[eqn.primitive.name]}"
    ys = [each.outvars[0] for each in chain]
    zero = core.Literal(np.zeros((), x.aval.dtype), jax.typeof(np.zeros((), x.aval.dtype)))
    bias = [v for v in last.invars if v is not ys[-2]] if len(chain) > 1 else [zero]
    return _call(eqn, [x, w, *bias], last.outvars, linear)


def _product(eqn: Any) -> Callable[..., Any]:
    def product(a: Any, b: Any) -> Any:
        return _run(eqn, (a, b))

    product.__name__ = "lrp_mul" if eqn.primitive.name == "mul" else "lrp_matmul"
    return product


def _call(eqn: Any, xs: Any, ys: Any, function: Callable[..., Any]) -> Any:
    """Return an equation that calls a compiled function, in place of another equation."""
    like = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in xs]
    (call,) = jax.make_jaxpr(jax.jit(function))(*like).eqns
    return eqn.replace(
        primitive=call.primitive, params=call.params, invars=list(xs), outvars=list(ys)
    )


def _run(eqn: Any, xs: Any) -> Any:
    return eqn.primitive.bind(*xs, **eqn.params)


def _check(eqn: Any, name: str) -> None:
    """Raise for linear maps and products of two values that no rule could reach."""
    held = [programs.called(eqn)] if programs.is_high(eqn) else eqn.params.values()
    for body in programs.bodies(held):
        for inner in programs.equations(body):
            if inner.primitive.name in MAPS_OF:
                raise ArgumentError(
                    f"relevance: a {inner.primitive.name} runs in the body of a {name} "
                    f"({find_line(eqn, 'unknown')}), where rules of linear maps cannot be placed. "
                    "Write the loop as a jax.lax.scan or in Python, without a custom derivative"
                )

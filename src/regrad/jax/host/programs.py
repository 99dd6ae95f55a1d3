"""Programs as JAX writes them down: equations, their bodies, and where they come from."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
from jax.extend import core

from regrad.core.hosts import Feature
from regrad.jax.host import OVERRIDES, SIGHT, fields, reads, refuse

# -- where an equation comes from ------------------------------------------------------------------

JAX: str = os.path.dirname(jax.__file__) + os.sep


def _files(feature: Feature, why: str, *names: str) -> tuple[str, ...]:
    """Return where files and folders of JAX's lie."""
    found = tuple(os.path.join(JAX, "_src", *name.split("/")) for name in names)
    feature.parts.append((f"jax/_src/{{{','.join(names)}}}", why))
    gone = [path for path in found if not (os.path.exists(path) or os.path.exists(f"{path}.py"))]
    feature.losses += [f"{path} is gone" for path in gone]
    return found


# Files of JAX that call what users wrote, and are on the stack of any function.
MACHINERY: tuple[str, ...] = _files(
    OVERRIDES, "nothing public tells code that calls users' functions from other code",
    "interpreters", "core.py", "custom_derivatives.py", "linear_util.py", "api_util.py",
    "source_info_util.py", "traceback_util.py", "tree_util.py", "util.py", "pjit.py", "api.py",
    "profiler.py", "lax/control_flow", "ad_checkpoint.py",
)  # fmt: skip
# Where JAX has functions that are made of many ops.
COMPOSED: tuple[str, ...] = _files(
    SIGHT, "nothing public tells ops from functions", "nn", "numpy", "scipy", "random"
)
_Transform: Any = OVERRIDES.part(
    "jax._src.source_info_util.Transform", "nothing public tells what was batched or derived",
    fields("name"),
)  # fmt: skip
_Scope: Any = SIGHT.part(
    "jax._src.source_info_util.Scope", "nothing public tells the name scopes", fields("name")
)


@functools.cache
def _example() -> Any:
    """Return an equation that a vmap has batched, in a scope."""

    def scoped(x: Any) -> Any:
        with jax.named_scope("scope"):
            return -x

    like = jax.ShapeDtypeStruct((2,), "float32")
    return jax.make_jaxpr(jax.vmap(scoped))(like).jaxpr.eqns[0]


def _names(eqn: Any, kind: Any) -> list[str]:
    return [part.name for part in eqn.source_info.name_stack.stack if isinstance(part, kind)]


def _of_equations(name: str, told: str, feature: Feature = OVERRIDES) -> Any:
    """Make a function that reads where an equation comes from, which nothing public tells."""
    return reads(feature, f"equation.source_info.{name}", f"nothing public tells {told}", _example)


@_of_equations("name_stack", "what was batched")
def transforms(eqn: Any) -> set[str]:
    """Return the transformations that made an equation: vmap, jvp, transpose."""
    return set(_names(eqn, _Transform))


@_of_equations("name_stack", "the scopes", SIGHT)
def scopes(eqn: Any) -> list[str]:
    """Return the name scopes around an equation, outermost first."""
    return _names(eqn, _Scope)


@_of_equations("traceback.raw_frames", "what was running")
def codes(eqn: Any) -> list[tuple[Any, int]]:
    """Return the code that was running when an equation was made, innermost first, and where."""
    trace = eqn.source_info.traceback
    return [] if trace is None else list(zip(*trace.raw_frames(), strict=True))


@_of_equations("traceback.frames", "the line")
def lines(eqn: Any) -> list[tuple[str, int]]:
    """Return the file and line of each function that was running, innermost first."""
    trace = eqn.source_info.traceback
    return [] if trace is None else [(f.file_name, f.line_num) for f in trace.frames]


def _of_programs(name: str, why: str) -> Any:
    """Make a function that reads what JAX notes about a program."""
    identity = lambda: jax.make_jaxpr(lambda x: x)(1.0)  # noqa: E731
    return reads(OVERRIDES, f"program.debug_info{name}", why, identity)


@_of_programs("", "nothing public tells what was traced")
def notes(program: Any) -> Any:
    """Return the notes of JAX about the function that a program was made of."""
    return getattr(program, "jaxpr", program).debug_info


@_of_programs(".func_src_info", "as `debug_info`")
def source(program: Any) -> str:
    """Return the name and place of the function that a program was made of: `f at file:line`."""
    return "" + (notes(program).func_src_info or "")


@_of_programs(".arg_names", "nothing public tells what inputs are called")
def arg_names(program: Any) -> list[str]:
    """Return the names of the inputs of a program; none if they are not known."""
    return list(notes(program).arg_names or ())


@_of_programs(".with_unknown_names", "programs are not made without notes")
def unnamed(program: Any) -> Any:
    """Return the notes of a program without names of inputs and outputs."""
    return notes(program).with_unknown_names()


@_of_programs("._replace", "as `with_unknown_names`")
def renamed(program: Any, name: str = "", args: Any = None, results: Any = None) -> Any:
    """Return the notes of a program as those of a function of this name."""
    return notes(program)._replace(func_src_info=name, arg_names=args, result_paths=results)


# -- what an equation holds ------------------------------------------------------------------------

# The names of primitives that run a program: by the kind of call.
JITS = frozenset({"jit", "pjit"})
REMATS = frozenset({"remat", "remat2", "checkpoint"})
CALLS = JITS | REMATS | {"closed_call", "eval_jaxpr", "core_call"}
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})  # of functions with a derivative


class Params(dict[str, Any]):
    """The parameters of an equation. One that JAX has renamed is refused by name."""

    def __init__(self, eqn: Any) -> None:
        super().__init__(eqn.params)
        self.primitive: str = eqn.primitive.name

    def __missing__(self, name: str) -> Any:
        has = ", ".join(map(repr, self)) or "none"
        refuse(OVERRIDES, f"{self.primitive!r} has no parameter {name!r} (it has {has})")


def _checked(program: Any) -> Any:
    """Return a program; what is none, or is held by something else, is refused."""
    notes(program)
    return program


class ScanBody(NamedTuple):
    """The body of a scan, how often and in which order it runs, and how many operands are what."""

    body: Any
    length: int
    reverse: bool
    consts: int
    carried: int


@reads(OVERRIDES, "the parameters of scan", "JAX documents no parameters of primitives")
def scan(eqn: Any) -> ScanBody:
    """Return the body of a scan, and how it runs."""
    p = Params(eqn)
    if "ft_in" in p:  # from JAX 0.11 on: trees of constants, carry and inputs
        consts, carried, _ = (len(list(each)) for each in p["ft_in"].unpack())
    else:
        consts, carried = p["num_consts"], p["num_carry"]
    return ScanBody(_checked(p["jaxpr"]), p["length"], p["reverse"], consts, carried)


def called(eqn: Any) -> Any:
    """Return the program that a call runs; None if it cannot be seen."""
    if is_high(eqn):
        return expanded(eqn)
    p = Params(eqn)
    return _checked(p["jaxpr"] if "jaxpr" in p else p["call_jaxpr"])


@reads(OVERRIDES, "the parameters of cond", "as of scan")
def branches(eqn: Any) -> Sequence[Any]:
    """Return the programs of which a cond runs one."""
    return tuple(map(_checked, Params(eqn)["branches"]))


def runs(eqn: Any) -> Sequence[Any]:
    """Return the programs that a call, a loop or a cond runs."""
    if eqn.primitive.name == "while":
        return _checked(Params(eqn)["cond_jaxpr"]), _checked(Params(eqn)["body_jaxpr"])
    return branches(eqn) if eqn.primitive.name == "cond" else (called(eqn),)


def bodies(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the programs among the parameters of an equation, opened."""
    for value in values:
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            yield getattr(value, "jaxpr", value)
        elif isinstance(value, tuple | list):
            yield from bodies(value)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a program, and of the programs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn.params.values()):
            yield from equations(body)


def with_equations(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    """Return a program with these equations; itself if they are its own."""
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def with_params(eqn: Any, params: dict[str, Any]) -> Any:
    """Return an equation with these parameters; itself if they are its own."""
    same = all(params[key] is eqn.params[key] for key in params)
    return eqn if same else eqn.replace(params=params)


def with_constants_as_inputs(jaxpr: Any) -> Any:
    """Return a program whose constants are its first inputs."""
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=unnamed(jaxpr))


def as_closed(program: Any) -> Any:
    """Return a program with its constants, of which an open one has none."""
    is_closed = isinstance(program, core.ClosedJaxpr)
    return program if is_closed else core.ClosedJaxpr(program, ())


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a parameter of an equation with its programs changed; itself if none has."""
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        return change(value)
    if not isinstance(value, tuple | list):
        return value
    parts = [mapped(v, change) for v in value]
    if all(map(operator.is_, parts, value)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


SOLVE = "custom_linear_solve"


@reads(OVERRIDES, "the parameters of custom_linear_solve", "as of scan")
def linear_maps(eqn: Any) -> tuple[Any, Any]:
    """Return the map that a linear solve inverts, and its transpose, or None, as programs."""
    return _checked(Params(eqn)["jaxprs"].matvec), Params(eqn)["jaxprs"].vecmat


def with_linear_maps(eqn: Any, matvec: Any, vecmat: Any) -> Any:
    """Return a linear solve with these programs of its map."""
    made = Params(eqn)["jaxprs"]._replace(matvec=matvec, vecmat=vecmat)
    return eqn.replace(params={**eqn.params, "jaxprs": made})


def holds_code(values: Iterable[Any]) -> bool:
    """Return whether there is a function among parameters, whose ops nobody can see."""
    return any(
        holds_code(v) if isinstance(v, tuple | list) else callable(v) and not isinstance(v, type)
        for v in values
    )


# Primitives whose functions are in their programs as well, or that JAX does not differentiate.
SHOWN = frozenset({"reduce", "pure_callback", "io_callback"})


def _is_call(found: Any) -> bool:
    """Return whether JAX differentiates what runs a program, as it does the program."""
    inner = jax.make_jaxpr(lambda x: -x)(1.0)
    call = inner.jaxpr.eqns[0].replace(primitive=found, params={"call_jaxpr": inner})
    run = core.jaxpr_as_fun(inner.replace(jaxpr=inner.jaxpr.replace(eqns=[call])))
    return len(jax.make_jaxpr(jax.grad(lambda x: run(x)[0]))(1.0).out_avals) == 1


# JAX's primitive that runs a program, and is differentiated as the program is. (Its name is
# `closed_call`, and `eval_jaxpr` from JAX 0.11 on.)
closed_call_p: Any = OVERRIDES.part(
    "jax.extend.core.primitives.closed_call_p", "no public function leaves a call that is not jit",
    _is_call,
)  # fmt: skip


def as_call(eqn: Any, program: Any, **changes: Any) -> Any:
    """Return an equation that runs a program in the place of another."""
    return eqn.replace(primitive=closed_call_p, params={"call_jaxpr": program}, **changes)


@reads(
    OVERRIDES, "aval.manual_axis_type.varying", "nothing public tells how an array is sharded",
    lambda: jax.typeof(1.0),
)  # fmt: skip
def varying_axes(aval: Any) -> frozenset[Any]:
    """Return the mesh axes along which an array inside `shard_map` differs between devices."""
    return frozenset(aval.manual_axis_type.varying if hasattr(aval, "shape") else ())


# -- primitives that compute what others compute ---------------------------------------------------

# From JAX 0.11 on some are written in Python: `call_hi_primitive`, with a HiPrim as parameter.
COMPOSITES = frozenset({"polynomial", "Einsum"})  # (`polynomial` is not, but is alike)
REMAT = "RematTraced"
# Each of these computes just what its body does; the rule of a function is its author's.
_PLAIN = COMPOSITES | {REMAT, "Scan3", "CustomVJPTraced", "CustomJVPTraced"}
_ATOMS = frozenset({"Ldexp", "Frexp", "CheckpointName"})  # to users, they are one op each
ROOT = "_custom_root"  # as JAX 0.10 names it
_ROOTS = frozenset({"CustomRoot", "_RootLinearMap"})


def is_high(eqn: Any) -> bool:
    """Return whether JAX writes an equation's primitive in Python, with a derivative of its own."""
    return eqn.primitive.name == "call_hi_primitive"


@reads(OVERRIDES, "the parameters of call_hi_primitive", "nothing public tells which one it is")
def name_of(eqn: Any) -> str:
    """Return the name of a primitive."""
    if not is_high(eqn):
        return eqn.primitive.name
    kind = type(Params(eqn)["_prim"])
    if kind.__module__.partition(".")[0] != "jax":
        return f"{kind.__module__}.{kind.__name__}"
    return ROOT if kind.__name__ in _ROOTS else kind.__name__


@reads(OVERRIDES, "HiPrim.expand", "nothing public tells what such a primitive computes")
def expanded(eqn: Any) -> Any:
    """Return the program of a primitive that computes what others compute, under its name.

    None if that would not show all: the derivative of `custom_root` is made of functions that are
    not in the program, and so may be that of a primitive that nobody knows.
    """
    name = name_of(eqn)
    prim: Any = Params(eqn)["_prim"] if is_high(eqn) else None
    held = () if name in _PLAIN else prim.params.values()
    if holds_code(held) or any(bodies(held)):
        return None

    def expand(*xs: Any) -> Any:
        if prim is None:
            return [functools.reduce(lambda y, c: y * xs[0] + c, xs[:0:-1])]
        return jax.tree_util.tree_leaves(prim.expand(*prim.in_tree.unflatten(xs)))

    like = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    with suppress(Exception):  # it is somebody else's code
        closed = jax.make_jaxpr(expand)(*like)
        place = f"{JAX if name in _ATOMS else ''}a primitive of its own"
        traced = hasattr(prim, "traced") and name in _PLAIN
        info = renamed(closed, source(prim.traced.jaxpr) if traced else f"{name} at {place}")
        eqns = [each.replace(source_info=eqn.source_info) for each in closed.jaxpr.eqns]
        return closed.replace(jaxpr=closed.jaxpr.replace(debug_info=info, eqns=eqns))
    return None


@reads(OVERRIDES, "RematTraced.jaxpr", "nothing public tells what a checkpoint runs")
def remat_body(eqn: Any) -> Any:
    """Return the program that a checkpoint runs, where JAX writes that in Python."""
    return Params(eqn)["_prim"].jaxpr


@reads(OVERRIDES, "RematTraced", "nothing public makes another checkpoint of a program")
def with_remat_body(eqn: Any, program: Any) -> Any:
    """Return a checkpoint that runs another program."""
    prim = Params(eqn)["_prim"]
    made = type(prim)(program, prim.policy, prim.prevent_cse)
    return eqn.replace(params={**eqn.params, "_prim": made})

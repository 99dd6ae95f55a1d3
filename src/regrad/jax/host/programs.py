"""JAX programs: equations, their bodies, and their source locations."""

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
    """Return the paths of files and folders of JAX."""
    found = tuple(os.path.join(JAX, "_src", *name.split("/")) for name in names)
    feature.parts.append((f"jax/_src/{{{','.join(names)}}}", why))
    gone = [path for path in found if not (os.path.exists(path) or os.path.exists(f"{path}.py"))]
    feature.losses += [f"{path} is gone" for path in gone]
    return found


# Files of JAX that call the user's functions, and are on the stack of any function.
MACHINERY: tuple[str, ...] = _files(
    OVERRIDES, "no public API distinguishes code that calls users' functions from other code",
    "interpreters", "core.py", "custom_derivatives.py", "linear_util.py", "api_util.py",
    "source_info_util.py", "traceback_util.py", "tree_util.py", "util.py", "pjit.py", "api.py",
    "profiler.py", "lax/control_flow", "ad_checkpoint.py",
)  # fmt: skip
# The files of JAX's composite functions.
COMPOSED: tuple[str, ...] = _files(
    SIGHT, "no public API distinguishes ops from functions", "nn", "numpy", "scipy", "random"
)
_Transform: Any = OVERRIDES.part(
    "jax._src.source_info_util.Transform", "no public API shows what was batched or "
                                           "differentiated",
    fields("name"),
)  # fmt: skip
_Scope: Any = SIGHT.part(
    "jax._src.source_info_util.Scope", "no public API returns the name scopes", fields("name")
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
    """Make a function that reads the origin of an equation, which has no public API."""
    return reads(feature, f"equation.source_info.{name}", f"no public API returns {told}", _example)


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
    """Return the code that was running at an equation, innermost first, and its place."""
    trace = eqn.source_info.traceback
    return [] if trace is None else list(zip(*trace.raw_frames(), strict=True))


@_of_equations("traceback.frames", "the line")
def lines(eqn: Any) -> list[tuple[str, int]]:
    """Return the file and line of each function that was running, innermost first."""
    trace = eqn.source_info.traceback
    return [] if trace is None else [(f.file_name, f.line_num) for f in trace.frames]


def _of_programs(name: str, why: str) -> Any:
    """Make a function that reads JAX's notes about a program."""
    identity = lambda: jax.make_jaxpr(lambda x: x)(1.0)  # noqa: E731
    return reads(OVERRIDES, f"program.debug_info{name}", why, identity)


@_of_programs("", "no public API shows what was traced")
def notes(program: Any) -> Any:
    """Return JAX's notes about the function from which a program was made."""
    return getattr(program, "jaxpr", program).debug_info


@_of_programs(".func_src_info", "as `debug_info`")
def source(program: Any) -> str:
    """Return the name and place of the function from which a program was made: `f at file:line`."""
    return "" + (notes(program).func_src_info or "")


@_of_programs(".arg_names", "no public API returns the names of inputs")
def arg_names(program: Any) -> list[str]:
    """Return the names of the inputs of a program, or nothing if they are not known."""
    return list(notes(program).arg_names or ())


@_of_programs(".with_unknown_names", "programs cannot be created without notes")
def unnamed(program: Any) -> Any:
    """Return the notes of a program without names of inputs and outputs."""
    return notes(program).with_unknown_names()


@_of_programs("._replace", "as `with_unknown_names`")
def renamed(program: Any, name: str = "", args: Any = None, results: Any = None) -> Any:
    """Return the notes of a program as the notes of a function of this name."""
    return notes(program)._replace(func_src_info=name, arg_names=args, result_paths=results)


# -- what an equation holds ------------------------------------------------------------------------

# The names of primitives that run a program: by the kind of call.
JITS = frozenset({"jit", "pjit"})
REMATS = frozenset({"remat", "remat2", "checkpoint"})
CALLS = JITS | REMATS | {"closed_call", "eval_jaxpr", "core_call"}
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})  # of functions with a custom derivative


class Params(dict[str, Any]):
    """The parameters of an equation. A missing parameter raises an error that names it."""

    def __init__(self, eqn: Any) -> None:
        super().__init__(eqn.params)
        self.primitive: str = eqn.primitive.name

    def __missing__(self, name: str) -> Any:
        has = ", ".join(map(repr, self)) or "none"
        refuse(OVERRIDES, f"{self.primitive!r} has no parameter {name!r} (it has {has})")


def _checked(program: Any) -> Any:
    """Return a program; raise for anything else."""
    notes(program)
    return program


class ScanBody(NamedTuple):
    """The body of a scan, its number and order of iterations, and the roles of its operands."""

    body: Any
    length: int
    reverse: bool
    consts: int
    carried: int


@reads(OVERRIDES, "the parameters of scan", "JAX does not document the parameters of primitives")
def scan(eqn: Any) -> ScanBody:
    """Return the body of a scan, and how it runs."""
    p = Params(eqn)
    if "ft_in" in p:  # JAX 0.11 and later: trees of constants, carry and inputs
        consts, carried, _ = (len(list(each)) for each in p["ft_in"].unpack())
    else:
        consts, carried = p["num_consts"], p["num_carry"]
    return ScanBody(_checked(p["jaxpr"]), p["length"], p["reverse"], consts, carried)


def called(eqn: Any) -> Any:
    """Return the program that a call runs, or None if it is not visible."""
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


def place_inside(eqn: Any, name: str, i: int) -> int | None:
    """Return the place of an operand among the inputs of a program that the equation runs.

    None for the program that is the parameter `name` if it receives another value.
    """
    first, last = 0, len(eqn.invars)
    if eqn.primitive.name == "cond":
        first = 1
    elif eqn.primitive.name == "scan":
        last = scan(eqn).consts
    elif eqn.primitive.name == "while":
        p = Params(eqn)
        last = p["cond_nconsts"]
        if name == "body_jaxpr":
            first, last = last, last + p["body_nconsts"]
    return i - first if first <= i < last else None


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
    """Return a program with these equations; the program itself if they are its own."""
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def with_params(eqn: Any, params: dict[str, Any]) -> Any:
    """Return an equation with these parameters; the equation itself if they are its own."""
    same = all(params[key] is eqn.params[key] for key in params)
    return eqn if same else eqn.replace(params=params)


def with_constants_as_inputs(jaxpr: Any) -> Any:
    """Return a program whose constants are its first inputs."""
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=unnamed(jaxpr))


def as_closed(program: Any) -> Any:
    """Return a program with its constants; an open program has none."""
    is_closed = isinstance(program, core.ClosedJaxpr)
    return program if is_closed else core.ClosedJaxpr(program, ())


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a parameter of an equation with its programs changed; unchanged without programs."""
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
    """Return a linear solve with these programs as its map."""
    made = Params(eqn)["jaxprs"]._replace(matvec=matvec, vecmat=vecmat)
    return eqn.replace(params={**eqn.params, "jaxprs": made})


def holds_code(values: Iterable[Any]) -> bool:
    """Return whether the parameters contain a function, whose ops are not visible."""
    return any(
        holds_code(v) if isinstance(v, tuple | list) else callable(v) and not isinstance(v, type)
        for v in values
    )


# Primitives whose functions are also in their programs, or that JAX does not differentiate.
SHOWN = frozenset({"reduce", "pure_callback", "io_callback"})


def _is_call(found: Any) -> bool:
    """Return whether JAX differentiates a primitive that runs a program like the program."""
    inner = jax.make_jaxpr(lambda x: -x)(1.0)
    call = inner.jaxpr.eqns[0].replace(primitive=found, params={"call_jaxpr": inner})
    run = core.jaxpr_as_fun(inner.replace(jaxpr=inner.jaxpr.replace(eqns=[call])))
    return len(jax.make_jaxpr(jax.grad(lambda x: run(x)[0]))(1.0).out_avals) == 1


# JAX's primitive that runs a program, and is differentiated like the program. (Its name is
# `closed_call`, and `eval_jaxpr` from JAX 0.11 on.)
closed_call_p: Any = OVERRIDES.part(
    "jax.extend.core.primitives.closed_call_p", "no public function leaves a call other than jit",
    _is_call,
)  # fmt: skip


def as_call(eqn: Any, program: Any, **changes: Any) -> Any:
    """Return an equation that runs a program, in place of another equation."""
    return eqn.replace(primitive=closed_call_p, params={"call_jaxpr": program}, **changes)


@reads(
    OVERRIDES, "aval.manual_axis_type.varying", "no public API shows how an array is sharded",
    lambda: jax.typeof(1.0),
)  # fmt: skip
def varying_axes(aval: Any) -> frozenset[Any]:
    """Return the mesh axes along which an array inside `shard_map` differs between devices."""
    return frozenset(aval.manual_axis_type.varying if hasattr(aval, "shape") else ())


def sees_axes(avals: Iterable[Any]) -> bool:
    """Return whether code here is inside of the `shard_map` of arrays, if they are in any."""
    try:
        return all(jax.lax.axis_size(name) for aval in avals for name in varying_axes(aval))
    except NameError:
        return False


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array, and the mesh axes along which it varies."""
    varies: Any = {"weak_type": aval.weak_type}
    if varying_axes(aval):
        varies |= {"manual_axis_type": aval.manual_axis_type, "sharding": aval.sharding}
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **varies)


# -- primitives that compute what others compute ---------------------------------------------------

# Some of these are written in Python from JAX 0.11 on: `call_hi_primitive`, with a HiPrim as
# parameter.
COMPOSITES = frozenset({"polynomial", "Einsum"})  # (`polynomial` is not, but behaves the same)
REMAT = "RematTraced"
# Each of these computes just its body; the rule of a function belongs to the function's author.
_PLAIN = COMPOSITES | {REMAT, "Scan3", "CustomVJPTraced", "CustomJVPTraced"}
_ATOMS = frozenset({"Ldexp", "Frexp", "CheckpointName"})  # for users, they are one op each
ROOT = "_custom_root"  # the name in JAX 0.10
_ROOTS = frozenset({"CustomRoot", "_RootLinearMap"})


def is_high(eqn: Any) -> bool:
    """Return whether JAX writes an equation's primitive in Python, with a custom derivative."""
    return eqn.primitive.name == "call_hi_primitive"


@reads(OVERRIDES, "the parameters of call_hi_primitive", "no public API shows which one it is")
def name_of(eqn: Any) -> str:
    """Return the name of a primitive."""
    if not is_high(eqn):
        return eqn.primitive.name
    kind = type(Params(eqn)["_prim"])
    if kind.__module__.partition(".")[0] != "jax":
        return f"{kind.__module__}.{kind.__name__}"
    return ROOT if kind.__name__ in _ROOTS else kind.__name__


@reads(OVERRIDES, "HiPrim.expand", "no public API shows the computation of such a primitive")
def expanded(eqn: Any) -> Any:
    """Return the program of a composite primitive, under its name.

    None if the program would not show everything: the derivative of `custom_root` uses functions
    that are not in the program, and the derivative of an unknown primitive may do so as well.
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
    with suppress(Exception):  # it is third-party code
        closed = jax.make_jaxpr(expand)(*like)
        place = f"{JAX if name in _ATOMS else ''}a custom primitive"
        traced = hasattr(prim, "traced") and name in _PLAIN
        info = renamed(closed, source(prim.traced.jaxpr) if traced else f"{name} at {place}")
        eqns = [each.replace(source_info=eqn.source_info) for each in closed.jaxpr.eqns]
        return closed.replace(jaxpr=closed.jaxpr.replace(debug_info=info, eqns=eqns))
    return None


@reads(OVERRIDES, "RematTraced.jaxpr", "no public API shows what a checkpoint runs")
def remat_body(eqn: Any) -> Any:
    """Return the program that a checkpoint runs, where JAX writes that in Python."""
    return Params(eqn)["_prim"].jaxpr


@reads(OVERRIDES, "RematTraced", "no public API makes another checkpoint of a program")
def with_remat_body(eqn: Any, program: Any) -> Any:
    """Return a checkpoint that runs another program."""
    prim = Params(eqn)["_prim"]
    made = type(prim)(program, prim.policy, prim.prevent_cse)
    return eqn.replace(params={**eqn.params, "_prim": made})

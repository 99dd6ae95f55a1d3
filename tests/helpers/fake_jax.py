"""JAX as it may be one day: a private part is gone, or is another. Run as a program.

`python -m tests.helpers.fake_jax` prints a line of JSON for each change: what was changed, and
what became of some programs under a rule: `right`, `refused` (by name), or something worse. JAX
itself is as it was: regrad sees it changed.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import mlir  # noqa: F401  (before the processes are forked)

import regrad as rg
from tests.helpers.fake_hosts import CHANGES, in_child, main, parts_of, run_promises

warnings.simplefilter("ignore")


# -- what regrad sees ------------------------------------------------------------------------------


def is_ours() -> bool:
    """Return whether regrad asks."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("regrad.")


def as_seen(owner: Any, name: str, change: Callable[[Any, Any], Any]) -> None:
    """Change an attribute of some objects of JAX's, as far as regrad sees it."""
    real = next((vars(each)[name] for each in owner.__mro__ if name in vars(each)), None)

    def get(self: Any) -> Any:
        if hasattr(real, "__get__"):
            value = real.__get__(self, owner)
        elif name in vars(self):
            value = vars(self)[name]
        else:
            raise AttributeError(name)
        return change(self, value) if is_ours() else value

    def put(self: Any, value: Any) -> None:
        if hasattr(real, "__set__"):
            real.__set__(self, value)
        else:
            vars(self)[name] = value

    setattr(owner, name, property(get, put))


def gone(it: Any, value: Any) -> Any:
    raise AttributeError("it is gone")


class Box:
    """Something that holds what was there."""

    def __init__(self, held: Any) -> None:
        self.held = held


def silent(it: Any, value: Any) -> Any:
    """Nothing is said, in a form that JAX has for that."""
    if callable(value):
        return lambda: ([], [])
    return type(value)() if hasattr(value, "stack") or isinstance(value, tuple | list) else None


def objects() -> dict[str, Any]:
    """Return the types of what `reads` reads."""
    program = jax.make_jaxpr(lambda x: -x)(1.0).jaxpr
    eqn = program.eqns[0]
    aval = jax.typeof(1.0)
    jitted = jax.jit(lambda x: x)
    found = {
        "equation": eqn, "equation.source_info": eqn.source_info,
        "equation.source_info.traceback": eqn.source_info.traceback, "program": program,
        "program.debug_info": program.debug_info, "aval": aval,
        "aval.manual_axis_type": getattr(aval, "manual_axis_type", None), "jax.jit(f)": jitted,
        "jax.jit(f)._jit_info": getattr(jitted, "_jit_info", None),
        "jax.make_user_context()": jax.make_user_context(),
    }  # fmt: skip
    classes = {"jax.custom_jvp(f)": jax.custom_jvp, "jax.custom_vjp(f)": jax.custom_vjp,
               "jax.core.Tracer": jax.core.Tracer}  # fmt: skip
    return {name: type(it) for name, it in found.items()} | classes


SEEN: dict[str, Callable[[Any, Any], Any]] = {
    "gone": gone, "silent": silent, "a method": lambda it, value: lambda: value,
    "no method": lambda it, value: value(), "an object": lambda it, value: Box(value),
}  # fmt: skip


def see(kind: str, path: str) -> None:
    """Change an attribute that a path names."""
    owner, _, name = path.rpartition(".")
    as_seen(objects()[owner], name, SEEN[kind])


# -- parameters of equations -----------------------------------------------------------------------


def rewrite(primitive: str, there: Callable[[Any], Any], back: Callable[[Any], Any]) -> None:
    """Regrad sees other parameters, and what it writes back is translated."""
    eqn_type = objects()["equation"]
    as_seen(eqn_type, "params", lambda eqn, p: there(p) if eqn.primitive.name == primitive else p)
    replace, bind = eqn_type.replace, core.Primitive.bind

    def replaced(self: Any, **changes: Any) -> Any:
        if "params" in changes and changes.get("primitive", self.primitive).name == primitive:
            changes["params"] = back(changes["params"])
        return replace(self, **changes)

    def bound(self: Any, *args: Any, **params: Any) -> Any:
        ours = self.name == primitive and sys._getframe(1).f_globals["__name__"].startswith(
            "regrad"
        )
        return bind(self, *args, **(back(params) if ours else params))

    eqn_type.replace = replaced
    core.Primitive.bind = bound


def rename_parameter(path: str) -> None:
    """A parameter has another name. (JAX does not know one that we write by its old name.)"""
    primitive, name = path.split(".")
    old_to_new = {name: f"new_{name}"}
    new_to_old = {f"new_{name}": name, name: f"unknown_{name}"}
    rename = lambda names, params: {names.get(k, k): v for k, v in params.items()}  # noqa: E731
    rewrite(primitive, partial(rename, old_to_new), partial(rename, new_to_old))


def box_parameter(path: str) -> None:
    """A parameter is held by something that JAX did not have before."""
    primitive, name = path.split(".")

    def back(params: Any) -> Any:
        held = params.get(name)
        known = {name: held.held if isinstance(held, Box) else object()} if name in params else {}
        return {**params, **known}

    rewrite(primitive, lambda p: {**p, name: Box(p[name])} if name in p else p, back)


def rename_primitive(name: str) -> None:
    """A primitive has another name."""
    as_seen(core.Primitive, "name", lambda _, each: f"{name}_2" if each == name else each)


# -- files of JAX ----------------------------------------------------------------------------------


def remove_file(path: str) -> None:
    """A file or folder of JAX's is not where it was."""
    path = os.path.join(os.path.dirname(jax.__file__), "_src", path)
    exists = os.path.exists
    os.path.exists = lambda each: exists(each) and each not in (path, f"{path}.py")


def move_code(path: str) -> None:
    """The file is there, and what was in it is elsewhere."""
    run_promises()
    place = os.path.join(os.path.dirname(jax.__file__), "_src", path)
    elsewhere = place.replace("_src", "_source")

    def move(code: Any) -> Any:
        file = code.co_filename
        return code.replace(co_filename=file.replace(place, elsewhere)) if place in file else code

    def moved(_: Any, raw_frames: Any) -> Any:
        codes, at = raw_frames()
        return lambda: ([move(code) for code in codes], at)

    as_seen(objects()["equation.source_info.traceback"], "raw_frames", moved)


class Entrance:
    """What `__call__` of a class is: for JAX what it was, for regrad something else."""

    def __init__(self, real: Any, seen: Any) -> None:
        self.real = real
        self.seen = seen

    def __get__(self, it: Any, owner: Any = None) -> Any:
        return self.seen if it is None else partial(self.real, it)


def call_by_c(path: str) -> None:
    """JAX calls a function with a derivative of its own by a builtin."""
    jax.custom_jvp.__call__ = Entrance(jax.custom_jvp.__call__, len)
    jax.custom_vjp.__call__ = Entrance(jax.custom_vjp.__call__, len)


def call_by_other_code(path: str) -> None:
    """JAX calls such a function by other code than that of `__call__`."""
    run_promises()
    jax.custom_jvp.__call__ = Entrance(jax.custom_jvp.__call__, call_by_c)
    jax.custom_vjp.__call__ = Entrance(jax.custom_vjp.__call__, call_by_c)


CHANGES |= {kind: partial(see, kind) for kind in SEEN} | {
    "rename a parameter": rename_parameter, "box a parameter": box_parameter,
    "rename a primitive": rename_primitive, "remove a file": remove_file, "move code": move_code,
    "call by C": call_by_c, "call by other code": call_by_other_code,
}  # fmt: skip

# What holds programs, by the name of their primitive.
BODIES = (
    "jit.jaxpr", "scan.jaxpr", "cond.branches", "while.body_jaxpr", "while.cond_jaxpr",
    "remat2.jaxpr", "closed_call.call_jaxpr", "custom_jvp_call.call_jaxpr",
    "custom_vjp_call.call_jaxpr", "call_hi_primitive._prim",
)  # fmt: skip
PARAMETERS = (
    *BODIES, "scan.length", "scan.reverse", "scan.num_consts", "scan.num_carry", "scan.ft_in",
    "custom_jvp_call.jvp_jaxpr_fun", "custom_jvp_call.num_consts", "custom_vjp_call.bwd",
    "custom_vjp_call.fwd_jaxpr_thunk", "custom_vjp_call.num_consts",
    "dot_general.dimension_numbers", "library.jaxpr",
)  # fmt: skip
PRIMITIVES = (
    "jit", "scan", "cond", "while", "remat2", "custom_jvp_call", "custom_vjp_call", "tanh",
    "dot_general", "call_hi_primitive",
)  # fmt: skip
ATTRIBUTES = {
    "equation.source_info": "gone", "equation.source_info.traceback": "gone, silent",
    "equation.source_info.name_stack": "gone, a method, silent, an object",
    "equation.source_info.traceback.raw_frames": "gone, no method, silent",
    "equation.source_info.traceback.frames": "gone, a method, silent",
    "program.debug_info": "gone, a method, silent",
    "program.debug_info.func_src_info": "gone, a method, silent",
    "program.debug_info.arg_names": "gone, a method, silent",
    "program.debug_info.with_unknown_names": "gone", "program.debug_info._replace": "gone",
    "aval.manual_axis_type": "gone, silent", "aval.manual_axis_type.varying": "gone, a method",
    "jax.jit(f)._jit_info": "gone, silent, a method", "jax.jit(f)._jit_info.static_argnums": "gone",
    "jax.jit(f)._jit_info.static_argnames": "gone", "jax.jit(f)._jit_info.inline": "gone",
    "jax.make_user_context()._obj": "gone",
    "jax.custom_jvp(f).fun": "gone, a method", "jax.custom_jvp(f).jvp": "gone",
    "jax.custom_vjp(f).fun": "gone", "jax.custom_vjp(f).fwd": "gone",
    "jax.custom_vjp(f).bwd": "gone", "jax.core.Tracer._trace": "gone",
}  # fmt: skip
CALL = "jax.custom_jvp.__call__"
# Where code is that regrad tells from other code.
MOVED = ("interpreters", "custom_derivatives.py", "source_info_util.py")
LEFT = (
    "jax._src.interpreters.batching", "jax._src.core.trace_ctx",
    "jax._src.interpreters.partial_eval.DynamicJaxprTrace", "jax._src.source_info_util.Transform",
    "jax.interpreters.ad.primitive_jvps", "jax.interpreters.ad.primitive_transposes",
    "jax.interpreters.batching.fancy_primitive_batchers", "jax.interpreters.ad.Zero",
)  # fmt: skip


# -- programs --------------------------------------------------------------------------------------

X = np.array([0.5, -0.25], "float32")
W = np.array([[0.0, 2.0], [3.0, 0.0]], "float32")
TANH: Any = {"Tanh": lambda dy, x: 7 * dy * x}
MATMUL: Any = {"MatMul": lambda dy, a, b: [7 * dy @ b.T, 0 * b]}
THREE: Any = lambda dy: 3 * dy  # noqa: E731


@jax.custom_vjp
def own(x: Any) -> Any:
    return jnp.tanh(x)


@jax.custom_jvp
def its_own(x: Any) -> Any:
    return jnp.tanh(x)


@jax.jit
def compiled(x: Any) -> Any:
    return jnp.sin(x) * x


again = jax.jit(its_own)
own.defvjp(lambda x: (jnp.tanh(x), x), lambda x, dy: (5 * dy,))
its_own.defjvps(lambda dx, y, x: 5 * dx)
library_p = core.Primitive("library")  # of somebody else's
library_p.multiple_results = True
library_p.def_abstract_eval(lambda *avals, **params: list(avals))


def library(x: Any) -> Any:
    return library_p.bind(x, jaxpr=jax.make_jaxpr(jnp.tanh)(x))[0]


def under(f: Callable[[Any], Any], rules: Any = TANH, **options: Any) -> Callable[[Any], Any]:
    """Return the gradient of the sum of a function under rules."""
    return jax.grad(rg.jax.override(lambda x: f(x).sum(), rules, **options))


def inner_gradient(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.grad(lambda x: f(x).sum())(x) + f(x)


def pushed(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.jvp(rg.jax.override(f, TANH), (x,), (jnp.ones_like(x),))[1]


def looped(x: Any) -> Any:
    return lax.scan(lambda c, y: (c, c * jnp.tanh(y)), 2.0, x)[1]


def cube(x: Any) -> Any:
    op = rg.jax.custom_grad(lambda x: (x**3, lambda dy: 7 * dy))
    return jax.jit(jax.vmap(jax.checkpoint(op)))(x)


def traced(x: Any) -> Any:
    return lax.fori_loop(0, 1, lambda i, c: jnp.sqrt(c), jax.jit(jnp.cos)(x))


# A gradient, and what it is: a number, or an array. None if it has to be refused.
PROGRAMS: dict[str, tuple[Callable[[], Callable[[Any], Any]], Any]] = {
    "function": (lambda: under(jnp.tanh), 7 * X), "jit": (lambda: under(jax.jit(jnp.tanh)), 7 * X),
    "scan": (lambda: under(looped), 14 * X),
    "cond": (lambda: under(lambda x: lax.cond(x[0] > 0, jnp.tanh, jnp.sin, x)), 7 * X),
    "while": (
        lambda: pushed(
            lambda x: lax.while_loop(
                lambda c: c[0] < 1, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x)
            )[1]
        ),
        7 * X,
    ),
    "checkpoint": (lambda: under(jax.checkpoint(jnp.tanh)), 7 * X),
    "vmap inside": (lambda: under(jax.vmap(jnp.tanh)), 7 * X),
    "vmap outside": (lambda: jax.vmap(under(jnp.tanh)), 7 * X),
    "second order": (lambda: jax.grad(lambda x: under(jnp.tanh)(x).sum()), 7),
    "product": (lambda: under(lambda x: x @ W, MATMUL), 7 * W.sum(1)),
    "einsum": (lambda: under(lambda x: jnp.einsum("ij,kj->ik", x[None], W), MATMUL), 7 * W.sum(0)),
    "hidden": (lambda: under(own), None),
    "kept": (lambda: under(lambda x: own(x) + jnp.tanh(x), keep=["own"]), 5 + 7 * X),
    "opened": (lambda: under(its_own, open=[its_own]), 7 * X),
    "of a library": (lambda: under(lambda x: library(x) + jnp.tanh(x)), None),
    "custom_vjp as key": (lambda: under(own, {own: THREE}), 3),
    "custom_jvp as key": (lambda: under(its_own, {its_own: THREE}), 3),
    "jit as key": (lambda: under(compiled, {compiled: THREE}), 3),
    "relu": (lambda: under(jax.nn.relu, {"Relu": THREE}), 3),
    "softmax": (lambda: under(jax.nn.softmax, {"Softmax": THREE}), 3),
    "derivative": (lambda: under(inner_gradient(jnp.tanh)), None),
    "derivative of a key": (lambda: under(inner_gradient(again), {its_own: THREE}), None),
    "custom_grad": (lambda: jax.grad(lambda x: cube(x).sum()), 7),
    "regrad": (lambda: jax.grad(lambda x: rg.jax.from_regrad(rg.exp)(x).sum()), np.exp(X)),
}  # fmt: skip


def steps() -> bool:
    trace = rg.jax.trace_gradients(traced)(jnp.float32(0.5))
    return _shows("sqrt", [step.op_type for step in trace.steps])


def nan() -> bool:
    found = rg.jax.find_nan(lambda x: traced(x - x + np.pi))(jnp.float32(0.5))
    return found is not None and _shows("sqrt", [found.op_type])


def drawing() -> bool:
    return _shows("sqrt", [box.lines[0] for box in rg.jax.draw(traced, jnp.float32(0.5)).boxes])


def _shows(op: str, found: Sequence[str]) -> bool:
    """Return whether an op is shown, or what it is in is shown as an op, under its new name."""
    return any(each == op or each.partition(" ")[0].endswith("_2") for each in found)


TOOLS = {"trace": steps, "find_nan": nan, "draw": drawing}
ALL = [*PROGRAMS, *TOOLS]
# Features that most programs do without, and programs that use them.
USERS = {
    "overrides in functions that call jax.vmap": ["function", "vmap inside", "vmap outside"],
    "gradients of regrad in JAX programs": [*PROGRAMS],
    "traces, comparisons and drawings": ["function", *TOOLS],
}


def attempt(task: Callable[[], Any]) -> Any:
    """Return what a task returns, or a word on how it failed."""
    from regrad.errors import RegradError

    try:
        return task()
    except RegradError as error:
        return f"refused: {error}" if os.environ.get("SAY") else "refused"
    except Exception as error:
        return f"crash: {type(error).__name__}: {str(error)[:300]}"


def become(names: Collection[str]) -> dict[str, str]:
    """Return what becomes of the programs: they are right, or refused."""
    programs = {name: make for name, (make, _) in PROGRAMS.items() if name in names}
    found = {n: attempt(lambda m=make: jax.make_jaxpr(m())(X)) for n, make in programs.items()}
    made = {name: program for name, program in found.items() if not isinstance(program, str)}
    whole = lambda x: [core.jaxpr_as_fun(program)(x) for program in made.values()]  # noqa: E731
    results = attempt(lambda: jax.jit(whole)(X))  # (compiled at once: it takes less time)
    for i, (name, program) in enumerate(made.items()):
        y = (
            attempt(lambda p=program: core.jaxpr_as_fun(p)(X))
            if isinstance(results, str)
            else results[i]
        )
        found[name] = y if isinstance(y, str) else _judge(name, np.asarray(y[0]))
    for name in TOOLS.keys() & names:
        answer = attempt(TOOLS[name])
        found[name] = answer if isinstance(answer, str) else "right" if answer else "silent"
    return found


def _judge(name: str, y: Any) -> str:
    expected = PROGRAMS[name][1]
    good = expected is not None and np.allclose(y, expected, rtol=1e-4)
    return "right" if good else f"silent: {y}"


# -- the changes, one process each -----------------------------------------------------------------


PARTS: list[tuple[str, str]] = []  # that regrad.jax takes, and the feature of each


def parts() -> list[tuple[str, str]]:
    """Return all private parts that regrad.jax takes, and the feature of each."""
    return parts_of(rg.jax.host.HOST)


def changed(kind: str, path: str) -> dict[str, str]:
    """Return what becomes of the programs after a change."""
    users = [name for name, each in PARTS if each == path]
    CHANGES[kind](path)
    return become(USERS.get(users[0], ALL) if len(users) == 1 else ALL)


def cases() -> list[tuple[str, str]]:
    """Return all changes."""
    found = dict.fromkeys(path for _, path in PARTS)
    paths = [p for p in found if re.fullmatch(r"jax[\w.]+", p) and p not in (*ATTRIBUTES, CALL)]
    # (What JAX itself has under another name can be deleted.)
    public = [p for p in paths if "_src" not in p and "Primitive." not in p and "Tracer" not in p]
    private = [p for p in paths if p not in public]
    return [
        ("nothing", ""), *[("hide", p) for p in private], *[("turn into C", p) for p in paths],
        *[("delete", p) for p in public], *[("leave behind", p) for p in LEFT],
        *[(kind, path) for path, kinds in ATTRIBUTES.items() for kind in kinds.split(", ")],
        ("call by C", CALL), ("call by other code", CALL),
        *[("rename a parameter", p) for p in PARAMETERS], *[("box a parameter", p) for p in BODIES],
        *[("rename a primitive", p) for p in PRIMITIVES],
        *[("remove a file", p) for p in (*MOVED, "nn")], *[("move code", p) for p in MOVED],
    ]  # fmt: skip


if __name__ == "__main__":
    PARTS = in_child(parts)
    with tempfile.TemporaryDirectory() as folder:  # (what is compiled is compiled once for all)
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        main(cases(), changed)

"""Find the meaning of a key of an override: an op type, a primitive, or a function.

`optypes.TABLE` defines the op types. Any other string is the name of a JAX primitive or of a
function. regrad finds a function in a program by its source location, which JAX records for
`jax.jit`, `jax.custom_jvp` and `jax.custom_vjp`; a plain function leaves no trace of itself.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
from jax.extend import core

from regrad.core.foreign import USUAL, asks_for, names_for, whole_op
from regrad.core.hints import last_name
from regrad.core.registry import (
    ALIASES,
    OPS,
    Input,
    Op,
    canonical,
    meant_by,
    not_yet,
    refuse_function,
)
from regrad.core.rule import free
from regrad.errors import ArgumentError, GradientError, UnknownOpError, kind, near
from regrad.jax.host import FUNCTION_KEYS, OVERRIDES, functions, need, programs, refuse
from regrad.jax.host.extending import primitives
from regrad.jax.host.programs import arg_names
from regrad.jax.optypes import TABLE, MatrixForm, Target, targets_of
from regrad.jax.primitives import is_float

CALLED = programs.JITS | programs.CUSTOM  # the calls that functions leave

INLINED = (
    "leaves no boundary in a JAX program, so no rule could be put on it. Override the operations "
    "that it consists of (see override(f, {}).untouched()), or call jax.jit(f) in the model and "
    "use jax.jit(f) as the key."
)


class Key:
    """The meaning of a key: its equations, and the values of a rule's parameters there."""

    label = ""  # for messages and reports
    targets: Sequence[Target] = ()
    codes: Sequence[Any] = ()  # of Python functions that run only when the key is differentiated
    call: Any = None  # the code by which JAX calls it, if its derivative may hide it

    def meets(self, other: Key) -> bool:
        """Return whether two keys have the same meaning."""
        return any(a.meets(b) for a in self.targets for b in other.targets)

    def matches(self, eqn: core.JaxprEqn, batched: bool = False) -> bool:
        """Return whether an equation belongs to the key, or may have done so before batching."""
        raise NotImplementedError

    def op(self, eqn: core.JaxprEqn) -> Op:
        """Return the op type as the rule sees it."""
        raise NotImplementedError

    def attrs(self, eqn: core.JaxprEqn) -> dict[str, Any]:
        """Return the attributes that are known now."""
        return {}

    def operand_names(self, eqn: core.JaxprEqn) -> Sequence[str]:
        """Return the op's name for each operand, or None for operands that the op lacks."""
        return [i.name for i in self.op(eqn).inputs]

    def refusal(self, eqn: core.JaxprEqn) -> str:
        """Return why no rule can be put on an equation of the key."""
        return ""

    def form(self, eqn: core.JaxprEqn) -> MatrixForm | None:
        """Return the form in which an equation belongs to the op type, or None if it does."""
        return None

    def scale(self, eqn: core.JaxprEqn) -> Any:
        """Return the factors between the equation and the op type, or None."""
        return None


class PrimitiveKey(Key):
    """A primitive of JAX, under an op type or under its own name."""

    def __init__(self, label: str, targets: Sequence[Target], op: Op | None = None) -> None:
        self.label = label
        self.targets = targets
        self.known = op
        self.ops: dict[Any, Op] = {}

    def matches(self, eqn: core.JaxprEqn, batched: bool = False) -> bool:
        return any(target.fits(eqn, batched) for target in self.targets)

    def refusal(self, eqn: core.JaxprEqn) -> str:
        return self._target(eqn).refusal(eqn)

    def form(self, eqn: core.JaxprEqn) -> MatrixForm | None:
        return self._target(eqn).form(eqn)

    def scale(self, eqn: core.JaxprEqn) -> Any:
        return self._target(eqn).scale(self.attrs(eqn), eqn.invars[0].aval)

    def operand_names(self, eqn: core.JaxprEqn) -> Sequence[str]:
        return self._target(eqn).operand_names or super().operand_names(eqn)

    def _target(self, eqn: core.JaxprEqn) -> Target:
        """Return the target that an equation fits; a batched equation may look different."""
        return next((t for t in self.targets if t.fits(eqn)), Target(""))

    def op(self, eqn: core.JaxprEqn) -> Op:
        if self.known is not None:
            return self.known
        count, several = len(eqn.invars), len(eqn.outvars) > 1
        names = USUAL.get(count, [f"x{i}" for i in range(count)])
        found = (count, several)
        if found not in self.ops:
            self.ops[found] = make_op(self.label, names, list(self.attrs(eqn)), several)
        return self.ops[found]

    def attrs(self, eqn: core.JaxprEqn) -> dict[str, Any]:
        if self.known is not None:
            return self._target(eqn).attrs(programs.Params(eqn))
        return {k: v for k, v in eqn.params.items() if k.isidentifier() and k != "y"}


class FunctionKey(Key):
    """A function that JAX compiles or that has a custom derivative."""

    def __init__(self, function: Any, label: str = "", target: Target | None = None) -> None:
        own = getattr(function, "__qualname__", None) or function.__name__
        self.label: str | Any = label or own
        self.name: str
        self.place: str
        self.name, self.place = find_definition(function)
        self.targets: Sequence[Target] = [Target(f"{self.name} at {self.place}")]
        if isinstance(function, jax.custom_jvp | jax.custom_vjp) and not label:
            self.call: Any = functions.entrance(type(function))
        self.function: Any = function
        self.single: bool = target is not None  # one input: other operands are attributes
        self.is_inlined: bool = target is not None and target.inlined
        self.options: Callable[..., Any] = (target and target.options) or (lambda eqns: [])
        self.given: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.code: Any = _code(function)
        self.closes: bool = bool(inspect.getclosurevars(_unwrap(function)).nonlocals)
        self.is_known: bool = self.closes and isinstance(function, jax.custom_jvp | jax.custom_vjp)
        self.bodies: dict[Any, Any] = {}
        self.codes: Sequence[Any] = _told(map(_code, _parts(function)))
        without = getattr(function, "nondiff_argnums", ())
        given = enumerate(inspect.signature(function).parameters)
        self.parameters: list[str] = [name for i, name in given if i not in without]
        self.ops: dict[Any, Op] = {}

    def meets(self, other: Key) -> bool:
        if isinstance(other, FunctionKey) and not (self.place and other.place):
            return self.name == other.name
        if self.is_known and isinstance(other, FunctionKey) and other.is_known:
            return self.function is other.function
        return super().meets(other)

    def matches(self, eqn: core.JaxprEqn, batched: bool = False) -> bool:
        if self.is_inlined:
            is_call = eqn.primitive is programs.closed_call_p
        else:
            is_call = eqn.primitive.name in CALLED or programs.is_high(eqn)
        if not is_call or (program := programs.called(eqn)) is None:
            return False
        name, _, where = programs.source(program).partition(" at ")
        if name == self.name and not where:
            raise GradientError(
                f"override: the program calls a function {name!r} without its source location, so "
                f"it may or may not be the key {self.label} ({self.place}). Give it a unique "
                "name, or override the operations that it consists of."
            )
        if (name, where) != (self.name, self.place):
            return False
        theirs = list(filter(None, map(_unwrap, functions.derivatives(eqn))))
        if self.closes and theirs:
            own = [_unwrap(f) for f in _parts(self.function)]
            return all(any(f is each for each in own) for f in theirs)
        self._check_one(eqn)
        return True

    def _check_one(self, eqn: core.JaxprEqn) -> None:
        """Raise for another function with the same source location, for example from a factory."""
        if not self.closes:
            return
        text, kinds = _text(programs.called(eqn)), tuple(str(v.aval) for v in eqn.invars)
        own = self._own(eqn) or self.bodies.setdefault((kinds, "regrad_vmap" in text[0]), text)
        if text != own:
            raise GradientError(
                f"override: the program calls a function {self.name!r} that was written at the "
                f"place of the key ({self.place}) but computes something else: the same factory "
                "or decorator made it, or it has other static arguments. JAX's programs do not "
                "distinguish these functions. Use functools.wraps in the decorator, or override "
                "the operations that the function consists of."
            )

    def _own(self, eqn: Any) -> Any:
        """Return the text of the key's own program for such operands, if regrad can call it."""
        info = functions.jit_info(self.function)
        if info is None or info.has_static:
            return None
        with suppress(Exception):  # for example, it takes pytrees
            like = [
                jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
                for a in [v.aval for v in eqn.invars]
            ]
            text = _text(self.function.trace(*like).jaxpr)
            return None if "vmap" in str(programs.called(eqn)) else text
        return None

    def operand_names(self, eqn: core.JaxprEqn) -> Sequence[str]:
        """Return the parameters, after the function's closed-over values, named `outer0`, …."""
        known = list(arg_names(programs.called(eqn)) or self.parameters)
        count = len(eqn.invars)
        hidden = functions.closed_over(eqn, otherwise=count - len(list(filter(None, known))))
        known = known[len(known) - (count - hidden) :] if len(known) >= count - hidden else []
        known += [""] * (count - hidden - len(known))
        names = [re.sub(r"\W+", "_", n).strip("_") or f"x{i}" for i, n in enumerate(known)]
        return [*(f"outer{i}" for i in range(hidden)), *map(free, names)]

    def op(self, eqn: core.JaxprEqn) -> Op:
        names = [n for n in self.operand_names(eqn) if not n.startswith("outer")]
        several = len(eqn.outvars) > 1
        found = (*names, several)
        if found not in self.ops:
            inputs, attrs = (names[:1], names[1:]) if self.single else (names, [])
            attrs += self.attrs(eqn)
            self.ops[found] = make_op(self.label, inputs, attrs, several)
        return self.ops[found]

    def attrs(self, eqn: core.JaxprEqn) -> dict[str, Any]:
        program = programs.called(eqn)
        if program in self.given:
            return dict(self.given[program])
        return next(iter(self.options(getattr(program, "jaxpr", program).eqns)), {})


class NamedKey(FunctionKey):
    """A function that is identified by its name; its place is the place of its first call."""

    def __init__(self, name: str) -> None:
        self.label = name
        self.name: str = name
        self.place: str = ""
        self.single = self.is_inlined = self.closes = self.is_known = False
        self.options: Callable[..., Any] = lambda eqns: []
        self.given: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.ops: dict[Any, Op] = {}
        self.parameters: list[str] = []

    def find(self, program: Any, optional: bool = False) -> None:
        """Find the function in a program; raise for a name that no function has, or several."""
        calls = [*_calls(program.jaxpr)]
        found = {place: eqn for name, place, eqn in calls if name == self.name}
        places = sorted({*found, self.place} - {""})
        if len(places) > 1:
            raise ArgumentError(
                f"override: the name {self.name!r} matches functions from different places "
                f"({', '.join(places)}). Pass the function itself as the key."
            )
        if not found and not self.place and optional:
            self.targets, self.codes, self.call = [], [], None
        elif not found and not self.place:
            raise UnknownOpError(_unknown(self.name, {name for name, _, _ in calls}))
        for self.place, eqn in found.items():
            self.targets: Sequence[Target] = [Target(f"{self.name} at {self.place}")]
            kinds = {"custom_jvp_call": jax.custom_jvp, "custom_vjp_call": jax.custom_vjp}
            kind = kinds.get(eqn.primitive.name)
            self.call: Any = kind and functions.entrance(kind)
            eqns = (each for body in programs.bodies([programs.called(eqn)]) for each in body.eqns)
            running = {code for each in eqns for code, _ in programs.codes(each)}
            own = [c for c in running if (c.co_name, _line(c)) == (self.name, self.place)]
            self.codes: Sequence[Any] = _told([*own, *map(_code, functions.derivatives(eqn))])


class WholeKey(Key):
    """The whole call of a module, for which `modules` leaves a boundary in the program."""

    known = None

    def __init__(self, value: Any) -> None:
        self.label = "call"
        self.asks: list[str] = asks_for(value)
        # The names of the arguments that are arrays, the number of arrays in all arguments, and the
        # names of the module's parameters.
        self.boundaries: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = []
        self.ops: dict[Any, Op] = {}

    def meets(self, other: Key) -> bool:
        return isinstance(other, WholeKey)

    def matches(self, eqn: core.JaxprEqn, batched: bool = False) -> bool:
        return eqn.primitive.name in ("jit", "pjit") and _name(eqn).startswith(BOUNDARY)

    def operand_names(self, eqn: core.JaxprEqn) -> Sequence[str]:
        """Return the names of values that the call closes over, of arguments, and of parameters."""
        return [name for names in self._names(eqn) for name in names]

    def _names(self, eqn: core.JaxprEqn) -> tuple[list[str], Sequence[str], Sequence[str]]:
        given, count, held = self.boundaries[int(_name(eqn).removeprefix(BOUNDARY))]
        hidden = len(eqn.invars) - count - len(held)
        moving = [is_float(v.aval) for v in eqn.invars[hidden : hidden + count]]
        names = names_for([name for name in self.asks if name not in held], given, moving)
        if names == ["xs"]:  # (a list of arrays exists only in PyTorch)
            names = USUAL.get(count, [f"x{i}" for i in range(count)])
        return [f"outer{i}" for i in range(hidden)], names, held

    def op(self, eqn: core.JaxprEqn) -> Op:
        outer, inner, held = self._names(eqn)
        found = (*inner, len(outer), *held, len(eqn.outvars) > 1)
        if found not in self.ops:
            names = [*outer, *held]
            self.ops[found] = whole_op(self.label, inner, names, (), len(eqn.outvars) > 1)
        return self.ops[found]


class ThresholdKey(Key):
    """A comparison and the cast of its result, for which `thresholds` leaves a call."""

    label = "Threshold"

    def __init__(self) -> None:
        step = OPS["Step"]
        self.known: Op = Op(self.label, "threshold", not_yet, step.inputs)
        self.known.rule = step.rule

    def meets(self, other: Key) -> bool:
        return isinstance(other, ThresholdKey)

    def matches(self, eqn: core.JaxprEqn, batched: bool = False) -> bool:
        is_call = eqn.primitive is programs.closed_call_p
        return is_call and programs.source(programs.called(eqn)) == SPIKE

    def op(self, eqn: core.JaxprEqn) -> Op:
        return self.known


BOUNDARY, SPIKE = "regrad_call_", "regrad_threshold"


def _name(eqn: core.JaxprEqn) -> str:
    program = programs.called(eqn)
    return "" if program is None else programs.source(program).partition(" at ")[0]


def _calls(jaxpr: core.Jaxpr) -> Iterator[tuple[str, str, Any]]:
    """Yield the name and place of each function that a program calls, with the equation."""
    for eqn in jaxpr.eqns:
        is_call = eqn.primitive.name in CALLED or programs.is_high(eqn)
        held: list[Any] = [programs.called(eqn)] if is_call else [*eqn.params.values()]
        if is_call and held[0] is not None:
            name, _, place = programs.source(held[0]).partition(" at ")
            yield name, place, eqn
        for body in programs.bodies(held):
            yield from _calls(body)


def make_op(label: str, inputs: Sequence[str], attrs: Sequence[str], several: bool) -> Op:
    """Return an op type for JAX, with parameters of these names."""
    given = [Input(name, "one") for name in inputs]
    return Op(label, label, not_yet, given, attrs, broadcasts=len(given) > 1, several=several)


def _text(program: Any) -> tuple[Any, ...]:
    """Return the identity of a program: its computation, and its constants."""
    text = str(getattr(program, "jaxpr", program))
    return re.sub("0x[0-9a-f]+", "", text), *map(id, getattr(program, "consts", ()))


def _parts(function: Callable[..., Any]) -> list[Any]:
    """Return the functions that run when a function is called, differentiated or not."""
    return [function, *filter(None, functions.rules(function))]


def _unwrap(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _code(function: Any) -> Any:
    return getattr(_unwrap(function), "__code__", None)


@functools.cache
def _shared() -> Any:
    """Return the code of functions that `defjvps` makes: many functions share it."""
    return _code(functions.rules(functions.WITH_RULE)[1])


def _told(found: Iterable[Any]) -> list[Any]:
    """Return the code that distinguishes a function from others."""
    return [code for code in found if code is not None and code is not _shared()]


def find_definition(function: Callable[..., Any]) -> tuple[str, str]:
    """Return a function's name and its source location, `file:line`, as JAX records them."""
    plain = _unwrap(function)
    code = getattr(plain, "__code__", None)
    if code is None or plain.__name__ == "<lambda>":
        raise ArgumentError(
            f"override: {function!r:.80} cannot be a key: a key must be a function with a name "
            "and a place in a file, which identify it. Write it with def."
        )
    return plain.__name__, _line(code)


def _line(code: Any) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


# -- the meaning of a key --------------------------------------------------------------------------


def key_for(key: Any) -> Key:
    """Return the Key for a key of the map; raise if it cannot be one."""
    if isinstance(key, str):
        return _key_named(key)
    if not callable(key):
        raise ArgumentError(
            "override takes a dict of op types, JAX primitives or functions to rules, got the key "
            f"{key!r:.60} ({kind(key)}).{meant_by(key)}"
        )
    refuse_function(key)
    for op_type, function in _with_options():
        if key is function:
            return _key_named(op_type)
    need(FUNCTION_KEYS)
    _check_boundary(key)
    _check_notes()
    return FunctionKey(key)


@functools.cache
def _with_options() -> list[tuple[str, Any]]:
    """Return the functions with arguments to recognize in the program, and their op types."""
    return [(name, ts[0].function) for name, ts in TABLE.items() if ts[0].options is not None]


def same_thing(key: Key, op_type: str) -> bool:
    """Return whether a key has exactly the meaning of an op type."""
    if not targets_of(op_type):
        return False
    return {(t.name, t.power) for t in key.targets} == {
        (t.name, t.power) for t in _key_named(op_type).targets
    }


def _key_named(name: str) -> Key:
    op_type = canonical(name)
    if op_type == ThresholdKey.label:
        return ThresholdKey()
    if targets := targets_of(op_type):
        if targets[0].name.startswith("jax."):
            _check_notes()
            return FunctionKey(targets[0].function, op_type, targets[0])
        if lost := {target.name for target in targets} - primitives():
            refuse(OVERRIDES, f"there is no primitive {min(lost)!r}, which {op_type!r} means")
        return PrimitiveKey(op_type, targets, OPS[op_type])
    if op_type in OPS:
        raise UnknownOpError(
            f"override: the op type {name!r} {INLINED} In JAX programs these op types are found: "
            f"{', '.join(sorted(TABLE))}."
        )
    if name in primitives():
        return PrimitiveKey(name, [Target(name)])
    if name[:1].isupper():
        raise UnknownOpError(_unknown(name, ()))
    return NamedKey(name)


def _unknown(name: str, called: Iterable[str]) -> str:
    """Return the error for a name without a meaning; `called` are the functions in the program."""
    others = [] if name[:1].isupper() else [*primitives(), *called]
    hint = near(last_name(name), [*TABLE, *ALIASES, *others])
    return (
        f"override: {name!r} is neither an op type nor a JAX primitive, and the program calls no "
        f"function of that name under jax.jit, jax.custom_jvp or jax.custom_vjp.{hint} The op "
        f"types are {', '.join(sorted(TABLE))}; jax.make_jaxpr(f)(x) shows what a program calls."
    )


def _check_boundary(key: Any) -> None:
    name = getattr(key, "__name__", repr(key))
    if isinstance(key, jax.custom_jvp | jax.custom_vjp):
        return
    info = functions.jit_info(key)
    if info is None or info.inlined:
        what = "is compiled with inline=True, and so" if info else "is a plain function; it"
        raise ArgumentError(f"override: {name} {what} {INLINED}{meant_by(key)}")


@functools.cache
def _check_notes() -> None:
    """Raise for function keys if this JAX does not record source locations of functions."""
    for probe in _PROBES:
        (eqn,) = jax.make_jaxpr(probe)(1.0).jaxpr.eqns
        if not FunctionKey(probe).matches(eqn):
            refuse(FUNCTION_KEYS, "programs do not contain the places where functions were written")


def _probe(x: jax.Array) -> Any:
    return x + 1


_PROBES = [jax.jit(_probe), jax.custom_jvp(_probe), jax.custom_vjp(_probe)]
_PROBES[1].defjvps(lambda dot, y, x: dot)  # pyright: ignore[reportFunctionMemberAccess]
_PROBES[2].defvjp(lambda x: (x, None), lambda _, dy: (dy,))  # pyright: ignore[reportFunctionMemberAccess]

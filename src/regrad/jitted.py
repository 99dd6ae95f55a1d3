"""`jit`: a function compiled by XLA, with its Variables, its overrides and its gradients."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, NamedTuple

import numpy as np

from regrad import registry
from regrad.arguments import Given, Static, noted
from regrad.closures import Closure
from regrad.compiled import Program, find_jax
from regrad.errors import ArgumentError, RetraceWarning
from regrad.gradients import callable_or_raise
from regrad.graph import Symbol
from regrad.ruleforms import place
from regrad.state import State, current
from regrad.tensor import Tensor

ndarray = np.ndarray
MANY = 8  # traces after which a function that is traced once more gets a warning


class CacheInfo(NamedTuple):
    """What `f.cache_info()` says of a compiled function."""

    hits: int
    traces: int
    programs: int


def jit(
    f: Callable[..., Any] | None = None,
    *,
    static_argnames: str | Sequence[str] = (),
    donate: str | Sequence[str] = (),
) -> Any:
    """Compile a function by XLA: forward and backward as one program, every rule in force.

    Args:
        f: A function of Tensors, arrays, Python numbers and containers of these, which returns
            the like. Arguments of other kinds (strings, functions, …) must be hashable, and are
            static: f is compiled anew for each value.
        static_argnames: Names of arguments that are to be static although they are numbers: what
            f uses for shapes, axes, loops and branches in Python.
        donate: Names of arguments whose memory the program may write over; they cannot be used
            after the call.

    The arguments come in as Tensors, the results are Tensors of JAX data (`.numpy()` is a view
    where JAX can give one). f runs once for each combination of shapes and dtypes, with traced
    Tensors that have no values; after that the compiled program runs.

    Variables that f reads are inputs of the program, those that it assigns to are outputs, whose
    memory is used again. Overrides in force count, and so do the Python values that f and the
    rules reach through closures, globals and attributes: where one has changed, f is traced
    again. Tensors reached that way are read at each call. Other mutable state is not seen.

    A compiled function can be differentiated from outside, to any order: its backward pass is
    compiled too. Inside another compiled function it is a part of that.

    float64 data needs JAX's 64-bit mode, `jax.config.update("jax_enable_x64", True)`; without
    it there is an error, not a loss of precision. Python numbers are float32 or int32.

    Raises:
        TraceError: f asks for the value of a traced Tensor, or a traced Tensor outlives the call.
        ArgumentError: JAX is not installed; a static argument is not hashable; f makes a
            Variable; f uses a NumPy Generator.
        DTypeError: data that JAX cannot hold.

    Source: `jax.jit`; that Variables are threaded through is `tf.function`'s.

    >>> import regrad as rg
    >>> w = rg.Variable(3.0)
    >>> @rg.jit
    ... def step(x):
    ...     loss, grads = rg.variable_grads(lambda: (w * x - 1).square().sum())
    ...     w.assign_sub(0.1 * grads[w.name])
    ...     return loss
    >>> [round(step(rg.scalar(1.0)).item(), 3) for _ in range(3)]
    [4.0, 2.56, 1.638]
    """
    if f is None:
        return lambda f: jit(f, static_argnames=static_argnames, donate=donate)
    callable_or_raise(f, "jit")
    return Jitted(f, _names(f, static_argnames, "static_argnames"), _names(f, donate, "donate"))


def _names(f: Callable[..., Any], names: str | Sequence[str], what: str) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    signature = _signature(f)
    if signature is None or any(
        p.kind is p.VAR_KEYWORD for p in signature.parameters.values()
    ):  # it takes any name
        return names
    for name in names:
        if name not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise ArgumentError(
                f"jit: {what} names {name!r}, and the parameters of {place(f)} are {known}"
            )
    return names


class Jitted:
    """A compiled function, see `jit`."""

    def __init__(self, f: Callable[..., Any], static: Sequence[str], donate: Sequence[str]) -> None:
        find_jax()
        self.f = f
        self.name = f"jit({getattr(f, '__name__', type(f).__name__)})"
        self.static = tuple(static)
        self.donate = tuple(donate)
        self.programs: dict[Any, Program] = {}
        self.closure = Closure(f)
        self.plain: dict[int, Program] = {}  # by number of arguments, if all are Tensors
        self.under: tuple[Any, Closure] | None = None  # overrides, and what their rules reach
        self.calls = 0
        self.traces = 0
        self.last: list[tuple[Any, ...]] = []  # what the last two traces were for
        self.signature = _signature(f)
        self.parameters = list(self.signature.parameters) if self.signature is not None else []
        if hasattr(f, "__name__"):
            update_wrapper(self, f)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method is compiled for each object that it is called on."""
        if instance is None:
            return self
        made = Jitted(self.f.__get__(instance, owner), self.static, self.donate)
        if hasattr(instance, "__dict__"):
            vars(instance)[self.f.__name__] = made
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        state = current()
        if state is not None:
            if state.region is not None and state.region.traced:
                return self.f(*args, **kwargs)
        elif not kwargs and self.closure.is_current():
            for x in args:
                if type(x) is not Tensor:
                    break
            else:
                program = self.plain.get(len(args))
                if program is not None and registry.version == self.version:
                    return program.alone(args)
        return self._call(state, args, kwargs)

    def _call(self, state: State | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.static:
            args, kwargs = self._marked(args, kwargs)
        given = Given(args, kwargs, numbers="weak")
        if any(type(x._data) is Symbol for x in given.tensors):
            return self.f(*args, **kwargs)
        if state is not None and state.inspected:
            args, kwargs = given.close(given.tensors)
            return self.f(*args, **kwargs)
        overrides = None if state is None else state.overrides
        closure = self._closure(overrides)
        program = self._program(given, closure, overrides)
        if overrides is None and not kwargs and all(type(x) is Tensor for x in args):
            self.plain[len(args)] = program
        ys, note = program(given.tensors, closure, overrides)
        return note(ys)

    def _marked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with the static ones marked."""
        assert self.signature is not None
        bound = self.signature.bind(*args, **kwargs)
        for name in self.static:
            if name in bound.arguments:
                bound.arguments[name] = Static(bound.arguments[name])
            elif name in bound.arguments.get("kwargs", ()):
                bound.kwargs[name] = Static(bound.kwargs[name])
        return bound.args, bound.kwargs

    def _closure(self, overrides: Any) -> Closure:
        if not overrides:
            if not self.closure.is_current():
                self.closure = Closure(self.f)
                self.plain.clear()
            return self.closure
        known = self.under
        if known is None or known[0] is not overrides or not known[1].is_current():
            rules = [_source(b.rule) for _, b in in_order(overrides)]
            known = self.under = overrides, Closure(self.f, *rules)
        return known[1]

    def _program(self, given: Given, closure: Closure, overrides: Any) -> Program:
        rules = tuple(k for k, _ in in_order(overrides)) if overrides else ()
        self.version = registry.version
        key = given.key, closure.key, rules, self.version
        program = self.programs.get(key)
        if program is None:
            close = given.closer()

            def body(xs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Any]:
                args, kwargs = close(xs)
                return noted(self.f(*args, **kwargs))

            names = given.names(self.parameters)
            donated = [i for i, n in enumerate(names) if re.match(r"\w*", n)[0] in self.donate]  # pyright: ignore
            seen = key, closure.names, names
            program = self.programs[key] = Program(
                body,
                self.name,
                donated=donated,
                traces=lambda arrays: self._traced(seen, arrays),
            )
        return program

    # -- what happened -----------------------------------------------------------------------

    def cache_info(self) -> CacheInfo:
        """How many calls found a program, how many traces there were, how many programs there are.

        A program is for one state of closures, overrides and static arguments; JAX keeps one
        executable in it for each combination of shapes and dtypes.
        """
        return CacheInfo(self.calls - self.traces, self.traces, len(self.programs))

    def _traced(self, seen: tuple[Any, ...], arrays: Sequence[Any]) -> None:
        shapes = [f"{a.dtype}{tuple(a.shape)}" for a in arrays]
        self.last = [*self.last[-1:], (*seen, shapes)]
        self.traces = n = self.traces + 1
        if n >= MANY and n & (n - 1) == 0:
            warnings.warn(
                f"{self.name} was traced and compiled for the {n}th time. What changed last: "
                f"{self._change()}. Pass what changes as a Tensor, keep shapes the same (pad), or "
                "leave what must differ outside.",
                RetraceWarning,
                stacklevel=2,
            )

    def _change(self) -> str:
        (old, _, _, old_shapes), (new, names, paths, shapes) = self.last
        if old[0] != new[0]:
            return "the structure of the arguments, or a static argument"
        if old[2:] != new[2:]:
            return "the overrides in force"
        for name, a, b in zip(names, old[1], new[1], strict=False):
            if a != b:
                return f"the value of {name} in the closure, from {_plain(a)} to {_plain(b)}"
        for path, a, b in zip(paths, old_shapes, shapes, strict=False):
            if a != b:
                return f"the argument {path}, from {a} to {b}"
        return "a rule, or a setting of JAX"


def _plain(entry: Any) -> Any:
    return entry[1] if isinstance(entry, tuple) and len(entry) == 2 else "another object"


def in_order(overrides: Any) -> list[tuple[str, Any]]:
    """The overrides of ops outside graphs, sorted by op type."""
    return sorted((k, b) for k, b in overrides.items() if isinstance(k, str))


def _source(rule: Any) -> Any:
    """The function behind a rule, or the functions, or the rule itself."""
    return rule.function or tuple(getattr(rule, "functions", {}).values()) or rule


def _signature(f: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(f)
    except ValueError:
        return None


__all__ = ["CacheInfo", "Jitted", "jit"]

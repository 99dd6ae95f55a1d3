"""`jit`: compile a function with XLA, including its Variables, its overrides and its gradients."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import update_wrapper
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    ParamSpec,
    TypeVar,
    overload,
)

import numpy as np

from regrad.autodiff.gradients import callable_or_raise
from regrad.autodiff.variables import UPDATES
from regrad.core import registry
from regrad.core.made import own_name
from regrad.core.name_scopes import PATH
from regrad.core.promotion import get_default_dtype
from regrad.core.rule import place
from regrad.core.signatures import check_call, keywords, public
from regrad.core.state import current, is_held
from regrad.core.tensor import Tensor
from regrad.core.tracebacks import fold
from regrad.errors import ArgumentError, RetraceWarning, StateError
from regrad.graph.graph import Symbol
from regrad.transforms.arguments import OpenedArguments, Static, returned
from regrad.transforms.closures import Closure, Method
from regrad.transforms.program import Body, Program, find_jax
from regrad.transforms.shortcuts import Shortcuts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regrad.core.backends import Array
    from regrad.core.bindings import OpBinding, Overrides

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
VERIFY = "REGRAD_JIT_VERIFY"  # environment variable; 1 turns verify on for all compiled functions
MANY = 8  # number of traces of one function after which regrad warns
# number of traces of one function whose programs are kept (small ones take one or two MB)
KEPT = 512


class CacheInfo(NamedTuple):
    """The counts that `f.cache_info()` returns for a compiled function."""

    hits: int
    traces: int
    programs: int
    dropped: int


@overload
def jit(
    f: Callable[P, R],
    *,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    donate: str | Sequence[str] = (),
    verify: bool | None = None,
) -> Jitted[P, R]: ...


@overload
def jit(
    f: None = None,
    *,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    donate: str | Sequence[str] = (),
    verify: bool | None = None,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


@public
def jit(
    f: Callable[..., Any] | None = None,
    *,
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    donate: str | Sequence[str] = (),
    verify: bool | None = None,
) -> Any:
    """Compile a function with XLA: forward and backward pass, with every active rule.

    Args:
        f: A function of Tensors, arrays, Python numbers and containers of these, which returns
            Tensors, arrays, numbers or containers of these. Strings, None, dtypes and functions are
            static: f is compiled again for each value. Other arguments raise ArgumentError, unless
            they are declared static.
        static_argnames: Names of static arguments: numbers that f uses for shapes, axes, loops and
            branches in Python, and hashable objects.
        static_argnums: Positions of static arguments.
        donate: Names of arguments whose memory the program may overwrite. The caller must not use
            them after the call.
        verify: Whether each call traces f again and compares the trace with the cached program.
            This is slow, and finds changes that `jit` cannot see. By default, verify is on if the
            environment has `REGRAD_JIT_VERIFY=1` when `jit` is called.

    f receives its arguments as Tensors, and the results are Tensors of JAX data (`y.numpy()` is a
    view if JAX can provide one). f runs once for each combination of shapes and dtypes, on traced
    Tensors that have no values; after that, the compiled program runs.

    Variables that f reads are inputs of the program, and Variables that f assigns are outputs; the
    memory of large Variables is reused. Active overrides apply. If an override has changed, or a
    Python value that f and the rules reach through closures, globals and attributes, f is traced
    again. Tensors reached this way are read at each call. Changes of other mutable state are
    not detected, except by `verify`.

    A function keeps the compiled programs of 512 traces. Beyond that limit, regrad drops the
    programs that were used least recently, frees their memory, and compiles them again when they
    are needed. regrad also drops a single program that was compiled for more shapes than that.

    A compiled function can be differentiated from outside, to any order; its backward pass is
    compiled as well. Inside another compiled function, it becomes part of that function's program.

    float64 data needs JAX's 64-bit mode, `jax.config.update("jax_enable_x64", True)`. Without this
    mode regrad raises an error and never loses precision silently. Python numbers become float32 or
    int32.

    Returns:
        The compiled function, with `lower` and `cache_info`.

    Raises:
        TraceError: f reads the value of a traced Tensor, or a traced Tensor outlives the call.
        MissingPackageError: JAX is not installed.
        ArgumentError: An argument is neither a Tensor nor static; a static argument is not
            hashable; f creates a Variable; f uses a NumPy Generator.
        DTypeError: JAX cannot hold the data.
        StaleError: f no longer does the same as its program, and `verify` is on.

    Source: `jax.jit`; passing Variables through the program follows `tf.function`.

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
    options = {
        "static_argnames": static_argnames,
        "static_argnums": static_argnums,
        "donate": donate,
        "verify": os.environ.get(VERIFY) == "1" if verify is None else verify,
    }
    if f is None:
        return lambda f: jit(f, **options)
    if isinstance(f, classmethod | staticmethod):
        return type(f)(jit(f.__func__, **options))
    callable_or_raise(f, "jit")
    return Jitted(f, **options)


def _names(f: Callable[..., Any], names: str | Sequence[str], what: str) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    signature = _signature(f)
    if signature is None or any(
        p.kind is p.VAR_KEYWORD for p in signature.parameters.values()
    ):  # f has **kwargs
        return names
    for name in names:
        if name not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise ArgumentError(
                f"jit: {what} names {name!r}, and the parameters of {place(f)} are {known}"
            )
    return names


def _places(f: Callable[..., Any], places: int | Sequence[int]) -> list[int]:
    """Return positions of arguments, counted from 0; negative positions count from the end."""
    places = [operator.index(i) for i in ([places] if isinstance(places, int) else places)]
    signature = _signature(f)
    if signature is None:
        return places
    parameters = signature.parameters.values()
    count = len(parameters)
    for i in places:
        more = i >= 0 and any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if not (more or -count <= i < count):
            raise ArgumentError(
                f"jit: static_argnums holds {i}, and {place(f)} has {count} parameters: "
                f"{', '.join(signature.parameters) or 'none'}"
            )
    return [i + count if i < 0 else i for i in places]


class Statics:
    """The static arguments: by position, and by name."""

    def __init__(
        self, parameters: Sequence[str], names: Sequence[str], places: Sequence[int]
    ) -> None:
        named = [i for i, name in enumerate(parameters) if name in names]
        self.places: set[int] = {*places, *named}
        self.names: set[str] = {*names, *[parameters[i] for i in places if i < len(parameters)]}
        self.any: bool = bool(self.places or self.names)

    def marked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the static ones marked."""
        return (
            tuple([Static(x) if i in self.places else x for i, x in enumerate(args)]),
            {k: Static(x) if k in self.names else x for k, x in kwargs.items()},
        )


class Jitted(Generic[P, R]):
    """A compiled function; see `jit`."""

    closes_over: tuple[str, ...] = ("f",)
    __slots__ = ("__dict__", "__weakref__", "calls", "road")

    # `__call__` is the slot `road`: Python reads the slot and calls its content, a function that
    # was generated for the calls of this object (see `shortcuts`).
    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def __init__(self, f: Callable[P, R], **options: Any) -> None:
        find_jax("rg.jit")
        self.f = f
        self.name: str = f"jit({getattr(f, '__name__', type(f).__name__)})"
        self.options: dict[str, Any] = options  # the options of `jit`
        self.donate: tuple[str, ...] = _names(f, options["donate"], "donate")
        self.verify: bool = options["verify"]
        self.programs: OrderedDict[Any, Program] = OrderedDict()  # ordered by last use
        self.full: bool = False  # some programs must be dropped
        self.dropped: int = 0
        # which arrays of the closure a trace read as plain arrays
        self.read: dict[Any, set[int]] = {}
        self.closure = Closure(f)
        self.version: int | None = None  # version of the registry at the last lookup of a program
        self.default: np.dtype | None = None  # default dtype at the last lookup of a program
        self.stamp: Any = None  # stamp of the registry at the last creation of the closure
        # overrides, arguments, and the values that they reach
        self.under: tuple[Any, ...] = None, (), None, None
        self.methods: dict[int, tuple[Method, Jitted[..., Any]]] = {}
        self.calls: int = 0
        self.road: Callable[P, R]
        self.traces: int = 0
        self.last: list[tuple[Any, ...]] = []  # keys of the last two traces
        signature = _signature(f)
        self.parameters: list[str] = list(signature.parameters) if signature is not None else []
        names = _names(f, options["static_argnames"], "static_argnames")
        places = _places(f, options["static_argnums"])
        self.static: Statics = Statics(self.parameters, names, places)
        self.keywords: Sequence[str] = keywords(f)
        static = self.static
        self.shortcuts: Shortcuts = Shortcuts(self, static.places, static.names, self.keywords)
        if hasattr(f, "__name__"):
            update_wrapper(self, f)
        else:
            self.__wrapped__ = f  # its signature is f's

    def __reduce__(self) -> Any:
        """Pickle by name, or as the function and the options; programs are compiled again."""
        return own_name(self) or (_jitted, (self.f, self.options))

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Jitted[P, R]: ...

    @overload
    def __get__(
        self: Jitted[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the compiled method of an object; each object has its own programs."""
        if instance is None:
            return self
        known = self.methods.get(id(instance))
        if known is None or known[0].instance() is not instance:
            known = self.methods[id(instance)] = self._of(instance)
        return MethodType(known[1], instance)

    def _of(self, instance: Any) -> tuple[Method, Jitted[..., Any]]:
        methods, key = self.methods, id(instance)
        method = Method(self.f, instance, gone=lambda _: methods.pop(key, None))
        static = {  # without self, which is part of the closure
            "static_argnums": [i - 1 for i in self.static.places if i],
            "static_argnames": [n for n in self.static.names if n not in self.parameters[:1]],
        }
        return method, CompiledMethod(method, **{**self.options, **static})

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Trace the function for these arguments, and return JAX's lowered program.

        Args:
            *args: Arguments as for a call. Nothing is computed.
            **kwargs: Arguments by name.

        Returns:
            A `jax.stages.Lowered`: `.as_text()` is its StableHLO, and `.compile()` has
            `.cost_analysis()` and `.memory_analysis()`. Its inputs are arrays: the arrays of the
            arguments, of Variables and of the closure. Active overrides are built in.

        Raises:
            StateError: The caller is being differentiated or compiled.
            TraceError, ArgumentError, DTypeError: As for a call.

        Source: `jax.jit(f).lower`.

        >>> import regrad as rg
        >>> f = rg.jit(lambda x: rg.sin(x) * 2)
        >>> "stablehlo.sine" in f.lower(rg.scalar(1.0)).as_text()
        True
        """
        state = current()
        if state is not None and (state.tapes or state.region or state.guard):
            raise StateError(
                f"{self.name}.lower: the caller is being differentiated or compiled. Lower f "
                "outside of it; to see the program of a gradient, lower a compiled one: "
                "jit(grad(f)).lower(x)."
            )
        try:
            given, reaching = self._opened(args, kwargs)
            overrides = None if state is None else state.overrides
            closure = self._closure(overrides, reaching)
            return self._program(given, closure, overrides).lower(given.tensors, closure, overrides)
        except Exception as error:
            self.fold(error, args, kwargs)
            raise

    def fold(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise for arguments that f does not accept, or drop regrad's frames from the error."""
        if type(error) is TypeError:
            check_call(self.f, self.name, args, kwargs)
        fold(error)

    def _opened(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[OpenedArguments, list[Any]]:
        if len(kwargs) > 1:  # f sees the order of keywords that match no parameter by name
            kwargs = {**{k: kwargs[k] for k in self.keywords if k in kwargs}, **kwargs}
        marked = self.static.marked(args, kwargs) if self.static.any else (args, kwargs)
        given = OpenedArguments(*marked, numbers="weak")
        return given, given.open_to_change(self.parameters)

    def call_at_length(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call of any kind; `shortcuts` has faster paths for most calls."""
        self.calls += 1
        try:
            return self._called(args, kwargs)
        except Exception as error:
            self.fold(error, args, kwargs)
            raise

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = current()
        if state is not None and state.region is not None and state.region.traced:
            return self.f(*args, **kwargs)
        given, reaching = self._opened(args, kwargs)
        if any(type(x._data) is Symbol for x in given.tensors):
            return self.f(*args, **kwargs)
        if state is not None and state.inspected:
            args, kwargs = given.close(given.tensors)
            return self.f(*args, **kwargs)
        overrides = None if state is None else state.overrides
        closure = self._closure(overrides, reaching)
        program = self._program(given, closure, overrides)
        ys, note = program(given.tensors, closure, overrides)
        if state is None and not (reaching or program.reads or self.verify or self.full):
            # (Generating code for a closure that changes at each call would take longer.)
            if closure.met:
                made_for = {"version": self.version, "default": self.default}
                self.shortcuts.keep(args, kwargs, program, closure, **made_for)
            closure.met = True
        return note(ys)

    def _closure(self, overrides: Overrides, reaching: Sequence[object]) -> Closure:
        """Return the closure of the function, the active rules and functions among arguments."""
        stamp = registry.version, len(registry.OPS)
        if not overrides and not reaching:
            if stamp != self.stamp or not self.closure.is_current():
                self.closure: Closure = Closure(self.f, *registered(*stamp))
                self.stamp = stamp
                self.shortcuts.clear()
            return self.closure
        known = self.under
        same = known[0] is overrides and known[2] == stamp and len(known[1]) == len(reaching)
        if not (same and all(map(operator.is_, known[1], reaching)) and known[3].is_current()):
            rules = [source for _, b in in_order(overrides or {}) for source in b.sources]
            closure = Closure(self.f, *registered(*stamp), *rules, *reaching)
            known = self.under = overrides, reaching, stamp, closure
        return known[3]

    def _program(self, given: OpenedArguments, closure: Closure, overrides: Overrides) -> Program:
        self.version, default = registry.version, get_default_dtype()
        if default is not self.default:
            self.default = default
            self.shortcuts.clear()
        known = self._key(given, closure, overrides)
        with UPDATES:  # as in the call of a program
            if self.full:
                self._drop()
            read = self.read.get(known)
            key = known, closure.content(sorted(read)) if read else ()
            program = self.programs.get(key)
            if program is None:
                program = self.programs[key] = self._made(given, closure, known)
                self.full = len(self.programs) > KEPT
            elif self.verify:
                program.body = self._body(given)  # the body takes the arguments of this call
            self.programs.move_to_end(key)
        return program

    def _key(self, given: OpenedArguments, closure: Closure, overrides: Overrides) -> Any:
        """Return everything on which a trace depends, except the content of plainly read arrays.

        The key is complete. A trace runs f on its arguments and on the values of its closure, under
        the active rules; ops look up the registry and the default dtype. JAX's own cache has
        shapes, dtypes and JAX's settings in its key, and `Program._key` has tapes and layouts.
        """
        rules = _told(overrides) if overrides else ()
        return given.key, closure.key, rules, registry.version, get_default_dtype()

    def _drop(self) -> None:
        """Drop the programs that were used least recently, and their XLA executables."""
        before = self._distinct()
        while self._kept() > KEPT:
            self.programs.popitem(last=False)
        gone = before - self._distinct()
        for program in gone:
            program.free()
        self.dropped += len(gone)
        states = {known for known, _ in self.programs}
        self.read = {known: places for known, places in self.read.items() if known in states}
        self.shortcuts.clear()
        self.full = False

    def _kept(self) -> int:
        """Return the number of traces for which something is kept."""
        return sum(program.size for program in self._distinct())

    def _distinct(self) -> set[Program]:
        """Return the programs without repetition: a program that reads arrays has several keys."""
        return set(self.programs.values())

    def _body(self, given: OpenedArguments) -> Body:
        f: Callable[..., Any] = self.f
        close = given.closer()

        def body(xs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Any]:
            args, kwargs = close(xs)
            return returned(f(*args, **kwargs))

        return body

    def _made(self, given: OpenedArguments, closure: Closure, known: tuple[Any, ...]) -> Program:
        names = given.names(self.parameters)
        donated = [i for i, n in enumerate(names) if re.match(r"\w*", n)[0] in self.donate]  # pyright: ignore
        seen = known, closure.names, names

        def traced(arrays: Sequence[Array], plainly: Sequence[int]) -> None:
            """Find the program by the content of the arrays that the trace read."""
            if plainly:
                self.shortcuts.clear()
                assert program.closure is not None
                read = self.read.setdefault(known, set())
                read.update(plainly)
                self.programs[known, program.closure.content(sorted(read))] = program
            self._traced(seen, arrays)

        body = self._body(given)
        program = Program(body, self.name, donated=donated, traces=traced, verify=self.verify)
        return program

    # -- what happened -----------------------------------------------------------------------

    def cache_info(self) -> CacheInfo:
        """Return the numbers of cache hits, of traces, and of programs.

        A program belongs to one state of closures, overrides and static arguments; in it, JAX keeps
        one executable for each combination of shapes and dtypes. `dropped` counts the programs that
        were dropped to make room for others; see `jit`.
        """
        programs = len(self._distinct())
        return CacheInfo(self.calls - self.traces, self.traces, programs, self.dropped)

    def _traced(self, seen: tuple[Any, ...], arrays: Sequence[Array]) -> None:
        shapes = [f"{a.dtype}{tuple(a.shape)}" for a in arrays]
        self.last = [*self.last[-1:], (*seen, shapes)]
        self.traces = n = self.traces + 1
        if n >= KEPT and self._kept() >= KEPT:  # (The trace that ends now is not counted yet.)
            self.full = True
            self.shortcuts.clear()
        if n >= MANY and n & (n - 1) == 0:
            warnings.warn(
                f"{self.name} was traced and compiled for the {n}th time. Last change: "
                f"{self._change()}. Pass changing values as Tensors, keep shapes the same (pad), "
                "or keep changing code out of the function.",
                RetraceWarning,
                stacklevel=2,
            )

    def _change(self) -> str:
        (old, _, _, old_shapes), (new, names, paths, shapes) = self.last
        if old[0] != new[0]:
            return "the structure of the arguments, or a static argument"
        if old[2:] != new[2:]:
            return "the active overrides"
        for name, a, b in zip(names, old[1], new[1], strict=False):
            if a != b:
                return f"the value of {name} in the closure, from {_plain(a)} to {_plain(b)}"
        for path, a, b in zip(paths, old_shapes, shapes, strict=False):
            if a != b:
                return f"the argument {path}, from {a} to {b}"
        if self.read.get(new):
            return "the content of a NumPy array that the function reads as a plain array"
        return "a rule, or a setting of JAX"


if not TYPE_CHECKING:
    Jitted.__call__ = Jitted.road


def _jitted(f: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Compile a function that was unpickled."""
    return jit(f, **options)


class CompiledMethod(Jitted[..., Any]):
    """A compiled method of one object; it does not keep the object alive."""

    def __call__(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        return self.road(*args, **kwargs)


@functools.lru_cache(maxsize=1)
def registered(version: int, ops: int) -> list[Any]:
    """Return the code of the user's op types, rules and kernels, at a version of the registry."""
    known = registry.OPS.loaded()  # (All other op types have only the library's own code.)
    code = [op.kernels.kernel for op in known]
    for op in known:
        code += [op.rule.function, *getattr(op.rule, "functions", {}).values()]
    return [f for f in code if callable(f) and not (f.__module__ or "").startswith("regrad.")]


def _plain(entry: object) -> Any:
    return entry[1] if isinstance(entry, tuple) and len(entry) == 2 else "another object"


def in_order(overrides: Mapping[object, OpBinding]) -> list[tuple[Any, Any]]:
    """The overrides of ops outside graphs, sorted by op type."""
    of_graphs = lambda k: isinstance(getattr(k, "op_type", k), tuple) and not is_held(k)  # noqa: E731
    found = [(k, b) for k, b in overrides.items() if not of_graphs(k)]
    return sorted(found, key=lambda pair: str(pair[0]))


def _told(overrides: Mapping[object, OpBinding]) -> tuple[Any, ...]:
    """Return the key of the selected rules: keys, counts, and the path."""
    found = [(k, b.token, b.once) for k, b in in_order(overrides)]
    return *found, PATH.get()


def _signature(f: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(f)
    except ValueError:
        return None


__all__ = ["CacheInfo", "Jitted", "jit"]

"""`jit`: a function compiled by XLA, with its Variables, its overrides and its gradients."""

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
VERIFY = "REGRAD_JIT_VERIFY"  # in the environment: 1 for all compiled functions
MANY = 8  # traces after which a function that is traced once more gets a warning
KEPT = 512  # traces of one function whose programs are kept (of one or two MB, if they are small)


class CacheInfo(NamedTuple):
    """The counts that `f.cache_info()` returns of a compiled function."""

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
    """Compile a function by XLA: forward and backward as one program, every rule in force.

    Args:
        f: A function of Tensors, arrays, Python numbers and containers of these, which returns
            the like. Strings, None, dtypes and functions are static: f is compiled anew for each
            value. Other arguments are refused, unless they are named as static.
        static_argnames: Names of arguments that are static: numbers that f uses for shapes, axes,
            loops and branches in Python, and hashable objects.
        static_argnums: The same by position.
        donate: Names of arguments whose memory the program may write over; they cannot be used
            after the call.
        verify: Whether each call traces f again and compares the result with the program in the
            cache. This is slow, and finds what `jit` cannot see. By default it is done where the
            environment has `REGRAD_JIT_VERIFY=1` when `jit` is called.

    The arguments come in as Tensors, the results are Tensors of JAX data (`y.numpy()` is a view
    where JAX can give one). f runs once for each combination of shapes and dtypes, with traced
    Tensors that have no values; after that the compiled program runs.

    Variables that f reads are inputs of the program, those that it assigns to are outputs; the
    memory of large ones is used again. Overrides in force count, and so do the Python values that f
    and the rules reach through closures, globals and attributes: where one has changed, f is traced
    again. Tensors reached that way are read at each call. Other mutable state is not seen, but
    found by `verify`.

    A function keeps what was compiled in 512 traces. After that the programs that were used longest
    ago are dropped, with their memory, and compiled again if they are called for; so is a program
    that was compiled for more shapes than that.

    A compiled function can be differentiated from outside, to any order: its backward pass is
    compiled too. Inside another compiled function it is a part of that.

    float64 data needs JAX's 64-bit mode, `jax.config.update("jax_enable_x64", True)`; without
    it there is an error, not a loss of precision. Python numbers are float32 or int32.

    Returns:
        The compiled function, with `lower` and `cache_info`.

    Raises:
        TraceError: f asks for the value of a traced Tensor, or a traced Tensor outlives the call.
        MissingPackageError: JAX is not installed.
        ArgumentError: an argument is neither a Tensor nor static; a static argument is not
            hashable; f makes a Variable; f uses a NumPy Generator.
        DTypeError: data that JAX cannot hold.
        StaleError: f does something else than its program, and `verify` is on.

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
    ):  # it takes any name
        return names
    for name in names:
        if name not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise ArgumentError(
                f"jit: {what} names {name!r}, and the parameters of {place(f)} are {known}"
            )
    return names


def _places(f: Callable[..., Any], places: int | Sequence[int]) -> list[int]:
    """Positions of arguments, those from the end too, as they count from 0."""
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
    """The arguments that are static: by position, and by name."""

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
        """The arguments with the static ones marked."""
        return (
            tuple([Static(x) if i in self.places else x for i, x in enumerate(args)]),
            {k: Static(x) if k in self.names else x for k, x in kwargs.items()},
        )


class Jitted(Generic[P, R]):
    """A compiled function, see `jit`."""

    closes_over: tuple[str, ...] = ("f",)
    __slots__ = ("__dict__", "__weakref__", "calls", "road")

    # `__call__` is the slot `road`: Python reads it and calls what is there, a function that was
    # written for the calls of this object (see `shortcuts`).
    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def __init__(self, f: Callable[P, R], **options: Any) -> None:
        find_jax("rg.jit")
        self.f = f
        self.name: str = f"jit({getattr(f, '__name__', type(f).__name__)})"
        self.options: dict[str, Any] = options  # those of `jit`
        self.donate: tuple[str, ...] = _names(f, options["donate"], "donate")
        self.verify: bool = options["verify"]
        self.programs: OrderedDict[Any, Program] = OrderedDict()  # the one used last comes last
        self.full: bool = False  # programs are to be dropped
        self.dropped: int = 0
        self.read: dict[Any, set[int]] = {}  # which arrays of the closure a trace read plainly
        self.closure = Closure(f)
        self.version: int | None = None  # of the registry, when a program was found
        self.default: np.dtype | None = None  # the default dtype, when a program was found
        self.stamp: Any = None  # of the registry, when the closure was made
        self.under: tuple[Any, ...] = None, (), None, None  # overrides, arguments, what they reach
        self.methods: dict[int, tuple[Method, Jitted[..., Any]]] = {}
        self.calls: int = 0
        self.road: Callable[P, R]
        self.traces: int = 0
        self.last: list[tuple[Any, ...]] = []  # what the last two traces were for
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
            self.__wrapped__ = f  # which says what it takes

    def __reduce__(self) -> Any:
        """Travel by name, or as the function and the options: programs are compiled anew."""
        return own_name(self) or (_jitted, (self.f, self.options))

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Jitted[P, R]: ...

    @overload
    def __get__(
        self: Jitted[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method is compiled for each object that it is called on."""
        if instance is None:
            return self
        known = self.methods.get(id(instance))
        if known is None or known[0].instance() is not instance:
            known = self.methods[id(instance)] = self._of(instance)
        return MethodType(known[1], instance)

    def _of(self, instance: Any) -> tuple[Method, Jitted[..., Any]]:
        methods, key = self.methods, id(instance)
        method = Method(self.f, instance, gone=lambda _: methods.pop(key, None))
        static = {  # less self, which is reached
            "static_argnums": [i - 1 for i in self.static.places if i],
            "static_argnames": [n for n in self.static.names if n not in self.parameters[:1]],
        }
        return method, CompiledMethod(method, **{**self.options, **static})

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Trace the function for these arguments, and return its program as JAX lowers it.

        Args:
            *args, **kwargs: Arguments as for a call. Nothing is computed.

        Returns:
            A `jax.stages.Lowered`: `.as_text()` is its StableHLO, and `.compile()` has
            `.cost_analysis()` and `.memory_analysis()`. Its inputs are arrays: those of the
            arguments, of Variables and of the closure. Overrides in force are built in.

        Raises:
            StateError: called in a function that is being differentiated or compiled.
            TraceError, ArgumentError, DTypeError: as a call.

        Source: `jax.jit(f).lower`.

        >>> import regrad as rg
        >>> f = rg.jit(lambda x: rg.sin(x) * 2)
        >>> "stablehlo.sine" in f.lower(rg.scalar(1.0)).as_text()
        True
        """
        state = current()
        if state is not None and (state.tapes or state.region or state.guard):
            raise StateError(
                f"{self.name}.lower: called in a function that is being differentiated or "
                "compiled. Lower f outside of it; to see the program of a gradient, "
                "lower a compiled one: jit(grad(f)).lower(x)."
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
        """Refuse arguments that f does not take, or leave our frames out of its error."""
        if type(error) is TypeError:
            check_call(self.f, self.name, args, kwargs)
        fold(error)

    def _opened(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[OpenedArguments, list[Any]]:
        if len(kwargs) > 1:  # f sees the order of keywords that bind to no parameter by name
            kwargs = {**{k: kwargs[k] for k in self.keywords if k in kwargs}, **kwargs}
        marked = self.static.marked(args, kwargs) if self.static.any else (args, kwargs)
        given = OpenedArguments(*marked, numbers="weak")
        return given, given.open_to_change(self.parameters)

    def call_at_length(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call of any kind; `shortcuts` has roads for the usual ones."""
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
            if closure.met:  # (to write for one that is another at each call would take longer)
                made_for = {"version": self.version, "default": self.default}
                self.shortcuts.keep(args, kwargs, program, closure, **made_for)
            closure.met = True
        return note(ys)

    def _closure(self, overrides: Overrides, reaching: Sequence[object]) -> Closure:
        """Return the closure of the function, the rules in force and functions among arguments."""
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
        with UPDATES:  # as the call of a program
            if self.full:
                self._drop()
            read = self.read.get(known)
            key = known, closure.content(sorted(read)) if read else ()
            program = self.programs.get(key)
            if program is None:
                program = self.programs[key] = self._made(given, closure, known)
                self.full = len(self.programs) > KEPT
            elif self.verify:
                program.body = self._body(given)  # with the arguments of this call
            self.programs.move_to_end(key)
        return program

    def _key(self, given: OpenedArguments, closure: Closure, overrides: Overrides) -> Any:
        """Return all that a trace depends on, but for the content of arrays that it read plainly.

        Nothing is missing: a trace runs f on its arguments, with what f reaches by its closure,
        under the rules in force; ops look up the registry and the default dtype. Shapes, dtypes and
        JAX's settings are in the key of JAX's own cache, and tapes and layouts in `Program._key`.
        """
        rules = _told(overrides) if overrides else ()
        return given.key, closure.key, rules, registry.version, get_default_dtype()

    def _drop(self) -> None:
        """Let go of the programs that were used longest ago, and of what XLA made of them."""
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
        """Return how many traces there are of which something is kept."""
        return sum(program.size for program in self._distinct())

    def _distinct(self) -> set[Program]:
        """The programs. One that has read arrays of the closure has several keys."""
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
        """Return the counts of calls that found a program, of traces, and of programs.

        A program is for one state of closures, overrides and static arguments; JAX keeps one
        executable in it for each combination of shapes and dtypes. `dropped` counts the programs
        that had to make room for others, see `jit`.
        """
        programs = len(self._distinct())
        return CacheInfo(self.calls - self.traces, self.traces, programs, self.dropped)

    def _traced(self, seen: tuple[Any, ...], arrays: Sequence[Array]) -> None:
        shapes = [f"{a.dtype}{tuple(a.shape)}" for a in arrays]
        self.last = [*self.last[-1:], (*seen, shapes)]
        self.traces = n = self.traces + 1
        if n >= KEPT and self._kept() >= KEPT:  # (the trace that ends now is not counted yet)
            self.full = True
            self.shortcuts.clear()
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
        if self.read.get(new):
            return "the content of a NumPy array that the function reads, not as an operand"
        return "a rule, or a setting of JAX"


if not TYPE_CHECKING:
    Jitted.__call__ = Jitted.road


def _jitted(f: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Compile a function that comes out of a pickle."""
    return jit(f, **options)


class CompiledMethod(Jitted[..., Any]):
    """A compiled method of one object, which it does not keep alive, but gets at each call."""

    def __call__(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        return self.road(*args, **kwargs)


@functools.lru_cache(maxsize=1)
def registered(version: int, ops: int) -> list[Any]:
    """Return the code of users' op types, rules and kernels, at a version of the registry."""
    known = registry.OPS.loaded()  # (all that others have is the library's own)
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
    """Return the key of the choice of rules: keys, counts, and the path."""
    found = [(k, b.token, b.once) for k, b in in_order(overrides)]
    return *found, PATH.get()


def _signature(f: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(f)
    except ValueError:
        return None


__all__ = ["CacheInfo", "Jitted", "jit"]

"""Finding the program of a common call again, through code generated for this kind of call.

Common arguments are Tensors, arrays of NumPy and JAX, strings, 32-bit Python numbers, and
containers of these; static arguments are plain values. `arguments.OpenedArguments` handles all
other arguments in general code.

For `f(x, {"w": w}, k=2)`, with k static, regrad writes a *road*, a function

    def road(*args, **kwargs):
        try:
            if not (current() is None and not OPEN and …): return other(*args, **kwargs)
            try: usual = c3['w'] is c4 and …                             # the closure is current
            except GONE: usual = False
            if not usual: return other(*args, **kwargs)
            v1, v2, = args
            if type(v1) is Tensor: v1 = v1._data
            elif type(v1) is ndarray: v1 = private(v1)                   # it may be filled again
            if type(v1) is not Array and not (type(v1) is ndarray and v1.dtype in TAKEN): …
            if not (type(v2) is c0 and (*v2,) == ('w',)): return other(…)    # c0: dict
            v3 = v2.get('w', other)
            …                                                            # as for v1
            v4 = kwargs.get('k', other)
            if not (type(v4) is c1): return other(…)                     # c1: int
            variant, quick = known.get((v4, ), (None, None))
            if not (quick is not None): return other(…)
            f.calls += 1
            return quick(v1, v3)
        except Exception as error: …

If no argument is static, the program is fixed, and its call is written into the road (see
`quick_calls`). `other` is the road of another kind of call, and the general road at the end of the
chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from keyword import iskeyword
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.core import registry
from regrad.core.containers import is_number_list
from regrad.core.promotion import PROCESS, SCOPED
from regrad.core.state import OPEN, current
from regrad.core.tensor import Tensor
from regrad.transforms.arguments import admitted, private
from regrad.transforms.closures import GONE, MISSING, is_unchanged
from regrad.transforms.quick_calls import QuickCall, Writer, array_type
from regrad.transforms.traces import find_jax

if TYPE_CHECKING:
    from regrad.transforms.closures import Closure
    from regrad.transforms.program import Program

ndarray = np.ndarray
EXACT: set[type[Any]] = {int, bool, str, type(None), type}  # types whose equal values are the same
# The check that a Python number has 32 bits, and its dtypes: without JAX's x64 mode, and with it.
# (JAX takes an array of rank 0 faster than a NumPy scalar.)
NUMBERS: dict[type, tuple[str, tuple[np.dtype, np.dtype]]] = {
    int: (f"{-(2**31)} <= {{0}} < {2**31}", (np.dtype(np.int32), np.dtype(np.int64))),
    float: ("-3e38 < {0} < 3e38", (np.dtype(np.float32), np.dtype(np.float64))),
}
ROADS = 16  # maximum number of roads for one function
DEPTH = 16  # maximum depth of containers
WRITTEN = 64  # maximum number of places of a closure, or entries of a list, with written-out checks


class Shortcuts:
    """The roads for the common calls of one compiled function.

    A call of a compiled function calls its attribute `road`, which is the road written last.
    """

    def __init__(self, f: Any, places: set[int], names: set[str], keywords: Sequence[str]) -> None:
        self.f = f
        self.places = places  # places of static arguments
        self.names = names
        self.keywords = keywords  # keywords that bind to parameters by name
        # By kind of call and by static values: the variant for which the road was written, and its
        # call.
        self.kinds: dict[Any, dict[tuple[Any, ...], tuple[Any, Any]]] = {}
        self.clear()

    def clear(self) -> None:
        """Reset to the general road for the next calls."""
        self.f.road = self.f.call_at_length
        self.kinds.clear()

    def keep(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program, closure: Closure,
        **state: Any,
    ) -> None:  # fmt: skip
        """Keep the program of a call, if the call is of a common kind.

        The program was made for the closure and `state`: the `version` of the registry and the
        `default` dtype. The caller clears the kept programs when one of these has changed.
        """
        writer = _ShortcutWriter(f=self.f, shortcuts=self, **state)
        try:
            writer.open(args, kwargs, self.places, self.names, self.keywords)
        except _Unusual:
            return
        kind, values = writer.key()
        known = self.kinds.get(kind)
        # a road for this kind of call exists and did not take it
        if known is not None and values in known:
            if known[values][0] is not program.quick:
                self.clear()
            return
        if known is None and len(self.kinds) == ROADS:
            return
        inner = Writer(shortcuts=self) if values else writer
        call = QuickCall(inner, program, closure, writer.arrays)
        if known is None:
            known = self.kinds[kind] = {}
            writer.scope |= {"other": self.f.road, "known": known}
            self.f.road = writer.road(call, len(args), len(kwargs))
        known[values] = program.quick, call.function() if values else None


OTHER = "return other(*args, **kwargs)"
STATE = (
    "current() is None and not OPEN and registry.version == version and "
    "(PROCESS[0] if (dtype := scoped()) is None else dtype) is default"
)


def checks_of(closure: Closure, bind: Callable[[Any], str]) -> str:
    """Return the source of `closure.is_current()`, which may raise one of `GONE` for False.

    `bind` returns a name for an object.
    """
    if len(closure.places) > WRITTEN:
        return f"{bind(closure)}.is_current()"
    return " and ".join([_check_of(read, value, bind) for read, value in closure.places])


def _check_of(read: Any, value: object, bind: Callable[[Any], str]) -> str:
    """Return the source of `read() is value`, with the calls inside `read` written out."""
    function: Any = getattr(read, "func", None)
    args: Any = getattr(read, "args", ())
    namespace = getattr(function, "__self__", None)
    # also the getattr of a cell
    if function is getattr and value is not MISSING and not iskeyword(args[1]):
        return f"{bind(args[0])}.{args[1]} is {bind(value)}"
    if type(namespace) in (dict, MappingProxyType):
        found = f"{bind(namespace)}[{args[0]!r}] is {bind(value)}"
        return f"{args[0]!r} not in {bind(namespace)}" if value is MISSING else found
    general = f"{bind(read)}() is {bind(value)}"
    entries_of = getattr(args[0], "func", None) if function is is_unchanged else None
    if entries_of is list and len(args[1]) <= WRITTEN:
        (entries,), parts = args[0].args, args[1]
        # (The general check compares values that are equal and not identical.)
        if type(entries) is list:
            name = bind(entries)
            same = [f"{name}[{i}] is {bind(part)}" for i, part in enumerate(parts)]
            return f"({' and '.join([f'len({name}) == {len(parts)}', *same])} or {general})"
    return general


class _Unusual(Exception):
    """Raised for a value for which regrad writes no code."""


class _ShortcutWriter(Writer):
    """Writes the road of one kind of call."""

    def __init__(self, **scope: Any) -> None:
        super().__init__(config=find_jax().config, **SCOPE, **scope)
        self.opened = 0  # how many values have a name
        self.arrays: list[str] = []  # the names of the inputs of the program
        self.statics: list[str] = []  # the names of the static values in the program's key
        self.values: list[Any] = []  # their values in this call
        self.classes: list[type] = []

    def open(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], places: set[int], names: set[str],
        keywords: Sequence[str],
    ) -> None:  # fmt: skip
        """Write the code that flattens the arguments of a call."""
        own = self.unpacked("args", len(args))
        for i, (value, name) in enumerate(zip(args, own, strict=True)):
            self.value(value, name, i in places)
        free = [key for key in kwargs if key not in keywords]
        # f sees the order of these keywords; the order of the others follows its signature
        if len(free) > 1:
            self.require(f"[k for k in kwargs if k not in {self.bind(keywords)}] == {free!r}")
        for key in sorted(kwargs):
            self.value(kwargs[key], self.entry("kwargs", key), key in names)

    def key(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the kind of the call and its static values; a road is kept under these two.

        The key is complete: the lines contain all checks of the arguments (containers, their
        lengths, and the order of keys), but name classes by number. Static values are compared by
        ==, and their classes are among the classes. Each road checks the rest of a program's key
        (`Jitted._key`) at each call: the closure (`checks_of`), the registry and the default dtype
        (`STATE`). Under overrides and tapes no road is taken (`STATE`). JAX's own cache and
        `QuickCall` check the rest of the key of XLA's program.
        """
        return ("\n".join(self.lines), *self.classes), tuple(self.values)

    def road(self, call: QuickCall, count: int, named: int) -> Any:
        """Return the road to a call of the program, for this number of arguments."""
        shape = f"len(args) == {count} and {f'len(kwargs) == {named}' if named else 'not kwargs'}"
        usual, places = f"{STATE} and {shape}", checks_of(call.closure, self.bind)
        head = [f"  if not ({usual}): {OTHER}"]
        if places:
            head += [f"  try: usual = {places}", "  except GONE: usual = False"]
            head += [f"  if not usual: {OTHER}"]
        self.lines = ["def road(*args, **kwargs):", " try:", *head, *self.lines]
        if self.statics:
            values = "".join([f"{name}, " for name in self.statics])
            self.write(f"variant, quick = known.get(({values}), (None, None))")
            self.require("quick is not None")
        self.write("f.calls += 1")
        if self.statics:
            self.write(f"return quick({', '.join(self.arrays)})")
        else:
            call.write_call()
        self.lines += [
            " except Exception as error:", "  f.fold(error, args, kwargs)", "  raise",
        ]  # fmt: skip
        return self.made("road")

    def write(self, line: str, depth: int = 2) -> None:
        super().write(line, depth)

    def name(self) -> str:
        self.opened += 1
        return f"v{self.opened}"

    def require(self, condition: str) -> None:
        self.write(f"if not ({condition}): {OTHER}")

    def unpacked(self, name: str, count: int) -> list[str]:
        """Write the code that unpacks a sequence."""
        names = [self.name() for _ in range(count)]
        if names:
            self.write(f"{', '.join(names)}, = {name}")
        return names

    def entry(self, name: str, key: str) -> str:
        """Write the code that reads an entry of a dict."""
        self.write(f"{(entry := self.name())} = {name}.get({key!r}, other)")
        return entry

    def static(self, value: object, name: str) -> None:
        if type(value) not in EXACT:
            raise _Unusual
        self.require(f"type({name}) is {self.bind(type(value))}")
        self.classes.append(type(value))
        self.statics.append(name)
        self.values.append(value)

    def value(self, value: Any, name: str, fixed: bool = False, depth: int = DEPTH) -> None:
        """Write the check that a value is of this kind, and record its inputs of the program."""
        kind = type(value)
        if fixed or kind is str or value is None:
            self.static(value, name)
        elif kind in NUMBERS:
            condition = NUMBERS[kind][0].format(name)
            self.require(f"type({name}) is {kind.__name__} and {condition}")
            dtype = f"{kind.__name__}s[config.jax_enable_x64]"
            self.write(f"{name} = array({name}, {dtype})")
            self.arrays.append(name)
        elif kind is Tensor or kind is ndarray or kind is array_type():
            self.write(f"if type({name}) is Tensor: {name} = {name}._data")
            self.write(f"elif type({name}) is ndarray: {name} = private({name})")
            plain = f"type({name}) is ndarray and {name}.dtype in TAKEN"
            self.write(f"if type({name}) is not Array and not ({plain}):")
            self.write(f" if ({name} := taken({name})) is None: {OTHER}")
            self.arrays.append(name)
        else:
            self.container(value, name, depth)

    def container(self, value: Any, name: str, depth: int) -> None:
        """Write the code that opens a container, if it is a Python builtin and not too deep.

        Other containers may have static fields. A list of numbers is not a container for regrad,
        but a Tensor.
        """
        kind = type(value)
        plain = kind in (dict, list, tuple) or (
            isinstance(value, tuple) and hasattr(kind, "_fields")
        )
        if not depth or not plain or is_number_list(value):
            raise _Unusual
        same = f"len({name}) == {len(value)}"
        if kind is dict:
            if not all(type(key) is str for key in value):
                raise _Unusual
            same = f"(*{name},) == {tuple(value)!r}"  # this order is built into the program
        self.require(f"type({name}) is {self.bind(kind)} and {same}")
        self.classes.append(kind)
        if kind is dict:
            for key in sorted(value):
                self.value(value[key], self.entry(name, key), depth=depth - 1)
        else:
            for part, own in zip(value, self.unpacked(name, len(value)), strict=True):
                self.value(part, own, depth=depth - 1)


def taken(data: Any) -> Any:
    """Return a non-JAX array in the form that a program takes, or None."""
    return admitted(data) if type(data) is ndarray else None


# The dtypes of NumPy arrays that programs take unchanged; `admitted` handles other dtypes.
TAKEN = {np.dtype(c) for c in "?bBhHiIef"}

SCOPE: dict[str, Any] = {
    "current": current, "OPEN": OPEN, "registry": registry, "PROCESS": PROCESS,
    "scoped": SCOPED.get, "GONE": GONE, "ndarray": ndarray, "TAKEN": TAKEN, "taken": taken,
    "array": np.array, "private": private,
    **{f"{kind.__name__}s": dtypes for kind, (_, dtypes) in NUMBERS.items()},
}  # fmt: skip

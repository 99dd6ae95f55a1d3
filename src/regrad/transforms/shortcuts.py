"""Finding the program of a usual call again, by code that is written for calls of that kind.

Usual are Tensors and arrays of NumPy and JAX, strings and Python numbers of 32 bits, and containers
of these; and plain values for static arguments. For all else there is `arguments.OpenedArguments`,
which says what it is, and does at length what is done here in few steps.

For `f(x, {"w": w}, k=2)`, with k static, a *road* is written that reads

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

Where no argument is static, the program is known, and its call stands here (see `quick_calls`).
`other` is the road of another kind of call, and at last the general road.
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
# How a Python number is asked whether it has 32 bits, and its dtypes: without JAX's x64 mode, and
# with it. (JAX takes an array without axes in less time than one of NumPy's scalars.)
NUMBERS: dict[type, tuple[str, tuple[np.dtype, np.dtype]]] = {
    int: (f"{-(2**31)} <= {{0}} < {2**31}", (np.dtype(np.int32), np.dtype(np.int64))),
    float: ("-3e38 < {0} < 3e38", (np.dtype(np.float32), np.dtype(np.float64))),
}
ROADS = 16  # kept for one function
DEPTH = 16  # of containers
WRITTEN = 64  # places of a closure, or entries of a list, whose checks are written out


class Shortcuts:
    """The roads of the usual calls of one compiled function.

    A call of a compiled function is one of its attribute `road`, which is the one written last.
    """

    def __init__(self, f: Any, places: set[int], names: set[str], keywords: Sequence[str]) -> None:
        self.f = f
        self.places = places  # of static arguments
        self.names = names
        self.keywords = keywords  # that bind to parameters by name
        # by kind of call, and by static values: the variant for which it was written, and what was
        self.kinds: dict[Any, dict[tuple[Any, ...], tuple[Any, Any]]] = {}
        self.clear()

    def clear(self) -> None:
        """Let the next calls come by the general road."""
        self.f.road = self.f.call_at_length
        self.kinds.clear()

    def keep(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program, closure: Closure,
        **state: Any,
    ) -> None:  # fmt: skip
        """Keep the program of a call, if it is a usual one.

        The closure and `state`, the `version` of the registry and the `default` dtype, are what it
        was made for. The caller clears what is kept when one has changed.
        """
        writer = _ShortcutWriter(f=self.f, shortcuts=self, **state)
        try:
            writer.open(args, kwargs, self.places, self.names, self.keywords)
        except _Unusual:
            return
        kind, values = writer.key()
        known = self.kinds.get(kind)
        if known is not None and values in known:  # the call was of this kind, and not taken
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
    """Return the source of `read() is value`: what `read` does, without its calls."""
    function: Any = getattr(read, "func", None)
    args: Any = getattr(read, "args", ())
    namespace = getattr(function, "__self__", None)
    if function is getattr and value is not MISSING and not iskeyword(args[1]):  # also of a cell
        return f"{bind(args[0])}.{args[1]} is {bind(value)}"
    if type(namespace) in (dict, MappingProxyType):
        found = f"{bind(namespace)}[{args[0]!r}] is {bind(value)}"
        return f"{args[0]!r} not in {bind(namespace)}" if value is MISSING else found
    general = f"{bind(read)}() is {bind(value)}"
    entries_of = getattr(args[0], "func", None) if function is is_unchanged else None
    if entries_of is list and len(args[1]) <= WRITTEN:
        (entries,), parts = args[0].args, args[1]
        if type(entries) is list:  # (what is equal and not the same is for the general check)
            name = bind(entries)
            same = [f"{name}[{i}] is {bind(part)}" for i, part in enumerate(parts)]
            return f"({' and '.join([f'len({name}) == {len(parts)}', *same])} or {general})"
    return general


class _Unusual(Exception):
    """A value for which no code is written."""


class _ShortcutWriter(Writer):
    """Writes the road of one kind of call."""

    def __init__(self, **scope: Any) -> None:
        super().__init__(config=find_jax().config, **SCOPE, **scope)
        self.opened = 0  # how many values have a name
        self.arrays: list[str] = []  # the names of what goes into the program
        self.statics: list[str] = []  # the names of what the program is found by
        self.values: list[Any] = []  # and what they hold in this call
        self.classes: list[type] = []

    def open(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], places: set[int], names: set[str],
        keywords: Sequence[str],
    ) -> None:  # fmt: skip
        """Write how the arguments of a call are opened."""
        own = self.unpacked("args", len(args))
        for i, (value, name) in enumerate(zip(args, own, strict=True)):
            self.value(value, name, i in places)
        free = [key for key in kwargs if key not in keywords]
        if len(free) > 1:  # f sees their order; the others go by its signature
            self.require(f"[k for k in kwargs if k not in {self.bind(keywords)}] == {free!r}")
        for key in sorted(kwargs):
            self.value(kwargs[key], self.entry("kwargs", key), key in names)

    def key(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the kind of the call, and its static values: by these a road is kept.

        Nothing is missing: the lines say what is checked of the arguments (containers, their
        lengths, and the order of keys), but name classes by number. Static values are compared by
        ==, and their classes are among the classes. The rest of a program's key (`Jitted._key`) is
        checked by each road at each call: the closure (`checks_of`), the registry and the default
        dtype (`STATE`). Under overrides and tapes no road is taken (`STATE`). JAX's own cache and
        `QuickCall` check the rest of the key of XLA's program.
        """
        return ("\n".join(self.lines), *self.classes), tuple(self.values)

    def road(self, call: QuickCall, count: int, named: int) -> Any:
        """Return the road to a call of the program, for so many arguments."""
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
        """Write that a sequence is taken apart."""
        names = [self.name() for _ in range(count)]
        if names:
            self.write(f"{', '.join(names)}, = {name}")
        return names

    def entry(self, name: str, key: str) -> str:
        """Write that an entry of a dict is read."""
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
        """Write that a value is of the kind of this one, and what of it goes into the program."""
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
        """Write that a container is opened, if it is one of Python's own and not too deep.

        Others may have static fields. And a list of numbers is not a container to us, but a Tensor.
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
            same = f"(*{name},) == {tuple(value)!r}"  # the program has this order built in
        self.require(f"type({name}) is {self.bind(kind)} and {same}")
        self.classes.append(kind)
        if kind is dict:
            for key in sorted(value):
                self.value(value[key], self.entry(name, key), depth=depth - 1)
        else:
            for part, own in zip(value, self.unpacked(name, len(value)), strict=True):
                self.value(part, own, depth=depth - 1)


def taken(data: Any) -> Any:
    """Return an array that is not one of JAX's as a program takes it, or None."""
    return admitted(data) if type(data) is ndarray else None


# The dtypes of NumPy arrays that programs take as they are; of the others, `admitted` decides.
TAKEN = {np.dtype(c) for c in "?bBhHiIef"}

SCOPE: dict[str, Any] = {
    "current": current, "OPEN": OPEN, "registry": registry, "PROCESS": PROCESS,
    "scoped": SCOPED.get, "GONE": GONE, "ndarray": ndarray, "TAKEN": TAKEN, "taken": taken,
    "array": np.array, "private": private,
    **{f"{kind.__name__}s": dtypes for kind, (_, dtypes) in NUMBERS.items()},
}  # fmt: skip

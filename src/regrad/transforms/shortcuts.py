"""Finding the program of a usual call again, by code that is written for calls of that kind.

Usual are Tensors and arrays of NumPy and JAX, strings and Python numbers of 32 bits, and containers
of these; and plain values for static arguments. For all else there is `arguments.OpenedArguments`,
which says what it is, and does at length what is done here in few steps.

For `f(x, {"w": w}, k=2)`, with k static, a *road* is written that reads

    def road(args, kwargs, f):
        if not (current() is None and …): return other(args, kwargs, f)
        v1, v2, = args
        if not (len(kwargs) == 1): return other(args, kwargs, f)
        v3 = kwargs.get('k', other)
        if type(v1) is Tensor: v1 = v1._data
        if not (type(v1) is Array or (v1 := taken(v1)) is not None): return other(…)
        if not (type(v2) is c0 and len(v2) == 1): return other(…)    # c0: dict
        v4 = v2.get('w', other)
        …                                                            # as for v1
        if not (type(v3) is c1): return other(…)                     # c1: int
        program = programs.get((v3, ))
        if not (program is not None): return other(…)
        return program.call_quick([v1, v4], closure)

`other` is the road of another kind with as many arguments, and at last the general road.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.core import registry
from regrad.core.containers import is_number_list
from regrad.core.promotion import get_default_dtype
from regrad.core.state import current
from regrad.core.tensor import Tensor
from regrad.transforms.arguments import admitted
from regrad.transforms.traces import find_jax

if TYPE_CHECKING:
    from regrad.transforms.program import Program

ndarray = np.ndarray
EXACT: set[type[Any]] = {int, bool, str, type(None), type}  # types whose equal values are the same
# How a Python number is asked whether it has 32 bits, and its dtypes: without JAX's x64 mode, and
# with it. (JAX takes an array without axes in less time than one of NumPy's scalars.)
NUMBERS: dict[type, tuple[str, tuple[np.dtype, np.dtype]]] = {
    int: (f"{-(2**31)} <= {{0}} < {2**31}", (np.dtype(np.int32), np.dtype(np.int64))),
    float: ("-3e38 < {0} < 3e38", (np.dtype(np.float32), np.dtype(np.float64))),
}
ROADS = 8  # kept for one number of arguments
DEPTH = 16  # of containers

Road = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]  # of a call, and of the function


def generally(args: tuple[Any, ...], kwargs: dict[str, Any], f: Any) -> Any:
    """Call a compiled function by the general road."""
    return f.call_at_length(args, kwargs)


class Shortcuts:
    """The roads of the usual calls of one compiled function."""

    def __init__(self, places: set[int], names: set[str]) -> None:
        self.places = places  # of static arguments
        self.names = names
        self.roads: dict[int, Road] = {}  # the first, by the number of arguments without a name
        self.lengths: Counter[int] = Counter()  # how many there are
        self.kinds: dict[Any, dict[Any, Program]] = {}  # by kind of call, and by static values

    def clear(self) -> None:
        """Let the next calls come by the general road."""
        self.roads.clear()
        self.lengths.clear()
        self.kinds.clear()

    def keep(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program, **state: Any
    ) -> None:
        """Keep the program of a call, if it is a usual one.

        `state` is what it was made for, as long as that lasts: the `closure`, the `version` of the
        registry and the `default` dtype. The caller clears what is kept when one has changed.
        """
        writer = _Writer()
        try:
            names = writer.unpacked("args", len(args))
            writer.require(f"len(kwargs) == {len(kwargs)}")
            for i, (value, name) in enumerate(zip(args, names, strict=True)):
                writer.value(value, name, i in self.places)
            for key in sorted(kwargs):
                writer.value(kwargs[key], writer.entry("kwargs", key), key in self.names)
        except _Unusual:
            return
        kind = writer.source(), *writer.classes
        if kind not in self.kinds and self.lengths[len(args)] < ROADS:
            self.kinds[kind] = {}
            self.lengths[len(args)] += 1
            other = self.roads.get(len(args), generally)
            state |= {"other": other, "programs": self.kinds[kind]}
            self.roads[len(args)] = writer.made(state)
        if kind in self.kinds:
            self.kinds[kind][tuple(writer.values)] = program


OTHER = "return other(args, kwargs, f)"
HEAD = (
    "def road(args, kwargs, f):",
    "if not (current() is None and registry.version == version and get_default_dtype() is default"
    f" and closure.is_current()): {OTHER}",
)


class _Unusual(Exception):
    """A value for which no code is written."""


class _Writer:
    """Writes the road of one kind of call."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0
        self.arrays: list[str] = []  # the names of what goes into the program
        self.statics: list[str] = []  # the names of what the program is found by
        self.values: list[Any] = []  # and what they hold in this call
        self.classes: list[type] = []

    def source(self) -> str:
        statics = "".join(f"{name}, " for name in self.statics)
        end = (
            f"program = programs.get(({statics}))",
            f"if not (program is not None): {OTHER}",
            f"return program.call_quick([{', '.join(self.arrays)}], closure)",
        )
        return "\n ".join([*HEAD, *self.lines, *end])

    def made(self, scope: dict[str, Any]) -> Road:
        classes = {f"c{i}": found for i, found in enumerate(self.classes)}
        scope |= {"config": find_jax().config, "Array": _array_type()}
        code = compile(self.source(), __file__, "exec")  # whose frames are ours
        exec(code, scope := {**SCOPE, **classes, **scope})
        return scope["road"]

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): {OTHER}")

    def unpacked(self, name: str, count: int) -> list[str]:
        """Write that a sequence is taken apart."""
        names = [self.name() for _ in range(count)]
        if names:
            self.lines.append(f"{', '.join(names)}, = {name}")
        return names

    def entry(self, name: str, key: str) -> str:
        """Write that an entry of a dict is read."""
        self.lines.append(f"{(entry := self.name())} = {name}.get({key!r}, other)")
        return entry

    def static(self, value: object, name: str) -> None:
        if type(value) not in EXACT:
            raise _Unusual
        self.require(f"type({name}) is c{len(self.classes)}")
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
            self.lines.append(f"{name} = array({name}, {dtype})")
            self.arrays.append(name)
        elif kind is Tensor or kind is ndarray or kind is _array_type():
            self.lines.append(f"if type({name}) is Tensor: {name} = {name}._data")
            self.require(f"type({name}) is Array or ({name} := taken({name})) is not None")
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
        self.require(f"type({name}) is c{len(self.classes)} and len({name}) == {len(value)}")
        self.classes.append(kind)
        if kind is dict:
            if not all(type(key) is str for key in value):
                raise _Unusual
            for key in sorted(value):
                self.value(value[key], self.entry(name, key), depth=depth - 1)
        else:
            for part, own in zip(value, self.unpacked(name, len(value)), strict=True):
                self.value(part, own, depth=depth - 1)


def taken(data: Any) -> Any:
    """Return an array that is not one of JAX's as a program takes it, or None."""
    return admitted(data) if type(data) is ndarray else None


SCOPE = {
    "current": current, "registry": registry, "get_default_dtype": get_default_dtype,
    "Tensor": Tensor, "taken": taken, "array": np.array,
    **{f"{kind.__name__}s": dtypes for kind, (_, dtypes) in NUMBERS.items()},
}  # fmt: skip


@functools.cache
def _array_type() -> type:
    """Return the type of JAX's arrays that have values."""
    return type(find_jax().numpy.zeros(()))

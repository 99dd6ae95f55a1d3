"""What a function reaches without being given it: closure cells, globals, defaults, attributes.

A compiled program has these values baked in. So they are looked at before each call: numbers,
strings and functions are part of the key under which a program is found; Tensors and arrays are
inputs of the program, read again each time.
"""

from __future__ import annotations

import functools
import os
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from regrad.errors import ArgumentError
from regrad.namespaces import is_array
from regrad.tensor import OURS, Tensor
from regrad.variable import Variable

_HERE = os.path.dirname(__file__) + os.sep
_LIBRARIES = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")
)
PLAIN = (bool, int, float, complex, str, bytes, type(None))
MISSING: Any = object()
CONTAINERS = (list, tuple, dict, set, frozenset)
OPERATORS = ("__call__", "__getitem__")  # which code asks for without naming them
HEAP_TYPE = 1 << 9  # the flag of classes that Python code has made
LARGEST = 256  # entries of a container that are looked at

Read = Callable[[], Any]


class Closure:
    """The values that some functions reach, by the places where they were found.

    `key` tells two states of these values apart; `tensors` are the places of Tensors and arrays.
    `names` say what each entry of the key is, for messages.
    """

    def __init__(self, *functions: Any) -> None:
        self.places: list[tuple[Read, Any]] = []
        self.key: tuple[Any, ...] = ()
        self.names: list[str] = []
        self.tensors: list[Read] = []
        self.generators: list[tuple[str, Any]] = []  # of NumPy, by name
        walk = _Walk(self)
        for function in functions:
            walk.value(function, getattr(function, "__name__", "f"), MISSING)
        self.key = tuple(walk.entries)

    def arrays(self) -> list[int]:
        """The places of arrays, which anybody can write to."""
        return [i for i, read in enumerate(self.tensors) if not isinstance(read(), Tensor)]

    @contextmanager
    def undrawn(self, kind: str) -> Iterator[None]:
        """Refuse that a body draws numbers which all calls, or all examples, would share."""
        before = [repr(g.bit_generator.state) for _, g in self.generators]
        yield
        for (name, g), state in zip(self.generators, before, strict=True):
            if repr(g.bit_generator.state) != state:
                raise ArgumentError(
                    f"{kind}: the function drew numbers from the NumPy Generator {name!r}, which "
                    "would be the same at every call and for all examples. Draw them outside and "
                    "pass them in, or use rg.random with a key (rg.random.key(0)) that is passed "
                    "in."
                )

    def is_current(self) -> bool:
        """Whether every place holds the very object that it held."""
        try:
            for read, value in self.places:
                if read() is not value:
                    return False
        except (LookupError, ValueError):  # the place is gone
            return False
        return True


class _Walk:
    """Looks through functions and containers, each once."""

    def __init__(self, closure: Closure) -> None:
        self.closure = closure
        self.entries: list[Any] = []
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []  # so that no id() is used twice
        self.asked: set[str] = set()  # attributes that the code asks for
        self.objects: list[tuple[Any, str]] = []

    def value(self, value: Any, name: str, read: Any, *, fixed: bool = False) -> None:
        """Note what is found at a place; at a fixed one there will never be anything else."""
        if read is not MISSING and not fixed:
            self.closure.places.append((read, value))
        if type(value) in PLAIN:
            self.entry(name, (type(value), repr(value) if type(value) is float else value))
        elif isinstance(value, np.generic):
            self.entry(name, (type(value), repr(value)))
        elif id(value) in self.seen:
            self.entry(name, ("the same as", self.seen[id(value)]))
        else:
            self.seen[id(value)] = len(self.entries)
            self.kept.append(value)
            self.open(value, name, read)

    def entry(self, name: str, value: Any) -> None:
        self.entries.append(value)
        self.closure.names.append(name)

    def open(self, value: Any, name: str, read: Any) -> None:
        """What is no plain value."""
        if isinstance(value, Tensor) or (is_array(value) and not isinstance(value, Variable)):
            if getattr(value, "_id", 0) == OURS:  # shared with constants that a body makes itself
                self.entry(name, Identity(value))
            elif read is not MISSING:
                self.entry(name, Tensor)
                self.closure.tensors.append(read)
        elif isinstance(value, types.FunctionType):
            self.function(value, name)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__, name, MISSING)
            self.value(value.__self__, f"{name}.__self__", MISSING)
        elif isinstance(value, functools.partial):
            for part in ("func", "args", "keywords"):
                self.value(getattr(value, part), f"{name}.{part}", MISSING)
        elif isinstance(value, CONTAINERS):
            if len(value) <= LARGEST and not type(value).__module__.startswith("regrad."):
                self.container(value, name)
            else:
                self.entry(name, Identity(value))
        elif isinstance(value, types.ModuleType) and _is_closed(value):
            self.entry(name, Identity(value))
        elif "__wrapped__" in getattr(value, "__dict__", ()):
            self.entry(name, Identity(value))
            self.value(value.__wrapped__, name, MISSING)
        else:
            self.entry(name, Identity(value))
            if isinstance(value, np.random.Generator):
                self.closure.generators.append((name, value))
            if not isinstance(value, type) and not _is_closed(value):
                self.objects.append((value, name))
                self.attributes(value, name, {*self.asked, *OPERATORS})

    def container(self, value: Any, name: str) -> None:
        self.entry(name, (type(value), len(value)))
        self.closure.places.append((functools.partial(_size, value), len(value)))
        if isinstance(value, dict):
            for k in value:
                self.value(k, f"a key of {name}", MISSING)
                self.value(value[k], f"{name}[{k!r}]", functools.partial(value.__getitem__, k))
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                self.value(item, f"{name}[{i}]", functools.partial(value.__getitem__, i))
        else:
            self.entry(name, frozenset(Identity(v) if _mutable(v) else v for v in value))

    def function(self, function: types.FunctionType, name: str) -> None:
        """A function: its code, its cells and defaults, and the globals that it names."""
        code = function.__code__
        self.entry(name, code)
        ours = code.co_filename.startswith(_HERE)
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            read = functools.partial(getattr, cell, "cell_contents")
            self.value(_content(cell), free, read, fixed=ours)
        for part in ("__defaults__", "__kwdefaults__"):
            if getattr(function, part) is not None:
                read = functools.partial(getattr, function, part)
                self.value(getattr(function, part), f"{name}.{part}", read)
        if "__wrapped__" in vars(function):
            self.value(vars(function)["__wrapped__"], name, MISSING)
        if _is_library_file(code.co_filename):
            return
        for global_name in _names(code):
            if global_name in function.__globals__:
                read = functools.partial(function.__globals__.get, global_name, MISSING)
                self.value(function.__globals__[global_name], global_name, read)
        new = set(_names(code)) - self.asked
        self.asked |= new
        for value, path in list(self.objects) if new else ():
            self.attributes(value, path, new)

    def attributes(self, value: Any, name: str, asked: set[str]) -> None:
        """The attributes of an object that some code found here asks for."""
        own = getattr(value, "__dict__", None)
        for attribute in sorted(asked):
            path = f"{name}.{attribute}"
            if own is not None and attribute not in OPERATORS:
                read = functools.partial(own.get, attribute, MISSING)
                if attribute in own:
                    self.value(own[attribute], path, read)
                    continue
                self.closure.places.append((read, MISSING))  # it may hide the class's own one day
            self.inherited(value, attribute, path)

    def inherited(self, value: Any, attribute: str, path: str) -> None:
        """What the class says of an attribute: a method, a property, a slot or a default."""
        found = getattr(type(value), attribute, MISSING)
        if isinstance(found, property):
            found = found.fget
        if isinstance(found, types.MemberDescriptorType):
            read = functools.partial(getattr, value, attribute, MISSING)
            self.value(read(), path, read)
        elif isinstance(found, types.FunctionType):
            self.value(found, path, MISSING)
        elif type(found) in (*PLAIN, *CONTAINERS):
            self.value(found, path, functools.partial(getattr, type(value), attribute, MISSING))


class Identity:
    """An object as part of a key: equal only to itself, and kept alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


def _mutable(value: Any) -> bool:
    return type(value) not in PLAIN


def _size(container: Any) -> Any:
    return len(container)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals and attributes that a function names, the functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_closed(value: Any) -> bool:
    """Whether an object is told apart by identity only: regrad's own, and modules of libraries."""
    if isinstance(value, types.ModuleType):
        return _is_library_file(getattr(value, "__file__", None) or _HERE)
    kind = type(value)
    if kind.__module__ == "builtins":  # also that of classes made by exec in a bare scope
        return not kind.__flags__ & HEAP_TYPE
    return kind.__module__.partition(".")[0] in ("regrad", "jax", "jaxlib")


@functools.lru_cache(maxsize=4096)
def _is_library_file(path: str) -> bool:
    path = os.path.realpath(path)
    return path.startswith((_HERE, *_LIBRARIES)) and not path.startswith("<")

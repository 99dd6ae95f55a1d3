"""The values that a function reaches by itself: closure cells, globals, defaults, attributes.

These values are built into a compiled program. So regrad compares them before each call: numbers,
strings and functions are part of the key of a program; Tensors and arrays are inputs of the
program, read again at each call. The walk follows the names in the code. It visits the entries of
containers, and the attributes of objects and classes that the code names, including special methods
of their classes.

For example, with

    rate = 0.1
    class Model: ...                       # with a method `loss` that reads `self.w`

    @rg.jit
    def step(x):
        return model.loss(x) * rate

the walk begins at `step`. Its code names `model`, `loss` and `rate`. `rate` is a plain value: the
key contains it as 0.1. `model` is an object: the key contains its identity, and the walk visits the
attributes that the code names. In the first round that is `loss`, and in the second round `w`,
which the code of `loss` names. `model.w` is a Tensor: the key contains its shape and dtype, and the
Tensor is an input. In each round, the walk visits each object once, for all names that are new to
it.

The walk takes much longer than a call. So regrad does it once and keeps a list of `places`, each a
function that reads one name, with the object found there. As long as every place holds the same
object (`is_current`), the key is unchanged. After any change, the walk runs again and makes a new
key, which may be the key of a program that was compiled before.

The key contains an object of regrad by its identity, because most of its state changes at each
call. If the object holds something of the user's (a function, a Variable, a map of rules), its
class names these attributes in `closes_over`, and the walk follows them. For other callables of
libraries (`jax.custom_vjp`, `numpy.vectorize`), the walk follows the callables that they hold.

Invariants:

* If a value can change while its place holds the same object, the walk opens it (containers,
  objects), raises (Generators), or makes it an input (arrays).
* The walk does not read the code of libraries and of regrad: it expects changes only in values that
  the user's code reaches. Modules, builtins and JAX's objects enter the key by identity.
* In doubt, regrad traces a new program, which is slow, and never reuses an old one, which could be
  wrong. A table in `docs/compiled.md` lists the changes that the walk cannot see (computed names,
  large containers, files); `rg.jit(f, verify=True)` finds them.
"""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import sys
import threading
import types
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.autodiff.variables import Variable
from regrad.core.backends import BACKENDS, is_array
from regrad.core.callers import PACKAGE, is_library_file
from regrad.core.pytrees import exactly
from regrad.core.registry import RULES
from regrad.core.tensor import OURS, Tensor
from regrad.errors import ArgumentError

if TYPE_CHECKING:
    from regrad.core.backends import Array

PLAIN = (bool, int, float, complex, str, bytes, type(None))
MISSING: Any = object()
CONTAINERS: tuple[type[Any], ...] = (
    list, tuple, dict, set, frozenset, deque, UserDict, UserList, ChainMap, bytearray, array,
    types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()),
)  # fmt: skip
CONSTRUCTORS = {"__init__", "__new__", "__post_init__"}  # called through the name of the class
SILENT = {"__init_subclass__", "__set_name__", "__del__", "__repr__"}  # no computation
# Code that names one of these may read attributes by a string, or attributes that are missing.
REFLECTION = {
    "getattr", "hasattr", "vars", "__dict__", "globals", "attrgetter", "AttributeError",
    "__getattribute__",
}  # fmt: skip
GETTERS = operator.attrgetter, operator.itemgetter, operator.methodcaller
# Types whose values enter the key by their parts; the tuples name the parts.
PARTS: dict[type[Any], tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinMethodType: ("__name__", "__self__"),  # for example `a_dict.get`
    types.MethodWrapperType: ("__name__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
    functools.partialmethod: ("func", "args", "keywords"),
}
MATCH_CLASS = dis.opmap["MATCH_CLASS"]
HEAP_TYPE = 1 << 9  # the flag of classes defined in Python
LARGEST = 256  # containers with more entries are not compared
SMALL = 64  # an array of objects with at most this many elements is compared by content

# Raised when a place is gone or is being changed.
GONE = LookupError, ValueError, RuntimeError, AttributeError

Read = Callable[[], Any]


MASK = 1024  # a mask (an array of bools) with at most this many elements is compared by content


class Closure:
    """The values that some functions reach, with the places where they were found.

    `key` distinguishes states of these values; `tensors` are the places of Tensors and arrays.
    `names` has a name for each entry of the key, for messages. By kind of value:

        kind                    in `key`                        the walk goes on to
        a plain value           the value                       the rule with this name
        a repeated value        the number of its first entry
        a Tensor, an array      shape and dtype                 the mask of a masked array
        a small array of bools  its type and length             its entries
        an array of objects     its type and length             its entries
        a function              its code                        cells, defaults, globals it names
        a method, a partial,    its type                        its parts, see `PARTS`: function,
        a property                                              object, arguments
        an `attrgetter`         its type and arguments          attributes of these names
        a container             its type and length             its entries, unless there are many
        a ContextVar            (no entry)                      the value in this context
        an object of regrad     its identity                    the attributes in `closes_over`
        a library's callable    its identity                    the callables among its attributes
        any other object        its identity                    the attributes that the code names

    The places of Tensors and arrays are in `tensors`.
    """

    def __init__(self, *functions: object) -> None:
        self.places: list[tuple[Read, Any]] = []
        self.met: bool = False  # a call has found it current
        self.key: tuple[Any, ...] = ()
        self.names: list[str] = []
        self.tensors: list[Read] = []
        self.generators: list[tuple[str, Any]] = []  # names and NumPy Generators
        walk = _Walk(self)
        for function in functions:
            walk.value(function, getattr(function, "__name__", "f"), MISSING)
        walk.look()
        self.key = tuple(walk.entries)
        self.asked: set[str] = walk.asked  # names of globals and attributes in the code
        self.arrays: list[int] = [
            i for i, r in enumerate(self.tensors) if not isinstance(r(), Tensor)
        ]

    @contextmanager
    def undrawn(self, kind: str) -> Iterator[None]:
        """Raise if a body draws numbers that all calls, or all examples, would share."""
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
        """Return whether every place still holds the same object."""
        try:
            for read, value in self.places:
                if read() is not value:
                    return False
        except GONE:
            return False
        return True

    def content(self, places: Sequence[int]) -> tuple[Any, ...]:
        """Return the current content of the arrays at some places, as part of a key."""
        return tuple([content(self.tensors[i]()) for i in places])


def reads_state(*functions: object) -> bool:
    """Return whether functions read any value that may differ at their next call."""
    return bool((closure := Closure(*functions)).generators or reached(closure))


def reached(closure: Closure, more: tuple[type, ...] = ()) -> list[Any]:
    """Return the values that a closure reaches, except for code and some other types."""
    values = [*[value for _, value in closure.places], *[read() for read in closure.tensors]]
    return [v for v in values if not (v is MISSING or isinstance(v, (*OF_CODE, *more)))]


OF_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def names_in(functions: Sequence[object]) -> set[str]:
    """Return the names in code: globals, attributes, and the packages of the objects there."""
    closure = Closure(*functions)
    found = set(closure.asked)
    for _, value in closure.places:
        if is_array(value):  # constants may come from any library
            continue
        is_module = isinstance(value, types.ModuleType)
        name = str(value.__name__ if is_module else getattr(value, "__module__", "")).split(".")
        is_theirs = name[0] == "regrad" and name[1:2] in (["torch"], ["jax"])
        found.add(name[is_theirs])
    return found


class Method:
    """A function bound to an object, by a weak reference where the object allows one."""

    def __init__(self, function: Any, instance: Any, gone: Callable[[Any], Any]) -> None:
        self.__func__ = function
        self.__name__: Any | str = getattr(function, "__name__", "method")
        bound = function.__get__(instance, type(instance))
        self.__signature__: inspect.Signature = inspect.signature(bound)
        try:
            self.instance: Callable[[], Any] = weakref.ref(instance, gone)
        except TypeError:  # its class has slots without __weakref__
            self.instance = lambda: instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        instance = self.instance()
        return self.__func__.__get__(instance, type(instance))(*args, **kwargs)


class _Walk:
    """Visits functions, containers, objects and classes, each once."""

    def __init__(self, closure: Closure) -> None:
        self.closure = closure
        self.entries: list[Any] = []  # the entries of the key
        self.seen: dict[int, int] = {}  # the first entry of each value, by the id() of the value
        self.kept: list[Any] = []  # keeps values alive, so that no id() is reused
        self.asked: set[str] = set()  # attributes that the code names
        self.tried: set[str] = set()  # attributes that may be missing
        self.order: list[str] = []  # `asked` and `tried`, in the order in which they were found
        self.objects: list[_Object] = []  # objects whose attributes the walk visits
        self.watched: set[tuple[int, Any]] = set()  # (owner, key) of each place
        self.weak: Callable[[], Any] = object  # reads the object that a Method is bound to

    def value(self, value: Any, name: str, read: Read) -> None:
        """Record a value; `read` reads its place again, if the place is more than a name."""
        if type(value) in PLAIN or isinstance(value, np.generic):
            # (1, 1.0 and True are equal, and so are 0.0 and -0.0: `exactly` makes them differ.)
            self.entry(name, exactly(value))
            self.rule(value)
        elif id(value) in self.seen:  # aliasing is part of the key: two names for one list
            self.entry(name, ("the same as", self.seen[id(value)]))
        else:
            self.seen[id(value)] = len(self.entries)
            self.kept.append(value)
            self.open(value, name, read)

    def rule(self, name: object) -> None:
        """Record the rule of this name, if it exists: the code may activate it by its name."""
        if isinstance(name, str) and name in RULES:
            self.value(RULES[name], name, MISSING)

    def place(self, namespace: Mapping[str, object], key: str, name: str) -> None:
        """Record the value of a name in a namespace, and watch the place."""
        self.follow(namespace, key, functools.partial(namespace.get, key, MISSING), name)

    def follow(self, where: object, key: object, read: Read, name: str) -> None:
        """Watch a place, and record its current value."""
        self.watch(where, key, read)
        self.value(read(), name, read)

    def watch(self, where: object, key: object, read: Read) -> None:
        """Add a place: the closure is current as long as the place holds its current object."""
        if (id(where), key) in self.watched:
            return
        self.watched.add((id(where), key))
        self.kept.append(where)
        value = read()
        if value is self.weak():  # a strong reference would keep the program's owner alive
            self.closure.places.append((functools.partial(_holds, read, self.weak), True))
        else:
            self.closure.places.append((read, value))

    def entry(self, name: str, value: object) -> None:
        self.entries.append(value)
        self.closure.names.append(name)

    def open(self, value: Any, name: str, read: Read) -> None:
        """Record a value that is not plain, and the values that are reachable from it."""
        if isinstance(value, Tensor) or (is_array(value) and not isinstance(value, Variable)):
            self.tensor(value, name, read)
        elif isinstance(value, types.FunctionType):
            self.function(value, name)
        elif isinstance(value, Method):
            self.method(value, name)
        elif isinstance(value, tuple(PARTS)):
            self.entry(name, type(value))
            for part in next(PARTS[kind] for kind in PARTS if isinstance(value, kind)):
                self.value(getattr(value, part), f"{name}.{part}", MISSING)
        elif isinstance(value, CONTAINERS) and not type(value).__module__.startswith("regrad."):
            self.entry(name, type(value))
            self.parts(value, name)
        elif isinstance(value, GETTERS):
            made: Any = value.__reduce__()  # the class (or a partial) and its arguments
            self.ask({n for text in _strings(made) for n in text.split(".")}, set())
            self.value(made, name, MISSING)
        elif isinstance(value, ContextVar):
            read = functools.partial(value.get, None)
            self.follow(value, "value", read, f"the value of {name}")
        else:
            self.entry(name, IdentityKey(value))
            if isinstance(value, np.random.Generator):
                self.closure.generators.append((name, value))
            for part in _held(value):
                self.follow(value, part, functools.partial(getattr, value, part), f"{name}.{part}")
            if not _is_closed(value):
                self.object(value, name)

    def tensor(self, value: Tensor | Array, name: str, read: Read) -> None:
        """Record a Tensor or an array; it is an input of the program if it holds numbers."""
        if getattr(value, "_id", 0) == OURS:  # shared with constants that a body creates
            self.entry(name, IdentityKey(value))
        elif isinstance(value, np.ndarray) and (
            value.dtype.kind not in "biufc" or (value.dtype.kind == "b" and value.size <= MASK)
        ):  # a mask may decide a shape, so the program needs its values
            self.entries_of(value, name, value.ravel().tolist, {})
        else:
            if isinstance(value, np.ma.MaskedArray):
                read_mask = functools.partial(np.ma.getmask, value)
                self.follow(value, "mask", read_mask, f"{name}.mask")
            self.entry(name, (Tensor, value.shape, value.dtype))
            self.closure.tensors.append(read if callable(read) else lambda: value)

    def method(self, method: Method, name: str) -> None:
        """Record a method of an object that may be freed, without a reference to the object."""
        self.weak = method.instance
        instance = self.weak()
        self.seen[id(instance)] = len(self.entries)
        self.entry(f"{name}.__self__", "the object")
        self.value(method.__func__, name, MISSING)
        self.parts(instance, "self")

    def parts(self, value: Any, name: str) -> None:
        """Record the entries of a container, and the attributes of an object."""
        if not isinstance(value, CONTAINERS):
            self.object(value, name)
            return
        if len(value) > LARGEST:  # comparing a large table would take longer than a call
            self.entry(name, IdentityKey(value))
        elif isinstance(value, Mapping):
            read = functools.partial(_keys_and_values, value)
            self.entries_of(value, name, read, dict(enumerate(value, len(value))))
        else:
            keys = {i: i for i in range(len(value))} if hasattr(value, "__getitem__") else {}
            self.entries_of(value, name, functools.partial(list, value), keys)
        if not _is_library_class(type(value)):
            self.object(value, name)

    def entries_of(self, value: Any, name: str, read: Read, keys: Mapping[int, Any]) -> None:
        """Record the parts of a container in order, some by key; one place watches all of them."""
        parts = read()
        if type(value) not in (tuple, frozenset):
            unchanged = functools.partial(is_unchanged, read, parts)
            self.closure.places.append((unchanged, True))
        self.entry(name, (type(value), len(parts)))
        for i, part in enumerate(parts):
            get = functools.partial(value.__getitem__, keys[i]) if i in keys else MISSING
            self.value(part, f"{name}[{keys[i]!r}]" if i in keys else f"a part of {name}", get)

    def function(self, function: types.FunctionType, name: str) -> None:
        """Record a function: its code, its cells and defaults, and the globals that it names."""
        code = function.__code__
        # Use the code and not the function: a lambda that is created again at each call has equal
        # code, and can differ only in its cells, which the walk visits.
        self.entry(name, code)
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            held = _cell_content(cell)
            read = functools.partial(getattr, cell, "cell_contents")
            if held is MISSING:
                read = functools.partial(_cell_content, cell)
            if not code.co_filename.startswith(PACKAGE):
                self.watch(cell, "cell_contents", read)
            self.value(held, free, read)
        for part in ("__defaults__", "__kwdefaults__"):
            if getattr(function, part) is not None:
                read = functools.partial(getattr, function, part)
                self.follow(function, part, read, f"{name}.{part}")
        if "__wrapped__" in vars(function):
            self.value(vars(function)["__wrapped__"], name, MISSING)
        if is_library_file(code.co_filename):
            return
        names, tried = _asked(code)
        for global_name in sorted(names):
            if global_name in function.__globals__:
                self.place(function.__globals__, global_name, global_name)
            elif global_name in sys.modules:  # for example, the function imports the module
                self.place(sys.modules, global_name, global_name)
        for constant in _constants(code):
            self.rule(constant)
        self.object(function, name)
        self.ask(names, tried)

    def ask(self, names: set[str], tried: set[str]) -> None:
        """Make `look` visit attributes of these names on every object, found so far or later.

        The code does not show of which object it reads an attribute, so the walk tries all objects.
        """
        self.order += sorted((names - self.asked) | (tried - self.tried))
        self.asked |= names
        self.tried |= tried

    def object(self, value: object, name: str) -> None:
        """Make `look` visit the attributes of an object, class, module or function."""
        if spaces := _namespaces(value):
            self.objects.append(_Object(value, name, spaces))

    def look(self) -> None:
        """Record the attributes that code names, in rounds: they may hold code with more names."""
        rounds = True
        while rounds:
            rounds = False
            for found in self.objects:  # (The loop itself finds more objects.)
                if (new := found.unseen(self.order)) and any(found.spaces):
                    rounds = True
                    self.attributes(found, new)
        for found in self.objects if self.tried else ():
            if not any(found.spaces):  # a function: missing attributes may be added
                self.watch(found.spaces[0], len, functools.partial(len, found.spaces[0]))

    def attributes(self, found: _Object, asked: Sequence[str]) -> None:
        """Record these attributes in each namespace that Python searches: object and classes."""
        spaces = found.spaces
        for attribute in asked:
            there = [i for i, space in enumerate(spaces) if attribute in space]
            for space in spaces[: there[-1] + 1] if there else spaces[:1]:
                if attribute in space:
                    self.member(space, attribute, found.value, f"{found.name}.{attribute}")
                elif there or found.lenient or attribute in self.tried:  # may be added later
                    self.watch(space, attribute, functools.partial(space.get, attribute, MISSING))

    def member(self, space: Mapping[str, object], attribute: str, owner: object, name: str) -> None:
        """Record the meaning of a name in a namespace: a value, or a descriptor with its code."""
        found = space[attribute]
        self.watch(space, attribute, functools.partial(space.get, attribute, MISSING))
        if isinstance(found, types.MemberDescriptorType):
            if not isinstance(owner, type):
                read = functools.partial(getattr, owner, attribute, MISSING)
                self.follow(owner, attribute, read, name)
        else:
            if attribute == "__match_args__":  # `case Point(x, y)` reads these
                self.ask({*_strings(found)}, set())
            self.place(space, attribute, name)


class _Object:
    """An object whose attributes the walk records, with the number of names that it has handled."""

    def __init__(self, value: object, name: str, spaces: list[Any]) -> None:
        self.value = value
        self.name = name
        self.spaces = spaces
        self.lenient: bool = any("__getattr__" in space for space in spaces)
        self.count: int | None = None  # the number of names already looked up

    def unseen(self, order: Sequence[str]) -> Sequence[str]:
        """Return the names that were not looked up yet, and mark them as looked up."""
        before, self.count = self.count, len(order)
        if before is not None:
            return order[before:]
        # Operators and statements call special methods, so the code names no attribute for them.
        special = {s for c in _own_classes(type(self.value)) for s in _specials(c) - CONSTRUCTORS}
        if isinstance(self.value, type):
            special |= {s for c in _own_classes(self.value) for s in _specials(c)}
        return sorted({*order} | special)


class IdentityKey:
    """An object as part of a key: equal only to itself, and kept alive."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value: object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


# -- places ----------------------------------------------------------------------------------------


def _holds(read: Read, reference: Read) -> bool:
    return read() is reference()


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return MISSING


def _keys_and_values(mapping: Mapping[object, object]) -> list[Any]:
    return [*mapping, *mapping.values()]


def is_unchanged(read: Read, parts: Sequence[object]) -> bool:
    """Return whether a container still has the same entries: same objects or equal values."""
    now = read()
    if len(now) != len(parts):
        return False
    if all(map(operator.is_, now, parts)):
        return True
    others = [(a, b) for a, b in zip(now, parts, strict=True) if a is not b]
    plain = all(type(a) is type(b) and type(a) in PLAIN for a, b in others)
    return plain and all(exactly(a) == exactly(b) for a, b in others)


def content(value: Tensor | Array) -> Any:
    """Return the content of an array as part of a key; for a read-only array, its identity."""
    if isinstance(value, Tensor) or BACKENDS[type(value)].name == "jax":
        return IdentityKey(value)
    value = BACKENDS[type(value)].to_numpy(value)
    written = np.ascontiguousarray(value)
    return value.shape, value.dtype, written.tobytes() if value.size <= SMALL else _digest(written)


def _digest(array: np.ndarray) -> bytes:
    from hashlib import blake2b

    return blake2b(array.data).digest()


# -- what Python code names, and where Python looks for it -----------------------------------------


@functools.lru_cache(maxsize=4096)
def _asked(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the globals and attributes that code names, and which of them may be missing."""
    names = {name for c in _codes(code) for name in c.co_names}
    for c in _codes(code):
        if MATCH_CLASS in c.co_code[::2]:  # `case Point(x=x)` has the names in a tuple
            names |= {"__match_args__", *_strings(c.co_consts)}
    if names.isdisjoint(REFLECTION):
        return names, set()
    # `getattr(x, "scale")`: any string that is a valid name may be an attribute.
    names |= {text for text in _constants(code) if text.isidentifier()}
    return names, names


def _strings(values: object) -> list[str]:
    """Return the strings among some values, in their tuples and in the arguments of partials."""
    found: Any = values.args if isinstance(values, functools.partial) else values
    if isinstance(found, tuple):
        return [text for value in found for text in _strings(value)]
    return [found] if isinstance(found, str) else []


@functools.lru_cache(maxsize=4096)
def _constants(code: types.CodeType) -> list[str]:
    """Return the strings among the constants of some code."""
    return [k for c in _codes(code) for k in c.co_consts if isinstance(k, str)]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _namespaces(value: object) -> list[Any]:
    """Return where Python looks up an attribute: the object, its class, and the class's bases."""
    classes = _own_classes(type(value))
    if isinstance(value, type):
        classes = [*_own_classes(value), *classes]
    own = None if isinstance(value, type) else getattr(value, "__dict__", None)
    spaces: list[Any] = [own] if isinstance(own, dict) else []
    if isinstance(value, threading.local):
        spaces = [_OfThread(value)]
    if hasattr(type(value), "__getattr__"):  # `__getattr__` may look it up in a dict of the object
        spaces += [held for space in spaces for held in space.values() if isinstance(held, dict)]
    return [*spaces, *map(vars, classes)]


class _OfThread(UserDict[str, Any]):
    """The attributes that a `threading.local` has in the thread that reads them."""

    def __init__(self, local: threading.local) -> None:
        self.local = local

    data = property(lambda self: self.local.__dict__)  # pyright: ignore[reportAssignmentType]


def _own_classes(kind: type) -> list[type]:
    """Return a class and its bases, except for classes of libraries."""
    return [c for c in kind.__mro__ if not _is_library_class(c)]


def _specials(kind: type) -> set[str]:
    """Return the special methods that the user's code defines in a class.

    Generated methods (dataclasses, attrs) follow from the fields and are left out.
    """
    return {
        name
        for name, found in vars(kind).items()
        if name[:2] == name[-2:] == "__" and name not in SILENT and not _is_made(kind, found)
    }


def _is_made(kind: type, method: object) -> bool:
    """Return whether the value of a special name is generated, not the user's code."""
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    if code is None:
        return not hasattr(method, "__wrapped__")
    made = "__dataclass_fields__" in vars(kind) and code.co_filename == "<string>"
    return made or code.co_filename.startswith("<attrs generated")


def _held(value: object) -> Sequence[str]:
    """Return the attributes by which a library's object holds something of the user's.

    A class of regrad names these attributes in `closes_over`. Any other callable may call the
    callables that it holds.
    """
    if isinstance(value, type):
        return ()
    own = getattr(value, "__dict__", {})
    follows = callable(value) and _is_library_class(type(value))
    names = [n for n, v in own.items() if n == "__wrapped__" or (follows and callable(v))]
    return getattr(type(value), "closes_over", names)


def _is_closed(value: object) -> bool:
    """Return whether the walk ignores the attributes of an object, as it does for libraries."""
    if isinstance(value, types.ModuleType):
        return is_library_file(getattr(value, "__file__", None) or PACKAGE)
    if isinstance(value, type):
        return _is_library_class(value)
    kind = type(value)
    if kind.__module__ == "builtins":  # also classes made by exec in a scope without __name__
        return not kind.__flags__ & HEAP_TYPE
    return kind.__module__.partition(".")[0] in ("regrad", "jax", "jaxlib")


def _is_library_class(kind: type) -> bool:
    if not kind.__flags__ & HEAP_TYPE:
        return True
    if kind.__module__ in ("builtins", "__main__"):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_library_file(file)

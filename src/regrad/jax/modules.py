"""The modules of a model, named while a function is traced: what `override(…, model=…)` is for.

Programs of NNX say nothing of modules, and those of Equinox their classes. So for the time of a
trace the `__call__` of each class in the model is replaced, and opens a name scope, `regrad:` and
the path of the module, around the call. Modules of Linen know their paths; there Flax has a way to
intercept calls. Where keys ask for classes (a predicate may do so), so do the calls of all other
modules, with the class for a name: a function may close over them, or `nnx.jit` have made them.

Modules are known by identity. `TracedCall` makes copies of those among the arguments, and jit, scan
and `tree_map` make more: all of them are walked along with what they are copies of. Where only the
copy is seen it must be one that just one module of the model can have: of the same classes, and
with arrays of the same shapes (or those of a step of a scan). If keys distinguish what it may
be, it is refused.

JAX remembers the programs of compiled functions. In a module each has an axis of that name, which
nobody uses, so that a program with one module's name is never another's.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax

from regrad.core.blocks import block
from regrad.core.containers import Leaves, Rebuild
from regrad.core.places import ChainStep
from regrad.core.signatures import named
from regrad.errors import ArgumentError, GradientError, kind
from regrad.jax.host import VMAPS, need
from regrad.jax.host.extending import trace_of, with_axes
from regrad.jax.keys import BOUNDARY

MARK = "regrad:"  # what the scopes of modules begin with
CLASS = "regrad::"  # … and of those that are known by their class alone
LIBRARIES = ("equinox", "flax.nnx", "flax.linen")

NAMING: ContextVar[Any] = ContextVar("regrad_naming", default=None)  # of the trace that is open
_numbers = itertools.count()
_lock = threading.RLock()
_replaced: Counter[type] = Counter()  # by how many traces, and what was there before
_before: dict[type, Any] = {}


def module_types(*names: str) -> tuple[type, ...]:
    """The classes of modules of the libraries that are loaded."""
    return tuple(sys.modules[name].Module for name in names if name in sys.modules)


def parts(value: Any) -> list[tuple[Any, Any]]:
    """Return the contents of a module or container, by name."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(enumerate(value))
    return list(vars(value).items()) if isinstance(value, module_types(*LIBRARIES)) else []


def walk(value: Any, path: str = "", above: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Yield the modules in a module or container, itself included, with their paths."""
    if isinstance(value, module_types(*LIBRARIES)):
        yield path, value
    if id(value) not in above:
        for name, part in parts(value):
            if not str(name).startswith("_"):
                inner = f"{path}.{name}" if path else str(name)
                yield from walk(part, inner, above | {id(value)})


class Naming:
    """The names of the modules of a model, and of copies of them.

    Args:
        model: A module of Flax or Equinox; None where only Flax's own names count.
        keys: Those that are in force (`Whereabouts`).
    """

    def __init__(self, model: Any, keys: Any) -> None:
        need(VMAPS)
        self.model = model
        self.keys = keys
        self.number: int = next(_numbers)
        self.is_linen: bool = isinstance(model, module_types("flax.linen"))
        if model is not None and not isinstance(model, module_types(*LIBRARIES)):
            raise ArgumentError(
                "override: model= expected a module of Flax (linen or nnx) or Equinox, got "
                f"{kind(model)}. Elsewhere name the parts with jax.named_scope, without model=."
            )
        found: dict[int, tuple[Any, list[str]]] = {}
        for path, module in () if model is None or self.is_linen else walk(model):
            found.setdefault(id(module), (module, []))[1].append(path)
        made = {key: ChainStep(tuple(paths), module) for key, (module, paths) in found.items()}
        self.named: dict[int, ChainStep] = made
        self.steps: list[ChainStep] | None = list(made.values()) or None
        self.called: set[str] = set()  # the paths of modules that were, or may have been
        self.by_path: dict[str, ChainStep] = {p: step for step in made.values() for p in step.paths}
        # what becomes of the result of a module of the model, by its path
        self.tap: Callable[[str, Any], Any] = lambda path, y: y
        self.classes: dict[type, str] = {}

    def name_of(self, kind: type) -> str:
        """Return the name of a class in scopes, which is not the path of any module."""
        name = self.classes.setdefault(kind, f":{len(self.classes)}.{kind.__name__}")
        self.by_path.setdefault(name, ChainStep((), kind=kind))
        return name

    # -- a trace -----------------------------------------------------------------------------------

    @block
    def around(self, given: Any, copies: Any, outside: Sequence[Any]) -> Generator[None]:
        """A block in which calls of modules are named.

        Args:
            given: What the function was called with, itself included.
            copies: What the trace has for that.
            outside: The traces that were open before (see `traces`).
        """
        token = NAMING.set(_Trace(self, given, copies, outside))
        try:
            with ExitStack() as stack:
                stack.enter_context(with_axes([(f"{MARK}{self.number}", 1)]))
                if "flax.linen" in sys.modules:
                    linen: Any = sys.modules["flax.linen"]
                    stack.enter_context(linen.intercept_methods(self._intercept))
                owners = {*map(owner, self.steps or ())} - {None}
                stack.enter_context(
                    _replacing(owners.union(_owners() if self.keys.by_class else ()))
                )
                yield
        finally:
            NAMING.reset(token)

    def _intercept(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Name a call of a module of Linen's."""
        module = context.module
        path, named = ".".join(module.path), isinstance(self._root(module), type(self.model))
        with ExitStack() as stack:
            stack.enter_context(_scope(self.number, path, named))
            if named:
                self.by_path.setdefault(path, ChainStep((path,), kind=type(module)))
            elif self.keys.by_class:
                stack.enter_context(_scope(self.number, self.name_of(type(module))))
            y = call(*args, **kwargs)
            return self.tap(path, y) if named and context.method_name == "__call__" else y

    def _root(self, module: Any) -> Any:
        types = module_types("flax.linen")
        while isinstance(module.parent, types):
            module = module.parent
        return module


class _Trace:
    """One trace: the modules that are known in it, and those that run."""

    def __init__(self, naming: Naming, given: Any, copies: Any, outside: Sequence[Any]) -> None:
        self.naming = naming
        self.outside = outside
        self.known: dict[int, ChainStep] = dict(naming.named)
        self.alive: list[Any] = []  # so that no id() is another's
        self.running: list[tuple[Any, ChainStep]] = []
        self.first: dict[str, Any] = {}  # by path, the module that was called first
        self.alike: list[str] = []  # the paths that stand for several modules, one to all keys
        among = dict(walk(copies))
        if naming.steps and not any(id(a) in self.known for _, a in walk(given)):
            same = [among[path] for path, a in walk(given) if _is_like(a, naming.model)]
            if len(same) > 1:
                raise GradientError(
                    f"override: {len(same)} arguments are like model=, and nothing tells which of "
                    "them is meant (jax.grad and others make copies). Let the function close over "
                    "the others, or use jax.named_scope without model=."
                )
            self.note(naming.model, same[0] if same else None)
        for path, a in walk(given):
            if id(a) in self.known:
                self.note(a, among[path])

    def note(self, module: Any, copy: Any) -> None:
        """Note that a module is a copy of one that is known, and so are those in it."""
        inside = dict(walk(module))
        for path, each in walk(copy):
            self.known[id(each)] = self.known[id(inside[path])]
            self.alive.append(each)

    def step(self, module: Any) -> ChainStep | None:
        """Return the module of the model that this is; None if it is none of them."""
        step = self._step(module)
        if step is not None and not any(f"{step.path}.".startswith(p) for p in self.alike):
            first = self.first.setdefault(step.path, module)
            pairs = (
                zip(_arrays(first), _arrays(module), strict=False) if first is not module else ()
            )
            if any(a is not b and trace_of(a) is trace_of(b) for a, b in pairs):
                raise GradientError(
                    f"override: two modules are called that are like {step.path!r} of model=, with "
                    "other arrays, and nothing tells which is meant. Let the function close over "
                    "the other one, or use jax.named_scope without model=."
                )
        return step

    def _step(self, module: Any) -> ChainStep | None:
        if id(module) in self.known:
            return self.known[id(module)]
        around = f"{self.running[-1][1].path}." if self.running else "."
        steps = self.naming.steps or ()
        found = [
            s for s in steps
            if (around == "." or f"{s.path}.".startswith(around)) and _is_like(module, s.module)
        ]  # fmt: skip
        arrays = _arrays(module)
        if not found or (arrays and all(map(self._is_from_outside, arrays))):
            return None  # (the function closes over another model, say)
        others = [s for s in found[1:] if self.naming.keys.tells_apart(found[0], s)]
        if others or not arrays:
            what = " or ".join(repr(s.path) for s in (found[0], *others))
            raise GradientError(
                "override: a copy of a module is called, made by jit, scan, checkpoint or "
                f"tree_map, and nothing tells whether it is {what}, which keys distinguish. "
                "Compile the module around it as a whole, or open a jax.named_scope there, and "
                "leave model= out."
            )
        self.naming.called |= {s.path for s in found}
        self.note(found[0].module, module)
        self.alike += [f"{found[0].path}."] if found[1:] else []
        return found[0]

    def _is_from_outside(self, array: Any) -> bool:
        """Return whether an array was there before the trace, and so was what holds it."""
        trace = trace_of(array)
        return trace is None or any(trace is each for each in self.outside)


def copied(model: Any) -> Any:
    """Return a copy of a module of NNX that this trace may change, and that has its names."""
    if not isinstance(model, module_types("flax.nnx")):
        return model
    copy = sys.modules["flax.nnx"].clone(model)
    if trace := NAMING.get():
        trace.note(model, copy)
    return copy


def _arrays(module: Any) -> list[Any]:
    """The arrays in a module, all the way down."""
    return [x for x in jax.tree_util.tree_leaves(module) if hasattr(x, "shape")]


def _is_like(module: Any, other: Any) -> bool:
    """Return whether a module may be a copy of another one, or a step of a stacked one."""
    if type(module) is not type(other) or _classes(module) != _classes(other):
        return False
    shapes, theirs = ([x.shape for x in _arrays(m)] for m in (module, other))
    return shapes in (theirs, [shape[1:] for shape in theirs])


def _classes(module: Any) -> dict[str, type]:
    return {path: type(each) for path, each in walk(module)}


def _scope(number: int, path: str, named: bool = True) -> ExitStack:
    """A block in which equations have the name of a module, and compiled programs are its own."""
    stack = ExitStack()
    stack.enter_context(with_axes([(f"{MARK}{number}.{path}", 1)]))
    if named:
        stack.enter_context(jax.named_scope(MARK + path))
    return stack


def owner(step: ChainStep) -> Any:
    """Return the class that defines the `__call__` of a module; None if none does."""
    return next((c for c in type(step.module).__mro__ if "__call__" in vars(c)), None)


def _owners() -> Iterator[type]:
    """Yield all classes of modules that define a `__call__`, but not Equinox's wrappers."""
    waiting = [*module_types("flax.nnx", "equinox")]
    while waiting:
        found = waiting.pop()
        waiting += type.__subclasses__(found)
        if "__call__" in vars(found) and not re.match(r"equinox\.(_|internal)", found.__module__):
            yield found


@block
def _replacing(owners: Any) -> Generator[None]:
    """Replace the `__call__`s of these classes, and put them back after the last of all traces."""
    try:
        with _lock:
            for owner in owners:
                if not _replaced[owner]:
                    _before[owner] = vars(owner)["__call__"]
                    type.__setattr__(owner, "__call__", _named_call(_before[owner]))
                _replaced[owner] += 1
        yield
    finally:
        with _lock:
            for owner in owners:
                _replaced[owner] -= 1
                if not _replaced[owner]:
                    type.__setattr__(owner, "__call__", _before.pop(owner))


def _named_call(old: Callable[..., Any]) -> Any:
    @wraps(old)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace: _Trace | None = NAMING.get()
        run = old.__get__(self, type(self))  # pyright: ignore
        # (a module that runs may call the `__call__` of its base class)
        if trace is None or (trace.running and trace.running[-1][0] is self):
            return run(*args, **kwargs)
        naming, step = trace.naming, trace.step(self)
        if step is None and not naming.keys.by_class:
            return run(*args, **kwargs)
        name = naming.name_of(type(self)) if step is None else step.path
        trace.running.append((self, step or ChainStep(())))
        naming.called.add(name)
        try:
            with _scope(naming.number, name):
                key = step and naming.keys.whole_key([step for _, step in trace.running])
                y = run(*args, **kwargs) if key is None else _bounded(key, run, args, kwargs)
                return y if step is None else naming.tap(name, y)
        finally:
            trace.running.pop()

    return call


def _bounded(key: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module by a compiled function, which leaves a boundary in the program.

    Args:
        key: that for whole calls, which finds the boundary again.
    """
    given = named(run, args, kwargs)
    names = tuple([name for name, x in given if isinstance(x, jax.Array)])
    leaves = Leaves(tuple([value for _, value in given]), jax.Array, _flatten)
    form = names, len(leaves.places)
    if form not in key.boundaries:
        key.boundaries.append(form)
    result: list[Leaves] = []

    def call(*xs: Any) -> Any:
        values = leaves.close(xs)
        options = zip([name for name, _ in given[len(args) :]], values[len(args) :], strict=True)
        y = run(*values[: len(args)], **dict(options))
        result[:] = [Leaves(y, jax.Array, _flatten)]
        return result[0].arrays

    call.__name__ = call.__qualname__ = f"{BOUNDARY}{key.boundaries.index(form)}"
    ys = jax.jit(call)(*leaves.arrays)
    return result[0].close(ys)


def _flatten(value: Any) -> tuple[list[Any], Rebuild]:
    leaves, structure = jax.tree_util.tree_flatten(value)
    return leaves, structure.unflatten

"""The modules of a model, named while a function is traced: the basis of `override(…, model=…)`.

Programs of NNX contain no names of modules, and programs of Equinox contain only their classes. So
during a trace, regrad replaces the `__call__` of each class in the model. The replacement opens a
name scope, `regrad:` and the path of the module, around the call. Modules of Linen have paths, and
Flax has an API to intercept their calls. If keys use classes (a predicate may do so), the calls of
all other modules get scopes as well, named by class: a function may close over such modules, or
`nnx.jit` may have made them.

Modules are identified by identity. `TracedCall` copies modules among the arguments, and jit, scan
and `tree_map` make further copies. regrad walks all of these copies together with their originals.
If only the copy is visible, it must match exactly one module of the model: the same classes, and
arrays of the same shapes (or of the shapes of a step of a scan). If keys distinguish between
several candidates, regrad raises an error.

JAX caches the programs of compiled functions. Inside a module, each program has an unused axis
named after the module, so that a cached program of one module is never used for another.
"""

from __future__ import annotations

import itertools
import operator
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
from regrad.core.call import as_name
from regrad.core.containers import Leaves, Rebuild, flatten_objects, is_closed, replaced
from regrad.core.places import ChainStep
from regrad.core.signatures import named
from regrad.errors import ArgumentError, GradientError, PassedOverError, kind
from regrad.jax.host import VMAPS, need
from regrad.jax.host.extending import trace_of, with_axes
from regrad.jax.keys import BOUNDARY

MARK = "regrad:"  # prefix of the scopes of modules
CLASS = "regrad::"  # … and of modules that are identified by their class alone
LIBRARIES = ("equinox", "flax.nnx", "flax.linen")

NAMING: ContextVar[Any] = ContextVar("regrad_naming", default=None)  # of the open trace
_numbers = itertools.count()
_lock = threading.RLock()
_replaced: Counter[type] = Counter()  # number of traces that replace it, and the original
_before: dict[type, Any] = {}


def module_types(*names: str) -> tuple[type, ...]:
    """Return the module classes of the libraries that are loaded."""
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
        model: A module of Flax or Equinox, or None if only Flax's own names are used.
        keys: The active keys (`Whereabouts`).
    """

    def __init__(self, model: Any, keys: Any) -> None:
        need(VMAPS)
        self.model = model
        self.keys = keys
        self.number: int = next(_numbers)
        self.is_linen: bool = isinstance(model, module_types("flax.linen"))
        if model is not None and not isinstance(model, module_types(*LIBRARIES)):
            raise ArgumentError(
                "override: expected model= to be a module of Flax (linen or nnx) or Equinox, got "
                f"{kind(model)}. For other libraries, name the parts with jax.named_scope, "
                "without model=."
            )
        found: dict[int, tuple[Any, list[str]]] = {}
        for path, module in () if model is None or self.is_linen else walk(model):
            found.setdefault(id(module), (module, []))[1].append(path)
        made = {key: ChainStep(tuple(paths), module) for key, (module, paths) in found.items()}
        self.named: dict[int, ChainStep] = made
        self.steps: list[ChainStep] | None = list(made.values()) or None
        self.called: set[str] = set()  # the paths of modules that were called, or may have been
        self.by_path: dict[str, ChainStep] = {p: step for step in made.values() for p in step.paths}
        # Applied to the result of a module of the model, with its path.
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
        """Return a block in which calls of modules are named.

        Args:
            given: The arguments of the function, and the function itself.
            copies: The copies of these in the trace.
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
        """Name a call of a Linen module."""
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
    """One trace: the modules that are known in it, and the modules that are running."""

    def __init__(self, naming: Naming, given: Any, copies: Any, outside: Sequence[Any]) -> None:
        self.naming = naming
        self.outside = outside
        self.known: dict[int, ChainStep] = dict(naming.named)
        self.alive: list[Any] = []  # keeps objects alive, so that no id() is reused
        self.running: list[tuple[Any, ChainStep]] = []
        self.first: dict[str, Any] = {}  # by path, the module that was called first
        self.alike: list[str] = []  # paths shared by several modules that no key distinguishes
        among = dict(walk(copies))
        if naming.steps and not any(id(a) in self.known for _, a in walk(given)):
            same = [among[path] for path, a in walk(given) if _is_like(a, naming.model)]
            if len(same) > 1:
                raise GradientError(
                    f"override: {len(same)} arguments match model=, and regrad cannot distinguish "
                    "them (jax.grad and others make copies). Let the function close over the "
                    "others, or use jax.named_scope without model=."
                )
            self.note(naming.model, same[0] if same else None)
        for path, a in walk(given):
            if id(a) in self.known:
                self.note(a, among[path])

    def note(self, module: Any, copy: Any) -> None:
        """Record that a module is a copy of a known module, including the modules inside."""
        inside = dict(walk(module))
        for path, each in walk(copy):
            self.known[id(each)] = self.known[id(inside[path])]
            self.alive.append(each)

    def step(self, module: Any) -> ChainStep | None:
        """Return the model's module for this module, or None if it is not in the model."""
        step = self._step(module)
        if step is not None and not any(f"{step.path}.".startswith(p) for p in self.alike):
            first = self.first.setdefault(step.path, module)
            pairs = (
                zip(_arrays(first), _arrays(module), strict=False) if first is not module else ()
            )
            if any(a is not b and trace_of(a) is trace_of(b) for a, b in pairs):
                raise GradientError(
                    f"override: the function calls two modules that match {step.path!r} of "
                    "model=, with different arrays, and regrad cannot determine which of them is "
                    "the model's. Let the function close over the other module, or use "
                    "jax.named_scope without model=."
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
            return None  # (for example, the function closes over another model)
        others = [s for s in found[1:] if self.naming.keys.tells_apart(found[0], s)]
        if others or not arrays:
            what = " or ".join(repr(s.path) for s in (found[0], *others))
            raise GradientError(
                "override: the function calls a copy of a module, made by jit, scan, checkpoint "
                f"or tree_map, and regrad cannot determine whether it is {what}, which keys "
                "distinguish. Compile the module around it as a whole, or open a jax.named_scope "
                "there, and leave model= out."
            )
        self.naming.called |= {s.path for s in found}
        self.note(found[0].module, module)
        self.alike += [f"{found[0].path}."] if found[1:] else []
        return found[0]

    def _is_from_outside(self, array: Any) -> bool:
        """Return whether an array, and so the object that holds it, existed before the trace."""
        trace = trace_of(array)
        return trace is None or any(trace is each for each in self.outside)


def copied(model: Any) -> Any:
    """Return a copy of an NNX module that this trace may change, with the module's names."""
    if not isinstance(model, module_types("flax.nnx")):
        return model
    copy = sys.modules["flax.nnx"].clone(model)
    if trace := NAMING.get():
        trace.note(model, copy)
    return copy


def _arrays(module: Any) -> list[Any]:
    """Return the arrays in a module, including nested modules."""
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
    """Return a block whose equations have the name of a module, with a separate program cache."""
    stack = ExitStack()
    stack.enter_context(with_axes([(f"{MARK}{number}.{path}", 1)]))
    if named:
        stack.enter_context(jax.named_scope(MARK + path))
    return stack


def owner(step: ChainStep) -> Any:
    """Return the class that defines the `__call__` of a module, or None."""
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
    """Replace `__call__` in these classes, and restore them after the last of all traces."""
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
        # (A running module may call the `__call__` of its base class.)
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
                if key is None:
                    y = run(*args, **kwargs)
                else:
                    y = _bounded(key, old, Parameters(self), trace, args, kwargs)
                return y if step is None else naming.tap(name, y)
        finally:
            trace.running.pop()

    return call


class Parameters:
    """The arrays of floats in a module, named by their paths: `layers_0_weight`."""

    def __init__(self, module: Any) -> None:
        self.module = module
        nnx = sys.modules["flax.nnx"] if isinstance(module, module_types("flax.nnx")) else None
        self.nnx: Any = nnx
        graph, tree = (None, module) if nnx is None else nnx.split(module)
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
        self.graph: Any = graph
        self.structure: Any = structure
        self.leaves: list[Any] = [x for _, x in pairs]
        self.places: list[int] = [
            i for i, x in enumerate(self.leaves)
            if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)
        ]  # fmt: skip
        self.arrays: list[Any] = [self.leaves[i] for i in self.places]
        self.names: tuple[str, ...] = tuple([_path(pairs[i][0]) for i in self.places])

    def put(self, xs: Sequence[Any]) -> Any:
        """Return a copy of the module with these arrays."""
        self.now: list[Any] = replaced(self.leaves, self.places, xs)
        tree = self.structure.unflatten(self.now)
        return tree if self.nnx is None else self.nnx.merge(self.graph, tree)

    def check(self, copy: Any) -> None:
        """Raise if the call has changed the state of an NNX module, because the change is lost."""
        now = self.now if self.nnx is None else jax.tree_util.tree_leaves(self.nnx.state(copy))
        if len(now) != len(self.now) or any(map(operator.is_not, now, self.now)):
            raise PassedOverError(
                f"override: the call of {type(copy).__name__} has a rule as a whole, and changes "
                "its state (the statistics of a norm, or random numbers). Call the model in "
                "evaluation mode, or name an op: rg.at(where, 'MatMul')."
            )


def _path(keys: Sequence[Any]) -> str:
    """Return the name of an array of a module in a rule, by the keys of JAX that lead to it."""
    parts = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in keys]
    return as_name(".".join(parts[:-1] if parts[1:] and parts[-1] == "value" else parts))


def _bounded(
    key: Any, old: Callable[..., Any], own: Parameters, trace: _Trace, args: Any, kwargs: Any
) -> Any:
    """Call a module through a compiled function, which leaves a boundary in the program.

    Args:
        key: The key for whole calls, which finds the boundary again.
        old: The function that computes the call, of the module and the arguments.
        own: The parameters of the module, which are arguments of the compiled function.
        trace: The trace, which receives the copy of the module in the compiled function.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
    """
    given = named(old.__get__(own.module), args, kwargs)  # pyright: ignore
    names = tuple([name for name, x in given if isinstance(x, jax.Array)])
    leaves = Leaves(tuple([value for _, value in given]), jax.Array, _flatten)
    form = names, len(leaves.places), own.names
    if form not in key.boundaries:
        key.boundaries.append(form)
    result: list[Leaves] = []

    def call(*xs: Any) -> Any:
        values = leaves.close(xs[: len(leaves.places)])
        options = zip([name for name, _ in given[len(args) :]], values[len(args) :], strict=True)
        copy = own.put(xs[len(leaves.places) :])
        trace.note(own.module, copy)
        trace.running[-1] = (copy, trace.running[-1][1])
        y = old(copy, *values[: len(args)], **dict(options))
        own.check(copy)
        result[:] = [Leaves(y, jax.Array, _flatten)]
        if hidden := [leaf for leaf in result[0].rest if is_closed((leaf,), 1)]:
            raise PassedOverError(
                f"override: the call of {type(copy).__name__} has a rule as a whole, and returned "
                f"{kind(hidden[0])}, so the rule would miss arrays inside. Return the arrays in a "
                "list, tuple, dict, named tuple or dataclass, or register the class with JAX."
            )
        return result[0].arrays

    call.__name__ = call.__qualname__ = f"{BOUNDARY}{key.boundaries.index(form)}"
    ys = jax.jit(call)(*leaves.arrays, *own.arrays)
    return result[0].close(ys)


def _flatten(value: Any) -> tuple[list[Any], Rebuild]:
    return flatten_objects(value, _flatten_registered)


def _flatten_registered(value: Any) -> tuple[list[Any], Rebuild]:
    leaves, structure = jax.tree_util.tree_flatten(value)
    return leaves, structure.unflatten

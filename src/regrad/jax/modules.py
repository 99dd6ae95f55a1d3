"""The modules of a model, named while a function is traced: what `override(…, model=…)` is for.

Programs of NNX say nothing of modules, and those of Equinox their classes. So for the time of a
trace the `__call__` of each class in the model is replaced, and opens a name scope, `regrad:` and
the path of the module, around the call. Modules of Linen know their paths; there Flax has a way to
intercept calls.

Modules are known by identity. `TracedCall` makes copies of those among the arguments, and jit, scan
and `tree_map` make more: all of them are walked along with what they are copies of. Where only the
copy is seen it must be one that just one module of the model can have: of the same classes, and
with arrays of the same shapes (or those of a step of a scan). If keys tell apart what it may be,
it is refused.

JAX remembers the programs of compiled functions. In a module each has an axis of that name, which
nobody uses, so that a program with one module's name is never another's.
"""

from __future__ import annotations

import itertools
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
from regrad.core.places import Step
from regrad.errors import ArgumentError, GradientError, kind
from regrad.jax.host import VMAPS, need
from regrad.jax.host.extending import with_axes

MARK = "regrad:"  # what the scopes of modules begin with
LIBRARIES = ("equinox", "flax.nnx", "flax.linen")

NAMING: ContextVar[Any] = ContextVar("regrad_naming", default=None)  # of the trace that is open
_numbers = itertools.count()
_lock = threading.RLock()
_replaced: Counter[type] = Counter()  # by how many traces, and what was there before
_before: dict[type, Any] = {}


def _module_types(*names: str) -> tuple[type, ...]:
    """The classes of modules of the libraries that are loaded."""
    return tuple(sys.modules[name].Module for name in names if name in sys.modules)


def parts(value: Any) -> list[tuple[Any, Any]]:
    """What a module or container holds, by name."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(enumerate(value))
    return list(vars(value).items()) if isinstance(value, _module_types(*LIBRARIES)) else []


def walk(value: Any, path: str = "", above: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Yield the modules in a module or container, itself included, with their paths."""
    if isinstance(value, _module_types(*LIBRARIES)):
        yield path, value
    if id(value) not in above:
        for name, part in parts(value):
            if not str(name).startswith("_"):
                inner = f"{path}.{name}" if path else str(name)
                yield from walk(part, inner, above | {id(value)})


def _shapes(module: Any) -> list[tuple[int, ...]]:
    """The shapes of the arrays in a module, all the way down."""
    return [x.shape for x in jax.tree_util.tree_leaves(module) if hasattr(x, "shape")]


class Naming:
    """The names of the modules of a model, and of copies of them.

    Args:
        model: A module of Flax or Equinox; None where only Flax's own names count.
        tells_apart: Returns whether keys that are in force tell two modules apart.
    """

    def __init__(self, model: Any, tells_apart: Callable[[Step, Step], bool]) -> None:
        need(VMAPS)
        self.model = model
        self.tells_apart = tells_apart
        self.number: int = next(_numbers)
        self.is_linen: bool = isinstance(model, _module_types("flax.linen"))
        if model is not None and not isinstance(model, _module_types(*LIBRARIES)):
            raise ArgumentError(
                "override: model= expected a module of Flax (linen or nnx) or Equinox, got "
                f"{kind(model)}. Elsewhere name the parts with jax.named_scope, without model=."
            )
        paths: dict[int, list[str]] = {}
        modules = {}
        for path, module in () if model is None or self.is_linen else walk(model):
            modules[id(module)] = module
            paths.setdefault(id(module), []).append(path)
        made = {key: Step(tuple(paths[key]), module) for key, module in modules.items()}
        self.named: dict[int, Step] = made
        self.steps: list[Step] | None = list(made.values()) or None
        self.by_path: dict[str, Step] = {step.path: step for step in made.values()}

    # -- a trace -----------------------------------------------------------------------------------

    @block
    def around(self, given: Any, copies: Any) -> Generator[None]:
        """A block in which calls of modules are named; a trace has the copies for `given`."""
        token = NAMING.set(_Trace(self, given, copies))
        try:
            with ExitStack() as stack:
                stack.enter_context(with_axes([(f"{MARK}{self.number}", 1)]))
                if "flax.linen" in sys.modules:
                    linen: Any = sys.modules["flax.linen"]
                    stack.enter_context(linen.intercept_methods(self._intercept))
                stack.enter_context(_replacing({*map(_owner, self.steps or ())} - {None}))
                yield
        finally:
            NAMING.reset(token)

    def _intercept(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Name a call of a module of Linen's."""
        module = context.module
        path = ".".join(module.path)
        with _scope(self.number, path, isinstance(self._root(module), type(self.model))):
            self.by_path.setdefault(path, Step((path,), kind=type(module)))
            return call(*args, **kwargs)

    def _root(self, module: Any) -> Any:
        types = _module_types("flax.linen")
        while isinstance(module.parent, types):
            module = module.parent
        return module


class _Trace:
    """One trace: the modules that are known in it, and those that run."""

    def __init__(self, naming: Naming, given: Any, copies: Any) -> None:
        self.naming = naming
        self.known: dict[int, Step] = dict(naming.named)
        self.alive: list[Any] = []
        self.running: list[tuple[Any, Step]] = []
        pairs = [(a, b) for (_, a), (_, b) in zip(walk(given), walk(copies), strict=True)]
        if not any(id(a) in self.known for a, _ in pairs) and naming.steps:
            same = [(naming.model, b) for a, b in pairs if self._is_like(a, naming.steps[0])]
            if len(same) > 1:
                raise GradientError(
                    f"override: {len(same)} arguments are like model=, and none of them is it, so "
                    "nothing tells which is meant. Pass one of them as model=."
                )
            pairs += [(a, b) for a, b in self._along(*same[0])] if same else []
        for a, b in pairs:
            self._note(self.known.get(id(a)), b)

    def _along(self, module: Any, copy: Any) -> Iterator[tuple[Any, Any]]:
        for (_, a), (_, b) in zip(walk(module), walk(copy), strict=True):
            yield a, b

    def _note(self, step: Step | None, module: Any) -> None:
        if step is not None:
            self.known[id(module)] = step
            self.alive.append(module)

    def _is_like(self, module: Any, step: Step) -> bool:
        """Return whether a module may be a copy of one of the model, or a step of a stacked one."""
        if type(module) is not type(step.module):
            return False
        if [(p, type(m)) for p, m in walk(module)] != [(p, type(m)) for p, m in walk(step.module)]:
            return False
        shapes, theirs = _shapes(module), _shapes(step.module)
        return shapes in (theirs, [shape[1:] for shape in theirs])

    def step(self, module: Any) -> Step | None:
        """Return the module of the model that this is; None if it is none of them."""
        if id(module) in self.known:
            return self.known[id(module)]
        assert self.naming.steps is not None
        around = f"{self.running[-1][1].path}." if self.running else "."
        every = self.naming.steps
        inside = [s for s in every if around == "." or f"{s.path}.".startswith(around)]
        found = [s for s in inside if self._is_like(module, s)]
        for other in found[1:]:
            if self.naming.tells_apart(found[0], other):
                raise GradientError(
                    f"override: a copy of a module is called, which jit, scan, checkpoint or "
                    f"tree_map made, and nothing tells whether it is {found[0].path!r} or "
                    f"{other.path!r}. Call the module in another module that is compiled as a "
                    "whole, or choose the place by jax.named_scope."
                )
        for a, b in self._along(found[0].module, module) if found else ():
            self._note(self.known.get(id(a)), b)
        return found[0] if found else None


def _scope(number: int, path: str, named: bool = True) -> ExitStack:
    """A block in which equations have the name of a module, and compiled programs are its own."""
    stack = ExitStack()
    stack.enter_context(with_axes([(f"{MARK}{number}.{path}", 1)]))
    if named:
        stack.enter_context(jax.named_scope(MARK + path))
    return stack


def _owner(step: Step) -> type | None:
    """The class that defines the `__call__` of a module."""
    return next((c for c in type(step.module).__mro__ if "__call__" in vars(c)), None)


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
        step = None if trace is None or _runs(trace, self) else trace.step(self)
        if trace is None or step is None:
            return run(*args, **kwargs)
        trace.running.append((self, step))
        try:
            with _scope(trace.naming.number, step.path):
                return run(*args, **kwargs)
        finally:
            trace.running.pop()

    return call


def _runs(trace: _Trace, module: Any) -> bool:
    """Return whether a module calls itself: the `__call__` of its base class."""
    return bool(trace.running) and trace.running[-1][0] is module

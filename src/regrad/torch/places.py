"""Rules at places: scopes whose maps name places follow the modules that run.

The idea: a rule in a module holds as if a scope with it were open while the module runs. So what
holds anywhere is a `RuleSet` (see `rulesets`), and a module that some key names leads from one to
another. While such scopes are open, `nn.Module.__call__` is replaced (`follow`). It moves from one
`Spot` to the next and back: the tuple of the scopes that are open, each as it is there.

    with gradient_override_map({at("encoder", "Relu"): rule}, model=model):
        model(x)        # the spot "": no rule. In it the spot "encoder": rules for Relu. And so on

Invariants:

* What holds depends on the modules that run and are named by a key (the trail), on nothing else.
  Equal trails share a RuleSet, with its class of modes, so that compiled code serves again.
* Whatever takes the open scopes along (a checkpoint, a thread) takes the spot along.
* Nothing is written on the user's modules. Those that were not in the model when the scope opened
  are refused, where a key would have named them.
* torch.compile moves as it traces: `compiled_code` does there what `follow` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.compiler import is_dynamo_compiling

from regrad.core.blocks import block
from regrad.core.interrupts import Deferred
from regrad.core.places import Counts, Step, at
from regrad.core.replacements import Replacements
from regrad.errors import ArgumentError, PassedOverError
from regrad.torch.host import (
    dynamo,
    is_program,
    mode_stack,
    name_inside,
    pop_mode,
    push_mode,
)  # fmt: skip
from regrad.torch.open_scopes import SCOPES

# How often keys have met calls in the model's call that runs, by the scope.
COUNTS: ContextVar[dict[Any, Counts]] = ContextVar("regrad_counts", default={})  # noqa: B039


class View:
    """A scope as it is while certain modules run: with the rules that hold there."""

    def __init__(self, root: Any, ruleset: Any) -> None:
        self._root = root
        self._ruleset = ruleset
        self._mode = ruleset.mode(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._root, name)


class Node(NamedTuple):
    """The place of the program in the modules that one scope knows."""

    step: Step = Step(())
    path: str = ""  # that of the innermost module with a path
    trail: tuple[tuple[Any, Step], ...] = ()  # the modules that keys name, by what names them
    module: Callable[[], Any] = lambda: None
    known: Callable[[], Any] = lambda: None  # the innermost module of the model


class Spot(tuple[Any, ...]):
    """The scopes that are open, as they are where the program is."""

    nodes: tuple[Node | None, ...]
    begins: Sequence[Any] = ()  # the scopes whose model is called here
    nexts: WeakKeyDictionary[Any, Spot]

    def enter(self, module: Any) -> Spot:
        """Return the spot inside a module that is called here."""
        found = self.nexts.get(module)
        if found is None:
            found = self.nexts[module] = self._inside(module)
        return found

    def _inside(self, module: Any) -> Spot:
        name = name_inside(type(module))
        if name is not None:
            inner = getattr(module, name)
            if not is_program(type(module)):
                return self
            found = self.enter(inner)
            found.nexts[inner] = found  # which torch.compile calls or not
            return found
        pairs = list(zip(self, self.nodes, strict=True))
        nodes = [node and scope._root._modules.enter(node, module) for scope, node in pairs]
        found = spot_at([scope._root for scope in self], nodes)
        found.begins = [
            scope._root
            for (scope, node), new in zip(pairs, nodes, strict=True)
            if node and new and node.step.paths == () and "" in new.step.paths
        ]
        return found

    def node_of(self, root: Any) -> Node | None:
        """Return where the program is in the modules of a scope."""
        for scope, node in zip(self, self.nodes, strict=True):
            if scope._root is root:
                return node
        return None


def spot_at(roots: Sequence[Any], nodes: Sequence[Node | None]) -> Spot:
    """Return open scopes as they are at some nodes (None: of a scope that names no places)."""
    scopes: list[Any] = []
    for root, node in zip(roots, nodes, strict=True):
        outer = scopes[-1]._ruleset if scopes else None
        ruleset = root._ruleset.room(node.trail if node else (), outer)
        if ruleset is not root._ruleset and ruleset not in root._views:
            root._views[ruleset] = View(root, ruleset)
        scopes.append(root._views.get(ruleset, root))
    spot = Spot(scopes)
    spot.nodes, spot.nexts = tuple(nodes), WeakKeyDictionary()
    return spot


def stand(scopes: Sequence[Any], around: Any = None) -> tuple[Any, ...]:
    """Return scopes as they are to be in SCOPES.

    Args:
        around: the spot, or tuple, that tells where the program is for those in it.
    """
    roots = [scope._root for scope in scopes]
    held = around.node_of if isinstance(around, Spot) else lambda _: None
    nodes = [held(root) or (root._modules and Node()) for root in roots]
    return spot_at(roots, nodes) if any(nodes) else tuple(scopes)


def open_here() -> tuple[Any, ...]:
    """Return the scopes that are open here, without those that another thread has closed."""
    scopes = SCOPES.get()
    found = [scope for scope in scopes if scope._root._ruleset is not None]
    return scopes if len(found) == len(scopes) else stand(found, scopes)


def path_here(scope: Any, spot: Any = None) -> str:
    """Return the path of the module that runs, as a scope knows it; "" if its keys name none."""
    spot = SCOPES.get() if spot is None else spot
    node = spot.node_of(scope._root) if isinstance(spot, Spot) else None
    return node.path if node else ""


def step_here(scope: Any, spot: Any) -> Step:
    """Return the module that runs, as far as a scope knows it."""
    node = (spot.node_of(scope._root) if isinstance(spot, Spot) else None) or Node()
    return Step((node.path,), node.module(), node.step.kind)


# -- the modules of a model ------------------------------------------------------------------------


class Modules:
    """The modules that a scope knows: those of its model, as they were when it was opened."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.names: dict[int, list[str]] = {}
        self.modules: dict[int, nn.Module] = {}
        self.steps: dict[int, Step] = {}
        self.ran: dict[str, None] = {}  # the paths of those that ran
        self.plan: Any = None
        if model is None:
            return
        paths: dict[int, list[str]] = {}
        clean = {"": ""}
        wraps_ = {"": name_inside(type(model))}
        for name, module in model.named_modules(remove_duplicate=False):
            if name:
                around, _, last = name.rpartition(".")
                inside = last == wraps_[around]
                clean[name] = clean[around] if inside else f"{clean[around]}.{last}".lstrip(".")
                wraps_[name] = name_inside(type(module))
            if wraps_[name] is None:
                self.modules[id(module)] = module
                self.names.setdefault(id(module), []).append(name)
                paths.setdefault(id(module), []).append(clean[name])
        for key, found in paths.items():
            module = self.modules[key]
            self.steps[key] = Step(tuple(found), module, type(module))

    @property
    def layout(self) -> Any:
        """What of the modules the meaning of keys depends on."""
        return tuple([(step.paths, step.kind) for step in self.steps.values()])

    def enter(self, node: Node, module: Any) -> Node:
        """Return the place inside a module."""
        step = self.steps.get(id(module))
        if step is None:
            self._refuse_strange(node.known(), module)
            step = Step((), module, type(module))
        else:
            self._refuse_moved(module)
            self.ran.update(dict.fromkeys(step.paths))
        bare, trail = self.plan.bare(step), node.trail
        if mark := self.plan.mark(bare):
            # (of two modules that the same keys name, the inner one counts)
            trail = (*[each for each in trail if each[0] != mark], (mark, bare))
        known = ref(module) if step.paths else node.known
        return Node(step, step.path if step.paths else node.path, trail, ref(module), known)

    def _refuse_moved(self, module: Any) -> None:
        assert self.model is not None
        if not any(_reach(self.model, name) is module for name in self.names[id(module)]):
            raise PassedOverError(
                f"the module {self.steps[id(module)].path!r} ({type(module).__name__}) is not in "
                "that place of the model any more, as it was when the scope opened. Open the scope "
                "after the model is complete"
            )

    def _refuse_strange(self, parent: Any, module: Any) -> None:
        """Refuse a module that came after the scope opened, or a copy, if keys name modules."""
        if self.model is None or not self.plan.names_modules:
            return
        kind = type(module).__name__
        if parent is not None:
            if any(each is module for each in parent.modules()):
                raise PassedOverError(
                    f"a {kind} was put into {self.steps[id(parent)].path!r} after the scope "
                    "opened, whose keys name modules of the model as it was then. Open the scope "
                    "after the model is complete"
                )
            return
        for key in self._concerned():
            if type(self.modules[key]) is type(module) and _are_alike(self.modules[key], module):
                raise PassedOverError(
                    f"a {kind} that is not in the model runs in a scope whose keys name modules, "
                    f"and is like {self.steps[key].path!r} of the model: a copy, which no key "
                    "names. Give the scope model=the copy, or run it outside of the scope"
                )

    def _concerned(self) -> list[int]:
        """Return the modules that a key names, and those around them."""
        named = [path for step in self.plan.named() for path in step.paths]
        around = {path[:i] for path in named for i, c in enumerate(path) if c == "."} | {""}
        return [k for k, s in self.steps.items() if not around.union(named).isdisjoint(s.paths)]

    def idle(self, key: at) -> list[str]:
        """Return the modules that a key names, and that never ran although one around them did."""
        named = self.plan.named(key)
        if key.what is not None:  # (what runs inside of a module that it names is covered)
            outer = {path for step in named for path in step.paths}
            named = [s for s in named if not any(_around(path, outer) for path in s.paths)]
        return [
            step.path for step in named
            if not any(path in self.ran for path in step.paths) and self._parent_ran(step.path)
        ]  # fmt: skip

    def _parent_ran(self, path: str) -> bool:
        lists = (nn.ModuleList, nn.ModuleDict)
        kinds = {path: step.kind for step in self.steps.values() for path in step.paths}
        while path:
            path = path.rpartition(".")[0]
            if path in kinds and not issubclass(kinds[path] or object, lists):
                return path in self.ran
        return False


def _around(path: str, outer: Iterable[str]) -> bool:
    """Return whether a module is inside one of some others."""
    parts = [path[:i] for i, c in enumerate(path) if c == "."] + [""] * bool(path)
    return any(part in outer for part in parts)


def _reach(model: nn.Module, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _are_alike(a: nn.Module, b: nn.Module) -> bool:
    """Return whether two modules are built alike, and hold anything that tells them apart."""
    layouts = [[(name, type(m)) for name, m in each.named_modules()] for each in (a, b)]
    return layouts[0] == layouts[1] and any(True for _ in b.parameters())


def check_model(model: Any, keys: Iterable[Any]) -> None:
    """Raise for a model that is none, and for keys that need one."""
    if model is not None and not isinstance(model, nn.Module):
        raise ArgumentError(f"model expected a torch.nn.Module, got {model!r:.80}")
    for key in keys if model is None else ():
        for selector in key.selectors if isinstance(key, at) else ():
            where = selector.where if isinstance(selector.where, tuple) else (selector.where,)
            if any(isinstance(entry, str) for entry in where):
                raise ArgumentError(
                    f"{key!r} names a path, which only the model tells. Give it: "
                    "gradient_override_map(rules, model=model)"
                )


# -- the modules that run --------------------------------------------------------------------------

_LOCK = threading.Lock()
_open = 0
_REPLACED = Replacements(lambda: [(nn.Module, "__call__", follow)])


def install() -> None:
    """A scope opens whose map names places."""
    global _open
    with _LOCK:
        _open += 1
        _REPLACED.make()


def remove() -> None:
    """Such a scope is left."""
    global _open
    with _LOCK:
        _open -= 1
        if not _open:
            _REPLACED.undo()


@block
def install_for_block() -> Generator[None]:
    """A block that runs in such a scope, when the scope itself may have been left."""
    install()
    try:
        yield
    finally:
        remove()


def follow(old: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that replaces the call of modules."""

    @wraps(old)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if is_dynamo_compiling():
            return old(self, *args, **options)
        spot = SCOPES.get()
        if type(spot) is not Spot:
            return old(self, *args, **options)
        to = spot.enter(self)
        if to is spot:
            return old(self, *args, **options)
        counts = COUNTS.get()
        try:
            _move(spot, to)
            if to.begins:
                COUNTS.set({**counts, **{root: Counts() for root in to.begins}})
            return old(self, *args, **options)
        finally:
            COUNTS.set(counts)
            now = SCOPES.get()
            # (scopes may have been opened in the module, or left)
            _move(now, spot if now is to or now is spot else stand(now, spot))

    dynamo.leave_alone(call, inside=False)
    return call


def _move(now: Sequence[Any], to: Sequence[Any]) -> None:
    """Put the scopes as they are elsewhere in the place of those that are here."""
    changed = {a._mode: b._mode for a, b in zip(now, to, strict=True) if a is not b}
    if not changed:
        SCOPES.set(to)  # pyright: ignore[reportArgumentType]
        return
    with Deferred():
        SCOPES.set(to)  # pyright: ignore[reportArgumentType]
        stack = mode_stack()
        first = next((i for i, mode in enumerate(stack) if mode in changed), len(stack))
        for _ in stack[first:]:
            pop_mode()
        for mode in stack[first:]:
            push_mode(changed.get(mode, mode))

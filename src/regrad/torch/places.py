"""Rules at places: scopes whose maps name places follow the modules that run.

A rule in a module applies as if a scope with the rule were open while the module runs. So each set
of rules that applies somewhere is a `RuleSet` (see `rulesets`), and entering a module that a key
names switches from one RuleSet to another. While such scopes are open, regrad replaces the call of
modules (`follow`). The replacement moves from one `Spot` to the next and back. A Spot is the tuple
of the open scopes, each in its state at that place.

    with gradient_override_map({at("encoder", "Relu"): rule}, model=model):
        model(x)        # the spot "": no rule. In it the spot "encoder": rules for Relu. And so on

Invariants:

* The active rules depend only on the running modules that keys name (the trail). Equal trails share
  a RuleSet and its class of modes, so torch.compile can reuse code.
* Everything that inherits the open scopes (a checkpoint, a thread) also inherits the spot.
* regrad writes nothing on the user's modules. A module that was not in the model when the scope
  opened raises an error if a key would have named it.
* torch.compile changes the spot while it traces: `compiled_code` does there what `follow` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from inspect import isroutine
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling, is_exporting

from regrad.core.interrupts import Deferred
from regrad.core.places import ChainStep, Counts, at, entries, is_predicate, paths_around
from regrad.errors import ArgumentError, PassedOverError
from regrad.torch.enclosing import refuse_to_be_written
from regrad.torch.host import (
    COMPILED_CALL,
    call_of,
    dynamo,
    is_program,
    mode_stack,
    name_inside,
    pop_mode,
    push_mode,
)  # fmt: skip
from regrad.torch.host.bodies import with_hooks_around
from regrad.torch.open_scopes import AROUND, SCOPES, InsideWholeCall
from regrad.torch.optypes import families

# By scope: how many calls each key has matched during the running call of the model.
COUNTS: ContextVar[dict[Any, Counts]] = ContextVar("regrad_counts", default={})  # noqa: B039

LISTS: tuple[Any, ...] = (nn.ModuleList, nn.ModuleDict)  # modules that have no forward pass


def counts_of(scope: Any) -> Counts:
    """Return how many calls each key of a scope has matched in the running call of the model."""
    return COUNTS.get().get(scope._root, Counts())


class View:
    """A scope while certain modules run, with the rules that apply there."""

    def __init__(self, root: Any, ruleset: Any) -> None:
        self._root = root
        self._ruleset = ruleset
        self._mode = self._here = ruleset.mode(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._root, name)


class PlaceInModules(NamedTuple):
    """The current place in the modules of one scope."""

    step: ChainStep = ChainStep(())
    path: str = ""  # the path of the innermost module that has one
    trail: tuple[tuple[Any, ChainStep], ...] = ()  # the running modules in keys, by their mark
    module: Callable[[], Any] = lambda: None
    known: Callable[[], Any] = lambda: None  # the innermost module of the model
    whole: Mapping[Any, Any] = {}  # the rules for the whole call of the module, by their fits


class Spot(tuple[Any, ...]):
    """The open scopes, each in its state at the current place."""

    nodes: tuple[PlaceInModules | None, ...]
    paths: dict[Any, str]  # the path of the running module, by scope
    module: Callable[[], Any] = lambda: None  # the running module
    moves: Mapping[Any, Any]  # from each mode of the outer spot to the mode that replaces it here
    begins: Sequence[Any] = ()  # the scopes whose model is called here
    whole: Sequence[Any] = ()  # (scope, rules for the whole call), the innermost scope first
    kind: Any = None  # the class of the module when the spot was made
    checks: Sequence[Callable[[], None]] = ()  # raise if modules inside have changed places
    nexts: dict[int, Spot]  # the spots inside of modules, by the identity of the module

    def enter(self, module: Any) -> Spot:
        """Return the spot inside a module that the program calls here."""
        found: Any = self.nexts.get(id(module))
        same = found is self or (found and found.module() is module and found.kind is type(module))
        if not same:
            found = self.nexts[id(module)] = self._inside(module)
        for check in found.checks:
            check()
        return found

    def _inside(self, module: Any) -> Spot:
        name = name_inside(type(module))
        if name is not None:
            inner = getattr(module, name)
            if not is_program(type(module)):
                return self
            found = self.enter(inner)
            found.nexts[id(inner)] = found  # torch.compile may or may not call `inner`
            return found
        pairs = list(zip(self, self.nodes, strict=True))
        nodes = [node and scope._root._modules.enter(node, module) for scope, node in pairs]
        found = spot_at([scope._root for scope in self], nodes)
        key = id(module)
        found.module = ref(module, lambda _: self.nexts.pop(key, None))
        found.moves, found.kind = moves(self, found), type(module)
        known = [scope._root._modules for scope, node in pairs if node]
        found.checks = [partial(each.check, module) for each in known if id(module) in each.known]
        found.begins = [
            scope._root
            for (scope, node), new in zip(pairs, nodes, strict=True)
            if node and new and node.step.paths == () and "" in new.step.paths
        ]
        pairs = list(zip(self, nodes, strict=True))[::-1]
        found.whole = [(scope._root, node.whole) for scope, node in pairs if node and node.whole]
        return found

    def node_of(self, root: Any) -> PlaceInModules | None:
        """Return the current place in the modules of a scope."""
        for scope, node in zip(self, self.nodes, strict=True):
            if scope._root is root:
                return node
        return None


def spot_at(roots: Sequence[Any], nodes: Sequence[PlaceInModules | None]) -> Spot:
    """Return the spot of open scopes at these nodes (None for a scope that names no places)."""
    scopes: list[Any] = []
    for root, node in zip(roots, nodes, strict=True):
        outer = scopes[-1]._ruleset if scopes else None
        ruleset = root._ruleset.room(node.trail if node else (), outer)
        if ruleset is not root._ruleset and ruleset not in root._views:
            root._views[ruleset] = View(root, ruleset)
        scopes.append(root._views.get(ruleset, root))
    spot = Spot(scopes)
    spot.nodes, spot.nexts = tuple(nodes), {}
    spot.paths = {root: node.path for root, node in zip(roots, nodes, strict=True) if node}
    return spot


def stand(scopes: Sequence[Any], around: Any = None) -> tuple[Any, ...]:
    """Return scopes in the form that SCOPES holds.

    Args:
        around: The spot or tuple that has the current place for the scopes in it.
    """
    roots = [scope._root for scope in scopes]
    held = around.node_of if isinstance(around, Spot) else None
    nodes = [(held and held(root)) or (root._modules and PlaceInModules()) for root in roots]
    return spot_at(roots, nodes) if any(nodes) else tuple(scopes)


def open_here() -> tuple[Any, ...]:
    """Return the scopes that are open here, without scopes that another thread has closed."""
    scopes = SCOPES.get()
    found = [scope for scope in scopes if scope._root._ruleset is not None]
    return scopes if len(found) == len(scopes) else stand(found, scopes)


def path_here(scope: Any, spot: Any = None) -> str:
    """Return the path of the running module in a scope; "" if the scope's keys name no module."""
    spot = SCOPES.get() if spot is None else spot
    return spot.paths.get(scope._root, "") if type(spot) is Spot else ""


def step_here(scope: Any, spot: Any) -> ChainStep:
    """Return the running module, as a step of a scope."""
    node = (spot.node_of(scope._root) if isinstance(spot, Spot) else None) or PlaceInModules()
    return ChainStep((node.path,), node.module(), node.step.kind)


# -- the modules of a model ------------------------------------------------------------------------


class Known(NamedTuple):
    """A module of a model, in its state when the scope opened."""

    number: int  # in the order of the model
    module: nn.Module
    kind: type
    paths: tuple[str, ...]
    inner: Sequence[tuple[Any, str, Any]]  # the places of the modules that it calls
    ways: Sequence[Sequence[tuple[Any, str, Any]]]  # for each name: the places on the path to it


class Modules:
    """The modules of a scope's model, in their state when the scope opened."""

    plan: Any  # the plan of the scope's rules

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.ran: dict[str, None] = {}  # the paths of the modules that ran
        held: dict[int, tuple[nn.Module, list[str], list[str]]] = {}
        clean, inside = {"": ""}, {}
        for name, module in () if model is None else model.named_modules(remove_duplicate=False):
            around, _, last = name.rpartition(".")
            if name:
                outer = clean[around]
                wrapped = inside[around] == last
                clean[name] = outer if wrapped else f"{outer}.{last}" if outer else last
            inside[name] = name_inside(type(module))
            if inside[name] is None:
                _, names, paths = held.setdefault(id(module), (module, [], []))
                names.append(name)
                paths.append(clean[name])
        self.known: dict[int, Known] = {  # by identity, in the order of the model
            key: Known(n, module, type(module), tuple(paths), [*_inner(module)],
                       [_way(model, name) for name in names])
            for n, (key, (module, names, paths)) in enumerate(held.items())
        }  # fmt: skip

    @property
    def layout(self) -> tuple[Any, ...]:
        """The paths and classes of the modules; the meaning of keys depends on them."""
        return tuple([(known.paths, known.kind) for known in self.known.values()])

    @property
    def steps(self) -> list[ChainStep] | None:
        """The modules as places of a program; None if there is no model."""
        each = self.known.values()
        return None if self.model is None else [ChainStep(k.paths, k.module, k.kind) for k in each]

    def enter(self, node: PlaceInModules, module: Any) -> PlaceInModules:
        """Return the place inside a module that the program enters at a place."""
        found = self.known.get(id(module))
        if found is None:
            self._refuse_strange(node.known(), module)
            step = self.plan.bare(ChainStep((), module, type(module)))
            path, known = node.path, node.known
        else:
            step = self.plan.places.steps[found.number]
            self.ran.update(dict.fromkeys(step.paths))
            path, known = step.path, ref(module)
        trail = node.trail
        if (mark := self.plan.mark(step)) is not None:
            # (if the same keys name two nested modules, the inner module counts)
            trail = (*[each for each in trail if each[0] != mark], (mark, step))
        whole = self.plan.whole_at([*[step for _, step in node.trail], step])
        return PlaceInModules(step, path, trail, ref(module), known, whole)

    def check(self, module: Any) -> None:
        """Raise if the class of a module, or the place of a module inside it, has changed."""
        known = self.known[id(module)]
        if type(module) is not known.kind:
            raise PassedOverError(
                f"the class of the module {known.paths[0]!r} was {known.kind.__name__} when "
                f"the scope opened, and is {type(module).__name__} now. {_LATER}"
            )
        for way in known.ways:
            for held, key, inner in way:
                if held.get(key) is not inner:
                    break
            else:
                break
        else:
            raise PassedOverError(
                f"the module {known.paths[0]!r} ({type(module).__name__}) is not in that place "
                f"of the model anymore. {_LATER}"
            )
        for held, key, inner in known.inner:
            if (now := held.get(key)) is not inner and id(now) in self.known:
                raise PassedOverError(
                    f"the module {self.path_of(now)!r} ({type(now).__name__}) was put in the place "
                    f"{key!r} of {known.paths[0] or 'the model'!r} after the scope opened. {_LATER}"
                )

    def path_of(self, module: Any) -> str:
        """Return the path of a module; "" if it is not known."""
        known = self.known.get(id(module))
        return "" if known is None else known.paths[0]

    def _refuse_strange(self, parent: Any, module: Any) -> None:
        """Raise for a module added after the scope opened, or a copy, if keys name modules."""
        if self.model is None or not self.plan.names_modules:
            return
        if is_exporting():  # (torch.export wraps each module, so no key finds it)
            refuse_to_be_written(", ".join(map(repr, self.plan.places.keys)))
        kind = type(module).__name__
        if parent is not None:
            if any(each is module for each in parent.modules()):
                raise PassedOverError(
                    f"a {kind} was put into {self.path_of(parent)!r} after the scope opened, but "
                    "the scope's keys name modules of the earlier model. Open the scope when the "
                    "model is complete"
                )
            return
        named = {path for step in self.plan.named() for path in step.paths}
        named |= {around for path in named for around in paths_around(path)}
        for known in self.known.values():  # modules in keys, and the modules around them
            if named.isdisjoint(known.paths) or known.kind is not type(module):
                continue
            if _are_alike(known.module, module):
                raise PassedOverError(
                    f"a {kind} that is not in the model runs in a scope whose keys name modules, "
                    f"and is built like {known.paths[0]!r} of the model: it is a copy, which no "
                    "key names. Pass the copy as model=, or run it outside of the scope"
                )

    def idle(self, key: at) -> list[str]:
        """Return the modules that a key names and that never ran although an outer module did."""
        named = [s for s in self.plan.outermost(key) if key.what or _is_called(s)]
        return [step.path for step in self.plan.places.idle(named, self.ran, _is_called)]


def _is_called(step: ChainStep) -> bool:
    """Return whether the program may call a module of this class."""
    return step.kind is None or not issubclass(step.kind, LISTS)


_LATER = "Open the scope after the model is complete"


def _inner(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the places of the modules that a module calls: the container, the key, the module."""
    for key, inner in module._modules.items():
        yield module._modules, key, inner
        if isinstance(inner, LISTS):
            yield from _inner(inner)


def _way(module: Any, name: str) -> list[tuple[Any, str, Any]]:
    """Return the places of the modules on the path to a name, in the form of `_inner`."""
    way: list[tuple[Any, str, Any]] = []
    for key in name.split(".") if name else ():
        way.append((module._modules, key, module._modules[key]))
        module = module._modules[key]
    return way


def _are_alike(a: nn.Module, b: nn.Module) -> bool:
    """Return whether two modules have equal structure, and enough of it to be copies."""
    layouts = [[(name, type(m)) for name, m in each.named_modules()] for each in (a, b)]
    return layouts[0] == layouts[1] and (len(layouts[0]) > 1 or any(True for _ in b.parameters()))


def check_model(model: Any, keys: Iterable[Any]) -> None:
    """Raise for a model that is not a module, and for keys that need a model."""
    if model is not None and not isinstance(model, nn.Module):
        raise ArgumentError(f"model expected a torch.nn.Module, got {model!r:.80}")
    for key in keys:
        for selector in key.selectors if isinstance(key, at) else ():
            where = entries(selector.where)
            for entry in where:
                if isroutine(entry) and not is_predicate(entry):
                    raise ArgumentError(
                        f"{key!r}: a function that selects modules has one parameter, `site`, as "
                        "in rg.at(lambda site: isinstance(site.module, torch.nn.ReLU), 'Relu')"
                    )
                if not (entry is None or isinstance(entry, str) or callable(entry)):
                    raise ArgumentError(
                        f"rg.at: `where` expected a path, a class, a module or a function of a "
                        f"site, got {entry!r:.40}. The n-th call is rg.at(where, what, nth=n)"
                    )
                unknown = [
                    w for w in entries(key.what) if isinstance(w, str) and w not in families()
                ]
                if entry in families() and unknown and not hasattr(model, str(entry)):
                    raise ArgumentError(
                        f"{key!r} has an op type for its place: did you mean "
                        f"rg.at({key.what!r:.40}, {entry!r})?"
                    )
            if model is None and any(isinstance(entry, str) for entry in where):
                raise ArgumentError(
                    f"{key!r} names a path, and only the model has paths. Pass the model: "
                    "gradient_override_map(rules, model=model)"
                )


# -- the running modules ---------------------------------------------------------------------------


def follow(old: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that replaces `nn.Module._call_impl`, which runs each call of a module.

    (Assigning `nn.Module.__call__` would take milliseconds, since Python updates all subclasses.)
    """

    @wraps(old)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if is_dynamo_compiling() or has_own_call(self):
            return old(self, *args, **options)
        return _call_followed(old, self, args, options)

    for each in (call, _call_followed):
        dynamo.skip_tracing(each, inside=False)
    for ours in (Spot.enter, InsideWholeCall.starts, stand, moves, _move):
        dynamo.skip_tracing(ours)
    return call


def has_own_call(module: Any) -> bool:
    """Return whether a module or its class has its own call, which regrad's does not wrap."""
    return getattr(call_of(module), "__func__", None) is not call_of(nn.Module)


class Compiled:
    """A descriptor for `nn.Module._compiled_call_impl`, the call of a compiled module.

    It also wraps the call of modules with their own `_call_impl`. (Modules have an attribute of
    this name. Python still uses the descriptor, because it has `__set__`.)
    """

    def __get__(self, module: Any, owner: Any = None) -> Any:
        made = None if module is None else module.__dict__.get(COMPILED_CALL)
        if module is None or is_dynamo_compiling() or type(spot := SCOPES.get()) is not Spot:
            return made
        if made is not None and not spot.enter(module).whole:
            return partial(_call_made, module, made)
        # (a compiled program does not apply a rule for the whole call)
        return partial(_call_made, module, call_of(module)) if has_own_call(module) else None

    def __set__(self, module: Any, made: Any) -> None:
        ours = isinstance(made, partial) and made.func is _call_made
        module.__dict__[COMPILED_CALL] = made.args[1] if ours else made

    def __delete__(self, module: Any) -> None:
        if COMPILED_CALL not in module.__dict__:
            name = type(module).__name__
            raise AttributeError(f"{name!r} object has no attribute {COMPILED_CALL!r}")
        del module.__dict__[COMPILED_CALL]


def _call_made(module: Any, made: Any, /, *args: Any, **options: Any) -> Any:
    return _call_followed(lambda _, *xs, **named: made(*xs, **named), module, args, options)


def _call_followed(old: Callable[..., Any], self: Any, args: Any, options: Any) -> Any:
    """Return the result of a module, with the scopes in their state inside the module."""
    spot = SCOPES.get()
    if type(spot) is not Spot:
        return old(self, *args, **options)
    within = AROUND.get().within
    hooks = with_hooks_around(old)
    if within is not None and within.dry:
        old, hooks = _run_forward, None
    if within is not None and within.starts(self):  # (its hooks run around the whole call)
        return (old if hooks is None else _run_forward)(self, *args, **options)
    to = spot.enter(self)
    if to is spot:
        return old(self, *args, **options)
    counts = COUNTS.get()
    try:
        _move(to, to.moves)
        if to.begins:
            COUNTS.set({**counts, **{root: Counts() for root in to.begins}})
        if to.whole and not (within is not None and within.kept):
            whole = partial(to.whole[0][0]._modules.plan.call_whole, to.whole)
            if hooks is None:
                return whole(old, self, args, options)
            token = FORWARD.set((self, whole, {**vars(self)}))
            try:
                y = hooks(self, *args, **options)
                if FORWARD.get() is not None:
                    raise PassedOverError(
                        f"the call of {type(self).__name__} has a rule as a whole, but the hooks "
                        "around it did not run its `forward` under the rule"
                    )
                return y
            finally:
                FORWARD.reset(token)
        return old(self, *args, **options)
    finally:
        now = SCOPES.get()
        if now is to:
            _move(spot, to.moves and moves(to, spot))
        else:  # the module opened or closed scopes, or the move to `to` failed
            back = stand(now, spot)
            _move(back, moves(now, back))
        if to.begins:
            COUNTS.set(counts)


# The module whose hooks run, and the whole call that replaces its forward pass.
FORWARD: ContextVar[Any] = ContextVar("regrad_forward", default=None)


def call_in_hooks(old: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that replaces `nn.Module._slow_forward`, around which hooks run."""

    @wraps(old)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        found = FORWARD.get()
        if found is None or found[0] is not self:
            return old(self, *args, **options)
        _, whole, before = found
        FORWARD.set(None)
        put = {
            name: x for name, x in vars(self).items()
            if isinstance(x, Tensor) and x.requires_grad and before.get(name) is not x
        }  # fmt: skip
        return whole(_run_forward, self, args, options, put)

    dynamo.skip_tracing(forward)
    return forward


def _run_forward(module: Any, *args: Any, **options: Any) -> Any:
    return module.forward(*args, **options)


def moves(here: Sequence[Any], there: Sequence[Any]) -> Mapping[Any, Any]:
    """Return which mode replaces which, if the program moves from one spot to another."""
    return {a._here: b._here for a, b in zip(here, there, strict=True) if a is not b}


def _move(to: Any, modes: Mapping[Any, Any]) -> None:
    """Make `to` the current scopes, and replace modes on torch's stack by `modes`."""
    if not modes:
        SCOPES.set(to)
        return
    with Deferred():
        SCOPES.set(to)
        stack = mode_stack()
        first = next((i for i, mode in enumerate(stack) if mode in modes), len(stack))
        for _ in stack[first:]:
            pop_mode()
        for mode in stack[first:]:
            push_mode(modes.get(mode, mode))

"""Rules that are limited to a place: keys `rg.at(where, what)` for regrad's ops.

The chain of an op (see `places`) consists of the functions and modules among the keys that run when
the op is created, followed by the open named scopes. For an op type with such keys, the overrides
of a state hold a `Chooser`. Each rule, with its hits, has its own key:

    {"Relu": Chooser, Placed("Relu", at("block1.*", "Relu"), 1): binding, Placed("Relu", None, 1):
     the rule for other places in the scope, or outside of it, Placed("", None, 1): Counting}

Invariants:

* regrad chooses when it creates an op. If a body runs a second time (the backward pass of a
  `checkpoint`), the choices of the first run, which its trail holds, apply again.
* The Counting counts how often ops of all types matched a key. A trace of `jit` counts in a copy.
  Each call of its program advances the Counting by the same number.
* Ops of other types, and scopes without such keys, are not affected.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

from regrad.core.backends import is_inexact
from regrad.core.bindings import Onlookers, OpBinding, RepeatedBinding
from regrad.core.callers import find_caller
from regrad.core.name_scopes import PATH, Path
from regrad.core.places import (
    ChainStep,
    Counts,
    Fit,
    Places,
    Site,
    at,
    entries,
    is_predicate,
    matches,
    pick,
    site_of,
    steps_of,
    waiting,
)
from regrad.core.registry import Input, Op
from regrad.core.replacing import Replace
from regrad.core.rule import MapRule, NoGradient, Rule, called, parameters
from regrad.core.state import State, current
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, GradientError, PassedOverError, alike

# Bodies that are traced once for many runs, or of which only one runs.
SHARED = frozenset({"scan", "fori_loop", "map", "while_loop", "cond"})

# The op type of whole calls of functions that a `name_scope` decorates.
CALL = Op("Call", "call", lambda xp, xs: xs, [Input("xs", "many")])


class Placed(NamedTuple):
    """The key of a rule that is limited to a place, in the overrides of a state."""

    op_type: Any  # (in a graph's own scope, with the graph)
    place: Any  # the place's `identity`; None: the rule for calls that match no place of the scope
    depth: int


def _counting(depth: int) -> Placed:
    """Return the key of the `Counting` of a scope, in the overrides of a state."""
    return Placed("", None, depth)


class Counting(OpBinding):
    """Counts the calls that match the keys of a scope, for all op types."""

    rule: Rule = NoGradient()

    def __init__(self, keys: Sequence[at], depth: int, counts: Mapping[Any, int]) -> None:
        super().__init__(CALL, self.rule, depth)
        self.keys = keys  # the keys with `nth`
        self.counts: Counts = Counts(counts)
        self.before: Counts = Counts(counts)  # the counts when this copy was made

    def copy(self) -> Counting:
        return Counting(self.keys, self.depth, self.counts)

    # (a body that runs again counts in a copy, because its first run was counted)
    repeat: Callable[[Any], Any] = copy

    @property
    def token(self) -> Any:
        """The calls that each key still waits for. The choices of a body depend on them."""
        return tuple([max(0, (key.nth or 0) - self.counts.of(key)) for key in self.keys])

    def moved(self, copy: OpBinding) -> None:
        """Count the calls in a run of a compiled program. Its trace counted them in a copy."""
        assert isinstance(copy, Counting)
        for key, n in copy.counts.items():
            self.counts[key] = self.counts.get(key, -1) + n - copy.before.get(key, -1)


class Chooser(OpBinding):
    """Chooses among a scope's rules for one op type, by the place where an op is created."""

    rule: Rule = NoGradient()

    def __init__(self, op: Op, key: Any, places: Places, depth: int) -> None:
        super().__init__(op, self.rule, depth, key)
        self.places = places
        self.asked: list[Any] = [e for e in places.entries if is_predicate(e)]
        # the functions, modules and classes among the places, with the code of the functions
        owners = [e for e in places.entries if not (isinstance(e, str) or is_predicate(e))]
        self.owners: list[tuple[Any, Any]] = [(e, code_of(e)) for e in owners]
        self.outside: tuple[ChainStep, ...] = ()  # the steps around this thread or run
        self.paths: dict[str, None] | None = {}  # where ops were created
        self.known: dict[Path, list[Fit]] = {}  # by path, if the path alone decides
        self.in_run = False  # whether ops are created in the run of a graph, any number of times

    def copy(self) -> Chooser:
        return self

    repeat: Callable[[Any], Any] = copy

    def settled(self, in_run: bool = False) -> OpBinding:
        running = tuple(reversed([*self._running()]))
        made = Chooser(self.op, self.key, self.places, self.depth)
        made.outside = (*self.outside, *running)
        made.in_run, made.paths = in_run, self.paths
        return made if running or in_run else self

    @property
    def sources(self) -> list[Any]:
        return self.asked

    @property
    def token(self) -> Any:
        """The running owners. The choices of a compiled body depend on them besides the keys."""
        running = (*reversed(self.outside), *self._running())
        return tuple([tuple([matches(e, s) for e, _ in self.owners]) for s in running])

    def bind(self, op: Op, xs: Sequence[Tensor], site: Site | None = None) -> Any:
        if xs and not any(is_inexact(x.dtype) for x in xs):
            return None  # (integers have no gradient, and the call does not count)
        state = current()
        assert state is not None and state.overrides is not None
        place, n = self._chosen(op, xs, state)
        binding: OpBinding | None = state.overrides.get(Placed(self.key, place, self.depth))
        if binding is None:
            return None
        return binding.bind(op, xs, self._site(op, xs, n) if binding.at_site else None)

    def _chosen(self, op: Op, xs: Sequence[Tensor], state: State) -> tuple[Any, int]:
        """Return the place that decides for a new op, and how often it has decided before."""
        trails, overrides = [*_trails(state)], state.overrides or {}
        for trail in trails:  # the outermost first
            known = trail.expected and trail.expected.places_chosen
            if known and len(trail.places_chosen) < len(known):
                found = known[len(trail.places_chosen)]
                break
        else:
            fits, counts = self._fits(), overrides[_counting(self.depth)].counts
            self._refuse_shared(waiting(fits, counts), state.region)
            fit, n = pick(fits, counts, lambda n: self._site(op, xs, n))
            found = fit and fit.key.identity, n
        for trail in trails:
            trail.places_chosen.append(found)
        return found

    def _fits(self) -> list[Fit]:
        if self.outside or self.owners:
            return self.places.fits(self._chain())
        path = PATH.get()
        if path not in self.known:
            self.known[path] = self.places.fits(self._chain())
        return self.known[path]

    def _refuse_shared(self, key: at | None, region: Any) -> None:
        """Raise for a key that counts calls in a body that may run several times, or not at all."""
        if key is None:
            return
        kinds = ["function that waits for the run of its graph"] if self.in_run else []
        while region is not None:
            kinds += [f"body of a {region.kind} that is compiled"] if region.kind in SHARED else []
            region = region.outer
        if kinds:
            raise GradientError(
                f"{key!r}: its calls cannot be counted in the {kinds[0]}, because a call that is "
                "written there once may run any number of times. Name the place by a name_scope or "
                "a function inside of it."
            )

    def _site(self, op: Op, xs: Sequence[Tensor], n: int) -> Site:
        return site_of(self._chain(), op.type, n, xs, find_caller())

    # -- the chain ---------------------------------------------------------------------------------

    def _chain(self) -> list[ChainStep]:
        scopes = steps_of(PATH.get())
        if self.paths is not None:
            self.paths[scopes[-1].path] = None
        return [*self.outside, *reversed([*self._running()]), *scopes]

    def _running(self) -> Iterator[ChainStep]:
        """Yield the owners that run, innermost first."""
        frame = sys._getframe(1) if self.owners else None
        while frame is not None:
            for owner, code in self.owners:
                if (module := _runs(owner, code, frame)) is not None:
                    yield ChainStep((), module)
                    break
            frame = frame.f_back


def _trails(state: State) -> Iterator[Any]:
    """Yield the trails of the bodies that run, outermost first."""
    region: Any = state.region
    if region is not None:
        yield from _trails(region.around or State())
        if region.capture is not None:
            yield region.capture


def code_of(owner: Any) -> Any:
    """Return the code that runs while a function runs; None for a class or an object."""
    function = inspect.unwrap(owner)
    return getattr(function, "__code__", None) if inspect.isroutine(function) else None


def _runs(owner: Any, own: Any, frame: Any) -> Any:
    """Return the owner that runs in a frame: a function, or an object that is called."""
    code, function = frame.f_code, inspect.unwrap(owner)
    held = getattr(function, "__self__", None)
    if own is not code and (own is not None or code.co_name != "__call__"):
        return None
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if own is None:
        return first if matches(owner, ChainStep((), first)) else None
    if held is not None:
        return owner if first is held else None
    # (functions that one `def` made share their code, and differ in their closures)
    known = inspect.getclosurevars(function).nonlocals
    return owner if all(frame.f_locals.get(name) is known[name] for name in known) else None


# -- whole calls -----------------------------------------------------------------------------------


class WholeCallRule(Rule):
    """The value of a map for whole calls. Each call binds it to the inputs of the call."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.name: str = value if isinstance(value, str) else called(value)


class Hiding(RepeatedBinding):
    """A binding inside of a whole call. It raises, because its rule would never run."""

    def __init__(self, first: OpBinding, path: str) -> None:
        super().__init__(first)
        self.path = path

    def bind(self, op: Op, xs: Sequence[Tensor], site: Site | None = None) -> Any:
        raise PassedOverError(
            f"{op.type!r} ran inside of the call of {self.path!r}, whose rule applies to the whole "
            f"call. So the rule {self.rule.name!r} would never run. Name other places."
        )


def hiding(overrides: Any, path: str) -> Any:
    """Return the overrides inside of a whole call, where none may fire."""
    plain = (Chooser, Counting, Onlookers)
    return {k: b if isinstance(b, plain) else Hiding(b, path) for k, b in overrides.items()}


# -- keys ------------------------------------------------------------------------------------------


def op_types(key: Any) -> tuple[Any, ...]:
    """Return the op types that a key names. Raise for a place where regrad can find no op."""
    if not isinstance(key, at):
        return (key,)
    if key.what is None:
        whole = [e for e in entries(key.where) if not (isinstance(e, str) or is_predicate(e))]
        if whole or key.nth is not None:
            raise ArgumentError(
                f"{key!r} means whole calls as one op, which exist only for functions that a "
                "name_scope decorates: write @rg.name_scope('block1') above the function, and "
                "rg.at('block1'). Or name the op type for the key, rg.at(where, 'Relu')."
            )
        import_module("regrad.transforms.whole_calls")  # (it registers how `name_scope` calls)
        return (CALL,)
    for entry in key.named:
        routine = inspect.isroutine(inspect.unwrap(entry)) and not is_predicate(entry)
        if routine and code_of(entry) is None:
            raise ArgumentError(f"{key!r}: regrad cannot detect calls of C code, {entry!r:.60}")
    return entries(key.what)


def place_of(key: Any, op: Op, value: Any) -> at | None:
    """Return the place at which an entry of a map applies to an op type; None for everywhere."""
    if isinstance(key, at):
        return key if op is CALL else replace(key, what=op.type, _given=key)
    return at(what=op.type) if asks_site(value, op) else None


def asks_site(value: Any, op: Op | None) -> bool:
    """Return whether a rule takes the site of the op."""
    if isinstance(value, Replace):
        return "site" in parameters(value.forward) or asks_site(value.gradient, op)
    if isinstance(value, MapRule | type) or not callable(value):
        return False
    if "site" not in parameters(value)[1:]:
        return False
    return not (op and "site" in op.names())


def with_site(value: Any, site: Site | None) -> Any:
    """Return a rule that takes the site of its op, bound to a site."""
    if not isinstance(value, Replace):
        return partial(value, site=site)
    f, rule = value.forward, value.gradient
    return Replace(
        partial(f, site=site) if "site" in parameters(f) else f,
        partial(rule, site=site) if asks_site(rule, None) else rule,
    )


def choosers(bindings: Collection[OpBinding], around: Mapping[Any, Any]) -> dict[Any, OpBinding]:
    """Return the overrides for bindings under `Placed` keys, also for bindings without a place.

    `around` holds the overrides of the outer scopes.
    """
    made: dict[Any, OpBinding] = {}
    every = [(b.place, b.depth) for b in bindings if b.place is not None]
    for _, depth in every[:1]:
        made[_counting(depth)] = Counting([place for place, _ in every if place.counts], depth, {})
    by_type = groupby(sorted(bindings, key=lambda b: b.op_type), lambda b: b.key.op_type)
    for op_type, found in by_type:
        placed = {b.key: b for b in found}
        first, *_ = placed.values()
        places = [b.place for b in placed.values() if b.place is not None]
        if not places:
            first.key = op_type
            made[op_type] = first
            continue
        otherwise = Placed(op_type, None, first.depth)
        outer = {otherwise: around[op_type]} if op_type in around else {}
        made |= {**outer, **placed}
        chooser = Chooser(first.op, op_type, Places(places), first.depth)
        made[op_type] = chooser
        for binding in placed.values():
            binding.paths = chooser.paths
    return made


def elsewhere(binding: OpBinding) -> str:
    """Return where ops of a type were created, if their rule applied to none of them."""
    if binding.hits or binding.kind or not (binding.paths and binding.place):
        return ""
    named = binding.place.named
    near = [path for e in named if isinstance(e, str) for path in alike(e, binding.paths)]
    paths = [repr(path) if path else "no scope" for path in (near or list(binding.paths)[:3])]
    return f"{binding.shown} applied to no op; {binding.op_type!r} ran in {', '.join(paths)}"

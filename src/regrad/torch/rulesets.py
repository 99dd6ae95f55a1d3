"""Sets of rules: which torch functions run under a rule, and which ones regrad decomposes.

`gradient_override_map({"Relu": guided})` has three layers. From the most to the least stable:

* `Coverage`: the callables that the *keys* cover, independent of the rules. "Relu" is a family:
  `torch.relu`, `F.relu`, `Tensor.relu_`, … (`spelled`). Other functions compute a relu inside
  (`fused`, `bodies`). regrad computes a Coverage once per set of keys.
* `RuleSet`: the rules, and the functions that replace torch's functions (`calls_of`, `parts_of`).
  regrad builds a RuleSet once per set of rules, and caches it for scopes that a program opens
  repeatedly, as in a training loop. If keys name places, a `Plan` determines which rules apply in
  which modules. Each such place has a RuleSet (`room`), as if it were a separate scope.
* `Mode`: one class per RuleSet, and one instance per open scope (see `modes`).

Invariants:

* Scopes nest. torch calls the innermost mode first. This mode alone decides which callables to
  decompose or trace into, for the outer scopes too (`chain`). Then the modes of the outer scopes
  receive the parts.
* A function with a rule runs inside an `autograd.Function`, where autograd and modes are off. The
  ops inside it are neither differentiated nor counted a second time.
* A rule may be unable to cover everything that the op returns or depends on (an in-place write to
  an input, an argument that regrad does not know). Then the call raises; regrad never ignores it.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.overrides
from torch import is_grad_enabled

from regrad.core.foreign import ForeignRule, check_builtin
from regrad.core.placed import asks_site, with_site
from regrad.core.places import (
    INSTANCE,
    ChainStep,
    Places,
    at,
    entries,
    is_predicate,
    paths_around,
    rank_of,
)  # fmt: skip
from regrad.core.registry import find_op, meant_by, refuse_function
from regrad.core.replacing import Replace, gradient_of
from regrad.core.rule import identity_of
from regrad.errors import ArgumentError, UnknownOpError, near
from regrad.torch import functions, optypes, thresholds
from regrad.torch.apart import decompose, put
from regrad.torch.arguments import fill, refuse_layout, refuse_unknown
from regrad.torch.biases import family_for, in_order_of
from regrad.torch.call_cache import CallCache
from regrad.torch.callable_rules import CallableRule
from regrad.torch.calls import RuleCall, check_learned
from regrad.torch.choices import Choice, at_its_site, bind_call
from regrad.torch.composites import Fused, fitting, fused, is_other_op
from regrad.torch.enclosing import is_built_in, is_left, refuse_to_be_written
from regrad.torch.host import DisableTorchFunction
from regrad.torch.host.bodies import asks, bodies
from regrad.torch.host.running import custom_op
from regrad.torch.modes import DispatchTable, Mode, WatchedTable
from regrad.torch.nodes import Watch, gradients, name_of, tensors
from regrad.torch.open_scopes import AROUND, scope_of
from regrad.torch.parameters import ParameterMode
from regrad.torch.places import Modules
from regrad.torch.replacing import refuse_indices, refuse_undelivered
from regrad.torch.run_time import learned_here
from regrad.torch.subclasses import as_given
from regrad.torch.whole_calls import WholeRule, call_whole

Trail = tuple[tuple[Any, ChainStep], ...]  # the running modules that keys name (see `places`)
KEPT = 16  # the number of sets of rules in the cache; torch.compile can reuse code for these


class Nested:
    """An object of a scope that links to the same kind of object of the outer scope."""

    outer: Any = None

    def chain(self) -> Iterator[Any]:
        """Yield this object, then the objects of the outer scopes."""
        each = self
        while each is not None:
            yield each
            each = each.outer


class Coverage(Nested):
    """The op types and callables that some keys cover, in a scope inside other scopes.

    A Coverage does not depend on the rules. torch calls the mode of the innermost scope first, so
    this mode also decomposes and traces into callables for the outer scopes. It leaves a callable
    to an outer scope that has a rule for the callable itself.
    """

    def __init__(self, keys: Sequence[Any], keep: tuple[Any, ...], outer: Coverage | None) -> None:
        self.families: dict[Any, optypes.Family] = {key: family_of(key) for key in keys}
        self.functions: dict[Any, str] = {
            k: f.type for k, f in self.families.items() if functions.is_function(k)
        }
        keep = (*keep, *[op.overloadpacket for op in map(custom_op, keep) if op])
        self.keep: tuple[Any, ...] = (*keep, *self.functions)  # their forward passes run unchanged
        self.outer = outer
        self.types: frozenset[str] = frozenset(family.type for family in self.families.values())
        spelled: dict[Any, optypes.Spelling] = {}
        for key, family in self.families.items():
            spelled.update(optypes.spellings_of(family))
            if op := custom_op(key):
                spelled.update(dict.fromkeys((op, op.overloadpacket), optypes.Spelling(family, op)))
        # callables with their own op type: a rule for the whole callable prevents decomposition
        self.alone: set[Any] = {f for f, s in spelled.items() if not s.family.parameters}
        self.spelled: dict[Any, optypes.Spelling] = {
            f: s for f, s in spelled.items() if f not in keep
        }
        self.left: set[Any] = {*keep, *gradients()}  # callables whose nodes regrad does not check
        self.watch: Watch = Watch(self.types)
        table = fused()
        if any(thresholds.KEY in each.types for each in self.chain()):
            table = {**table, **thresholds.rows()}
        found = [(f, rows) for f, all in table.items() if (rows := self._concerned(f, all))]
        self.fused: dict[Any, list[Fused]] = dict(found)
        self.bodies: dict[Any, Callable[..., Any]] = {
            f: b for f, b in bodies().items() if not self._is_left(f)
        }

    def _concerned(self, function: Callable[..., Any], rows: Sequence[Fused]) -> list[Fused]:
        """Return the rows by which a callable decomposes; none if the callable has a rule."""
        every = [each for each in self.chain() if function not in each.keep]
        types = {op_type for each in every for op_type in each.types}
        # A function may be an overridden op itself. Then only the rows about that op apply (`add`
        # with an alpha), because its rule covers everything else that the function computes.
        own = {_type_of(function)} & types
        if any(function in each.alone for each in every):
            return []
        return [row for row in rows if row.contains & (types if row.compares else own or types)]

    def _is_left(self, function: Callable[..., Any]) -> bool:
        """Return whether regrad does not trace into a callable: it has a rule or is in `keep`."""
        return any(function in each.spelled or function in each.keep for each in self.chain())


@lru_cache(maxsize=64)
def coverage_of(keys: tuple[Any, ...], keep: tuple[Any, ...], outer: Coverage | None) -> Coverage:
    """Return the coverage of the keys, which all rules for these keys share."""
    return Coverage(keys, keep, outer)


class RuleSet(Nested):
    """Rules by op type, and the class of mode that applies them.

    torch.compile guards on the *class* of an open mode. So every set of rules has its own class,
    and equal sets share one class.
    """

    def __init__(
        self, plan: Plan, keep: tuple[Any, ...], outer: RuleSet | None = None,
        home: RuleSet | None = None, trail: Trail = (), reads_copies: bool = False,
    ) -> None:  # fmt: skip
        self.plan = plan
        # whether keys here or in outer scopes name parameters
        self.reads_copies: bool = reads_copies or (outer is not None and outer.reads_copies)
        self.outer = outer
        self.home: RuleSet = home or self  # the set that applies outside of all modules in keys
        self.given = keep
        rules = plan.rules_at([step for _, step in trail])
        self.coverage: Coverage = coverage_of(
            tuple(rules), keep, None if outer is None else outer.coverage
        )
        self.keep: tuple[Any, ...] = self.coverage.keep
        self.rules: dict[str, ForeignRule | Choice] = {
            self.coverage.families[key].type: rule for key, rule in rules.items()
        }
        # the op types whose rules in this scope replace values
        self.values: frozenset[str] = frozenset(t for t, r in self.rules.items() if r.replaces)
        # the parameters that rules in this scope and the outer scopes learn, without duplicates
        chosen = [
            r.held.values() if r.chooses else [r] for e in self.chain() for r in e.rules.values()
        ]
        chosen += [each.plan.whole.values() for each in self.chain()]
        learned = {id(x): x for held in chosen for rule in held for x in rule.learned}
        # the names that a program of torch.compile reports for the rules that it has built in
        self.reported: frozenset[str] = frozenset(self.rules) | {*map(str, plan.whole)}
        self.learned: tuple[torch.Tensor, ...] = tuple(learned.values())
        # (in `home` only) the sets that apply in modules; the modes for torch.compile, by number
        self.rooms: dict[Any, RuleSet] = {((), outer): self} if home is None else home.rooms
        self.modes: list[Mode] = [] if home is None else home.modes
        self.number: int = len(self.modes)
        self.rows: DispatchTable = DispatchTable(self)
        self.watched: WatchedTable = WatchedTable(self.rows)
        names = {"ruleset": self, "rows": self.rows, "modes": self.modes,
                 "watch": self.coverage.watch}  # fmt: skip
        kind: Any = ParameterMode if self.reads_copies else Mode
        self.mode: type[Mode] = type("Mode", (kind,), names)
        self.modes.append(self.mode(None))

    def room(self, trail: Trail, outer: RuleSet | None) -> RuleSet:
        """Return the rules that apply while these modules run, in a scope inside other scopes."""
        key = tuple([mark for mark, _ in trail]), outer
        found = self.rooms.get(key)
        if found is None:
            made = RuleSet(self.plan, self.given, outer, self.home, trail, self.reads_copies)
            found = self.rooms.setdefault(key, made)
        return found

    def calls_of(self, function: Callable[..., Any]) -> CallCache | None:
        """Return the calls of a callable under its rule; None if it has no rule here."""
        spelling = self.coverage.spelled.get(function)
        return spelling and CallCache(self, function, spelling, _override(self, function, spelling))

    def calls_of_functions(self) -> dict[Any, Callable[..., Any]]:
        """Make the calls of the autograd.Functions that keys here or around name, for programs."""
        pairs = [(each, f) for each in self.chain() for f in each.plan.functions]
        return {f: functions.as_node(each, f) for each, f in reversed(pairs)}

    def parts_of(self, function: Callable[..., Any]) -> Sequence[tuple[Any, Any]]:
        """Return the functions that replace a callable with several ops, each with a condition."""
        rows = self.coverage.fused.get(function, ())
        # (for arguments that regrad's op does not have, only the op's own rule needs the parts; a
        # rule that names the bias receives the whole call)
        fit = [r for r in rows if not (r.lent or r.biased) or self._fits(r)]
        return [(row.when, decompose(self, function, row)) for row in fit]

    def _fits(self, row: Fused) -> bool:
        """Return whether these parts serve the kind of rule that is innermost for an op type."""
        (op_type,) = row.contains
        rule = next(each.rules[op_type] for each in self.chain() if op_type in each.rules)
        return not rule.has_bias if row.biased else rule.takes_all

    def keys_of(self, types: set[str]) -> set[str]:
        """Return the keys of the rules for some op types, as text."""
        rules = [self.rules[t] for t in types if t in self.rules]
        every = [r.held.values() if isinstance(r, Choice) else [r] for r in rules]
        return {str(rule.key) for held in every for rule in held} | types - self.rules.keys()

    def counts(self, types: frozenset[str]) -> bool:
        """Return whether a key counts the calls of one of these op types."""
        return any(
            t in each.rules and each.rules[t].chooses for each in self.chain() for t in types
        )

    def replaces(self, types: frozenset[str]) -> bool:
        """Return whether the innermost rule for one of these op types replaces values."""
        found = (next((s for s in self.chain() if t in s.rules), None) for t in types)
        pairs = zip(types, found, strict=True)
        held = [s.keep for t, s in pairs if s is not None and s.rules[t].replaces]
        return any(not is_left(keep) for keep in held)

    def op(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable under its innermost rule; the callable itself if it has no rule."""
        call = function
        for each in self.chain():
            if (calls := each.rows[function].calls) is not None:
                scope, call = scope_of(each), calls.call
                if scope is not None and scope._here is not None:
                    call = partial(calls.run, scope._here)
                break
        parts = self.rows[function].parts
        if not parts:
            return call
        return lambda *args, **options: (fitting(parts, args, options) or call)(*args, **options)

    def count_ops(self, types: frozenset[str], xs: Sequence[torch.Tensor]) -> None:
        """Count ops of these types that ran inside a callable which needs no gradient."""
        for op_type in types:
            # the innermost rule for the op type is the rule that would have run
            each = next((s for s in self.chain() if op_type in s.rules), None)
            scope = None if each is None else scope_of(each)
            if each is not None and not is_built_in(op_type, each.keep) and scope is not None:
                shape = () if xs[0].is_nested else tuple(xs[0].shape)
                bind_call(scope, each.rules[op_type].key, op_type, shape)


def _type_of(function: Callable[..., Any]) -> str | None:
    spelling = optypes.spellings().get(function)
    return None if spelling is None else spelling.family.type


class Plan:
    """The rules of a map, and which of them apply while given modules run.

    Args:
        rules: The map, without nested maps (see `core.places.spread`).
        steps: The modules of the model; None without a model.
        order: 1 if the rules define only the first derivative.
    """

    def __init__(
        self, rules: Mapping[Any, Any], steps: Sequence[ChainStep] | None, order: int | None = None
    ) -> None:
        self.given = rules
        self.once: bool = order == 1
        self.rules: dict[str, dict[at, ForeignRule]] = {}  # by op type
        self.replaces: dict[Any, bool] = {}  # whether rules replace values, by the same keys
        self.named_as: dict[str, Any] = {}  # the key or `what` from which an op type was found
        self.names: dict[Any, str] = {}  # the names of the rules, by the keys in reports
        for key, value in rules.items():
            whats = entries(key.what) if isinstance(key, at) else (key,)
            for what in whats if whats != (None,) else ():
                self._add(key, what, value)
        # the names of the keys whose rules replace values, in a module or anywhere
        self.replaced: frozenset[str] = frozenset(
            op_type.rpartition(".")[2]
            for op_type, held in self.rules.items()
            if any(rule.replaces for rule in held.values())
        )
        whole = [key for key in rules if isinstance(key, at) and key.what is None]
        self.whole: dict[at, WholeRule] = {key: WholeRule(key, rules[key]) for key in whole}
        self.names |= {key: rule.name for key, rule in self.whole.items()}
        self.replaces |= {key: rule.replaces for key, rule in self.whole.items()}
        keys = {key: None for held in [*self.rules.values(), self.whole] for key in held}
        named = [e for key in keys for e in key.named]
        self.instances: set[int] = {id(e) for e in named if rank_of(e) == INSTANCE}
        self.names_modules: bool = bool(self.instances) or any(isinstance(e, str) for e in named)
        self.names_modules |= any(
            s.nth is not None and not s.counts for k in keys for s in k.selectors
        )
        self.places: Places = Places(keys, None if steps is None else [*map(self.bare, steps)])
        self._marks: dict[ChainStep, int | None] = {}
        self._numbers: dict[Any, int] = {}
        self._outermost: dict[at, list[ChainStep]] = {}
        self._apart: dict[type, bool] = {}

    def _add(self, key: Any, what: Any, value: Any) -> None:
        family = family_of(what)
        if isinstance(what, str) and optypes.find_family(what) is None:
            what = functions.find_named(what)
        made, place = (key, key) if isinstance(key, at) else (family.type, at(what=family.type))
        make = partial(_make_rule, made, what, family, self.once)
        asks = asks_site(value, family.op)
        rule = make(with_site(value, None) if asks else value)
        if asks:
            rule.at_site = lambda site: make(with_site(value, site))
        held = self.rules.setdefault(family.type, {})
        if place in held:
            raise ArgumentError(f"two keys of the map mean {family.type!r}; give one")
        held[place] = rule
        self.named_as.setdefault(family.type, what)
        self.names[rule.key], self.replaces[rule.key] = rule.name, rule.replaces

    def bare(self, step: ChainStep) -> ChainStep:
        """Return a step without a reference to its module, unless a key names that instance."""
        return step._replace(module=step.module if id(step.module) in self.instances else None)

    def mark(self, step: ChainStep) -> int | None:
        """Return a number that modules share if the same keys name them; None if no key does."""
        if step not in self._marks:
            found = self.places.mark(step)
            self._marks[step] = (
                self._numbers.setdefault(found, len(self._numbers)) if found else None
            )
        return self._marks[step]

    def tells_apart(self, module: Any) -> bool:
        """Return whether the keys distinguish between modules of one class."""
        kind = type(module)
        if kind not in self._apart:
            steps = [step for step in self.places.steps or () if step.kind is kind]
            whole = [[(f.order, f.key) for f in self.whole_at([step])] for step in steps]
            marks = {(self.mark(s), *fits) for s, fits in zip(steps, whole, strict=True)}
            is_one = any(rank_of(e) == INSTANCE and type(e) is kind for e in self.places.entries)
            self._apart[kind] = len(marks) > 1 or (is_one and not self.places.steps)
        return self._apart[kind]

    def named(self, key: at | None = None) -> list[ChainStep]:
        """Return the modules of the model that a key names; by default, that any key names."""
        if key is not None:
            return self.places.named.get(key.selectors, [])
        return [step for steps in self.places.named.values() for step in steps]

    def outermost(self, key: at) -> list[ChainStep]:
        """Return the modules that a key names, without modules inside another covered module."""
        if key not in self._outermost:
            asks = any(map(is_predicate, entries(key.where)))  # (the modules are not known yet)
            named = [] if key.what is None and asks else self.named(key)
            outer = {path for step in named for path in step.paths} if key.what is not None else ()
            inner = [s for s in named if any(a in outer for p in s.paths for a in paths_around(p))]
            self._outermost[key] = [step for step in named if step not in inner]
        return self._outermost[key]

    def rules_at(self, chain: Sequence[ChainStep]) -> dict[Any, ForeignRule | Choice]:
        """Return the rules that apply while these modules run, by the name of their op type."""
        found: dict[Any, ForeignRule | Choice] = {}
        for op_type, held in self.rules.items():
            fits = [(fit, held[fit.key]) for fit in self.places.fits(chain, held)]
            if any(fit.key.counts or fit.predicates for fit, _ in fits):
                found[self.named_as[op_type]] = Choice(op_type, dict(fits))
            elif fits:
                found[self.named_as[op_type]] = fits[0][1]
        return found

    call_whole: Any = staticmethod(call_whole)

    def whole_at(self, chain: Sequence[ChainStep]) -> dict[Any, WholeRule]:
        """Return the rules for the whole call of the last of these modules, by their fit."""
        fits = self.places.fits(chain, self.whole) if self.whole else ()
        return {fit: self.whole[fit.key] for fit in fits}

    def check_whole(self, modules: Modules) -> None:
        """Raise for rules that return no gradient for a parameter of a module in their key."""
        steps = {path: step for step in self.places.steps or () for path in step.paths}
        for known in modules.known.values():
            path = known.paths[0]
            chain = [steps[each] for each in [*paths_around(path), path] if each in steps]
            fits = self.whole_at(chain)
            for rule in [rule for fit, rule in fits.items() if not fit.predicates][:1]:
                rule.check(known.module, path)

    @cached_property
    def functions(self) -> dict[Any, bool]:
        """The autograd.Functions that keys name, and whether a rule for each has parameters."""
        return {
            key: any(rule.learned for rule in self.rules[op_type].values())
            for op_type, key in self.named_as.items()
            if functions.is_function(key)
        }


def _make_rule(key: Any, what: Any, family: optypes.Family, once: bool, value: Any) -> ForeignRule:
    """Return the rule of a key, for one op type that the key names."""
    if isinstance(value, Replace) and functions.is_function(what):
        functions.refuse_unreplaceable(what)
    elif isinstance(value, Replace) and not isinstance(what, str):
        refuse_undelivered(what, (), {})
    gradient = gradient_of(value)
    refuse_layout(gradient, family.type)
    check_learned(gradient)
    check_builtin(gradient, family.type, lambda k: family_of(k).type == family.type)
    seen = family_for(value, family)
    if seen.parameters:  # regrad has the names of the op's inputs
        rule = ForeignRule(value, seen.op)
    else:
        rule = CallableRule(value, seen.op, what)
    rule.family, rule.key, rule.once = seen, key, once
    if functions.is_function(what):
        functions.refuse_parameters(what, rule)
    return rule


_SETS: OrderedDict[Any, RuleSet] = OrderedDict()
_LOCK = threading.Lock()


def identity_of_map(rules: Mapping[Any, Any]) -> Any:
    """Return a value that equal maps share; it is valid while the rules are alive."""
    meant = [(key.meaning if isinstance(key, at) else key, rule) for key, rule in rules.items()]
    return frozenset([(key, identity_of(rule)) for key, rule in meant])


def rule_set(
    rules: Mapping[Any, Any], identity: Any, keep: tuple[Any, ...], outer: RuleSet | None = None,
    modules: Modules | None = None, order: int | None = None, reads_copies: bool = False,
) -> RuleSet:  # fmt: skip
    """Return the cached set of these rules; all scopes with the same rules share it."""
    key = identity, keep, outer, () if modules is None else modules.layout, order, reads_copies
    with _LOCK:
        found = _SETS.get(key)
        if found is None or not _mean(found.plan.given, rules, identity):
            plan = Plan(rules, modules and modules.steps, order)
            found = _SETS[key] = RuleSet(plan, keep, outer, reads_copies=reads_copies)
            if len(_SETS) > KEPT:
                _SETS.popitem(last=False)
        _SETS.move_to_end(key)
        return found


def _mean(known: Mapping[Any, Any], rules: Mapping[Any, Any], identity: Any) -> bool:
    """Return whether a cached map has an identity; the code of a function may have changed."""
    same = [*known] == [*rules] and all(map(operator.is_, known.values(), rules.values()))
    return same or identity_of_map(known) == identity


def family_of(key: Any) -> optypes.Family:
    """Return the family of callables that a key of a map covers."""
    if isinstance(key, str):
        family = optypes.find_family(key)
        if family is None:
            if (function := functions.find_named(key)) is not None:
                return optypes.make_family(function)
            op = find_op(key)  # raises for a name that regrad does not know
            raise UnknownOpError(
                f"there is no torch callable for the op type {op.type!r}."
                f"{near(op.type, optypes.families())} Give the torch callable itself as the key."
            )
        return family
    refuse_function(key)
    if functions.is_function(key) or custom_op(key):
        return optypes.make_family(custom_op(key) or key)
    if isinstance(key, type) or not callable(key):
        raise ArgumentError(
            f"a key is an op type such as 'Relu', a torch callable such as torch.relu, or a "
            f"torch.autograd.Function; got {key!r:.80}. For a module class, give the function that "
            f"it calls, or rg.at(the class) for its whole call.{meant_by(key)}"
        )
    if key in optypes.spellings():
        return optypes.spellings()[key].family
    if not dispatches_to_modes(key):
        raise UnknownOpError(
            f"{key!r:.80} is not a callable that torch dispatches to modes, so torch would skip a "
            "rule for it. Give a function of torch, torch.Tensor or torch.nn.functional; change "
            "your own function with regrad.torch.custom_grad." + meant_by(key)
        )
    return optypes.make_family(key)


def dispatches_to_modes(function: Callable[..., Any]) -> bool:
    """Return whether torch calls a mode before it runs this function."""
    if function in torch.overrides.get_testing_overrides():
        return True
    if (asked := asks(function)) is not None:
        return asked
    name = getattr(function, "__name__", "")
    return any(getattr(place, name, None) is function for place in optypes.PLACES)


# -- calls under a rule ----------------------------------------------------------------------------


def _override(
    ruleset: RuleSet, function: Callable[..., Any], spelling: optypes.Spelling
) -> Callable[..., Any]:
    """Return the function that replaces one torch callable."""
    key = spelling.family.type

    def overridden(*args: Any, **options: Any) -> Any:
        scope = scope_of(ruleset)
        held: Any = ruleset.rules[key]
        if is_other_op(key, args, options) or not has_tensors(args, options):
            if held.replaces:
                refuse_undelivered(function, args, options)
            return function(*args, **options)
        refuse_to_be_written(repr(key))
        if held.chooses:
            held = held.pick(scope, [*tensors((args, options))])
            if held is None:
                op = function if ruleset.outer is None else ruleset.outer.op(function)
                if op is function and scope is not None:
                    scope._here.note(name_of(function), 1)
                return op(*args, **options)
        if held.at_site is not None and scope is not None:
            held = at_its_site(held, scope, key, [*tensors((args, options))])
        family = in_order_of(function, held.family) if held.has_bias else spelling.family
        # with the modes off, since the ops inside regrad's autograd.Function are not the user's
        with DisableTorchFunction():
            if not is_grad_enabled() and is_built_in(key, ruleset.keep):
                return function(*args, **options)
            changes, args, options = spelling.out_of_place(args, options)
            if held.replaces:
                refuse_undelivered(function, args, options)
            filled = fill(family, function, args, options)
            xs = [v for v in filled.values if isinstance(v, torch.Tensor)]
            shape = tuple(xs[0].shape) if xs else ()
            if scope is not None:
                hit = bind_call(scope, held.key, key, shape)
            else:  # torch.compile runs the backward pass of the program after the scope
                place = AROUND.get().place
                hit = None if place is None else place.hits.get(key)
            rule = held.for_call(filled)
            if rule.takes_all:
                refuse_unknown(family, args, options)
            layout = None if rule.op.flat else filled.layout
            forward = filled.bind(spelling.function)
            call = RuleCall(rule, filled.values, layout, filled.attrs, forward, hit)
            call.once, call.materializes = held.once, scope is None or scope._materialize
            if rule.learned or AROUND.get().place is not None:
                xs += learned_here(rule, xs[0])
            target = (args[0] if args else xs[0]) if changes else None
            at = [x is target for x in xs].index(True) if changes else -1
            if changes and (at in call.kept or rule.asks_builtin or rule.replaces or call.once):
                xs[at] = xs[at].clone()  # the rule needs the value from before the write
            y = call(*xs)
            if not (family.parameters or held.is_derivative):
                refuse_indices(function, xs, y)
            return as_given(y, xs) if target is None else put(target, y, function)

    overridden.ruleset, overridden.op_types = ruleset, frozenset({key})  # pyright: ignore
    return overridden


def has_tensors(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a call has tensors among its arguments (and not proxies of torch.fx)."""
    if args and isinstance(args[0], torch.Tensor):
        return True
    return any(True for _ in tensors((args, options)))

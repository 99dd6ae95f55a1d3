"""Where a rule applies: the keys `at(where, what, nth)`, and which key wins at a place.

Modules (named scopes, functions) call each other. The modules that run at a moment are the *chain*,
outermost first. Each is a `ChainStep`. A key selects steps by its `where`, and applies to the calls
that run while a selected step runs. So the chain alone decides which rules apply, except for keys
that count calls or have a predicate. `Places.fits` returns the keys that match the chain, the best
first. `pick` returns the key for one call.

Invariants:

* Among the keys that fit, the first criterion is the rank (an instance, a path, a class, a
  predicate, everywhere). Then the key with the innermost selected step wins, and then a key that
  names the n-th call. If two keys are still equal, regrad raises: dict order never matters.
* This module does not depend on a library. Each library builds its chain, and interprets `what`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cache, cached_property
from inspect import isroutine, signature
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from regrad.core.rule import identity_of
from regrad.errors import ArgumentError, kind, near

INSTANCE, PATH, CLASS, PREDICATE, EVERYWHERE = range(5)  # the ranks, best first


@dataclass(frozen=True, repr=False)
class at:
    """A key of a map of overrides that limits where its rule applies.

    Args:
        where: The modules (or named scopes) to select: a pattern over their paths (`*` matches
            one step, `**` any number including none; `layers.[3-5]` works as for files), a class,
            a module itself, or a predicate: a function whose one parameter is called `site` (see
            `Site`). A tuple selects by any of its entries. None is everywhere.
        what: An op type, or anything else that the map takes as a key. A tuple is any of its
            entries. The rule applies to the calls that run while a selected module runs, its
            submodules included. None is the call of each selected module itself, as one op.
        nth: The index of one module or call, from 0. If the key selects whole modules, it counts
            these modules (-1 is the last). Otherwise it counts the calls that the key fits, in each
            outermost call of the model.
        parameter: The parameters of the model whose gradient the rule changes: a pattern over their
            paths (the paths of modules, and the name), a parameter itself, or a tuple of these. The
            key then has no other argument.

    The value is a rule, or a map that applies there: `{rg.at("encoder"): {"Relu": rule}}`. If
    several keys fit a call, a module wins over a path, a path over a class, a class over a
    predicate, and a predicate over an op type alone. Next, the key whose module is innermost wins,
    and then a key with `nth` over one without. Two keys that select one module for a call raise.

    The rule of a parameter runs once for each backward pass. `dy` is the sum of the gradients of
    all uses of the parameter in the scope, and `x` is its value. `builtin` is the identity. The
    rule of the innermost scope applies. Two keys with different rules for one parameter raise.

    Raises:
        ArgumentError: an argument of the wrong kind; neither `where` nor `what` nor `parameter`;
            `parameter` together with another argument.

    Source: the parameters' hooks of PyTorch (`Tensor.register_hook`), which see the same sum.

    >>> import regrad as rg
    >>> rg.at("layers.*", "Relu")
    rg.at('layers.*', 'Relu')
    >>> rg.at("layers.*", "Relu") == rg.at("layers.*", "Relu")
    True
    >>> w = rg.Variable([1.0, 2.0], name="w")
    >>> with rg.gradient_override_map({rg.at(parameter="w"): lambda dy: dy / 10}):
    ...     rg.variable_grads(lambda: (w * w + w).sum())[1]["w"].print()
    Tensor
        [0.3, 0.5]
    """

    closes_over: ClassVar[tuple[str, ...]] = ("where", "what", "parameter", "_within")

    where: Any = None
    what: Any = None
    nth: int | None = None
    parameter: Any = field(default=None, kw_only=True, compare=False)  # (arrays have no hash)
    _selected: tuple[Any, ...] = field(default=(), init=False)  # the same, as values with a hash
    _within: tuple[at, ...] = field(default=(), kw_only=True)  # outer selectors, outermost first
    # The key of which this one is an entry.
    _given: at | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if self.parameter is not None:
            if (self.where, self.what, self.nth, self._within) != (None, None, None, ()):
                raise ArgumentError(
                    f"{self!r:.120}: a key for parameters has no other argument, and is not in the "
                    "map of a place. Name the parameters by their paths in the model: "
                    "at(parameter='encoder.*.weight')"
                )
            selected = [e if isinstance(e, str) else id(e) for e in entries(self.parameter)]
            object.__setattr__(self, "_selected", tuple(selected))
            return
        if self.where is None and self.what is None:
            raise ArgumentError(
                "at() names no place and no op. Pass a path, a class or a module, an op type, or "
                "both: at('encoder.*', 'Relu')"
            )
        if self.nth is not None and type(self.nth) is not int:
            raise ArgumentError(f"at: nth expected an int such as 0, got {kind(self.nth)}")
        try:
            hash((self.where, self.what))
        except TypeError:
            raise ArgumentError(
                f"{self!r:.120}: expected a valid where and what (several in a tuple), "
                f"got {kind(self.where)} and {kind(self.what)}"
            ) from None

    def __repr__(self) -> str:
        if self.parameter is not None:
            return f"rg.at(parameter={_shown(self.parameter)})"
        given = [_shown(self.where)] if self.where is not None or self.nth is not None else []
        given += [_shown(self.what)] if given and self.what is not None else []
        given += [f"what={_shown(self.what)}"] if not given else []
        given += [f"nth={self.nth}"] if self.nth is not None else []
        return " > ".join([*map(repr, self._within), f"rg.at({', '.join(given)})"])

    @property
    def selectors(self) -> tuple[at, ...]:
        """The places that must all be in the chain. The last one ranks the key."""
        return (*self._within, self) if self.where is not None else self._within

    @property
    def named(self) -> list[Any]:
        """The entries of all its places: paths, classes, modules, predicates."""
        return [entry for place in self.selectors for entry in entries(place.where)]

    @property
    def identity(self) -> Any:
        """The value that equal places share, even if their predicates are new function objects."""
        means = lambda entry: identity_of(entry) if is_predicate(entry) else entry  # noqa: E731
        places = [(s.nth, *map(means, entries(s.where))) for s in self.selectors]
        return *places, self.nth

    @property
    def counts(self) -> bool:
        """Return whether `nth` counts calls (it counts modules in a key for whole modules)."""
        return self.nth is not None and self.what is not None

    def entries(self) -> list[at]:
        """Return a key for each entry of `what`. These keys count calls together."""
        return [replace(self, what=what, _given=self) for what in entries(self.what)]

    @property
    def meaning(self) -> Any:
        """The value that equal keys share: the identity of the place, and the op types."""
        return at, self.identity, self.what, self._selected

    @cached_property
    def counted(self) -> Any:
        """The key under which `Counts` counts the calls of all entries of a key."""
        return (self._given or self).meaning

    def inside(self, outer: at | None) -> at:
        """Return the key that applies where both do."""
        if outer is None:
            return self
        if self.parameter is not None or outer.parameter is not None:
            return replace(self, _within=(outer,))  # raises
        if self.where is None and outer.nth is None:
            return replace(self, where=outer.where, _within=outer._within)
        return replace(self, _within=(*outer._within, replace(outer, _within=())))

    def of_modules(self) -> at:
        """Return a key whose `what` is a class of modules as the key for their whole calls."""
        outer = None if self.where is None else at(self.where, _within=self._within)
        return at(self.what, nth=self.nth).inside(outer)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))}{',' * (len(value) == 1)})"
    if value is None or isinstance(value, str):
        return repr(value)
    name = getattr(value, "__qualname__", None)
    return name or f"<a {type(value).__qualname__}>"


def refuse_none(rules: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a map; raise if a key is None, which `at` uses for whole calls."""
    if None in rules:
        raise ArgumentError(
            "the key None is neither an op type such as 'Relu', nor a function, nor a place"
        )
    return rules


def spread(
    rules: Mapping[Any, Any],
    is_module: Callable[[Any], bool] = lambda what: False,
    outer: at | None = None,
) -> dict[Any, Any]:
    """Return a map without nested maps. The keys that name a place are instances of `at`.

    Args:
        is_module: Returns whether a `what` is a class of modules, so that it selects whole modules.

    Raises:
        ArgumentError: a nested map has a key that is not a place, or two keys are equal.
    """
    found: dict[Any, Any] = {}
    for key, value in rules.items():
        made = key
        if outer is not None:
            made = (key if isinstance(key, at) else at(what=key)).inside(outer)
        inner = {made: value}
        if isinstance(value, Mapping):
            if not isinstance(key, at) or key.what is not None or key.parameter is not None:
                raise ArgumentError(
                    f"the key {key!r:.80} has a map as its rule. A map is for a place, without an "
                    "op: {rg.at('encoder'): {'Relu': rule}}"
                )
            inner = spread(refuse_none(value), is_module, made)
        for each, rule in inner.items():
            if isinstance(each, at) and all(map(is_module, entries(each.what))):
                each = each.of_modules()
            plain = isinstance(each, at) and not (each.selectors or each.parameter is not None)
            plain = plain and each.nth is None
            each = each.what if plain else each
            if isinstance(each, at) and each.counts and (each.nth or 0) < 0:
                raise ArgumentError(f"{each!r}: nth counts calls from 0; the last call is unknown")
            if each in found:
                raise ArgumentError(f"two keys of the map mean {each!r:.80}; pass only one")
            found[each] = rule
    return found


# -- a call, and the modules that run --------------------------------------------------------------


class ChainStep(NamedTuple):
    """A running module, named scope or function."""

    paths: tuple[str, ...]  # its names, starting from the name of the model or outermost scope
    module: Any = None  # (None for a named scope)
    kind: type | None = None  # the class, if it differs from the class of `module`

    @property
    def path(self) -> str:
        """The first of its names."""
        return self.paths[0] if self.paths else ""


@dataclass(frozen=True)
class Site:
    """A call, as the argument of a predicate of `at` or of a rule that takes its `site`.

    `nth` counts the earlier calls that the key was tested on. `module` and `module_class` are
    the running module's (None if unknown). `file` and `line` are a line of the program.

    >>> import regrad as rg
    >>> def first(site):
    ...     return site.nth == 0
    >>> with rg.gradient_override_map({rg.at(first, "Sin"): lambda dy: dy * 7}):
    ...     rg.grad(lambda x: rg.sin(rg.sin(x)))(0.0).item()
    7.0
    """

    path: str
    op_type: str | None
    nth: int = 0
    shapes: tuple[Any, ...] = ()
    dtypes: tuple[Any, ...] = ()
    module: Any = field(default=None, repr=False)
    module_class: type | None = None
    file: str = ""
    line: int = 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a Site has no {name!r}. It has {', '.join(self.__dict__)}")


def site_of(
    chain: Sequence[ChainStep], op_type: str | None, nth: int, xs: Iterable[Any], where: str
) -> Site:
    """Return the site of a call of an op on some arrays, at a line such as `model.py:12`."""
    step, specs = chain[-1] if chain else ChainStep(()), [(tuple(x.shape), x.dtype) for x in xs]
    file, _, line = where.rpartition(":")
    return Site(
        step.path, op_type, nth, tuple([s for s, _ in specs]), tuple([d for _, d in specs]),
        step.module, step.kind or (None if step.module is None else type(step.module)),
        file, int(line or 0),
    )  # fmt: skip


def steps_of(scopes: Sequence[str]) -> list[ChainStep]:
    """Return the chain of the open named scopes, beginning with the code outside of them."""
    return [ChainStep((".".join(scopes[:i]),)) for i in range(len(scopes) + 1)]


class Counts(dict[Any, int]):
    """Counts how often each key occurred."""

    def meet(self, what: Any) -> int:
        """Return how often it occurred before, and count this occurrence."""
        n = self[what] = self.get(what, -1) + 1
        return n

    def of(self, key: at) -> int:
        """Return the index of the last call that a key matched; -1 if it matched none."""
        return self.get(key.counted, -1)


def waiting(fits: Iterable[Fit], counts: Counts) -> at | None:
    """Return a key that fits and whose n-th call is still to come, or None."""
    keys = [fit.key for fit in fits if fit.key.counts]
    return next((key for key in keys if counts.of(key) < (key.nth or 0)), None)


# -- which steps a place selects -------------------------------------------------------------------


def entries(where: Any) -> tuple[Any, ...]:
    """Return the alternatives of a `where`."""
    return where if isinstance(where, tuple) else (where,)


def rank_of(entry: Any) -> int:
    """Return the rank of one alternative."""
    if isinstance(entry, str):
        return PATH
    if isinstance(entry, type):
        return CLASS
    return PREDICATE if is_predicate(entry) else INSTANCE


def is_predicate(entry: Any) -> bool:
    """Return whether an entry is a function of a `site`."""
    if isinstance(entry, type) or not isroutine(entry):
        return False
    try:
        return list(signature(entry).parameters) == ["site"]
    except (TypeError, ValueError):  # (a C function)
        return False


def matches(entry: Any, step: ChainStep) -> bool:
    """Return whether an alternative that is not a predicate selects a step."""
    if isinstance(entry, str):
        fits = _pattern(entry).fullmatch
        return any(fits(_closed(path)) for path in step.paths)
    if isinstance(entry, type):
        return isinstance(step.module, entry) or (
            step.kind is not None and issubclass(step.kind, entry)
        )
    return step.module is entry


def _closed(path: str) -> str:
    """Return a path in which each step ends in a dot (a closed path)."""
    return path.replace("/", ".") + "." if path else ""


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    """Return a pattern over paths as a regular expression over closed paths."""
    steps = re.split(r"[./]", pattern) if pattern else []
    return re.compile("".join(map(_step, steps)))


def _step(step: str) -> str:
    """Return one step of a pattern as a regular expression. `*` and `?` do not match a dot."""
    if step == "**":
        return r"(?:[^.]+\.)*"
    return translate(step)[len("(?s:") : -len(r")\Z")].replace(".", "[^.]") + r"\."


def paths_around(path: str) -> list[str]:
    """Return the paths of the modules around one, outermost first."""
    return [path[:i] for i in [0, *[i for i, c in enumerate(path) if c == "."]]] if path else []


class Fit(NamedTuple):
    """A key that matches a chain."""

    order: tuple[int, int]  # the rank, and the distance of the selected step from the innermost one
    key: at
    step: ChainStep | None  # the selected step
    predicates: tuple[Any, ...]  # one entry of each of these must also accept the call


class Places:
    """The keys of a map that name places, prepared for lookup by chain.

    Args:
        keys: Instances of `at`. None has a class of modules as its `what`: see `at.of_modules`.
        steps: The modules of the model, in order; None if they are not known in advance.

    Raises:
        ArgumentError: a pattern, a class or a module names none of the steps, or `nth` none.
    """

    def __init__(self, keys: Iterable[at], steps: Sequence[ChainStep] | None = None) -> None:
        self.keys: tuple[at, ...] = tuple(keys)
        self.entries: list[Any] = [entry for key in self.keys for entry in key.named]
        self.steps = steps
        self._exact: dict[str, list[ChainStep]] = {}
        for step in steps or ():
            for path in step.paths:
                self._exact.setdefault(_closed(path), []).append(step)
        # the modules of the model that a key's place names, by the place and its outer places
        self.named: dict[tuple[at, ...], list[ChainStep]] = {}
        for key in self.keys:
            for n in range(len(key.selectors)):
                self._name(key.selectors[: n + 1])

    def _name(self, selectors: tuple[at, ...]) -> None:
        """Find the modules that the last place names inside of the other places."""
        selector, counts_modules = selectors[-1], not selectors[-1].counts
        if self.steps is None:
            if selector.nth is not None and counts_modules:
                raise ArgumentError(f"{selector!r}: nth counts the modules of a model; pass model=")
            return
        if selectors in self.named:
            return
        named = {id(step): step for entry in entries(selector.where) for step in self._by(entry)}
        around = [self.named[selectors[: n + 1]] for n in range(len(selectors) - 1)]
        found = [s for s in self.steps if id(s) in named and all(_lies_in(s, a) for a in around)]
        if not found and not any(map(is_predicate, entries(selector.where))):
            raise ArgumentError(f"{' > '.join(map(repr, selectors))} names no module of the model.")
        if selector.nth is not None and counts_modules:
            if not -len(found) <= selector.nth < len(found):
                raise ArgumentError(f"{selector!r}: there are {len(found)} such modules.")
            found = [found[selector.nth]]
        self.named[selectors] = found

    def _by(self, entry: Any) -> list[ChainStep]:
        """Return the modules of the model that an alternative names: all for a predicate."""
        assert self.steps is not None
        if is_predicate(entry):
            return list(self.steps)
        exact = isinstance(entry, str) and self._exact.get(_closed(entry))
        if found := exact or [step for step in self.steps if matches(entry, step)]:
            return found
        raise ArgumentError(_names_nothing(entry, self.steps))

    def _rank(self, selectors: tuple[at, ...], step: ChainStep) -> int | None:
        """Return the best rank at which the last place selects a step, or None."""
        selector = selectors[-1]
        if selector.nth is not None and not selector.counts and step != self.named[selectors][0]:
            return None
        plain = [e for e in entries(selector.where) if not is_predicate(e) and matches(e, step)]
        return min(map(rank_of, plain), default=None)

    def idle(
        self,
        named: Iterable[ChainStep],
        ran: Container[str],
        is_called: Callable[[ChainStep], bool],
    ) -> list[ChainStep]:
        """Return the modules that never ran, although the module around them did.

        Args:
            named: Modules of the model.
            ran: The paths of the modules that ran.
            is_called: Returns whether a program calls a module. (Some only contain others.)
        """
        idle = [step for step in named if not any(path in ran for path in step.paths)]
        if not idle:
            return []
        called = {path for step in self.steps or () if is_called(step) for path in step.paths}
        around = [[path for path in paths_around(s.path) if path in called] for s in idle]
        return [s for s, outer in zip(idle, around, strict=True) if outer and outer[-1] in ran]

    def mark(self, step: ChainStep) -> tuple[Any, ...]:
        """Return the places that select a step, with the rank; steps with equal marks are alike.

        (Places of keys for whole modules are not included, as they are not found in a chain.)
        """
        ends = [(key, n + 1) for key in self.keys for n in range(len(key.selectors))]
        inner = {key.selectors[:n]: None for key, n in ends if key.what or key.selectors[n:]}
        ranks = [(places, self._rank(places, step)) for places in inner]
        return tuple([(places, rank) for places, rank in ranks if rank is not None])

    def fit(self, key: at, chain: Sequence[ChainStep]) -> Fit | None:
        """Return how a key matches a chain; None if it does not.

        For a key of whole modules the last step of the chain is the called module.
        """
        order, selected, predicates = (EVERYWHERE, 0), None, ()
        for n, selector in enumerate(key.selectors):
            whole = selector is key and key.what is None
            for i, step in enumerate(reversed(chain[-1:] if whole else chain)):
                if (rank := self._rank(key.selectors[: n + 1], step)) is not None:
                    order, selected = (rank, i), step
                    break
            else:
                asked = tuple(filter(is_predicate, entries(selector.where)))
                if not asked:
                    return None
                order, selected = (PREDICATE, 0), chain[-1] if chain else None
                predicates = (*predicates, asked)
        return Fit(order, key, selected, predicates)

    def fits(self, chain: Sequence[ChainStep], keys: Iterable[at] | None = None) -> list[Fit]:
        """Return how keys (all by default) match a chain, the best first.

        Raises:
            ArgumentError: two of them select the same module for all calls.
        """
        found = [fit for key in keys or self.keys if (fit := self.fit(key, chain)) is not None]
        found.sort(key=lambda fit: (fit.order, not fit.key.counts))
        always = [fit for fit in found if not (fit.predicates or fit.key.counts)]
        for _, tied in groupby(always, lambda fit: fit.order):
            _refuse_two(list(tied))
        return found


def pick(
    fits: Sequence[Fit], counts: Counts, site: Callable[[int], Site]
) -> tuple[Fit | None, int]:
    """Return the fit whose rule a call gets (or None), and the index of the call for this key.

    All fits are for one op. Every key that counts calls counts this one if it fits.

    Args:
        site: Returns the site of the call for an index.

    Raises:
        ArgumentError: two keys select the same module for the call.
    """
    held: list[tuple[Fit, int]] = []
    for fit in fits:
        if fit.predicates:
            here = site(counts.meet((fit.key.counted, "asked")))
            if not all(any(ask(here) for ask in asked) for asked in fit.predicates):
                continue
        n = counts.meet(fit.key.counted)
        if not fit.key.counts or fit.key.nth == n:
            held.append((fit, n))
    if not held:
        return None, 0
    _refuse_two([fit for fit, _ in held if fit.order == held[0][0].order])
    return held[0]


def _refuse_two(tied: Sequence[Fit]) -> None:
    """Raise for two fits of one rank and step, unless the first alone counts calls."""
    first, *others = tied
    for other in others:
        if first.key.counts == other.key.counts:
            path = "" if first.step is None else f" {first.step.path!r}"
            raise ArgumentError(
                f"two keys of the map select the same place{path}, {first.key!r} and "
                f"{other.key!r}, and neither is more specific. Pass one, or name the module itself"
            )


def _lies_in(step: ChainStep, around: Sequence[ChainStep]) -> bool:
    """Return whether a module is in a list of modules, or inside one of them."""
    paths = [_closed(path) for outer in around for path in outer.paths]
    return any(_closed(path).startswith(outer) for path in step.paths for outer in paths)


def _names_nothing(entry: Any, steps: Sequence[ChainStep]) -> str:
    """Return the message for a place that is not in the model."""
    if not isinstance(entry, str):
        classes = {type(s.module).__name__: None for s in steps if s.module is not None}
        hint = near(_shown(entry), classes)
        if isroutine(entry):  # (a predicate would have the parameter `site`)
            hint = (
                " A predicate has one parameter, which must be called `site`. For the calls of a "
                f"function that is a key, write at(what={_shown(entry)})."
            )
        why = "is of that class" if isinstance(entry, type) else "is this object"
        return f"at({_shown(entry)}): no module of the model {why}.{hint}"
    paths = [path for step in steps for path in step.paths]
    return f"at({entry!r}) names no module of the model.{near_paths(entry, paths)}"


def near_paths(entry: str, paths: Iterable[str]) -> str:
    """Return a hint that lists similar paths of modules for a path or pattern."""
    known = [path for path in paths if path]
    shown = f" It has {', '.join(map(repr, known[:5]))}{', …' * (len(known) > 5)}; * is any name."
    hint = near(entry, known) or _near_last(entry, known)
    return hint or (
        shown if known else " No part of it has a path; regrad takes paths from model=model."
    )


def _near_last(pattern: str, paths: Sequence[str]) -> str:
    """Return a hint that lists paths that end like the pattern."""
    ends = [path for path in paths if f".{path}".endswith("." + pattern.lstrip("*.")) and path]
    return f" Did you mean {' or '.join(map(repr, ends[:3]))}?" if ends else ""

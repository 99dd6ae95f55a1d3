"""Rules that a scope binds to op types. Hits count their calls by source line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from regrad.core.callers import find_caller
from regrad.core.name_scopes import PATH
from regrad.core.places import Site, at
from regrad.core.registry import Op
from regrad.core.reports import Binding, Hit
from regrad.core.rule import Cotangent, NoGradient, Rule, RuleFunction, RuleLike
from regrad.core.tape import Record
from regrad.core.tensor import Tensor


class WrappedRule(RuleLike):
    """A rule that wraps the pull of another rule."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self.function: RuleFunction | None = rule.function
        self.watches: bool = rule.watches
        self.flat: bool = rule.flat
        self.constant: bool = rule.constant
        self.holomorphic: bool = rule.holomorphic
        self.carries: Callable[..., Any] = rule.carries
        self.unless: Callable[..., Any] | None = rule.unless

    @property
    def bare(self) -> Rule:
        return self.rule.bare


class CountedRule(WrappedRule):
    """A rule that counts its runs in a hit."""

    def __init__(self, rule: Rule, hit: Hit, key: Any, once: bool = False) -> None:
        super().__init__(rule)
        self.hit = hit
        self.once = once
        self.key = key  # the key of its binding in the overrides of a state

    def under(self, scopes: Mapping[Any, OpBinding]) -> Rule:
        """Return the same rule for an op that runs again, counted in the scope that is open now."""
        binding = scopes.get(self.key)
        if binding is None or binding.rule is not self.rule or binding.once != self.once:
            return self
        return binding.counted_at(self.hit.where, self.hit.path)

    def pull(
        self, record: Record, dy: Cotangent, wanted: Sequence[int]
    ) -> Iterable[tuple[int, Any]]:
        self.hit.pulled()
        return self.rule.pull(record, dy, wanted)


class OpBinding(Binding):
    """A rule that is bound to an op type of regrad.

    `key` is its key in the overrides of a state. `place` limits where the rule applies (None:
    everywhere). `at_site` makes the rule for an op's site, if the map's rule takes `site`.
    """

    token: Any = None  # further data on which the rules of a compiled body depend
    paths: dict[str, None] | None = None  # where ops were created, if the rule is limited to places

    def __init__(
        self, op: Op, rule: Rule, depth: int, key: Any = None,
        at_site: Callable[[Site], Rule] | None = None, place: at | None = None,
    ) -> None:  # fmt: skip
        named = place is not None and (place.selectors or place.nth is not None)
        super().__init__(op.type, rule.name, place if named else None)
        self.op = op
        self.rule = rule
        self.replaces: bool = getattr(rule, "forward", None) is not None  # replaces op values
        self.depth = depth  # the number of enclosing scopes; the innermost scope wins
        self.key: Any = key or op.type
        self.at_site = at_site
        self.place = place
        self.counted: dict[Any, CountedRule] = {}  # by line and path

    def bind(self, op: Op, xs: Sequence[Tensor], site: Site | None = None) -> Rule:
        """Return the rule for a new op on `xs`, counted at its caller's line."""
        counted = self.counted_at(find_caller(), ".".join(PATH.get()))
        counted.hit.add(xs[0]._data.shape if xs else ())
        if self.at_site is None or site is None:
            return counted
        return CountedRule(self.at_site(site), counted.hit, self.key, self.once)

    def counted_at(self, where: str, path: str) -> CountedRule:
        """Return the rule that counts at a source line, in a scope."""
        if (where, path) not in self.counted:
            hit = self.hit_at(where, path)
            self.counted[where, path] = CountedRule(self.rule, hit, self.key, self.once)
        return self.counted[where, path]

    @property
    def sources(self) -> Sequence[Any]:
        """Return the functions of the rule, or the rule itself."""
        functions = getattr(self.rule, "functions", {}).values()
        return [self.rule.function or tuple(functions) or self.rule]

    def copy(self) -> OpBinding:
        """Return the same rule with its own hits, for a program while it is traced."""
        made = OpBinding(self.op, self.rule, self.depth, self.key, self.at_site)
        made.once = self.once
        return made

    def absorb(self, hit: Hit, count: int, ran: int) -> None:
        """Add the counts of a compiled program's run. `hit` counted the calls in its trace."""
        mine = self.hit_at(hit.where, hit.path)
        mine.count += count
        mine.ran += ran
        mine.sizes.update(hit.sizes)

    def moved(self, copy: OpBinding) -> None:
        """Record that a compiled program ran, whose trace used the copy."""

    def settled(self, in_run: bool = False) -> OpBinding:
        """Return the same rule for ops that are created elsewhere, or in the run of a graph."""
        return self

    def repeat(self) -> OpBinding:
        """Return the same rule for ops that are created again: it counts only their runs."""
        return RepeatedBinding(self)


Overrides = Mapping[Any, OpBinding] | None  # by op type; see `State` for other keys


class RepeatedBinding(OpBinding):
    """A binding for ops that are created again. Their first creation was counted."""

    def __init__(self, first: OpBinding) -> None:
        super().__init__(first.op, first.rule, first.depth, first.key, first.at_site)
        self.once: bool = first.once
        self.counted_at: Callable[..., Any] = first.counted_at
        self.hit_at: Callable[..., Any] = first.hit_at

    def bind(self, op: Op, xs: Sequence[Tensor], site: Site | None = None) -> Rule:
        counted: Any = super().bind(op, xs, site)
        counted.hit.count -= 1
        return counted

    def repeat(self) -> OpBinding:
        return self


class Onlookers(OpBinding):
    """Counts ops that no rule applies to, if their type is similar to a key of a map.

    The counts help to report the likely reason why a key matches nothing. One binding serves all
    of these op types. All other ops are created as if there were no scope.
    """

    rule: Rule = NoGradient()
    depth = 0  # (any other binding wins)
    at_site = None

    def __init__(self) -> None:
        self.op_type = self.rule_name = ""
        self.by_line: dict[Any, Hit] = {}

    def bind(self, op: Op, xs: Sequence[Tensor], site: Site | None = None) -> Rule:
        self.hit_at(op.type).count += 1
        return op.rule

    def copy(self) -> Onlookers:
        return Onlookers()

    repeat: Callable[[Any], Any] = copy  # (no code reads the counts of the copy)

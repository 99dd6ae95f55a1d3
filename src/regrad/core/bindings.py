"""Rules bound to op types by a scope, and counted by line."""

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
    """A rule with something around its pull."""

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
    """A rule that counts in a hit how often it runs."""

    def __init__(self, rule: Rule, hit: Hit, key: Any, once: bool = False) -> None:
        super().__init__(rule)
        self.hit = hit
        self.once = once
        self.key = key  # of its binding, among the overrides of a state

    def under(self, scopes: Mapping[Any, OpBinding]) -> Rule:
        """Return the same rule for an op that is run again, counted in the scope open now."""
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
    """A rule bound to an op type of regrad's.

    `key` is under what it stands among the overrides of a state, `place` where it holds (None:
    everywhere). `at_site` makes a rule that asks for the `site` of an op.
    """

    token: Any = None  # what else the rules of a compiled body depend on
    paths: dict[str, None] | None = None  # where ops were created of which the rule holds for some

    def __init__(
        self, op: Op, rule: Rule, depth: int, key: Any = None,
        at_site: Callable[[Site], Rule] | None = None, place: at | None = None,
    ) -> None:  # fmt: skip
        named = place is not None and (place.selectors or place.nth is not None)
        super().__init__(op.type, rule.name, place if named else None)
        self.op = op
        self.rule = rule
        self.replaces: bool = getattr(rule, "forward", None) is not None  # the values of ops
        self.depth = depth  # how many scopes are around; the innermost wins
        self.key: Any = key or op.type
        self.at_site = at_site
        self.place = place
        self.counted: dict[Any, CountedRule] = {}  # by line and path

    def bind(self, op: Op, xs: Sequence[Tensor], site: Site | None = None) -> Rule:
        """Return the rule for an op of `xs` that is being created, counted at its caller's line."""
        counted = self.counted_at(find_caller(), ".".join(PATH.get()))
        counted.hit.add(xs[0]._data.shape if xs else ())
        if self.at_site is None or site is None:
            return counted
        return CountedRule(self.at_site(site), counted.hit, self.key, self.once)

    def counted_at(self, where: str, path: str) -> CountedRule:
        """Return the rule as it is counted at a source line, in a scope."""
        if (where, path) not in self.counted:
            hit = self.hit_at(where, path)
            self.counted[where, path] = CountedRule(self.rule, hit, self.key, self.once)
        return self.counted[where, path]

    @property
    def sources(self) -> Sequence[Any]:
        """The functions behind the rule, or the rule itself."""
        functions = getattr(self.rule, "functions", {}).values()
        return [self.rule.function or tuple(functions) or self.rule]

    def copy(self) -> OpBinding:
        """Return the same rule with hits of its own: those of a program while it is traced."""
        made = OpBinding(self.op, self.rule, self.depth, self.key, self.at_site)
        made.once = self.once
        return made

    def absorb(self, hit: Hit, count: int, ran: int) -> None:
        """Count hits of a compiled program that runs, which were `hit` when it was traced."""
        mine = self.hit_at(hit.where, hit.path)
        mine.count += count
        mine.ran += ran
        mine.sizes.update(hit.sizes)

    def moved(self, copy: OpBinding) -> None:
        """Take note that a compiled program ran, for whose trace the copy was made."""

    def settled(self, in_run: bool = False) -> OpBinding:
        """Return the same rule for ops that are created elsewhere, or in the run of a graph."""
        return self

    def repeat(self) -> OpBinding:
        """Return the same rule for ops that are created again: only its runs are counted."""
        return RepeatedBinding(self)


Overrides = Mapping[Any, OpBinding] | None  # by op type; see `State` for other keys


class RepeatedBinding(OpBinding):
    """A binding under which ops are created that were counted before."""

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
    """Counts ops that no rule concerns: those whose types have names like the keys of a map.

    They tell the likely reason where a key matches nothing. It stands for them all, under their
    types in the place of rules; all other ops are created as if there were no scope.
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

    repeat: Callable[[Any], Any] = copy  # whose counts nobody reads

"""Rules for parameters: keys `at(parameter=…)`, and the op type that their rules see.

The rule of a parameter changes the sum of the gradients of all uses. So each library lets the uses
in a scope read one copy of the parameter. The copy is the result of an identity, whose gradient is
the rule. This module finds the parameters that keys name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from regrad.core import dispatch
from regrad.core.bindings import OpBinding
from regrad.core.places import ChainStep, at, entries, matches, near_paths
from regrad.core.replacing import Replace
from regrad.core.reports import Binding
from regrad.core.rule import Rule, identity_of
from regrad.core.surrogates import Learns
from regrad.errors import ArgumentError

PARAMETER = dispatch.PARAMETER


class ParameterBinding(OpBinding):
    """The rule of a key for Variables of regrad."""

    def __init__(self, key: at, rule: Rule, depth: int, stands: Any) -> None:
        super().__init__(dispatch.PARAMETER, rule, depth, stands)
        self.selector = key
        self.kind: str = ""
        self.shown: str = repr(key)
        self.others: dict[str, None] = {}  # the names of the other Variables

    def copy(self) -> ParameterBinding:
        made = ParameterBinding(self.selector, self.rule, self.depth, self.key)
        made.once, made.others = self.once, self.others
        return made

    repeat: Callable[[Any], Any] = copy  # (no code reads the counts of the copy)

    def selects(self, variable: Any) -> bool:
        """Return whether the key names a Variable."""
        # (a Variable of regrad.v1 is called `w:0`)
        step = ChainStep((variable.name, variable.name.removesuffix(":0")), variable)
        found = any(matches(entry, step) for entry in entries(self.selector.parameter))
        if not found:
            self.others[variable.name] = None
        return found

    def unread(self) -> str:
        """Return the names of the Variables that were read, if the key names none of them."""
        shown = ", ".join(map(repr, [*self.others][:5]))
        read = f"the Variables {shown} were read" if shown else "no Variable was read"
        return f"{self.shown} names no Variable that a gradient function reads; {read}"


def binding_of(
    variable: Any, overrides: Mapping[Any, Any], graph: object = None
) -> ParameterBinding | None:
    """Return the rule of a Variable in the innermost scope that has one.

    A rule of a graph's own scope applies only to the Variables of this graph.

    Raises:
        ArgumentError: Two keys of the scope have different rules for it.
    """
    types = PARAMETER.type, (graph, PARAMETER.type)
    every = [b for key, b in overrides.items() if getattr(key, "op_type", None) in types]
    found = [b for b in every if b.selects(variable)]
    found = [b for b in found if b.depth == max(each.depth for each in found)]
    for other in found[1:]:
        if identity_of(other.sources[0]) != identity_of(found[0].sources[0]):
            raise _refuse_two(found[0].selector, other.selector, [variable.name])
    return found[0] if found else None


def _refuse_two(a: at, b: at, paths: Sequence[str]) -> ArgumentError:
    return ArgumentError(
        f"two keys with different rules, {a!r} and {b!r}, name the parameter "
        f"{' = '.join(map(repr, paths))}. Pass one rule for it"
    )


def split(rules: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[at, Any]]:
    """Return the rules of a map for ops and calls, and the rules for parameters."""
    found = {k: r for k, r in rules.items() if isinstance(k, at) and k.parameter is not None}
    for key, rule in found.items():
        if isinstance(rule, Replace | Learns):
            raise ArgumentError(
                f"{key!r} has the rule {rule!r:.60}, which replaces a value or learns parameters. "
                "The rule of a parameter only changes its gradient: a function of `dy`."
            )
    return {k: r for k, r in rules.items() if k not in found} if found else dict(rules), found


def select(
    rules: Mapping[at, Any], parameters: Sequence[ChainStep], marked: Collection[Any] = ()
) -> list[at | None]:
    """Return the key of each parameter, or None.

    Args:
        rules: The rules for parameters, by key.
        parameters: The parameters of the model, each with all of its paths.
        marked: The keys that may name nothing.

    Raises:
        ArgumentError: A key names no parameter, or keys with different rules name the same one.
    """
    made: list[at | None] = [None] * len(parameters)
    for key, rule in rules.items():
        for entry in entries(key.parameter):
            found = [n for n, step in enumerate(parameters) if matches(entry, step)]
            if not found and key not in marked:
                raise ArgumentError(f"{key!r}: {_names_nothing(entry, parameters)}")
            for n in found:
                known = made[n]
                if known is not None and identity_of(rules[known]) != identity_of(rule):
                    raise _refuse_two(known, key, parameters[n].paths)
                made[n] = known or key
    return made


def tell_idle(
    key: at, binding: Binding, paths: Mapping[str, at], covered: Collection[str] = ()
) -> list[str]:
    """Return a message if some parameters of a key got a gradient, and others did not."""
    ran = {hit.path for hit in binding.hits if hit.ran}.union(covered)
    idle = [repr(path) for path, each in paths.items() if each == key and path not in ran]
    if not idle or not any(hit.ran for hit in binding.hits):
        return []
    more = f" and {len(idle) - 5} more" if len(idle) > 5 else ""
    return [f"{key!r} names {', '.join(idle[:5])}{more}, which got no gradient"]


def _names_nothing(entry: Any, parameters: Sequence[ChainStep]) -> str:
    if not isinstance(entry, str):
        return "this object is not a parameter of the model."
    paths = [path for step in parameters for path in step.paths]
    return f"no parameter has the path {entry!r}.{near_paths(entry, paths)}"

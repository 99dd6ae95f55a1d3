"""Rules for parameters: keys `at(parameter=…)`, and the op type that their rules see.

The rule of a parameter changes the sum of the gradients of all uses. So each library lets the uses
in a scope read one copy of the parameter. The copy is the result of an identity, whose gradient is
the rule. This module finds the parameters that keys name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from regrad.core.call import Own
from regrad.core.places import ChainStep, at, entries, matches, near_paths
from regrad.core.registry import Input, Op
from regrad.core.replacing import Replace
from regrad.core.rule import identity_of
from regrad.core.surrogates import Learns
from regrad.errors import ArgumentError

PARAMETER = Op("Parameter", "parameter", lambda xp, x: x, [Input("x", "one")])
PARAMETER.rule = Own()


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
                    raise ArgumentError(
                        f"two keys with different rules, {known!r} and {key!r}, name the parameter "
                        f"{' = '.join(map(repr, parameters[n].paths))}. Pass one rule for it"
                    )
                made[n] = known or key
    return made


def _names_nothing(entry: Any, parameters: Sequence[ChainStep]) -> str:
    if not isinstance(entry, str):
        return "this object is not a parameter of the model."
    paths = [path for step in parameters for path in step.paths]
    return f"no parameter has the path {entry!r}.{near_paths(entry, paths)}"

"""Rules for ops of other libraries, for `regrad.torch` and `regrad.jax`.

A foreign op keeps its forward pass and its arrays. A record computes its gradient, as for an op of
regrad (see `core.call`). So rules take the same forms, and their answers get the same checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

from regrad.core.builtin import Builtin, ForeignBuiltin
from regrad.core.call import Asked, Own, OwnBias, OwnOfCall
from regrad.core.registry import RULES, Input, Op, canonical, not_yet, resolve
from regrad.core.replacing import Forward, Replace, gradient_of
from regrad.core.rule import Rule, RuleFunction, free, parameters
from regrad.core.signatures import declared, plain_code
from regrad.core.tape import Layout, positions
from regrad.errors import RuleError

TINY = 1e-19  # its square is above 0 in float32


def nonzero(v: Any) -> Any:
    """Return a Tensor, or an array of any library, plus `TINY`, so that 0 can be a divisor.

    Rounding cancels the addition for all but the smallest numbers. For those the effect cancels
    out, because the caller divides by the result and multiplies by it again. (The addition is one
    pass over memory. A selection by `v == 0` would be more.)
    """
    return v + TINY


class ForeignRule(Asked):
    """A rule, bound to an op type, for arrays of another library.

    `writes` holds whether the rule writes into its arguments (None before its first run).
    """

    writes: bool | None = None
    key: Any = None  # the key in the map, for reports
    recordings: Any = None  # recordings of its runs, if the library keeps them
    asks: Any = ()  # the names of parameters and inputs that the rule takes, for a module's call
    family: Any = None  # the callables to which the rule applies (for torch)
    at_site: Callable[[Any], ForeignRule] | None = None  # makes the rule for a call, with `site`
    once = False  # whether the rule is for the first derivative alone
    chooses = False  # whether it holds several rules, of which each call gets one
    forward: Forward | None = None  # the function that replaces the op's value
    may_hold: bool | None = None  # whether its functions reach objects; None: not checked yet
    is_surrogate: bool = False  # whether its gradient comes from another function (`vjp_of`)
    is_derivative: bool = False  # whether the library derives its gradient from `forward`

    def __init__(self, value: Any, op: Op) -> None:
        self.op: Op = with_own_gradient(op)
        given, value = value, gradient_of(value)
        self.learned: Sequence[Any] = ()  # parameters of the rule, the last inputs of the op
        if (parameters := getattr(value, "parameters", None)) is not None:
            learning: Any = value
            self.op, value = learning.extended(self.op), learning.rule
            self.learned = [*parameters.values()]
        self.rule: Rule = resolve(value, self.op)
        self.is_surrogate = getattr(value, "is_surrogate", False)
        self.name: str = self.rule.name
        bare: Any = self.rule.bare
        every = [bare.function, *getattr(bare, "functions", {}).values()]
        self.functions: Sequence[RuleFunction] = [f for f in every if f is not None]
        if isinstance(given, Replace):
            self.name, self.forward = given.__name__, Forward(given.forward, self.op)
            self.is_derivative = given.is_derivative
        self.has_bias: bool = isinstance(op.rule, OwnBias)
        # (builtin may need all inputs)
        self.asks_builtin: bool = not {"builtin", "derivative_"}.isdisjoint(self.rule.extras)
        self.asks_builtin |= self.has_bias
        self.runs_op: bool = self.rule.runs_op
        self.is_borrowed: bool = lender(value) is not None
        self.takes_all: bool = self.is_borrowed or takes_all(value)
        if self.is_borrowed:
            self.plain: bool | None = False
        self.plans: dict[Any, tuple[list[int], list[int], bool]] = {}

    @property
    def replaces(self) -> bool:
        """Return whether the rule replaces the op's value."""
        return self.forward is not None

    def for_call(self, filled: Any) -> ForeignRule:
        """Return the rule for a call with these arguments."""
        return self

    def plan(self, arrays: tuple[bool, ...], layout: Layout) -> tuple[list[int], list[int], bool]:
        """Return where arrays are among the values, which ones the rule names, and if it names y.

        The other values are numbers, or absent.
        """
        found = self.plans.get((arrays, layout))
        if found is None:
            places = [i for i, is_one in enumerate(arrays) if is_one]
            kept, keeps_y = self.keeps(range(len(self.op.inputs)))
            parts = layout or tuple(range(len(arrays)))
            leaves = {i for p in kept if p < len(parts) for i in positions(parts[p])}
            found = places, [n for n, i in enumerate(places) if i in leaves], keeps_y
            self.plans[arrays, layout] = found
        return found

    def keeps(self, wanted: Sequence[int]) -> tuple[frozenset[int], bool]:
        """Return the inputs (by parameter) that the rule names, and whether it names the output."""
        return self.rule.keeps(frozenset(wanted))


def lender(value: Any) -> str | None:
    """Return the op type whose own rule is a value in a map, or None."""
    if isinstance(value, Builtin):
        return value.op.type
    return canonical(value) if isinstance(value, str) and value not in RULES else None


def takes_all(value: Any) -> bool:
    """Return whether a rule takes `**names`, which only a built-in rule can use."""
    if hasattr(type(value), "bound_to"):
        return False
    if (code := plain_code(value)) is not None:
        return bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return any(p.kind is p.VAR_KEYWORD for p in declared(value) or ())


def asks_for(value: Any) -> list[str]:
    """Return the names that a rule takes; empty if the rule is not in the native form."""
    if isinstance(value, Replace):
        return [*parameters(value.forward), *asks_for(value.gradient)]
    value = RULES.get(value, value) if isinstance(value, str) else value
    if hasattr(value, "asks"):  # a `vjp_of`
        return value.asks
    if not callable(value) or isinstance(value, type):
        return []
    names = parameters(value)
    return names[1:] if names[:1] == ["dy"] else []


# The names of inputs in a rule for any function, by their number. For more inputs it is xs, a list.
USUAL = {1: ["x"], 2: ["a", "b"]}


def first_bound(make: Callable[[Op], Any], ops: Iterable[Op]) -> Any:
    """Return the rule for the first of these ops that has all names in the rule."""
    errors: list[RuleError] = []
    for op in ops:
        try:
            return make(op)
        except RuleError as error:
            errors.append(error)
    raise errors[0]


def whole_op(
    type: str, inputs: Sequence[str], parameters: Sequence[str], attrs: Iterable[str] = (),
    several: bool = False,
) -> Op:  # fmt: skip
    """Return the op of a whole call: inputs (see `names_for`), parameters, and attributes."""
    kinds = [Input(n, "many" if n == "xs" else "one") for n in inputs]
    kinds += [Input(n, "one") for n in parameters]
    op = Op(type, type, not_yet, kinds, [*attrs], several=several)
    op.rule = OwnOfCall(len(inputs), parameters)
    return op


def whole_layout(op: Op, count: int, total: int) -> Layout:
    """Return the layout of the op of a whole call, if `xs` holds `count` arrays."""
    many = op.inputs[0].kind == "many"
    return (tuple(range(count)), *range(count, total)) if many else None


def names_for(
    asks: Sequence[str], names: Sequence[str | None], moving: Sequence[bool]
) -> list[str]:
    """Return the names of the arrays of a call in a rule that uses the names `asks`.

    `names` are the parameters of the function, for arrays that are arguments. Arrays in containers
    have no name, or None. The only array, or the only differentiated array (`moving`), is also x.
    Two arrays are also a and b, and any number is xs, a list.
    """
    known, count = [free(n) for n in names if n is not None], len(moving)
    asked = {*asks} - {*known}
    if len(known) < count or not count or {"a", "b", "xs"} & asked:
        return ["xs"] if "xs" in asked else USUAL.get(count, ["xs"])
    unnamed = [i for i, name in enumerate(known) if name not in asks]
    moves = [i for i in unnamed if moving[i]]
    first = [i for i in unnamed if known[i] == "input"]
    only = next((found for found in (moves, unnamed, first) if len(found) == 1), [])
    if "x" in asked and only:
        known[only[0]] = "x"
    return known


def with_own_gradient(op: Op) -> Op:
    """Return an op type with the other library's own gradient in place of regrad's."""
    if op.rule.is_foreign:
        return op
    theirs = copy(op)
    theirs.rule, theirs.replaced, theirs.reads = Own(), None, {}
    return theirs


def check_builtin(value: Any, label: str, same: Callable[[Any], bool]) -> None:
    """Raise RuleError for another function's gradient. `same` compares a key with the rule's."""
    if isinstance(value, ForeignBuiltin) and not same(value.key):
        raise RuleError(f"{value!r} is not the gradient of {label!r}; pass builtin({label}).")

"""The forms in which users write a rule, each as a `Rule`.

In the native form a rule's first parameter is `dy`, the incoming gradient, and the others are
**names**: an input (`x`), the output (`y`), an attribute (`axis`), or only an input's shape or
dtype (`x_shape`, `x_dtype`). In TensorFlow's form it takes `(op, grad, ...)` and gets the whole
record. The names decide what a record keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from regrad.core.hints import hint_at
from regrad.core.names import OP_VIEW
from regrad.core.rule import (
    EXTRAS,
    NO_GRADIENT,
    Cotangent,
    Kept,
    Pulled,
    Rule,
    RuleFunction,
    describe,
    describe_pull,
    parameters,
)
from regrad.core.signatures import parameters_of, plain_code
from regrad.errors import MissingRuleError, RuleError, SignatureError, near

if TYPE_CHECKING:
    from regrad.core.registry import Op
    from regrad.core.tape import Record
    from regrad.core.tensor import Tensor

STARS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS

# -- the names of a rule -------------------------------------------------------------------------


class BoundFunction:
    """A rule function in the native form, with its names resolved against one op."""

    __slots__ = ("extras", "inputs", "output", "pull", "short")

    def __init__(self, function: RuleFunction, op: Op, rule_name: str) -> None:
        names, by_place = asked(function, op)
        reads = op.reads.get(key := tuple(names))
        if reads is None:
            inputs = [i.name for i in op.inputs]
            kept = frozenset([inputs.index(n) for n in names if n in inputs])
            getters = [getter(op, name, function, rule_name) for name in names]
            extras = frozenset([n for n in names if n in EXTRAS and n not in op.names()])
            needs = [(kept, "y" in names), *(EXTRAS[n].keeps(op) for n in extras)]
            kept = frozenset().union(*(kept for kept, _ in needs))
            reads = op.reads[key] = kept, any(y for _, y in needs), extras, getters
        self.inputs: frozenset[int]
        self.output: bool
        self.extras: frozenset[str]
        self.inputs, self.output, self.extras, getters = reads
        self.pull = _call_with(named(function, f"d{op.type}"), getters)
        if not by_place:
            self.pull: Callable[..., Any] = partial(
                _call_by_keyword, function, dict(zip(names, getters, strict=True))
            )
        given = {op.inputs[0].name: "x", "y": "y"} if op.single and by_place else {}
        self.short = SHORT.get("".join([given.get(n, "?") for n in names])) if given else None
        self.short: Any = self.short and self.short(function)


# By the names in a rule of a one-input op.
SHORT: Mapping[str, Callable[[RuleFunction], Callable[..., Any]]] = {
    "": lambda function: lambda rule, dy, x, y: function(dy),
    "x": lambda function: lambda rule, dy, x, y: function(dy, x),
    "y": lambda function: lambda rule, dy, x, y: function(dy, y),
    "xy": lambda function: lambda rule, dy, x, y: function(dy, x, y),
}


def _call_with(
    function: RuleFunction, getters: Sequence[Callable[[Record], Any]]
) -> Callable[[Any, Any], Any]:
    """Return a function that calls `function(dy, …)` with the values of its names in a record."""
    if not getters:
        return lambda record, dy: function(dy)
    first, *rest = getters
    if not rest:
        return lambda record, dy: function(dy, first(record))
    if len(rest) == 1:
        (second,) = rest
        return lambda record, dy: function(dy, first(record), second(record))
    return lambda record, dy: function(dy, *[get(record) for get in getters])


def _call_by_keyword(
    function: RuleFunction,
    getters: dict[str, Callable[[Record], Any]],
    record: Record,
    dy: Cotangent,
) -> Any:
    return function(dy, **{name: get(record) for name, get in getters.items()})


def asked(function: RuleFunction, op: Op) -> tuple[list[str], bool]:
    """Return the names in a rule, and whether it takes their values by position.

    These are all parameters after `dy`, except for unknown parameters with a default. (`lambda dy,
    k=k: dy * k` has its own k.) `**names` takes all names of the op.
    """
    code = plain_code(function)
    if code and not (function.__defaults__ or code.co_kwonlyargcount or code.co_flags & STARS):
        return list(code.co_varnames[1 : code.co_argcount]), True
    _, *rest = inspect.signature(function).parameters.values()
    known = op.names()
    named = [
        p.name
        for p in rest
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and (p.default is p.empty or p.name in known)
    ]
    if any(p.kind is p.VAR_KEYWORD for p in rest):
        named += [n for n in known if n not in named]
    return named, named == parameters(function)[1 : len(named) + 1]


def getter(op: Op, name: str, function: RuleFunction, rule_name: str) -> Callable[[Any], Any]:
    """Return the function that reads a rule's parameter `name` from a record."""
    if name == "y":
        return lambda record: record.y
    if name in op.attrs:
        return lambda record: record.attrs[name]
    for i, entry in enumerate(op.inputs):
        if name == entry.name:
            return partial(_kept if op.flat else _kept_in_groups, i)
        if name == f"{entry.name}_shape":
            return partial(_detail, i, 0)
        if name == f"{entry.name}_dtype":
            return partial(_detail, i, 1)
    if name in EXTRAS:
        return EXTRAS[name].read
    known = [*op.names(), *[n for n in EXTRAS if not n.endswith("_")]]
    raise RuleError(
        f"{describe(function, rule_name)} takes {name!r}, which the op type {op.type!r} does "
        f"not have.{near(name, known)} After dy it may name {', '.join(known)}."
    )


def _kept(i: int, record: Record) -> Any:
    return record.xs[i]


def _kept_in_groups(i: int, record: Record) -> Any:
    return record.argument(record.xs, i)


def _detail(i: int, which: int, record: Record) -> Any:
    return record.detail(i, which)


def named(function: RuleFunction, name: str) -> Callable[..., Any]:
    """Return the rule under a name for tracebacks: `dSquare` if its author called it `_`."""
    if type(function) is FunctionType and function.__name__ == "_":
        function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)
        function.__name__ = function.__qualname__ = name
    return function


# -- the native form ------------------------------------------------------------------------------


class PerInput(Rule):
    """One function per input. Each runs only if its gradient is needed."""

    def __init__(self, op: Op, name: str) -> None:
        self.op = op
        self.name = name
        self.answers: bool = op.lone
        self.parts: dict[int, BoundFunction] = {}
        self.functions: dict[str, RuleFunction] = {}
        self.made: dict[frozenset[int], Kept] = {}
        self.plans: Mapping[frozenset[int], Kept] = self.made

    def add(self, wrt: str, function: RuleFunction) -> None:
        index = [i.name for i in self.op.inputs].index(wrt)
        self.parts[index] = BoundFunction(function, self.op, self.name)
        self.extras: frozenset[str] = self.extras | self.parts[index].extras
        self.asks_needs: bool = "needs" in self.extras
        self.functions[wrt] = function
        self.each_pull: Any = [
            self.parts[i].pull if i in self.parts else partial(self.missing, i)
            for i in range(len(self.op.inputs))
        ]
        self.pulls: Any = None if self.asks_needs else self.each_pull
        self.short: Any = self.parts[index].short

    def keeps(self, wanted: frozenset[int]) -> Kept:
        plan = self.plans.get(wanted)
        if plan is None:
            parts = [p for i, p in self.parts.items() if i in wanted]
            kept = frozenset().union(*(p.inputs for p in parts))
            plan = self.made[wanted] = kept, any(p.output for p in parts)
        return plan

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Pulled:
        return [(i, self.each_pull[i](record, dy)) for i in wanted]

    def missing(self, index: int, record: Record, dy: Cotangent) -> Any:
        name = self.op.inputs[index].name
        if self.op.inputs[index].integers:
            return None  # indices have no gradient
        raise MissingRuleError(
            f"no gradient: the op type {self.op.type!r} is on the path by its input {name!r}, "
            f"for which it has no rule. Register one with @gradient({self.op.type!r}, {name!r}), "
            "or cut the path with stop_gradient."
        )


class Entwined(PerInput):
    """Like `PerInput`, with another function for the first input if other inputs are needed too.

    This is for ops that are themselves gradients. At some points their second derivative depends
    on how the incoming gradient changes with x. If both gradients are needed, the incoming gradient
    is a function of x.
    """

    together: BoundFunction
    of_both: RuleFunction

    def add_together(self, function: RuleFunction) -> None:
        self.of_both = function
        self.together = BoundFunction(function, self.op, self.name)
        self.pulls: Any = None  # so that the backward pass calls `pull` with the wanted inputs

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Pulled:
        first = self.together if len(wanted) > 1 else self.parts[0]
        return [(i, (self.parts[i] if i else first).pull(record, dy)) for i in wanted]


class Joint(Rule):
    """One function for all inputs, in order."""

    def __init__(self, op: Op, name: str, function: RuleFunction) -> None:
        self.op = op
        self.name = name
        self.function: RuleFunction | None = function
        self.part: BoundFunction = BoundFunction(function, op, name)
        self.extras: frozenset[str] = self.part.extras
        self.asks_needs: bool = "needs" in self.extras

    def keeps(self, wanted: frozenset[int]) -> Kept:
        return self.part.inputs, self.part.output

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Pulled:
        answer = self.part.pull(record, dy)
        if self.op.rule.is_foreign:
            answer = self.op.rule.complete(answer, record, dy, len(self.op.inputs))
        several = isinstance(answer, list | tuple) or answer is NO_GRADIENT
        if not several and len(wanted) == 1 and self.part.inputs <= {*wanted}:
            return [(wanted[0], answer)]  # (for the only possible input)
        return enumerate(as_many(answer, len(self.op.inputs), record))


def as_many(answer: Any, count: int, record: Record) -> Sequence[Any]:
    """Return the gradients in a rule's answer, one per input."""
    if answer is NO_GRADIENT:
        return [answer] * count
    answer = list(answer) if isinstance(answer, list | tuple) else [answer]
    if len(answer) != count:
        raise RuleError(
            f"wrong number of gradients: {describe_pull(record)} returned {len(answer)}, and the "
            f"op has {count} input{'s' if count != 1 else ''}. "
            "Return one gradient per input, in order, or None for an input without one."
        )
    return answer


# -- TensorFlow's form ----------------------------------------------------------------------------


class TensorFlowForm(Rule):
    """A rule `(op, grad, ...)`, which gets the whole record."""

    def __init__(self, op: Op, name: str, function: RuleFunction) -> None:
        self.op = op
        self.name = name
        self.call: RuleFunction
        self.function: RuleFunction | None
        self.function = self.call = function

    def keeps(self, wanted: frozenset[int]) -> Kept:
        return frozenset(range(len(self.op.inputs))), True

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Pulled:
        grads = dy if isinstance(dy, tuple) else (dy,)
        view = record.view()
        try:
            answer = self.call(view, *map(view.shown, grads))
        except TypeError as error:
            self.explain(error)
            raise
        return record.by_parameter(view.own(answer))

    def explain(self, error: TypeError) -> None:
        """Raise an error that names the form of the call, for a rule that accepts any arguments."""
        if first_is_any(self.call):
            raise SignatureError(
                f"{describe(self.call, self.name)} takes {parameters_of(self.call)}, which "
                "does not show its form. So regrad called it in TensorFlow's form, (op, grad), and "
                f"it failed: {error}. For the native form, name its first parameter dy. A wrapper "
                "gets the parameters of its rule by functools.wraps."
            ) from error


def first_is_any(function: RuleFunction) -> bool:
    """Return whether a function's first parameter is `*args`."""
    found = inspect.signature(function).parameters.values()
    return any(p.kind is p.VAR_POSITIONAL for p in list(found)[:1])


class OpView:
    """A record, as the argument of a rule in TensorFlow's form (TF's `Operation`)."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.type: str = record.op.type
        self.name: str = record.op.name
        self.inputs: tuple[Any, ...] = tuple(record.xs)
        self.outputs: list[Any] = list(record.y) if isinstance(record.y, tuple) else [record.y]

    @property
    def record(self) -> Any:
        """The record behind the view."""
        return self._record

    def places(self) -> Sequence[int | None]:
        """Return the leaf of the record for each input; None if it is an attribute in regrad."""
        return range(len(self.inputs))

    def shown(self, tensor: Tensor | None) -> Any:
        """Return a gradient in the form that the rule expects."""
        return tensor

    def own(self, answer: Any) -> Sequence[Any]:
        """Return the gradients in a rule's answer, one per leaf of the record.

        A None at the end belongs to an input of TensorFlow that is an attribute in regrad.
        """
        count = len(self.inputs)
        if isinstance(answer, list | tuple) and not any(dx is not None for dx in answer[count:]):
            answer = answer[:count]
        return as_many(answer, count, self._record)

    def get_attr(self, name: str) -> Any:
        """Return the attribute `name` (`axis`, `keepdims`, …); RuleError if there is none."""
        attrs = self._record.attrs
        if name not in attrs:
            raise RuleError(
                f"the op type {self.type!r} has no attribute {name!r}."
                f"{near(name, attrs)} It has {', '.join(attrs) or 'none'}."
            )
        return attrs[name]

    def __repr__(self) -> str:
        return f"<op {self.name!r} type={self.type}>"


hint_at(OpView, OP_VIEW)

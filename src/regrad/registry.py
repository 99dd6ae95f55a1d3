"""The one table of op types and rules, for built-ins and users alike.

An `Op` is an op type: its kernel, its inputs and attributes by name, and its rule. A *rule*
is a gradient function. In the native form its first parameter is `dy`, the gradient
arriving, and the others are **names**: an input (`x`), the output (`y`), an attribute
(`axis`), or only an input's shape or dtype (`x_shape`, `x_dtype`). In TensorFlow's form it
takes `(op, grad, ...)` and gets the whole record. The names decide what a record keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from regrad import namespaces
from regrad.errors import (
    ArgumentError,
    MissingRuleError,
    RegistrationError,
    RuleError,
    UnknownOpError,
    near,
)

F = TypeVar("F", bound=Callable[..., Any])

OPS: dict[str, Op] = {}
RULES: dict[str, Callable[..., Any]] = {}  # registered under a free name, for maps

ALIASES = {
    "Add": "AddV2",
    "BatchMatMul": "MatMul",
    "BatchMatMulV2": "MatMul",
    "Concat": "ConcatV2",
    "Div": "RealDiv",
    "Gather": "GatherV2",
    "Pad": "PadV2",
    "ReverseV1": "ReverseV2",
    "Select": "SelectV2",
    "SplitV": "Split",
    "TopK": "TopKV2",
}


class Input(NamedTuple):
    """A tensor parameter of an op: one tensor, an optional one, or a sequence of them."""

    name: str
    kind: str  # "one", "optional" or "many"
    integers: bool = False  # Python numbers given here are indices, not float32


class Kernels(dict[type, Callable[..., Any]]):
    """Array type → the kernel bound to that array's namespace, filled on first use."""

    def __init__(self, kernel: Callable[..., Any] | str) -> None:
        self.kernel = kernel

    def __missing__(self, array_type: type) -> Callable[..., Any]:
        xp = namespaces.BACKENDS[array_type].xp
        if isinstance(self.kernel, str):
            bound = getattr(xp, self.kernel)
        else:
            bound = partial(self.kernel, xp)
        self[array_type] = bound
        return bound


def not_yet(*args: Any, **attrs: Any) -> Any:
    """Stands for the public function until it is made."""
    raise AssertionError("an op was called before its definition ended")


class Op:
    """An op type. `flat` ops take one tensor per parameter, so arguments are leaves."""

    __slots__ = (
        "attrs",
        "broadcasts",
        "flat",
        "function",
        "holomorphic",
        "inputs",
        "kernels",
        "name",
        "promotes",
        "rule",
        "to_float",
        "type",
    )

    def __init__(
        self,
        type: str,
        name: str,
        kernel: Callable[..., Any] | str,
        inputs: Sequence[Input],
        attrs: Sequence[str] = (),
        *,
        broadcasts: bool = False,
        promotes: Sequence[str] | bool = False,
        to_float: bool = False,
        holomorphic: bool = True,
    ) -> None:
        self.type = type
        self.name = name
        self.kernels = Kernels(kernel)
        self.inputs = tuple(inputs)
        self.attrs = tuple(attrs)
        self.flat = all(i.kind == "one" for i in inputs)
        self.broadcasts = broadcasts
        if isinstance(promotes, bool):
            promotes = [i.name for i in inputs] if promotes or broadcasts or to_float else []
        self.promotes = tuple(i.name in promotes for i in inputs)
        self.to_float = to_float
        self.holomorphic = holomorphic
        self.rule: Rule = Missing(self)
        self.function: Callable[..., Any] = not_yet

    def __repr__(self) -> str:
        return f"<op type {self.type}>"

    def names(self) -> list[str]:
        """Everything that a rule of this op may name after `dy`."""
        inputs = [i.name for i in self.inputs]
        details = [f"{n}_{what}" for n in inputs for what in ("shape", "dtype")]
        return [*inputs, "y", *self.attrs, *details]


# -- rules ---------------------------------------------------------------------------------


class Rule:
    """How the gradient passes one op: what a record must keep, and the pull itself."""

    watches = True  # whether outputs of an op under this rule are watched
    flat = False  # zero wherever it is defined (sign, floor, …): never linear in its input
    unless: Callable[[dict[str, Any], Sequence[Any]], bool] | None = None  # no gradient then
    name = ""
    function: Callable[..., Any] | None = None
    pulls: Sequence[Callable[[Any, Any], Any]] | None = None  # one per input, if it is so simple

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        """The parameters whose tensors a record must keep, and whether it keeps the output."""
        return frozenset(), False

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        """`(parameter, gradient)` for each wanted parameter."""
        raise NotImplementedError

    def linear_in(self, wanted: frozenset[int]) -> bool:
        """Whether the op is affine in these inputs together: its gradient ignores them."""
        kept, keeps_output = self.keeps(wanted)
        return not (self.flat or keeps_output or kept & wanted)


class Conjugated(Rule):
    """The rule of a holomorphic op, written as for real numbers, for complex ones.

    TensorFlow's convention for y = f(x) is dy * conj(f'(x)), which is conj(conj(dy) * f'(x)).
    """

    def __init__(self, rule: Rule, conj: Callable[[Any], Any]) -> None:
        self.rule = rule
        self.conj = conj
        self.name = rule.name
        self.keeps = rule.keeps
        self.linear_in = rule.linear_in

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        pulled = self.rule.pull(record, _each(self.conj, dy), wanted)
        return [(i, _each(self.conj, dx)) for i, dx in pulled]


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_each(function, v) for v in value])
    return value if value is None else function(value)


class Missing(Rule):
    """No rule yet: fine until a gradient is wanted."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Any:
        raise MissingRuleError(
            f"no gradient: the op type {self.op.type!r} is on the path and has no rule. "
            f"Register one with @gradient({self.op.type!r}), put one in force with "
            f"gradient_override_map, or cut the path with stop_gradient."
        )


class NoGradient(Rule):
    """Declared to have no gradient: outputs are free."""

    watches = False
    flat = True


class Part:
    """A rule function in the native form, its names resolved against one op."""

    __slots__ = ("inputs", "output", "pull")

    def __init__(self, function: Callable[..., Any], op: Op, where: str) -> None:
        names = parameters(function)[1:]
        inputs = [i.name for i in op.inputs]
        self.inputs = frozenset(inputs.index(n) for n in names if n in inputs)
        self.output = "y" in names
        self.pull = _call_with(
            named(function, f"d{op.type}"), [getter(op, name, where) for name in names]
        )


def _call_with(
    function: Callable[..., Any], getters: Sequence[Callable[[Any], Any]]
) -> Callable[[Any, Any], Any]:
    """`function(dy, …)` with what its names stand for in a record; the usual cases unrolled."""
    if not getters:
        return lambda record, dy: function(dy)
    first, *rest = getters
    if not rest:
        return lambda record, dy: function(dy, first(record))
    if len(rest) == 1:
        (second,) = rest
        return lambda record, dy: function(dy, first(record), second(record))
    return lambda record, dy: function(dy, *[get(record) for get in getters])


def getter(op: Op, name: str, where: str) -> Callable[[Any], Any]:
    """How a rule's parameter `name` is read from a record."""
    if name == "y":
        return lambda record: record.y
    if name in op.attrs:
        return lambda record: record.attrs[name]
    for i, entry in enumerate(op.inputs):
        if name == entry.name:
            return (lambda record: record.xs[i]) if op.flat else (lambda r: r.argument(r.xs, i))
        if name == f"{entry.name}_shape":
            return lambda record: record.detail(i, 0)
        if name == f"{entry.name}_dtype":
            return lambda record: record.detail(i, 1)
    known = op.names()
    raise RuleError(
        f"{where} asks for {name!r}, which the op type {op.type!r} does not have."
        f"{near(name, known)} After dy it may name {', '.join(known)}."
    )


class PerInput(Rule):
    """One function per input; each runs only if its gradient is wanted."""

    def __init__(self, op: Op, name: str) -> None:
        self.op = op
        self.name = name
        self.parts: dict[int, Part] = {}
        self.functions: dict[str, Callable[..., Any]] = {}
        self.plans: dict[frozenset[int], tuple[frozenset[int], bool]] = {}

    def add(self, wrt: str, function: Callable[..., Any]) -> None:
        index = [i.name for i in self.op.inputs].index(wrt)
        self.parts[index] = Part(function, self.op, describe(function, self.name))
        self.functions[wrt] = function
        self.pulls = [
            self.parts[i].pull if i in self.parts else partial(self.missing, i)
            for i in range(len(self.op.inputs))
        ]

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        plan = self.plans.get(wanted)
        if plan is None:
            parts = [p for i, p in self.parts.items() if i in wanted]
            kept = frozenset().union(*(p.inputs for p in parts))
            plan = self.plans[wanted] = kept, any(p.output for p in parts)
        return plan

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        assert self.pulls is not None
        return [(i, self.pulls[i](record, dy)) for i in wanted]

    def missing(self, index: int, record: Any, dy: Any) -> Any:
        name = self.op.inputs[index].name
        raise MissingRuleError(
            f"no gradient: the op type {self.op.type!r} is on the path by its input {name!r}, "
            f"for which it has no rule. Register one with @gradient({self.op.type!r}, {name!r}), "
            "or cut the path with stop_gradient."
        )


class Joint(Rule):
    """One function for all inputs, in order."""

    def __init__(self, op: Op, name: str, function: Callable[..., Any]) -> None:
        self.op = op
        self.name = name
        self.function = function
        self.part = Part(function, op, describe(function, name))

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return self.part.inputs, self.part.output

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        return enumerate(as_many(self.part.pull(record, dy), len(self.op.inputs), self, self.op.type))


class TensorFlowForm(Rule):
    """A rule `(op, grad, ...)`, which sees the whole record."""

    def __init__(self, op: Op, name: str, function: Callable[..., Any]) -> None:
        self.op = op
        self.name = name
        self.function = function

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return frozenset(range(len(self.op.inputs))), True

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        grads = dy if isinstance(dy, tuple) else (dy,)
        view = OpView(record)
        answer = as_many(self.function(view, *grads), len(view.inputs), self, self.op.type)
        return record.by_parameter(answer)


class OpView:
    """What a rule in TensorFlow's form sees of a record (TF's `Operation`)."""

    def __init__(self, record: Any) -> None:
        self._record = record
        self.type: str = record.op.type
        self.name: str = record.op.name
        self.inputs: tuple[Any, ...] = tuple(record.xs)
        self.outputs: list[Any] = list(record.y) if isinstance(record.y, tuple) else [record.y]

    def get_attr(self, name: str) -> Any:
        """The attribute `name` (`axis`, `keepdims`, …); ValueError if the op has none such."""
        attrs = self._record.attrs
        if name not in attrs:
            raise RuleError(
                f"the op type {self.type!r} has no attribute {name!r}."
                f"{near(name, attrs)} It has {', '.join(attrs) or 'none'}."
            )
        return attrs[name]

    def __repr__(self) -> str:
        return f"<op {self.name!r} type={self.type}>"


def as_many(answer: Any, count: int, rule: Rule, op_type: str) -> Sequence[Any]:
    """A rule's answer as one gradient per input."""
    answer = list(answer) if isinstance(answer, list | tuple) else [answer]
    if len(answer) != count:
        raise RuleError(
            f"wrong number of gradients: {label(rule)} for the op type {op_type!r} returned "
            f"{len(answer)}, and the op has {count} input{'s' if count != 1 else ''}. "
            "Return one gradient per input, in order, or None for an input without one."
        )
    return answer


# -- registering ---------------------------------------------------------------------------


def canonical(op_type: str) -> str:
    """The op type under the name used here (TF has several for some: Add and AddV2)."""
    return ALIASES.get(op_type, op_type)


def find_op(op_type: str) -> Op:
    """The op of a type, or an error with near names."""
    if not isinstance(op_type, str):
        raise ArgumentError(f"an op type is a string such as 'Relu', got {op_type!r}")
    op = OPS.get(canonical(op_type))
    if op is None:
        raise UnknownOpError(
            f"there is no op type {op_type!r}.{near(op_type, [*OPS, *ALIASES])} "
            "regrad.op_types() lists them all."
        )
    return op


def gradient(type: str, wrt: str | None = None, *, overwrite: bool = False) -> Callable[[F], F]:
    """Give an op type its rule: `@gradient("Square")`, or for one input `@gradient("MatMul", "a")`.

    The rule's first parameter decides its form. `dy` makes it native: the other parameters
    name what it needs (an input, the output `y`, an attribute, `x_shape`, `x_dtype`), and
    a record keeps just that. Anything else makes it TensorFlow's: `(op, grad, ...)`.
    With `wrt` it gives one input's gradient and runs only if that is wanted; without, the
    gradients of all inputs in order. None means no gradient.

    Raises:
        UnknownOpError: the op type does not exist.
        RegistrationError: it has a rule already; pass `overwrite=True` to replace it
            everywhere, or use `gradient_override_map` to replace it in a scope.
        RuleError: the rule asks for a name that the op does not have.

    Source: TensorFlow's `RegisterGradient`; names that decide what is kept are
    PyTorch's `derivatives.yaml`.

    >>> import regrad as rg
    >>> @rg.op("Cube")
    ... def cube(xp, x: rg.Tensor, /) -> rg.Tensor:
    ...     "`x * x * x`, element by element."
    ...     return x * x * x
    >>> @rg.gradient("Cube")
    ... def _(dy, x):
    ...     return dy * 3 * x * x
    >>> rg.grad(cube)(rg.scalar(2.0)).print()
    Tensor
        12
    """
    op = find_op(type)

    def register(function: F) -> F:
        taken = not isinstance(op.rule, Missing)
        if taken and not overwrite and not (wrt and _lacks(op.rule, wrt)):
            raise RegistrationError(
                f"the op type {op.type!r} has a rule already"
                f"{f' for its input {wrt!r}' if wrt else ''}. To change it within a scope use "
                f"gradient_override_map({{{op.type!r}: rule}}); to replace it everywhere pass "
                "overwrite=True."
            )
        op.rule = _extended(op, wrt, function) if wrt else bind(function, op, op.type)
        return function

    return register


def _lacks(rule: Rule, wrt: str) -> bool:
    return isinstance(rule, PerInput) and wrt not in rule.functions


def _extended(op: Op, wrt: str, function: Callable[..., Any]) -> PerInput:
    names = [i.name for i in op.inputs]
    if wrt not in names:
        raise RuleError(
            f"the op type {op.type!r} has no input {wrt!r}.{near(wrt, names)} "
            f"Its inputs are {', '.join(names)}."
        )
    rule = PerInput(op, op.type)
    if isinstance(op.rule, PerInput):
        for known, old in op.rule.functions.items():
            rule.add(known, old)
    rule.add(wrt, function)
    return rule


def RegisterGradient(name: str) -> Callable[[F], F]:  # noqa: N802 (TensorFlow's name)
    """Register a rule under a free name, for use in `gradient_override_map`.

    Raises ArgumentError for a name that is not a string and RegistrationError (a KeyError)
    for one that is taken, by another rule or by an op type. The function itself comes back.

    Source: `tf.RegisterGradient`.

    >>> import regrad as rg
    >>> @rg.RegisterGradient("StraightThroughDoc")
    ... def straight_through(op, grad):
    ...     return grad
    >>> with rg.gradient_override_map({"Sign": "StraightThroughDoc"}):
    ...     rg.grad(rg.sign)(rg.scalar(0.5)).print()
    Tensor
        1
    """
    if not isinstance(name, str):
        raise ArgumentError(f"RegisterGradient needs a name (a string), got {name!r}")

    def register(function: F) -> F:
        if not callable(function):
            raise ArgumentError(f"the rule registered as {name!r} must be callable, got {function!r}")
        if name in RULES or name in OPS:
            former = f" by {place(RULES[name])}" if name in RULES else " by an op type"
            raise RegistrationError(
                f"the name {name!r} is taken already{former}. Choose another name, or give "
                "gradient_override_map the function itself, which needs no name."
            )
        RULES[name] = function
        return function

    return register


def not_differentiable(*op_types: str) -> None:
    """Declare that these op types have no gradient; what they return is free of any tape."""
    for op_type in op_types:
        find_op(op_type).rule = NoGradient()


def op_types() -> list[str]:
    """All op types, sorted: the keys that `gradient_override_map` and `gradient` accept.

    >>> import regrad as rg
    >>> "MatMul" in rg.op_types()
    True
    """
    return sorted(OPS)


# -- putting a rule in force ---------------------------------------------------------------


def resolve(value: str | Callable[..., Any], op: Op) -> Rule:
    """The rule that a map's value stands for, bound to `op`."""
    if callable(value):
        return bind(value, op, getattr(value, "__name__", type(value).__name__))
    if not isinstance(value, str):
        raise ArgumentError(
            f"gradient_override_map maps op types to rules: for {op.type!r} a registered name "
            f"or a function is due, got {value!r}"
        )
    if value in RULES:
        return bind(RULES[value], op, value)
    if canonical(value) in OPS:
        return _borrowed(OPS[canonical(value)], op)
    raise UnknownOpError(
        f"no rule is registered as {value!r} (wanted for the op type {op.type!r})."
        f"{near(value, [*RULES, *OPS])} Register it with @RegisterGradient({value!r}), or give "
        "the function itself."
    )


def _borrowed(lender: Op, op: Op) -> Rule:
    """Another op type's rule, its names resolved against `op`."""
    rule = lender.rule
    if isinstance(rule, NoGradient):
        return rule
    if rule.function is not None:
        return bind(rule.function, op, lender.type)
    if not isinstance(rule, PerInput):
        raise MissingRuleError(f"the op type {lender.type!r} has no rule to borrow for {op.type!r}")
    borrowed = PerInput(op, lender.type)
    if not set(rule.functions) <= {i.name for i in op.inputs}:
        raise RuleError(
            f"the rule of {lender.type!r} is for inputs {', '.join(rule.functions)}; the op type "
            f"{op.type!r} has {', '.join(i.name for i in op.inputs)}"
        )
    for wrt, function in rule.functions.items():
        borrowed.add(wrt, function)
    return borrowed


def bind(function: Callable[..., Any], op: Op, name: str) -> Rule:
    """A rule function as a rule of `op`; the first parameter's name decides its form."""
    first = parameters(function)[:1]
    if first == ["dy"]:
        if len(op.inputs) > 1:
            return Joint(op, name, function)
        rule = PerInput(op, name)
        rule.add(op.inputs[0].name, function)
        rule.function = function
        return rule
    _check_tensorflow_form(function, name)
    return TensorFlowForm(op, name, function)


def _check_tensorflow_form(function: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(function).bind("op", "grad")
    except TypeError:
        names = ", ".join(parameters(function))
        if not _takes_several(function):
            raise RuleError(
                f"the rule {name!r} takes ({names}). A rule's first parameter is dy (native "
                "form: the others name what it needs, as in `def rule(dy, x)`), or else it is "
                "in TensorFlow's form and takes (op, grad, ...)."
            ) from None
    except ValueError:  # a builtin without a signature: its own call will tell
        pass


def _takes_several(function: Callable[..., Any]) -> bool:
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    return sum(k in (k.POSITIONAL_ONLY, k.POSITIONAL_OR_KEYWORD) for k in kinds) > 2


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters, in order."""
    if type(function) is FunctionType:
        code = function.__code__
        return list(code.co_varnames[: code.co_argcount])
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The rule, called `dSquare` in tracebacks if its author called it `_`."""
    if type(function) is FunctionType and function.__name__ == "_":
        function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)
        function.__name__ = function.__qualname__ = name
    return function


def label(rule: Rule) -> str:
    """A rule in a message."""
    return f"the rule {rule.name!r}" if rule.name else "the rule"


def describe(function: Callable[..., Any], name: str) -> str:
    """A rule in a message, with its place."""
    where = place(function)
    return f"the rule {name!r}" + (f" ({where})" if where else "")


def place(function: Callable[..., Any]) -> str:
    """Where a function was written: `name, file:line`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return getattr(function, "__name__", repr(function))
    return f"{function.__name__}, {code.co_filename}:{code.co_firstlineno}"

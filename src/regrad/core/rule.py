"""The forms that a rule can take, and how the gradient passes each.

In the native form a rule's first parameter is `dy`, the gradient arriving, and the others are
**names**: an input (`x`), the output (`y`), an attribute (`axis`), or only an input's shape or
dtype (`x_shape`, `x_dtype`). In TensorFlow's form it takes `(op, grad, ...)` and gets the whole
record. The names decide what a record keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from regrad.core.hints import hint_at
from regrad.core.made import Made
from regrad.core.names import OP_VIEW
from regrad.core.signatures import declared, parameters_of, plain_code
from regrad.errors import MissingRuleError, RuleError, SignatureError, near

if TYPE_CHECKING:
    from regrad.core.protocols import NodeLike
    from regrad.core.registry import Op
    from regrad.core.tape import Record
    from regrad.core.tensor import Tensor

# What arrives at an op: one gradient, or for several outputs one each, None where none arrives.
Cotangent: TypeAlias = "Tensor | tuple[Tensor | None, ...]"

# A rule as it was written: `(dy, …)` with names, or `(op, grad, …)`; it answers gradients or None.
RuleFunction: TypeAlias = Callable[..., Any]


# What a rule's pull returns: gradients, each with the number of its parameter.
Pulled: TypeAlias = Iterable[tuple[int, Any]]

# What a record keeps: the parameters whose tensors it holds, and whether it holds the output.
Kept: TypeAlias = tuple[frozenset[int], bool]


class Extra(NamedTuple):
    """A name that the rule of any op may ask for, besides the op's own names."""

    read: Callable[[Any], Any]  # from a record
    keeps: Callable[[Op], Kept]  # what a record must keep for it


EXTRAS: dict[str, Extra] = {}  # `builtin` and `forward`: see `core.builtin`


def free(name: str) -> str:
    """Return the name of somebody's parameter in a rule, where it may stand for something else."""
    return f"{name}_" if name in ("dy", "y", "op", "grad", *EXTRAS) else name


NO_GRADIENT: Any = type("NoGradient", (), {"__repr__": lambda _: "no gradient"})()


def no_gradient(dy: Any) -> Any:
    """Return no gradient: what leads to the op's inputs is as if the op were not differentiated.

    A rule of an op of one differentiable input that returns None has forgotten its `return`, and
    raises. This rule says None on purpose; another rule may return `no_gradient(dy)`. The gradient
    is then zero where an array is asked for (`grad`, `jax.grad`), and None where that stands for
    none (`x.grad` in PyTorch).

    Args:
        dy: The gradient that arrives.

    Returns:
        What stands for no gradient in the answer of a rule.

    Raises:
        Nothing. It fits every op type.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Tanh": rg.rules.no_gradient}):
    ...     print(rg.grad(lambda x: x + rg.tanh(x))(rg.tensor([-2.0, 0.5])).tolist())
    [1.0, 1.0]
    """
    return NO_GRADIENT


STARS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
NO_PLANS: Mapping[frozenset[int], Kept] = MappingProxyType({})


class Rule:
    """The way of a gradient through one op: what a record must keep, and the pull itself."""

    __slots__ = ()  # (for rules that are made at each call; others may have any attributes)

    watches = True  # whether outputs of an op under this rule are watched
    flat = False  # zero wherever it is defined (sign, floor, …): never linear in its input
    constant = False  # the op's value does not depend on the values of its inputs (ones_like)
    each = False  # of several outputs each depends on the input at its place, and on no other
    sparse = False  # whether None, not zeros, arrives from outputs that have no gradient
    unless: Callable[[dict[str, Any], Sequence[Any]], bool] | None = None  # no gradient then
    replaces = False  # whether it replaces the values of ops: see `core.replacing`
    own_count: int | None = None  # of the inputs for which `builtin` answers a rule, if not of all
    is_foreign = False  # the gradient that another library has for an op of its own
    asks_needs = False  # which gradients are wanted: see `Record.only`
    holomorphic = False  # whether an op's own rule, borrowed by another, is to be conjugated
    by_leaf = False  # `wanted` are leaves, not parameters
    answers = False  # of one differentiable input, so that None is refused; see `no_gradient`
    whole = False  # for all inputs of an op of one: its answer may be a list, of one gradient
    once = False  # for the first derivative alone: what differentiates that takes the op's own
    name = ""
    function: RuleFunction | None = None
    hit: Any = None  # a Hit: where the op under it was called, if it was put in force by a scope
    plans: Mapping[frozenset[int], Kept] = NO_PLANS  # what `keeps` said
    pulls: Sequence[Callable[[Any, Any], Any]] | None = None  # one per input, if it is so simple
    # `pulls[0](record, dy)` as `short(rule, dy, x, y)`, if it asks for no more of a record
    short: Callable[..., Any] | None = None
    extras: frozenset[str] = frozenset()  # the names among EXTRAS that it asks for

    @property
    def is_ours(self) -> bool:
        """True if the rule is one of the library's own, for an op of its own."""
        functions = [self.function, *getattr(self, "functions", {}).values()]
        modules = {getattr(f, "__module__", None) or "" for f in functions if f is not None}
        return bool(modules) and all(m.partition(".")[0] == "regrad" for m in modules)

    @property
    def bare(self) -> Rule:
        """The rule without what counts its runs, or conjugates it."""
        return self

    def keeps(self, wanted: frozenset[int]) -> Kept:
        """The parameters whose tensors a record must keep, and whether it keeps the output."""
        return frozenset(), False

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Pulled:
        """`(parameter, gradient)` for each wanted parameter."""
        return ()

    def complete(self, answer: Any, record: Record, dy: Cotangent, count: int) -> Any:
        """Return what another rule for the op answered, with what it may leave out to this one.

        It is one gradient, or None, for each of the first so many parameters.
        """
        return answer

    def carries(self, node: NodeLike, index: int) -> bool:
        """Return whether an integer output in a graph carries a gradient, as integer inputs do."""
        return any(s.carries and s.dtype.kind in "biu" for s in node.sources())

    def input_name(self, leaf: int) -> str | None:
        """Return the name of an input in messages; None for its name in the op."""
        return None

    def linear_in(self, wanted: frozenset[int]) -> bool:
        """Return whether the op is affine in these inputs together: its gradient ignores them."""
        kept, keeps_output = self.keeps(wanted)
        return not (self.flat or keeps_output or kept & wanted)


class Conjugated(Rule):
    """The rule of a holomorphic op, written as for real numbers, for complex ones.

    TensorFlow's convention for y = f(x) is dy * conj(f'(x)), which is conj(conj(dy) * f'(x)).
    """

    def __init__(self, rule: Rule, conj: Callable[[Tensor], Tensor]) -> None:
        self.rule = rule
        self.conj = conj
        self.name: str = rule.name
        self.hit: Any = rule.hit
        self.keeps: Callable[..., Any] = rule.keeps
        self.answers: bool = rule.answers
        self.whole: bool = rule.whole
        self.once: bool = rule.once
        self.asks_needs: bool = rule.asks_needs
        self.linear_in: Callable[..., Any] = rule.linear_in

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Pulled:
        pulled = self.rule.pull(record, _each(self.conj, dy), wanted)
        return [(i, _each(self.conj, dx)) for i, dx in pulled]


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_each(function, v) for v in value])
    return value if value is None or value is NO_GRADIENT else function(value)


class NoRule(Rule):
    """No rule yet: fine until a gradient is wanted."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Any:
        raise MissingRuleError(
            f"no gradient: the op type {self.op.type!r} is on the path and has no rule. "
            f"Register one with @gradient({self.op.type!r}), put one in force with "
            f"gradient_override_map, or cut the path with stop_gradient."
        )


class NoGradient(Rule):
    """Declared to have no gradient: outputs are free."""

    watches = False
    flat = True


class BoundFunction:
    """A rule function in the native form, its names resolved against one op."""

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


# By what a rule of one input asks for.
SHORT: Mapping[str, Callable[[RuleFunction], Callable[..., Any]]] = {
    "": lambda function: lambda rule, dy, x, y: function(dy),
    "x": lambda function: lambda rule, dy, x, y: function(dy, x),
    "y": lambda function: lambda rule, dy, x, y: function(dy, y),
    "xy": lambda function: lambda rule, dy, x, y: function(dy, x, y),
}


def _call_with(
    function: RuleFunction, getters: Sequence[Callable[[Record], Any]]
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


def _call_by_keyword(
    function: RuleFunction,
    getters: dict[str, Callable[[Record], Any]],
    record: Record,
    dy: Cotangent,
) -> Any:
    return function(dy, **{name: get(record) for name, get in getters.items()})


def asked(function: RuleFunction, op: Op) -> tuple[list[str], bool]:
    """The names that a rule asks for, and whether it takes them by place.

    It asks for all after `dy`, but for unknown ones that have a default. (`lambda dy, k=k: dy * k`
    brings its own k.) `**names` asks for all that there are.
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
    """Return how a rule's parameter `name` is read from a record."""
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
        f"{describe(function, rule_name)} asks for {name!r}, which the op type {op.type!r} does "
        f"not have.{near(name, known)} After dy it may name {', '.join(known)}."
    )


def _kept(i: int, record: Record) -> Any:
    return record.xs[i]


def _kept_in_groups(i: int, record: Record) -> Any:
    return record.argument(record.xs, i)


def _detail(i: int, which: int, record: Record) -> Any:
    return record.detail(i, which)


class PerInput(Rule):
    """One function per input; each runs only if its gradient is wanted."""

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
            return None  # indices have none in mathematics
        raise MissingRuleError(
            f"no gradient: the op type {self.op.type!r} is on the path by its input {name!r}, "
            f"for which it has no rule. Register one with @gradient({self.op.type!r}, {name!r}), "
            "or cut the path with stop_gradient."
        )


class Entwined(PerInput):
    """As `PerInput`, with another function for the first input where others are wanted too.

    For ops that are gradients themselves, at points where the second derivative needs to know how
    the gradient that arrived changes with x. It arrived from a function of x if both are wanted.
    """

    together: BoundFunction
    of_both: RuleFunction

    def add_together(self, function: RuleFunction) -> None:
        self.of_both = function
        self.together = BoundFunction(function, self.op, self.name)
        self.pulls: Any = None  # the walk asks `pull`, and says what is wanted

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
            return [(wanted[0], answer)]  # (by the one input that it may be meant for)
        return enumerate(as_many(answer, len(self.op.inputs), record))


class TensorFlowForm(Rule):
    """A rule `(op, grad, ...)`, which sees the whole record."""

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
        """Say in which form a rule was called that takes anything: it may be in the native one."""
        if first_is_any(self.call):
            raise SignatureError(
                f"{describe(self.call, self.name)} takes {parameters_of(self.call)}, which "
                "does not say its form, so it was called in TensorFlow's, (op, grad), and failed: "
                f"{error}. Name its first parameter dy for the native form; a wrapper takes over "
                "the parameters of its rule by functools.wraps."
            ) from error


class OpView:
    """A record as a rule in TensorFlow's form sees it (TF's `Operation`)."""

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
        """Return which leaf of the record each input is; None for what is an attribute there."""
        return range(len(self.inputs))

    def shown(self, tensor: Tensor | None) -> Any:
        """A gradient as the rule is to see it."""
        return tensor

    def own(self, answer: Any) -> Sequence[Any]:
        """A rule's answer as one gradient per leaf of the record.

        None at the end is for what TensorFlow has as an input and regrad as an attribute.
        """
        count = len(self.inputs)
        if isinstance(answer, list | tuple) and not any(dx is not None for dx in answer[count:]):
            answer = answer[:count]
        return as_many(answer, count, self._record)

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


hint_at(OpView, OP_VIEW)


def as_many(answer: Any, count: int, record: Record) -> Sequence[Any]:
    """A rule's answer as one gradient per input."""
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


# -- rules in messages ---------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters, in order."""
    if (code := plain_code(function)) is not None:
        return list(code.co_varnames[: code.co_argcount])
    return [p.name for p in declared(function) or ()]


def first_is_any(function: RuleFunction) -> bool:
    """Return whether a function's first parameter is `*args`."""
    found = inspect.signature(function).parameters.values()
    return any(p.kind is p.VAR_POSITIONAL for p in list(found)[:1])


def called(function: RuleFunction) -> str:
    """A function's name, for a message."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def named(function: RuleFunction, name: str) -> Callable[..., Any]:
    """The rule, called `dSquare` in tracebacks if its author called it `_`."""
    if type(function) is FunctionType and function.__name__ == "_":
        function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)
        function.__name__ = function.__qualname__ = name
    return function


def label(rule: Rule) -> str:
    """A rule in a message."""
    return f"the rule {rule.name!r}" if rule.name else "the rule"


def describe(function: RuleFunction, name: str) -> str:
    """A rule in a message, with its place."""
    where = place(function)
    return f"the rule {name!r}" + (f" ({where})" if where else "")


def describe_pull(record: Record, name: str = "") -> str:
    """The rule of a record in a message, with the op, and the line that called it if it is known.

    `the rule 'clip' (clip, rules.py:3) for the op type 'Relu' at model.py:12`. A rule that has a
    function for each input is described by the function for the input `name`.
    """
    rule = getattr(record.rule, "rule", record.rule).bare  # without what counts, or conjugates
    functions = getattr(rule, "functions", {})
    custom = getattr(rule, "written", None) or getattr(rule, "grad_func", None)
    function = rule.function or functions.get(name) or custom
    hit = record.rule.hit or getattr(record, "hit", None)
    own = getattr(record, "name", "")  # in a graph
    return (
        (describe(function, rule.name) if function else label(rule))
        + f" for the op type {record.op.type!r}"
        + (f" (the op {own!r})" if own else "")
        + (f" at {hit.where}" if hit else "")
    )


def wrong_gradient(which: str, name: str, got: str, expected: str) -> RuleError:
    """An error: a rule (or function, `which`) returned what cannot be the gradient of an input."""
    return RuleError(
        f"wrong gradient: {which}, input {name!r}, returned {got}, expected {expected}"
    )


def identity_of(rule: Any) -> Any:
    """Return the key that a rule shares with all that do the same; it holds while the rule is held.

    A `lambda` in a training loop is a new function at each step, of one code object and with the
    same cells. What a factory such as `superspike(10.0)` makes is known by its arguments.
    """
    if type(rule) is FunctionType and not rule.__dict__:
        defaults = (*(rule.__defaults__ or ()), *(rule.__kwdefaults__ or {}).values())
        held = (rule.__code__, rule.__globals__, *(rule.__closure__ or ()), *defaults)
        return tuple(map(id, held))
    if isinstance(rule, Made):
        module, name, args, options = rule.made_by
        given = [("", x) for x in args] + sorted(options.items())
        if all(type(x) in (float, int, str) for _, x in given):
            return module, name, *((key, type(x), x) for key, x in given)
    try:
        hash(rule)
    except TypeError:  # an object that can be called
        return id(rule)
    return rule


class MapValue:
    """A value in a map that stands for a rule, equal to others that do the same."""

    @property
    def identity(self) -> Any:
        """The key that it shares with them."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


class MapRule(MapValue):
    """A rule that only a map can put in force: it can be wrapped as others, and not be called."""

    instead = ""  # what to write in a rule

    def __call__(self, *args: Any, **names: Any) -> Any:
        raise RuleError(
            f"{self!r} is a value in a map of rules, and cannot be called.{self.instead}"
        )


def place(function: Any) -> str:
    """Return where a function was written: `name, file:line`."""
    while inner := getattr(function, "__wrapped__", None) or getattr(function, "func", None):
        function = inner
    code = getattr(function, "__code__", None)
    if code is None:
        return getattr(function, "__name__", repr(function))
    return f"{function.__name__}, {code.co_filename}:{code.co_firstlineno}"

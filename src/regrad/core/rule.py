"""The interface of rules for the backward pass and the tapes, and descriptions for messages.

`core.rule_forms` implements the forms in which users write rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from regrad.core.made import Made
from regrad.core.signatures import declared, plain_code
from regrad.errors import MissingRuleError, RuleError

if TYPE_CHECKING:
    from regrad.core.protocols import NodeLike
    from regrad.core.registry import Op
    from regrad.core.tape import Record
    from regrad.core.tensor import Tensor

# The incoming gradient of an op: one, or a tuple with one per output, None for no gradient.
Cotangent: TypeAlias = "Tensor | tuple[Tensor | None, ...]"

# A rule as the user wrote it: `(dy, …)` with names, or `(op, grad, …)`. Returns gradients or None.
RuleFunction: TypeAlias = Callable[..., Any]


# The result of a rule's pull: gradients, each with the number of its parameter.
Pulled: TypeAlias = Iterable[tuple[int, Any]]

# The values that a record keeps: the parameters whose tensors it holds, and whether it holds y.
Kept: TypeAlias = tuple[frozenset[int], bool]


class Extra(NamedTuple):
    """A name that the rule of any op may take, in addition to the op's own names."""

    read: Callable[[Any], Any]  # returns the value for a record
    # returns what a record must keep for it
    keeps: Callable[[Op], Kept] = lambda op: (frozenset(), False)
    runs_op: bool = False  # whether it runs the op itself, so that the record must allow this


EXTRAS: dict[str, Extra] = {}  # see `core.builtin` and `core.surrogates`


def free(name: str) -> str:
    """Return a user's parameter name for use in a rule, changed if the name has a meaning there."""
    return f"{name}_" if name in ("dy", "y", "op", "grad", *EXTRAS) else name


NO_GRADIENT: Any = type("NoGradient", (), {"__repr__": lambda _: "no gradient"})()


def no_gradient(dy: Any) -> Any:
    """Return no gradient: the inputs get a gradient as if the op were not differentiated.

    If an op has one differentiable input and its rule returns None, the rule probably lacks a
    `return`, so regrad raises. This rule returns no gradient on purpose. Other rules may return
    `no_gradient(dy)`. The gradient is then zero where an array is required (`grad`, `jax.grad`),
    and None where None is allowed (`x.grad` in PyTorch).

    Args:
        dy: The incoming gradient.

    Returns:
        The marker for no gradient in the answer of a rule.

    Raises:
        Nothing. It fits every op type.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Tanh": rg.rules.no_gradient}):
    ...     print(rg.grad(lambda x: x + rg.tanh(x))(rg.tensor([-2.0, 0.5])).tolist())
    [1.0, 1.0]
    """
    return NO_GRADIENT


NO_PLANS: Mapping[frozenset[int], Kept] = MappingProxyType({})


class Rule:
    """Propagates a gradient through one op. Decides which values a record must keep."""

    __slots__ = ()  # (for rules that are made at each call; other rules may have any attributes)

    watches = True  # whether tapes watch the outputs of an op under this rule
    flat = False  # zero wherever it is defined (sign, floor, …): never linear in its input
    constant = False  # the op's value does not depend on the values of its inputs (ones_like)
    each = False  # each output depends only on the input at the same position
    sparse = False  # whether outputs without a gradient get None as dy, not zeros
    unless: Callable[[dict[str, Any], Sequence[Any]], bool] | None = None  # if True: no gradient
    replaces = False  # whether it replaces the values of ops: see `core.replacing`
    own_count: int | None = None  # the number of inputs with a gradient by `builtin` (None: all)
    is_foreign = False  # whether it is another library's own gradient
    asks_needs = False  # whether it takes `needs`: see `Record.only`
    holomorphic = False  # whether an op's own rule, borrowed by another op, has to be conjugated
    by_leaf = False  # `wanted` are leaves, not parameters
    answers = False  # for one differentiable input, so that None raises; see `no_gradient`
    whole = False  # for all inputs of a one-input op: it may return a list with one gradient
    once = False  # for the first derivative alone: derivatives of the gradient use the op's own
    name = ""
    function: RuleFunction | None = None
    hit: Any = None  # the Hit of the op's call site, if a scope applied the rule
    plans: Mapping[frozenset[int], Kept] = NO_PLANS  # results of `keeps`
    pulls: Sequence[Callable[[Any, Any], Any]] | None = None  # one per input, for simple rules
    # `short(rule, dy, x, y)` is `pulls[0](record, dy)`, if the pull needs nothing else of a record.
    # It is the key of columns (see `Tape`). It is complete: for a real op of one tensor without
    # attributes, all values in a record follow from x, y and the rule.
    short: Callable[..., Any] | None = None
    extras: frozenset[str] = frozenset()  # the names among EXTRAS that it takes

    @property
    def is_ours(self) -> bool:
        """True if the rule is one of regrad's own, for an op of regrad."""
        functions = [self.function, *getattr(self, "functions", {}).values()]
        modules = {getattr(f, "__module__", None) or "" for f in functions if f is not None}
        return bool(modules) and all(m.partition(".")[0] == "regrad" for m in modules)

    @property
    def runs_op(self) -> bool:
        """True if the rule takes a name that runs the op itself, and so needs the op's inputs."""
        return any(EXTRAS[name].runs_op for name in self.extras)

    @property
    def bare(self) -> Rule:
        """The rule without the wrappers that count its runs or conjugate it."""
        return self

    def keeps(self, wanted: frozenset[int]) -> Kept:
        """Return the parameters whose tensors a record must keep, and whether it keeps y."""
        return frozenset(), False

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Pulled:
        """Return `(parameter, gradient)` for each wanted parameter."""
        return ()

    def complete(self, answer: Any, record: Record, dy: Cotangent, count: int) -> Any:
        """Complete the answer of another rule for the op with gradients that it may omit.

        The result has one gradient, or None, for each of the first `count` parameters.
        """
        return answer

    def carries(self, node: NodeLike, index: int) -> bool:
        """Return whether an integer output in a graph carries a gradient, like integer inputs."""
        return any(s.carries and s.dtype.kind in "biu" for s in node.sources())

    def input_name(self, leaf: int) -> str | None:
        """Return the name of an input in messages; None for its name in the op."""
        return None

    def linear_in(self, wanted: frozenset[int]) -> bool:
        """Return whether the op is affine in these inputs together: its gradient ignores them."""
        kept, keeps_output = self.keeps(wanted)
        return not (self.flat or keeps_output or kept & wanted)


class RuleLike(Rule):
    """A rule with the interface of another rule, whose pull may differ."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.name: str = rule.name
        self.hit: Any = rule.hit
        self.keeps: Callable[..., Any] = rule.keeps
        self.answers: bool = rule.answers
        self.whole: bool = rule.whole
        self.once: bool = rule.once
        self.asks_needs: bool = rule.asks_needs


class Conjugated(RuleLike):
    """The rule of a holomorphic op on complex numbers, although written as for real numbers.

    TensorFlow's convention for y = f(x) is dy * conj(f'(x)), which is conj(conj(dy) * f'(x)).
    """

    def __init__(self, rule: Rule, conj: Callable[[Tensor], Tensor]) -> None:
        super().__init__(rule)
        self.conj = conj
        self.linear_in: Callable[..., Any] = rule.linear_in

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Pulled:
        pulled = self.rule.pull(record, _each(self.conj, dy), wanted)
        return [(i, _each(self.conj, dx)) for i, dx in pulled]


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_each(function, v) for v in value])
    return value if value is None or value is NO_GRADIENT else function(value)


class NoRule(Rule):
    """No rule yet. It raises only if a gradient is needed."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Any:
        raise MissingRuleError(
            f"no gradient: the op type {self.op.type!r} is on the path and has no rule. "
            f"Register a rule with @gradient({self.op.type!r}), apply one with "
            f"gradient_override_map, or cut the path with stop_gradient."
        )


class NoGradient(Rule):
    """The rule of an op that is declared to have no gradient. Tapes ignore its outputs."""

    watches = False
    flat = True


# -- rules in messages ---------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, in order."""
    if (code := plain_code(function)) is not None:
        return list(code.co_varnames[: code.co_argcount])
    if own := vars(function).get("__signature__") if hasattr(function, "__dict__") else None:
        return [*own.parameters]
    return [p.name for p in declared(function) or ()]


def called(function: RuleFunction) -> str:
    """Return a function's name, for a message."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def label(rule: Rule) -> str:
    """Return the description of a rule for a message."""
    return f"the rule {rule.name!r}" if rule.name else "the rule"


def describe(function: RuleFunction, name: str) -> str:
    """Return the description of a rule for a message, with the place of its function."""
    where = place(function)
    return f"the rule {name!r}" + (f" ({where})" if where else "")


def describe_pull(record: Record, name: str = "") -> str:
    """Return the description of a record's rule, with the op, and the op's call site if known.

    `the rule 'clip' (clip, rules.py:3) for the op type 'Relu' at model.py:12`. If a rule has a
    function for each input, the description has the function for the input `name`.
    """
    rule = getattr(record.rule, "rule", record.rule).bare  # without wrappers
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
    """Return the error for a rule (or function, `which`) with a wrong gradient for an input."""
    return RuleError(
        f"wrong gradient: {which}, input {name!r}, returned {got}, expected {expected}"
    )


def identity_of(rule: Any) -> Any:
    """Return a key that equal rules share. The key is valid as long as the rule is alive.

    A `lambda` in a training loop is a new function at each step, but has the same code object and
    the same cells. The result of a factory such as `superspike(10.0)` is identified by its
    arguments.
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
    except TypeError:  # (a callable object)
        return id(rule)
    return rule


class MapValue:
    """A value in a map that represents a rule. It equals other values with the same effect."""

    @property
    def identity(self) -> Any:
        """The key that equal values share."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


class MapRule(MapValue):
    """A rule for use in maps only. Other rules can wrap it, but it cannot be called."""

    instead = ""  # a hint for use in a rule

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

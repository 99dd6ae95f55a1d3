"""A rule, as the walk and the tapes see it, and how messages describe one.

The forms in which rules are written are in `core.rule_forms`.
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
    # what a record must keep for it
    keeps: Callable[[Op], Kept] = lambda op: (frozenset(), False)
    runs_op: bool = False  # whether it runs the op itself, which a record must then be able to do


EXTRAS: dict[str, Extra] = {}  # see `core.builtin` and `core.surrogates`


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
    # `pulls[0](record, dy)` as `short(rule, dy, x, y)`, if it needs no more of a record. It is
    # the key of columns (see `Tape`). Nothing is missing: of a real op of one tensor and no
    # attributes, a record holds what follows from x and y, and the rule.
    short: Callable[..., Any] | None = None
    extras: frozenset[str] = frozenset()  # the names among EXTRAS that it asks for

    @property
    def is_ours(self) -> bool:
        """True if the rule is one of the library's own, for an op of its own."""
        functions = [self.function, *getattr(self, "functions", {}).values()]
        modules = {getattr(f, "__module__", None) or "" for f in functions if f is not None}
        return bool(modules) and all(m.partition(".")[0] == "regrad" for m in modules)

    @property
    def runs_op(self) -> bool:
        """True if the rule asks for a name that runs the op itself, so that it needs its inputs."""
        return any(EXTRAS[name].runs_op for name in self.extras)

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
        """Return the answer of another rule for the op, with what it may leave out to this one.

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


class RuleLike(Rule):
    """A rule that records and walks see as another one, and whose pull may differ."""

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
    """The rule of a holomorphic op, written as for real numbers, for complex ones.

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


# -- rules in messages ---------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters, in order."""
    if (code := plain_code(function)) is not None:
        return list(code.co_varnames[: code.co_argcount])
    return [p.name for p in declared(function) or ()]


def called(function: RuleFunction) -> str:
    """A function's name, for a message."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


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

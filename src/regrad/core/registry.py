"""The one table of op types and rules, for built-ins and users alike.

An `Op` is an op type: its kernel, its inputs and attributes by name, and its rule.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from regrad.core import backends
from regrad.core.hints import last_name, makes_rules, of_no_rule, of_rule, of_rule_name
from regrad.core.rule import NoGradient, NoRule, Rule, RuleFunction, called, parameters, place
from regrad.core.rule_forms import Joint, PerInput, TensorFlowForm
from regrad.core.signatures import parameters_of, public
from regrad.errors import (
    ArgumentError,
    MissingRuleError,
    RegistrationError,
    RuleError,
    SignatureError,
    UnknownOpError,
    near,
)

F = TypeVar("F", bound=Callable[..., Any])
Attrs: TypeAlias = dict[str, Any]  # the attributes of one op, by name
Kernel: TypeAlias = Callable[..., backends.Array] | str  # or its name in the standard


class OpTable(dict[str, "Op"]):
    """The op types by name: those of sheets that are loaded late are found as the others are.

    `late` has their modules from the start, so that which op types there are, and how many, does
    not depend on what is loaded. They stay apart, in `sheets`: the only way to one is the import
    of its module, which waits for a thread that has begun it. So none is found without its rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.late: dict[str, str] = {}
        self.sheets: dict[str, Op] = {}
        self.makers: dict[str, ModuleType | None] = {}  # the modules that made those of the sheets

    def __missing__(self, op_type: str) -> Op:
        import_module(self.late[op_type])
        return self.sheets[op_type]

    def __contains__(self, op_type: object) -> bool:
        return super().__contains__(op_type) or op_type in self.late

    def __iter__(self) -> Iterator[str]:
        return iter([*self.late, *super().__iter__()])

    def __len__(self) -> int:
        return len(self.late) + super().__len__()

    def get(self, op_type: Any, default: Any = None) -> Any:
        if op_type not in self:
            return default
        return self[op_type]  # (whatever its import raises)

    keys: Any = Mapping.keys  # (those of dict know nothing of the sheets)
    values: Any = Mapping.values
    items: Any = Mapping.items

    def loaded(self) -> list[Op]:
        """Return the ops that somebody may hold: sheets that are not loaded have none."""
        return [*super().values(), *self.sheets.values()]

    def add(self, op: Op) -> None:
        (self.sheets if op.type in self.late else self)[op.type] = op
        if op.type in self.late:
            self.makers[op.type] = sys.modules.get(self.late[op.type])

    def is_free(self, op_type: str) -> bool:
        """Return whether there is no such op type, but for one whose own sheet is being loaded.

        That may be for a second time, if an interrupt or an error cut the first short: Python has
        then forgotten the module which made the op.
        """
        if op_type not in self.late:
            return op_type not in self
        module = sys.modules.get(self.late[op_type])
        return module is not None and self.makers.get(op_type) is not module


OPS = OpTable()
RULES: dict[str, RuleFunction | Rule] = {}  # registered under a free name, for maps

CACHED = type(cache(id))
version: int = 0  # counts the changes of rules, which compiled programs have built in

ALIASES = {
    "Add": "AddV2", "BatchMatMul": "MatMul", "BatchMatMulV2": "MatMul", "Concat": "ConcatV2",
    "Div": "RealDiv", "Gather": "GatherV2", "Inv": "Reciprocal", "Pad": "PadV2",
    "ReverseV1": "ReverseV2", "Rint": "Round", "Select": "SelectV2", "SplitV": "Split",
    "TopK": "TopKV2",
}  # fmt: skip


class Input(NamedTuple):
    """A tensor parameter of an op: one tensor, an optional one, or a sequence of them."""

    name: str
    kind: str  # "one", "optional" or "many"
    integers: bool = False  # Python numbers given here are indices, not float32


class Kernels(dict[type, Callable[..., Any]]):
    """Array type → the kernel bound to that array's namespace, filled on first use."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __missing__(self, array_type: type) -> Callable[..., Any]:
        backend = backends.BACKENDS[array_type]
        if isinstance(self.kernel, str):
            bound = backend.function(self.kernel)
        else:
            bound = partial(self.kernel, backend.xp)
        self[array_type] = bound
        return bound


def not_yet(*args: object, **attrs: object) -> Any:
    """Stands for the public function until it is made."""
    raise AssertionError("an op was called before its definition ended")


@dataclass(slots=True, eq=False, repr=False)
class Op:
    """An op type. `flat` ops take one tensor per parameter, so arguments are leaves."""

    type: str
    name: str
    kernel: InitVar[Kernel]
    inputs: Sequence[Input]
    attrs: Sequence[str] = ()
    _: KW_ONLY
    broadcasts: bool = False
    promotes: Any = False  # once it is made: whether each input is promoted
    to_float: bool = False
    holomorphic: bool = True
    real: bool = False
    several: bool = False  # its kernel returns a tuple
    stateful: bool = False  # its kernel takes the state of the run first (graphs only)
    elementwise: bool = False
    kernels: Kernels = field(init=False)
    flat: bool = field(init=False)
    lone: bool = field(init=False)
    single: bool = field(init=False)
    kinds: str | None = field(init=False)
    rule: Rule = field(init=False)
    reads: dict[tuple[str, ...], Any] = field(init=False, default_factory=dict)  # `BoundFunction`s
    replaced: Rule | None = None  # its first rule, once it was given another
    function: Callable[..., Any] = not_yet

    def __post_init__(self, kernel: Kernel) -> None:
        self.inputs = inputs = tuple(self.inputs)
        self.attrs = tuple(self.attrs)
        self.kernels = Kernels(kernel)
        self.flat = all(i.kind == "one" for i in inputs)
        self.lone = [i.kind for i in inputs if not i.integers] == ["one"]  # differentiable
        self.single = self.flat and len(inputs) == 1 and not inputs[0].integers
        if isinstance(promotes := self.promotes, bool):
            every = promotes or self.broadcasts or self.to_float
            promotes = [i.name for i in inputs] if every else []
        self.promotes = tuple(i.name in promotes for i in inputs)
        # the kinds of NumPy dtypes that need neither promotion nor refusal; None: all
        real, to_float = self.real, self.to_float
        self.kinds = ("f" if real else "fc") if to_float else "biuf" if real else None
        self.rule = NoRule(self)

    def __repr__(self) -> str:
        return f"<op type {self.type}>"

    @property
    def shipped(self) -> Rule:
        """The rule of its author."""
        return self.replaced or self.rule

    def owns(self, rule: Rule) -> bool:
        """Return whether a rule, counted or not, is the op's own."""
        return rule.bare is self.rule or rule.bare is self.replaced

    def names(self) -> list[str]:
        """Everything that a rule of this op may name after `dy`."""
        inputs = [i.name for i in self.inputs]
        details = [f"{n}_{what}" for n in inputs for what in ("shape", "dtype")]
        return [*inputs, "y", *self.attrs, *details]


# -- registering ---------------------------------------------------------------------------


def canonical(op_type: str) -> str:
    """The op type under the name used here (TF has several for some: Add and AddV2)."""
    return ALIASES.get(op_type, op_type)


def check_op_type(op_type: object) -> None:
    """Refuse what cannot be the name of an op type."""
    if not isinstance(op_type, str) or not op_type:
        refuse_function(op_type)
        raise ArgumentError(
            f"an op type is a string such as 'Relu', got {op_type!r:.80}.{meant_by(op_type)}"
        )


def meant_by(key: object) -> str:
    """Return a hint at the op type that a foreign function, class or module means by its name."""
    if isinstance(key, tuple | list):
        return " Give each op type an entry of its own."
    plain = getattr(key, "__name__", type(key).__name__).lower().replace("_", "")
    ops = [t for t, op in OPS.items() if plain in (t.lower(), op.name.replace("_", ""))]
    return f" Did you mean {ops[0]!r}?" if ops else ""


def refuse_function(key: object) -> None:
    """Refuse a function of regrad as a key: it is an op type in a place."""
    for op in OPS.loaded():
        if op.function is key:
            raise ArgumentError(
                f"a key is an op type, a string, got the function {op.name}. Did you mean "
                f"{op.type!r}?"
            )


@public
def find_op(op_type: str) -> Op:
    """Return the op of a type.

    Args:
        op_type: The op type, such as `"MatMul"`.

    Raises:
        UnknownOpError: there is none; the message has near names.

    >>> import regrad as rg
    >>> rg.find_op("MatMul").name
    'matmul'
    """
    check_op_type(op_type)
    op = OPS.get(canonical(op_type))
    if op is None:
        hint = _ELSEWHERE.get(op_type) or near(last_name(op_type), [*OPS, *ALIASES])
        raise UnknownOpError(
            f"there is no op type {op_type!r}.{hint} regrad.op_types() lists them all."
        )
    return op


# Keys of PyTorch and JAX programs alone.
_ELSEWHERE = {
    "Threshold": " In PyTorch and JAX programs it is the key of a comparison that is cast. In "
    "regrad's functions a spike is rg.step(v - threshold), key 'Step'.",
}


@public
def gradient(type: str, wrt: str | None = None, *, overwrite: bool = False) -> Callable[[F], F]:
    """Give an op type its rule: `@gradient("Square")`, or for one input `@gradient("MatMul", "a")`.

    The rule's first parameter decides its form. `dy` makes it native: the other parameters
    name what it needs (an input, the output `y`, an attribute, `x_shape`, `x_dtype`), and
    a record keeps just that; `**names` takes, and keeps, all of them. Anything else makes it
    TensorFlow's: `(op, grad, ...)`.
    With `wrt` it returns one input's gradient and runs only if that is wanted; without, the
    gradients of all inputs in order. None means no gradient, unless the op has only one
    differentiable input: then it raises, and `rules.no_gradient` says so.

    Args:
        type: The op type.
        wrt: The name of one input, if the rule is for that input alone.
        overwrite: Replace the rule that the op type has.

    Returns:
        A decorator, which returns the rule as it is.

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
        first = isinstance(op.rule, NoRule) or bool(wrt and _lacks(op.rule, wrt))
        if not (first or overwrite):
            raise RegistrationError(
                f"the op type {op.type!r} has a rule already"
                f"{f' for its input {wrt!r}' if wrt else ''}. To change it within a scope use "
                f"gradient_override_map({{{op.type!r}: rule}}); to replace it everywhere pass "
                "overwrite=True."
            )
        if not first and op.replaced is None:
            op.replaced = op.rule
        op.rule = _extend(op, wrt, function) if wrt else bind(function, op, op.type)
        _count_change(op, first)
        return function

    return register


def _count_change(op: Op, first: bool) -> None:
    """Count a change of rules, but for the first ones that an op gets as its sheet is loaded late.

    No program has built in that there were none: who asks for the op waits for its sheet.
    """
    global version
    if not (first and op.type in OPS.late):
        version += 1


def _lacks(rule: Rule, wrt: str) -> bool:
    return isinstance(rule, PerInput) and wrt not in rule.functions


def _extend(op: Op, wrt: str, function: RuleFunction) -> PerInput:
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


@public
def RegisterGradient(name: str) -> Callable[[F], F]:
    """Register a rule under a free name, for use in `gradient_override_map`.

    Args:
        name: The name, a string.

    Returns:
        A decorator, which returns the rule as it is.

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
            raise ArgumentError(
                f"the rule registered as {name!r} must be callable, got {function!r}"
            )
        if name in RULES or name in OPS:
            raise name_is_taken(name)
        RULES[name] = function
        return function

    return register


def name_is_taken(name: str) -> RegistrationError:
    """A second registration under one name."""
    former = RULES.get(name)
    by = " by an op type" if former is None else ""
    if callable(former):
        by = f" by {place(former)}"
    return RegistrationError(
        f"the name {name!r} is taken already{by}. Choose another name, or give "
        "gradient_override_map the function itself, which needs no name."
    )


@public
def not_differentiable(*op_types: str) -> None:
    """Declare that these op types have no gradient; what they return is free of any tape.

    Args:
        op_types: Op types.

    Raises:
        UnknownOpError: there is no such op type.
        RegistrationError: one of them has a rule.

    >>> import regrad as rg
    >>> @rg.op("CountPositive")
    ... def count_positive(xp, x: rg.Tensor, /) -> rg.Tensor:
    ...     "Count the elements above 0."
    ...     return xp.sum(xp.astype(x > 0, xp.int64))
    >>> rg.not_differentiable("CountPositive")
    >>> count_positive(rg.tensor([1.0, -2.0, 3.0])).item()
    2
    """
    for op_type in op_types:
        op = find_op(op_type)
        first, op.rule = isinstance(op.rule, NoRule), NoGradient()
        _count_change(op, first)


@public
def op_types() -> list[str]:
    """Return all op types, sorted: the keys that `gradient_override_map` and `gradient` accept.

    >>> import regrad as rg
    >>> "MatMul" in rg.op_types()
    True
    """
    return sorted(OPS)


# -- putting a rule in force ---------------------------------------------------------------


def resolve(value: str | RuleFunction, op: Op) -> Rule:
    """The rule that a map's value stands for, bound to `op`."""
    bound_to = getattr(type(value), "bound_to", None)  # a builtin
    if bound_to is not None:
        return bound_to(value, op)
    if callable(value) and not isinstance(value, type):
        return bind(value, op, called(value))
    if not isinstance(value, str):
        raise ArgumentError(
            f"gradient_override_map maps op types to rules: for {op.type!r} expected a "
            f"registered name or a function, got {value!r:.80}.{of_no_rule(value)}"
        )
    if value in RULES:
        registered = RULES[value]
        return registered if isinstance(registered, Rule) else bind(registered, op, value)
    if canonical(value) in OPS:
        lender = OPS[canonical(value)]
        return borrowed(lender, lender.rule, op)
    hint = of_rule_name(value) or near(value, [*RULES, *OPS])
    raise UnknownOpError(
        f"no rule is registered as {value!r} (wanted for the op type {op.type!r}).{hint} Register "
        f"it with @RegisterGradient({value!r}), or give the function itself."
    )


def borrowed(lender: Op, rule: Rule, op: Op) -> Rule:
    """A rule of another op type, its names resolved against `op`."""
    if isinstance(rule, NoGradient):
        return rule
    if rule.function is not None:
        borrowed = bind(rule.function, op, lender.type)
        borrowed.holomorphic = lender.holomorphic
        return borrowed
    if not isinstance(rule, PerInput):
        raise MissingRuleError(f"the op type {lender.type!r} has no rule to borrow for {op.type!r}")
    borrowed = PerInput(op, lender.type)
    if not set(rule.functions) <= {i.name for i in op.inputs}:
        raise RuleError(
            f"the rule of {lender.type!r} is for the inputs {', '.join(rule.functions)}; the op "
            f"type {op.type!r} has {len(op.inputs)} inputs, {', '.join(i.name for i in op.inputs)}"
        )
    for wrt, function in rule.functions.items():
        borrowed.add(wrt, function)
    borrowed.holomorphic = lender.holomorphic
    return borrowed


def bind(function: RuleFunction, op: Op, name: str) -> Rule:
    """A rule function as a rule of `op`; the first parameter's name decides its form."""
    if isinstance(function, CACHED):
        raise ArgumentError(
            f"the rule {name!r} is wrapped in functools.cache or lru_cache, which cannot look up "
            "Tensors. Give the function itself: a gradient is computed anew for each op."
        )
    if (refuses := getattr(function, "refuses", None)) is not None:  # (rules of relevance have it)
        refuses(op)
    first = parameters(function)[:1]
    if first == ["dy"]:
        if len(op.inputs) > 1:
            return Joint(op, name, function)
        rule = PerInput(op, name)
        for only in op.inputs:
            rule.add(only.name, function)
        rule.function = function
        rule.whole = True
        return rule
    _check_tensorflow_form(function, op, name)
    return TensorFlowForm(op, name, function)


def _check_tensorflow_form(function: RuleFunction, op: Op, name: str) -> None:
    names = parameters(function)
    ours = {"dy", "y", *op.attrs, *[i.name for i in op.inputs]}  # the native form was meant
    meant = names[:1] != ["op"] and (makes_rules(function) or not ours.isdisjoint(names))
    try:
        given = inspect.signature(function).bind("op", "grad")
        second = list(given.signature.parameters.values())[1:2]
        # (and not `torch.nn.functional.relu(input, inplace=False)`)
        fits = names[:1] == ["op"] or all(p.default is p.empty for p in second)
    except TypeError:
        fits = _takes_several(function)
    except ValueError:  # a builtin without a signature: its own call will tell
        fits = True
    if meant or not fits:
        raise SignatureError(
            f"the rule {name!r} takes {parameters_of(function)}. A rule's first parameter is dy "
            "(native form: the others name what it needs, as in `def rule(dy, x)`), or else it is "
            f"in TensorFlow's form and takes (op, grad, ...).{of_rule(function)}"
        )


def _takes_several(function: RuleFunction) -> bool:
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    return sum(k in (k.POSITIONAL_ONLY, k.POSITIONAL_OR_KEYWORD) for k in kinds) > 2

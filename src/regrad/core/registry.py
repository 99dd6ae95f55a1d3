"""The table of all op types and rules, built-in and user-defined.

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
Kernel: TypeAlias = Callable[..., backends.Array] | str  # or the function's name in the standard


class OpTable(dict[str, "Op"]):
    """The op types by name, including the op types of lazily loaded modules (sheets).

    `late` lists the sheets' modules from the start. So the op types, and their number, do not
    depend on which sheets are loaded. Their ops are stored separately, in `sheets`. The only access
    to such an op imports its module, and waits for any thread that has begun the import. So an op
    is never found without its rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.late: dict[str, str] = {}
        self.sheets: dict[str, Op] = {}
        self.makers: dict[str, ModuleType | None] = {}  # the modules that made the sheets' ops

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
        return self[op_type]  # (an error of the import propagates)

    keys: Any = Mapping.keys  # (dict's own methods do not include the sheets)
    values: Any = Mapping.values
    items: Any = Mapping.items

    def loaded(self) -> list[Op]:
        """Return the ops that code may already hold: unloaded sheets have none."""
        return [*super().values(), *self.sheets.values()]

    def add(self, op: Op) -> None:
        (self.sheets if op.type in self.late else self)[op.type] = op
        if op.type in self.late:
            self.makers[op.type] = sys.modules.get(self.late[op.type])

    def is_free(self, op_type: str) -> bool:
        """Return whether the name is free. During its sheet's import, a sheet's own op is free.

        A sheet may be imported twice, if an interrupt or an error ended the first import: Python
        has then discarded the module that made the op.
        """
        if op_type not in self.late:
            return op_type not in self
        module = sys.modules.get(self.late[op_type])
        return module is not None and self.makers.get(op_type) is not module


OPS = OpTable()
RULES: dict[str, RuleFunction | Rule] = {}  # rules registered under a name, for maps

CACHED = type(cache(id))
version: int = 0  # counts the changes of rules, because compiled programs contain rules

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
    integers: bool = False  # Python numbers are indices here, and not converted to float32


class Kernels(dict[type, Callable[..., Any]]):
    """Maps an array type to the kernel for its namespace. Entries are added on first use."""

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
    """Placeholder for the public function until it exists."""
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
    promotes: Any = False  # after construction: for each input, whether it is promoted
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
    replaced: Rule | None = None  # its first rule, if another rule has replaced it
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
        # the kinds of NumPy dtypes that need no promotion and raise no error; None: all
        real, to_float = self.real, self.to_float
        self.kinds = ("f" if real else "fc") if to_float else "biuf" if real else None
        self.rule = NoRule(self)

    def __repr__(self) -> str:
        return f"<op type {self.type}>"

    @property
    def shipped(self) -> Rule:
        """The rule of the op's author."""
        return self.replaced or self.rule

    def owns(self, rule: Rule) -> bool:
        """Return whether a rule, counted or not, is the op's own."""
        return rule.bare is self.rule or rule.bare is self.replaced

    def names(self) -> list[str]:
        """Return every name that a rule of this op may have as a parameter after `dy`."""
        inputs = [i.name for i in self.inputs]
        details = [f"{n}_{what}" for n in inputs for what in ("shape", "dtype")]
        return [*inputs, "y", *self.attrs, *details]


# -- registering ---------------------------------------------------------------------------


def canonical(op_type: str) -> str:
    """Return regrad's name of an op type (TF has several names for some: Add and AddV2)."""
    return ALIASES.get(op_type, op_type)


def check_op_type(op_type: object) -> None:
    """Raise for a value that cannot be the name of an op type."""
    if not isinstance(op_type, str) or not op_type:
        refuse_function(op_type)
        raise ArgumentError(
            f"an op type is a string such as 'Relu', got {op_type!r:.80}.{meant_by(op_type)}"
        )


def meant_by(key: object) -> str:
    """Return a hint with the op type that matches the name of a function, class or module."""
    if isinstance(key, tuple | list):
        return " Write one entry for each op type."
    plain = getattr(key, "__name__", type(key).__name__).lower().replace("_", "")
    ops = [t for t, op in OPS.items() if plain in (t.lower(), op.name.replace("_", ""))]
    return f" Did you mean {ops[0]!r}?" if ops else ""


def refuse_function(key: object) -> None:
    """Raise for a function of regrad as a key, and name its op type."""
    for op in OPS.loaded():
        if op.function is key:
            raise ArgumentError(
                f"a key is an op type, a string, but got the function {op.name}. Did you mean "
                f"{op.type!r}?"
            )


@public
def find_op(op_type: str) -> Op:
    """Return the op of a type.

    Args:
        op_type: The op type, such as `"MatMul"`.

    Raises:
        UnknownOpError: there is no such op type; the message has similar names.

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
    """Register the rule of an op type: `@gradient("Square")`, or `@gradient("MatMul", "a")`.

    The rule's first parameter decides its form. `dy` selects the native form: the other parameters
    name the values that the rule needs (an input, the output `y`, an attribute, `x_shape`,
    `x_dtype`), and a record keeps only these. With `**names` the rule gets all of them, and the
    record keeps all. Any other first parameter selects TensorFlow's form: `(op, grad, ...)`.

    With `wrt`, the rule returns the gradient of one input, and runs only if this gradient is
    needed. Without `wrt`, it returns the gradients of all inputs in order. None means no gradient.
    If the op has only one differentiable input, None raises: return `rules.no_gradient` instead.

    Args:
        type: The op type.
        wrt: The name of one input, if the rule is for that input alone.
        overwrite: Replace the existing rule of the op type.

    Returns:
        A decorator, which returns the rule unchanged.

    Raises:
        UnknownOpError: the op type does not exist.
        RegistrationError: it has a rule already; pass `overwrite=True` to replace it
            everywhere, or use `gradient_override_map` to replace it in a scope.
        RuleError: the rule takes a name that the op does not have.

    Source: TensorFlow's `RegisterGradient`. PyTorch's `derivatives.yaml` also uses names to decide
    which values are kept.

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
    """Count a change of rules, except for the first rules of an op from a lazily loaded sheet.

    No program can depend on the op without a rule: any access to the op waits for its sheet.
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
    """Register a rule under a name of its own, for use in `gradient_override_map`.

    Args:
        name: The name, a string.

    Returns:
        A decorator, which returns the rule unchanged.

    Raises ArgumentError if the name is not a string, and RegistrationError (a KeyError)
    if another rule or an op type already has the name.

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
        raise ArgumentError(
            f"RegisterGradient needs a name (a string), got {place(name)}. Write "
            "@RegisterGradient('Name')"
        )

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
    """Return the error for a second registration under one name."""
    former = RULES.get(name)
    by = " by an op type" if former is None else ""
    if callable(former):
        by = f" by {place(former)}"
    return RegistrationError(
        f"the name {name!r} is taken already{by}. Choose another name, or pass "
        "gradient_override_map the function itself, which needs no name."
    )


@public
def not_differentiable(*op_types: str) -> None:
    """Declare that these op types have no gradient. Tapes do not track their results.

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


# -- applying a rule -----------------------------------------------------------------------


def resolve(value: str | RuleFunction, op: Op) -> Rule:
    """Return the rule for a map's value, bound to `op`."""
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
        f"it with @RegisterGradient({value!r}), or pass the function itself."
    )


def borrowed(lender: Op, rule: Rule, op: Op) -> Rule:
    """Return a rule of another op type, with its names resolved against `op`."""
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
    """Return a rule function as a rule of `op`. The first parameter's name decides its form."""
    if isinstance(function, CACHED):
        raise ArgumentError(
            f"the rule {name!r} is wrapped in functools.cache or lru_cache, which cannot look up "
            "Tensors. Pass the function itself: each op needs its own gradient."
        )
    if (refuses := getattr(function, "refuses", None)) is not None:  # (as rules of relevance do)
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
    ours = {"dy", "y", *op.attrs, *[i.name for i in op.inputs]}  # names of the native form
    meant = names[:1] != ["op"] and (makes_rules(function) or not ours.isdisjoint(names))
    try:
        given = inspect.signature(function).bind("op", "grad")
        second = list(given.signature.parameters.values())[1:2]
        # (and not `torch.nn.functional.relu(input, inplace=False)`)
        fits = names[:1] == ["op"] or all(p.default is p.empty for p in second)
    except TypeError:
        fits = _takes_several(function)
    except ValueError:  # (a builtin without a signature: the call itself will raise)
        fits = True
    if meant or not fits:
        raise SignatureError(
            f"the rule {name!r} takes {parameters_of(function)}. A rule's first parameter is dy "
            "(native form: the other parameters name the values that it needs, as in `def rule(dy, "
            f"x)`), or the rule takes (op, grad, ...), TensorFlow's form.{of_rule(function)}"
        )


def _takes_several(function: RuleFunction) -> bool:
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    return sum(k in (k.POSITIONAL_ONLY, k.POSITIONAL_OR_KEYWORD) for k in kinds) > 2

"""regrad's own rules, as functions to call or to put in maps, and as `builtin` in a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from regrad.core.dispatch import lift
from regrad.core.gradients import Gradients
from regrad.core.registry import OPS, Attrs, Input, Op, bind, borrowed, find_op, refuse_function
from regrad.core.rule import (
    EXTRAS,
    NO_GRADIENT,
    Extra,
    Kept,
    MapRule,
    NoGradient,
    NoRule,
    Rule,
    describe_pull,
)
from regrad.core.rule_forms import OpView, PerInput, asked
from regrad.core.state import current, masked
from regrad.core.tape import REAL, Record, cuts, effective, leaves_of
from regrad.core.tensor import Tensor, TensorLike
from regrad.core.walk import check_gradient, open_groups
from regrad.errors import MissingRuleError, RuleError

if TYPE_CHECKING:
    from regrad.core.rule import Cotangent

UNSAID = object()


def builtin(op_type: str | Callable[..., Any]) -> Any:
    """Return the built-in rule of an op type, for example to scale, clip or log its result.

    Args:
        op_type: The op type, such as `"Relu"`. Or a key of a map for PyTorch or JAX programs
            (`F.linear`, an `autograd.Function`, `jax.nn.relu`): then the result is a value for a
            map, and uses that library's own gradient.

    Inside a rule, the parameter `builtin` does the same without names: `lambda dy, builtin:
    3 * builtin(dy)`, for any op of any library. For an op of several inputs, `builtin(dy)` returns
    a tuple, and arithmetic on the tuple applies to each gradient.

    Call the rule of an op type as `builtin("Relu")(dy, y=y)`: with the incoming gradient and, by
    keyword, the names that the rule needs. The call ignores further names, so a rule may pass on
    all of its own: a rule with `**names` gets every name (all inputs, the output, attributes,
    shapes and dtypes), and its record keeps all of these values. To save memory, read the needed
    names from `builtin("Relu").names`.

    For an op of one input, the call returns one gradient, of the input's shape. For any other op it
    returns a list with one gradient per input, None for an input without a gradient. Where an op
    broadcasts, the gradients have the shape of the output, and regrad sums them afterwards.
    Piecewise constant ops (`Floor`, `Step`) return zeros.

    The rule is always the first one of the op type, even if `gradient(…, overwrite=True)` replaced
    it. Overrides do not apply to the ops that the rule creates. As a value in a map, `builtin(…)`
    is the rule itself, and computes only the gradients that are needed.

    Raises:
        UnknownOpError: there is no such op type.
        MissingRuleError: the op type has no gradient.
        RuleError: (when called) a name is missing.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Square": lambda dy, builtin: 0.5 * builtin(dy)}):
    ...     rg.grad(rg.square)(rg.tensor([1.0, 3.0])).print()
    Tensor
        [1, 3]
    >>> halved = lambda dy, **names: 0.5 * rg.rules.builtin("Square")(dy, **names)
    >>> with rg.gradient_override_map({"Square": halved}):
    ...     rg.grad(rg.square)(rg.tensor([1.0, 3.0])).print()
    Tensor
        [1, 3]
    """
    if callable(op_type):
        refuse_function(op_type)
        return ForeignBuiltin(op_type)
    return _of(find_op(op_type))


@lru_cache(maxsize=1024)
def _of(op: Op) -> Builtin:
    return Builtin(op)


class Builtin:
    """The first rule of an op type. See `builtin`."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.__name__: str = op.type
        if isinstance(self.rule, NoGradient | NoRule):
            has = "has no gradient" if isinstance(self.rule, NoGradient) else "has no rule"
            raise MissingRuleError(
                f"builtin({op.type!r}): the op type {has}, so there is no rule to call."
            )

    @property
    def rule(self) -> Rule:
        """The rule object."""
        return self.op.shipped

    def bound_to(self, op: Op) -> Rule:
        """Return the rule for an op of any type whose inputs have the same names."""
        return self.rule if op is self.op else borrowed(self.op, self.rule, op)

    @property
    def names(self) -> list[str]:
        """Return the names of the values that a call needs besides `dy`."""
        inputs = [i.name for i in self.op.inputs]
        always = [*inputs, *self.op.attrs] if self.rule.unless is not None else []
        asking = [n for f in self._functions().values() for n in asked(f, self.op)[0]]
        return list(dict.fromkeys([*asking, *always]))

    def _functions(self) -> Mapping[str, Any]:
        if not isinstance(self.rule, PerInput):
            raise RuleError(
                f"{self!r} cannot be called: the op type's rule is not in the native form with "
                "one function per input. Use it as a value in a map."
            )
        return self.rule.functions

    def __call__(self, dy: Cotangent, /, **names: Any) -> Any:
        self._check(names)
        with masked():
            gradients = [self._by(entry, dy, names) for entry in self.op.inputs]
        return gradients[0] if len(gradients) == 1 else gradients

    def _by(self, entry: Input, dy: Cotangent, names: Attrs) -> Any:
        """Return the gradient with respect to one input."""
        function = self._functions().get(entry.name)
        absent = entry.kind == "optional" and names.get(entry.name, UNSAID) is None
        if function is None or absent:
            return None
        given = {n: names[n] for n in asked(function, self.op)[0]}
        conjugates = self._conjugates(dy)
        dx = function(_conjugate(dy) if conjugates else dy, **given)
        if dx is NO_GRADIENT or (dx is None and self.rule.flat) or self._is_cut(names):
            return OPS["ZerosLike"].function(dy if dx is None or dx is NO_GRADIENT else dx)
        return _conjugate(dx) if conjugates else dx

    def _is_cut(self, names: Attrs) -> bool:
        """Return whether the op has no gradient for these arguments."""
        unless = self.rule.unless
        return unless is not None and unless(names, [names[i.name] for i in self.op.inputs])

    def _conjugates(self, dy: Cotangent) -> bool:
        """Return whether the rule is for a holomorphic op on complex numbers."""
        first = dy[0] if isinstance(dy, tuple) else dy
        return self.op.holomorphic and lift(first).dtype.kind == "c"

    def _check(self, names: Attrs) -> None:
        missing = [n for n in self.names if n not in names]
        if missing:
            needed = ", ".join(f"{n}={n}" for n in self.names)
            raise RuleError(
                f"{self!r} needs {', '.join(missing)}: call it as {self!r}(dy, {needed}), or in a "
                f"rule that gets all names: lambda dy, **names: {self!r}(dy, **names)."
            )

    def of(self, op: OpView, *grads: TensorLike | None) -> Any:
        """Return the gradients for an op in TensorFlow's form: one, or a list, one per input."""
        record = op.record
        dys = tuple([g if g is None else lift(g) for g in grads])
        dy = dys if isinstance(record.outputs, tuple) else dys[0]
        found = _pulled(record, dy, self.bound_to(record.op))
        dxs = [None if i is None else found.get(i) for i in op.places()]
        shown = [dx if dx is None else op.shown(dx) for dx in dxs]
        return shown[0] if len(shown) == 1 else shown

    def __reduce__(self) -> Any:
        return builtin, (self.op.type,)

    def __repr__(self) -> str:
        return f"builtin({self.op.type!r})"


class ForeignBuiltin(MapRule):
    """The gradient that another library defines for its function, as a value in a map."""

    closes_over: tuple[str, ...] = ("key",)
    instead = " Use the parameter builtin: lambda dy, builtin: 3 * builtin(dy)."

    def __init__(self, key: Any) -> None:
        self.key = key
        self.__name__: str = getattr(key, "__name__", repr(key))

    def bound_to(self, op: Op) -> Rule:
        """Return the rule for an op of the library."""
        if not op.rule.is_foreign:
            raise RuleError(
                f"{self!r} is another library's gradient, but {op.type!r} is an op type of regrad. "
                f"Use regrad's own rule, rules.builtin({op.type!r})."
            )
        return bind(own_rule, op, self.__name__)

    @property
    def identity(self) -> Any:
        return self.key

    def __repr__(self) -> str:
        return f"builtin({self.__name__})"


def own_rule(dy: Any, builtin: Any) -> Any:
    """Return the op's own gradient: a rule that changes nothing."""
    return builtin(dy)


def derivative(dy: Any, derivative_: Any) -> Any:
    """Return the gradients of the replacement of an op, parameters included: a rule."""
    return derivative_(dy)


def _conjugate(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_conjugate(v) for v in value])
    return value if value is None else OPS["Conj"].function(value)


def _pulled(record: Record, dy: Any, rule: Rule) -> dict[int, Any]:
    """Return the gradients that a rule returns, by leaf, in the shapes of the inputs."""
    if cuts(rule, record.attrs, record.xs):
        return {}
    wanted = record.wanted(set(record.inputs))
    if isinstance(rule, PerInput):
        wanted = [p for p in wanted if p in rule.parts]
    with masked():
        rule = effective(record.op, rule, record.specs, dy)
        pulled = rule.pull(record, dy, wanted)
        pairs = pulled if record.plain else open_groups(record, pulled)
        return {i: check_gradient(record, i, dx, dy) for i, dx in pairs if dx is not None}


# -- names that every rule may take ----------------------------------------------------------------


def own_gradient(record: Record, dy: Any, of_parameters: bool = False) -> Any:
    """Return the own gradient of a record's op: `builtin(dy)` in a rule.

    The result is one gradient, or `Gradients` with one per input. It is zero where the op has no
    gradient (`Floor`). With `of_parameters` it includes the gradients with respect to the
    parameters of the rule.
    """
    dys = dy if isinstance(dy, list | tuple) else (dy,)
    count = len(record.outputs) if isinstance(record.outputs, tuple) else 1
    if len(dys) != count:
        raise RuleError(
            f"builtin: {describe_pull(record)} passed {len(dys)} gradient{'s' * (len(dys) != 1)}, "
            f"and the op has {count} output{'s' * (count != 1)}. Pass one per output, or None: "
            "builtin(dy), builtin(2 * dy), or builtin((2 * dy[0], *dy[1:]))."
        )
    if record.own is not None:
        lone: Any = record
        found = record.own.pull(record.xs, dys)
        lone.pulled.append(found)
    else:
        if count > 1 and not record.op.shipped.sparse:
            several: Any = record
            dys = [several.unused(i) if d is None else d for i, d in enumerate(dys)]
        dys = tuple([d if d is None else lift(d) for d in dys])
        dx = _of_one(record, dys[0])
        if dx is not None:
            return dx
        given = dys if isinstance(record.outputs, tuple) else dys[0]
        found = _pulled(record, given, record.op.shipped)
    dxs = [found.get(i) for i in range(len(record.inputs))]
    parts = [Gradients(p) if isinstance(p, list) else p for _, p in record.by_parameter(dxs)]
    parts = parts[: None if of_parameters else record.op.rule.own_count]
    if len(parts) != 1:
        return Gradients(parts)
    return OPS["ZerosLike"].function(dys[0]) if parts[0] is None else parts[0]


def _of_one(record: Record, dy: Any) -> Tensor | None:
    """Return the gradient of a one-input op by a shorter path, or None if there is no such path."""
    rule, state = record.op.shipped, current()
    usual = record.plain and rule.pulls and rule.unless is None and record.specs[0][1] in REAL
    if not usual or len(record.specs) != 1 or (state is not None and state.overrides is not None):
        return None
    dx = rule.pulls[0](record, dy)  # pyright: ignore[reportOptionalSubscript]
    return dx if type(dx) is Tensor else None


def run_forward(record: Record, *inputs: Any) -> Any:
    """Compute the op of a record on other inputs: `forward(x)` in a rule."""
    if record.own is not None:
        names = [i.name for i in record.op.inputs[: record.op.rule.own_count]]
        places = record.places[: len(names)]
        counts = [len(p) if isinstance(p, tuple) else 1 for p in places]
        given = [len(x) if isinstance(x, list | tuple) else 1 for x in inputs]
        if given != counts:
            hit = getattr(record, "hit", None)
            raise RuleError(
                f"forward of the op type {record.op.type!r}{f' at {hit.where}' if hit else ''} got "
                f"{len(given)} inputs of {given} tensors, expected {counts}: call "
                f"forward({', '.join(names)}), with None for an input that the call omits."
            )
        pairs = zip(inputs, places, strict=True)
        ys = record.own.values_at([x for pair in pairs for x in leaves_of(*pair)])
        return ys[0] if len(ys) == 1 else tuple(ys)
    with masked():
        return record.op.function(*inputs, **record.attrs)


def _kept(op: Op) -> Kept:
    """Return the values that a record keeps for `builtin`: all that the op's own rule names."""
    rule = Builtin(op).rule
    every = frozenset(range(len(op.inputs)))
    kept, keeps_y = rule.keeps(every)
    return (kept if rule.unless is None else every), keeps_y


def needs_of(record: Record) -> tuple[Any, ...]:
    """Return which gradients are needed, one bool per input: `needs` in a rule.

    A sequence has a list of bools. An input that the call omits has False.
    """
    wanted = record.by_parameter([bool(i) for i in record.inputs])
    return tuple([False if part is None else part for _, part in wanted])


EXTRAS["builtin"] = Extra(lambda record: partial(own_gradient, record), _kept, runs_op=True)
EXTRAS["derivative_"] = Extra(
    lambda record: partial(own_gradient, record, of_parameters=True), _kept, runs_op=True
)
EXTRAS["forward"] = Extra(lambda record: partial(run_forward, record), runs_op=True)
EXTRAS["needs"] = Extra(needs_of)

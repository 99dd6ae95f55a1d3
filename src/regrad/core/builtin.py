"""The library's own rules, as functions to call and to put in maps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from regrad.core.dispatch import lift
from regrad.core.registry import OPS, Attrs, Input, Op, borrowed, find_op
from regrad.core.rule import NO_GRADIENT, NoGradient, NoRule, OpView, PerInput, Rule, asked
from regrad.core.state import masked
from regrad.core.tape import Record, cuts, effective
from regrad.core.tensor import Tensor, TensorLike
from regrad.core.walk import check_gradient, open_groups
from regrad.errors import MissingRuleError, RuleError

if TYPE_CHECKING:
    from regrad.core.rule import Cotangent

UNSAID = object()


def builtin(op_type: str) -> Builtin:
    """Return the built-in rule of an op type, to be scaled, clipped or logged.

    Args:
        op_type: The op type, such as `"Relu"`.

    It is called as `builtin("Relu")(dy, y=y)`: with the gradient that arrives and, by keyword,
    the names that it needs. Further names are ignored, so that a rule may hand on whatever it
    was given: a rule with `**names` gets everything that it could name (all inputs, the output,
    attributes, shapes and dtypes), and its record keeps all of that. `builtin("Relu").names`
    lists what is needed, if memory matters.

    An op of one input has one gradient, of the input's shape; for any other it is a list with one
    gradient per input, None for an input that has none. Where an op broadcasts, the gradients
    have the shape of the output, and what asked for them sums them. Ops that are constant by
    pieces (`Floor`, `Step`) give zeros.

    It is always the rule that the op type was given first, also if `gradient(…, overwrite=True)`
    replaced it; the ops that it creates are not overridden. As a value in a map it stands for
    the rule itself, and computes only the gradients that are wanted.

    Raises:
        UnknownOpError: there is no such op type.
        MissingRuleError: the op type has no gradient.
        RuleError: (when called) a name is missing.

    >>> import regrad as rg
    >>> halved = lambda dy, **names: 0.5 * rg.rules.builtin("Square")(dy, **names)
    >>> with rg.gradient_override_map({"Square": halved}):
    ...     rg.grad(rg.square)(rg.tensor([1.0, 3.0])).print()
    Tensor
        [1, 3]
    """
    return _of(find_op(op_type))


@lru_cache(maxsize=1024)
def _of(op: Op) -> Builtin:
    return Builtin(op)


class Builtin:
    """The first rule of an op type; see `builtin`."""

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
        """The rule itself."""
        return self.op.shipped

    def bound_to(self, op: Op) -> Rule:
        """The rule for an op of any type whose inputs have the same names."""
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
                f"{self!r} cannot be called: the op type's rule is not one in the native form "
                "with a function per input. Use it as a value in a map."
            )
        return self.rule.functions

    def __call__(self, dy: Cotangent, /, **names: Any) -> Any:
        self._check(names)
        with masked():
            gradients = [self._by(entry, dy, names) for entry in self.op.inputs]
        return gradients[0] if len(gradients) == 1 else gradients

    def _by(self, entry: Input, dy: Cotangent, names: Attrs) -> Any:
        """The gradient by one input."""
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
        """Return whether the op has no gradient for what it was given."""
        unless = self.rule.unless
        return unless is not None and unless(names, [names[i.name] for i in self.op.inputs])

    def _conjugates(self, dy: Cotangent) -> bool:
        """Return whether the rule is that of a holomorphic op, for complex numbers."""
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
        """The gradients for an op in TensorFlow's form: one, or a list with one per input."""
        record = op.record
        dys = tuple([g if g is None else lift(g) for g in grads])
        dy = dys if isinstance(record.outputs, tuple) else dys[0]
        found = self._pulled(record, dy)
        dxs = [None if i is None else found.get(i) for i in op.places()]
        shown = [dx if dx is None else op.shown(dx) for dx in dxs]
        return shown[0] if len(shown) == 1 else shown

    def _pulled(self, record: Record, dy: Any) -> dict[int, Tensor | None]:
        """Return the gradients that the rule returns, by leaf, in the shapes of the inputs."""
        rule = self.bound_to(record.op)
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

    def __repr__(self) -> str:
        return f"builtin({self.op.type!r})"


def _conjugate(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_conjugate(v) for v in value])
    return value if value is None else OPS["Conj"].function(value)

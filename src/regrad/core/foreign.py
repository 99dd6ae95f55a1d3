"""Ops of other libraries under rules of ours: what `regrad.torch` and `regrad.jax` share.

A foreign op keeps its forward pass and its arrays. Its gradient is pulled through a record, as
for an op of our own, so rules take the same forms and answers get the same checks.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from regrad.core.backends import BACKENDS, Array, DTypeLike, is_array, numpy_dtype
from regrad.core.builtin import Builtin
from regrad.core.registry import RULES, Attrs, Op, canonical, resolve
from regrad.core.reports import Hit
from regrad.core.rule import NO_GRADIENT, Rule, RuleFunction
from regrad.core.signatures import declared, plain_code
from regrad.core.state import current, in_state, masked
from regrad.core.tape import Layout, Record, Spec, effective, positions, record_of
from regrad.core.tensor import Tensor, wrap
from regrad.core.walk import check_gradient, leaf_gradients
from regrad.errors import DetachedTensorWarning

LIBRARIES = {"regrad", "torch", "jax"}  # that a rule may be written with


class ForeignRule:
    """A rule, bound to an op type, for arrays of another library.

    A function may be written with regrad's functions or with the other library's. `plain` says
    which it is: whether it answers with arrays (None until it first ran). A plain rule is
    differentiated by its own library, any other by regrad.

    `named` is what the rule's code names (None until it was read), and `writes` whether it writes
    into the arrays that it is given (None until it first ran).
    """

    named: set[str] | None = None
    writes: bool | None = None
    key: Any = None  # the one in the map, as reports know it
    chooses = False  # whether it stands for several, of which each call gets one

    def __init__(self, value: str | RuleFunction, op: Op) -> None:
        self.op = op
        self.rule: Rule = resolve(value, op)
        self.name: str = self.rule.name
        self.is_borrowed: bool = lender(value) is not None
        self.takes_all: bool = self.is_borrowed or takes_all(value)
        self.plain: bool | None = False if self.is_borrowed else None
        self.plans: dict[Any, tuple[list[int], list[int], bool]] = {}

    @property
    def functions(self) -> list[RuleFunction]:
        """The functions that the rule is made of."""
        rule = self.rule.bare
        every = [rule.function, *getattr(rule, "functions", {}).values()]
        return [f for f in every if f is not None]

    def for_count(self, count: int) -> ForeignRule:
        """The rule for a call with so many tensors."""
        return self

    def plan(self, arrays: tuple[bool, ...], layout: Layout) -> tuple[list[int], list[int], bool]:
        """Return where arrays are among the values, which the rule names, and if it names y.

        The others are numbers, or not given.
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
        """The inputs (by parameter) that the rule names, and whether it names the output."""
        return self.rule.keeps(frozenset(wanted))


def lender(value: Any) -> str | None:
    """The op type whose own rule a value in a map stands for."""
    if isinstance(value, Builtin):
        return value.op.type
    return canonical(value) if isinstance(value, str) and value not in RULES else None


def takes_all(value: Any) -> bool:
    """Return whether a rule takes `**names`, which only a built-in rule can read."""
    if (code := plain_code(value)) is not None:
        return bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return any(p.kind is p.VAR_KEYWORD for p in declared(value) or ())


class ForeignCall:
    """One call of a foreign op, without its arrays: enough to pull a gradient through it.

    Args:
        rule: the rule in force.
        specs: shape and dtype of each input array.
        attrs: the attributes, by their names in the op.
        layout: which inputs belong to which parameter, where these are not one and one.
        outputs: shape and dtype of each output, where there are several.
        hit: where the call is counted.
    """

    def __init__(
        self,
        rule: ForeignRule,
        specs: Sequence[Spec],
        attrs: Attrs,
        layout: Layout = None,
        outputs: Sequence[Spec] | None = None,
        hit: Hit | None = None,
    ) -> None:
        self.rule = rule
        self.hit = hit
        self.specs = specs
        self.attrs = attrs
        self.layout = layout
        self.outputs = outputs

    def pull(self, xs: Sequence[Any], y: Any, dy: Any, wanted: Sequence[int]) -> list[Any]:
        """The gradients by the wanted inputs; arrays if given arrays, Tensors if given Tensors.

        `xs` and `y` are what the rule names (None elsewhere). None is for no gradient.

        Raises:
            RuleError: the rule's answer has the wrong number, kind, shape or dtype.
        """
        record = self._record(xs, y, wanted, dy)
        answers = self._answers(record, dy)
        first = dy[0] if isinstance(dy, tuple) else dy
        return [self._checked(record, i, answers.get(i), first) for i in wanted]

    def _answers(self, record: Record, dy: Any) -> Any:
        """Return the rule's answers by leaf, as they are."""
        ids = set(record.inputs)
        ids.discard(0)
        if current() is None:
            return leaf_gradients(record, dy, ids)
        # Tensors may be differentiated once more, by the tapes that are open
        first = dy[0] if isinstance(dy, tuple) else dy
        with masked() if isinstance(first, Tensor) else in_state(None):
            return leaf_gradients(record, dy, ids)

    def _first_answers(self, record: Record, dy: Any) -> Any:
        """Return a rule's answers to arrays; it may turn out that it needs Tensors."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DetachedTensorWarning)
            return self._answers(record, dy)

    def pull_either(
        self, xs: Sequence[Any], y: Any, dy: Any, wanted: Sequence[int], ours: Callable[[], Any]
    ) -> Sequence[Any]:
        """The gradients, given arrays: by a plain rule, or by `ours()`, which passes it Tensors.

        A rule runs once. Where its code does not say which it is, it is given arrays first; only
        if it cannot take them, or answers with Tensors for all that, it runs again.
        """
        rule, libraries = self.rule, (self.rule.named or set()) & LIBRARIES
        if rule.plain is False or (rule.plain is None and libraries == {"regrad"}):
            rule.plain = False
            return ours()
        record = self._record(xs, y, wanted, dy)
        ask = self._first_answers if rule.plain is None else self._answers
        try:
            answers = ask(record, dy)
        except (AttributeError, TypeError) as error:
            if rule.plain or (libraries and "regrad" not in libraries):
                raise
            try:
                dxs = ours()
            except (AttributeError, TypeError) as other:
                raise error from other
            rule.plain = False
            return dxs
        if rule.plain is None:
            rule.plain = not any(isinstance(dx, Tensor) for dx in answers.values())
        if not rule.plain:
            return ours()
        first = dy[0] if isinstance(dy, tuple) else dy
        return [self._checked(record, i, answers.get(i), first) for i in wanted]

    def _record(self, xs: Sequence[Any], y: Any, wanted: Sequence[int], dy: Any) -> Record:
        ids = tuple([i + 1 if i in wanted else 0 for i in range(len(self.specs))])
        op, rule = self.rule.op, self.rule.rule
        if self.specs and _is_complex(self.specs[0][1]):
            shape, dtype = self.specs[0]
            rule = effective(op, rule, [(shape, numpy_dtype(dtype))], dy)
        out = tuple([-1 - i for i in range(len(self.outputs))]) if self.outputs else -1
        return record_of(
            op, rule, self.attrs, ids, self.specs, xs, out, y, self.layout, self.outputs, self.hit
        )

    def _checked(self, record: Record, leaf: int, dx: Any, dy: Any) -> Any:
        if dx is None or dx is NO_GRADIENT or isinstance(dy, Tensor):
            return check_gradient(record, leaf, dx, dy)
        shape, dtype = self.specs[leaf]
        if type(dx) is type(dy) and dx.shape == shape and dx.dtype == dtype:
            return dx
        made = wrap(dx) if _same_library(dx, dy) else dx
        found = check_gradient(record, leaf, made, wrap(dy))
        return None if found is None else found._data


@cache
def _is_complex(dtype: DTypeLike) -> bool:
    """Return whether a dtype of any library is complex.

    (NumPy compares dtypes with torch's by trying to convert them, and swallows what is raised
    meanwhile, Ctrl-C too.)
    """
    return "complex" in str(dtype)


def _same_library(a: Array, b: Array) -> bool:
    return is_array(a) and BACKENDS[type(a)] is BACKENDS[type(b)]

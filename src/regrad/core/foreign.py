"""Ops of other libraries under rules of ours: what `regrad.torch` and `regrad.jax` share.

A foreign op keeps its forward pass and its arrays. Its gradient is pulled through a record, as
for an op of our own, so rules take the same forms and answers get the same checks.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any, Protocol

from regrad.core.backends import BACKENDS, Array, DTypeLike, is_array, is_inexact, numpy_dtype
from regrad.core.builtin import Builtin, ForeignBuiltin
from regrad.core.dispatch import lift, rerun
from regrad.core.registry import RULES, Attrs, Input, Op, canonical, resolve
from regrad.core.replacing import Forward, Replace, gradient_of
from regrad.core.reports import Hit
from regrad.core.rule import NO_GRADIENT, Rule, RuleFunction, describe_pull, free, parameters
from regrad.core.signatures import declared, plain_code
from regrad.core.state import current, in_state, masked
from regrad.core.tape import (
    GroupedRecord,
    Layout,
    Record,
    Spec,
    effective,
    positions,
    record_of,
)
from regrad.core.tensor import Tensor, wrap
from regrad.core.walk import check_gradient, leaf_gradients
from regrad.errors import DetachedTensorWarning, RuleError, near

LIBRARIES = {"regrad", "torch", "jax"}  # that a rule may be written with
TINY = 1e-19  # its square is above 0 in float32


def nonzero(v: Any) -> Any:
    """Return a Tensor, or an array of any library, moved away from 0 by `TINY`.

    All but the smallest numbers round it off. For those it cancels: what is divided by the result
    here is multiplied by it there. (It is one pass over memory, which a choice by `v == 0` is not.)
    """
    return v + TINY


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
    recordings: Any = None  # of its runs, where a library keeps them
    asks: Any = ()  # the names of parameters and inputs that it asks for, of the call of a module
    family: Any = None  # the callables that it is for, as it sees them (of torch's)
    at_site: Callable[[Any], ForeignRule] | None = None  # for a call, if it asks for its `site`
    once = False  # whether it is for the first derivative alone
    chooses = False  # whether it stands for several, of which each call gets one
    forward: Forward | None = None  # the function that replaces the op's value
    may_hold: bool | None = None  # whether its functions reach objects; None: nobody has looked
    is_surrogate: bool = False  # whether its gradient is that of another function (`vjp_of`)
    is_derivative: bool = (
        False  # whether its gradient is what the library derives from that function
    )

    def __init__(self, value: Any, op: Op) -> None:
        self.op: Op = with_own_gradient(op)
        given, value = value, gradient_of(value)
        self.learned: Sequence[Any] = ()  # parameters of the rule, the last inputs of the op
        if (parameters := getattr(value, "parameters", None)) is not None:
            learning: Any = value
            self.op, value = learning.extended(self.op), learning.rule
            self.learned = [*parameters.values()]
        self.rule: Rule = resolve(value, self.op)
        self.is_surrogate = getattr(value, "is_surrogate", False)
        self.name: str = self.rule.name
        if isinstance(given, Replace):
            self.name, self.forward = given.__name__, Forward(given.forward, self.op)
            self.is_derivative = given.gradient is None
        self.has_bias: bool = isinstance(op.rule, OwnBias)
        # (which may need all inputs)
        self.asks_builtin: bool = "builtin" in self.rule.extras or self.has_bias
        self.asks_own: bool = bool(self.rule.extras - {"needs"})
        self.is_borrowed: bool = lender(value) is not None
        self.takes_all: bool = self.is_borrowed or takes_all(value)
        self.plain: bool | None = False if self.is_borrowed else None
        self.plans: dict[Any, tuple[list[int], list[int], bool]] = {}

    @property
    def replaces(self) -> bool:
        """Return whether it replaces the op's value."""
        return self.forward is not None

    @property
    def functions(self) -> list[RuleFunction]:
        """The functions that the rule is made of."""
        rule = self.rule.bare
        every = [rule.function, *getattr(rule, "functions", {}).values()]
        return [f for f in every if f is not None]

    def for_call(self, filled: Any) -> ForeignRule:
        """The rule for a call with these arguments."""
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
    if hasattr(type(value), "bound_to"):
        return False
    if (code := plain_code(value)) is not None:
        return bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return any(p.kind is p.VAR_KEYWORD for p in declared(value) or ())


def asks_for(value: Any) -> list[str]:
    """Return the names that a rule asks for; none where it is not in the native form."""
    if isinstance(value, Replace):
        return [*parameters(value.forward), *asks_for(value.gradient)]
    value = RULES.get(value, value) if isinstance(value, str) else value
    if hasattr(value, "asks"):  # a `vjp_of`
        return value.asks
    if not callable(value) or isinstance(value, type):
        return []
    names = parameters(value)
    return names[1:] if names[:1] == ["dy"] else []


class Own(Rule):
    """Stands for the gradient that another library has for an op: the record's call knows it."""

    name = "builtin"
    is_foreign = True


class OwnOfOne(Own):
    """The same for an op of whose inputs only some are differentiated: one gradient may do."""

    def complete(self, answer: Any, record: Record, dy: Any) -> Any:
        """Return a rule's answer with a gradient, or None, for each input."""
        wanted = [i for i, moves in enumerate(record.inputs) if moves]
        if isinstance(answer, list | tuple) or len(wanted) != 1:
            return answer
        return [answer if i in wanted else None for i in range(len(record.inputs))]


class OwnBias(Own):
    """The same for an op whose last input is a bias, which keeps its own gradient.

    A rule that returns one gradient more than for the other inputs has one for the bias. What was
    left out of a call may be left out of the answer.
    """

    def complete(self, answer: Any, record: Record, dy: Any) -> Any:
        """Return a rule's answer with a gradient, or None, for each input."""
        last = len(record.op.inputs) - 1
        layout = record.layout if isinstance(record, GroupedRecord) else range(last + 1)
        given = [p for p, place in enumerate(layout) if place is not None]
        if not isinstance(answer, list | tuple) or len(answer) > last:
            return answer
        if given[-1] == last and len(answer) == len(given) - 1:
            assert record.own is not None
            dys = dy if isinstance(dy, tuple) else (dy,)
            (leaf,) = positions(layout[last])
            answer = [*answer, record.own.pull(record.xs, dys, leaf)[leaf]]
        found = dict(zip(given, answer, strict=False)) if len(answer) == len(given) else {}
        return [found.get(p) for p in range(last + 1)] if found else answer


class OwnOfCall(Own):
    """The same for the call of a module, or of a function, whose last inputs are parameters.

    `builtin` answers for the others, and what it has found for the parameters is theirs, where the
    rule returns nothing for them by name.
    """

    def __init__(self, count: int, names: Sequence[str]) -> None:
        self.own_count: int | None = count
        self.names = names

    def complete(self, answer: Any, record: Any, dy: Any) -> Any:
        """Return a rule's answer with a gradient, or None, for each input and parameter."""
        more: Mapping[str, Any] = {}
        if isinstance(answer, list | tuple) and answer and isinstance(answer[-1], dict):
            *answer, more = answer
            more = {as_name(n): dx for n, dx in more.items()}
        if isinstance(answer, list | tuple) and len(answer) == len(record.op.inputs):
            return answer  # (that of `vjp_of`)
        which = describe_pull(record)
        if unknown := [n for n in more if n not in self.names]:
            raise RuleError(
                f"wrong gradient: {which} returned one for {unknown[0]!r}, and the call has no "
                f"such parameter.{near(unknown[0], self.names)} It has {', '.join(self.names)}."
            )
        found = self._by_parameter(record, more, which)
        return [*self._by_input(answer, record, which), *found]

    def _by_input(self, answer: Any, record: Any, which: str) -> list[Any]:
        count: Any = self.own_count
        first = [*answer] if isinstance(answer, list | tuple) else [answer]
        if record.op.inputs[0].kind == "many":  # (xs, and one list of gradients for them)
            first = [first]
        moves = [i for i in range(count) if record.inputs[i]]
        if len(first) == 1 < count and len(moves) == 1:
            first = [first[0] if i == moves[0] else None for i in range(count)]
        if len(first) != count:
            raise RuleError(
                f"wrong number of gradients: {which} returned {len(first)}, and the call has "
                f"{count} inputs. Return one per input, in order, and those of parameters "
                "in a dict after them: (dx, {'weight': dw})."
            )
        return first

    def _by_parameter(self, record: Any, more: Mapping[str, Any], which: str) -> list[Any]:
        moves = record.inputs[len(record.inputs) - len(self.names) :]
        wanted = [n for n, moves in zip(self.names, moves, strict=True) if moves]
        missing = [n for n in wanted if n not in more]
        pulled = record.pulled
        if missing and len(pulled) != 1:
            how = f"called builtin {len(pulled)} times" if pulled else "did not call builtin"
            raise RuleError(
                f"{which} {how}, so nobody knows the gradient of {missing[0]!r}. Call builtin(dy) "
                "once, or return the gradients of the parameters by name, None for none: "
                f"(dx, {{{missing[0]!r}: dw}})."
            )
        last = pulled[0][len(pulled[0]) - len(self.names) :] if pulled else ()
        own = dict(zip(self.names, last, strict=False))
        return [more[n] if n in more else own.get(n) for n in self.names]


def op_of_call(label: str, names: Sequence[str], parameters: Sequence[str], attrs: Any) -> Op:
    """Return the op type that a whole call is to its rule, by the names of what it is given."""
    kinds = [Input(n, "many" if n == "xs" else "one") for n in names]
    kinds += [Input(n, "one") for n in parameters]
    op = Op(label, label, lambda xp, *xs: xs, kinds, [*attrs])
    op.rule = OwnOfCall(len(names), parameters)
    return op


def layout_of_call(op: Op, count: int, total: int) -> Layout:
    """Return which arrays belong to which input of such an op, if `xs` is so many of them."""
    many = op.inputs[0].kind == "many"
    return (tuple(range(count)), *range(count, total)) if many else None


class OwnOfLearning(Own):
    """The same for an op with further inputs: parameters of the rule, which returns gradients.

    Args:
        base: the op without them.
    """

    def __init__(self, base: Op, names: Sequence[str]) -> None:
        self.base = base
        self.names = names
        self.own_count: int | None = base.rule.own_count or len(base.inputs)

    def complete(self, answer: Any, record: Any, dy: Any) -> Any:
        """Return a rule's answer with a gradient, or None, for each input and parameter."""
        *first, more = answer if isinstance(answer, list | tuple) and answer else (answer, None)
        given = isinstance(answer, list | tuple) and not isinstance(more, dict)
        if given and len(answer) == len(record.op.inputs):
            return answer  # (that of `vjp_of`)
        if not isinstance(more, dict) or not more.keys() >= {*self.names}:
            raise RuleError(
                f"wrong gradient: {describe_pull(record)} learns {', '.join(self.names)}, and did "
                "not return gradients by name after those of the inputs. Return (dx, "
                f"{{{self.names[-1]!r}: …}}), None for no gradient."
            )
        count, pulled = len(self.names), record.pulled
        rest = {name: dx for name, dx in more.items() if name not in self.names}
        others: Any = [*first, rest] if rest else first
        cut: Any = record_of(
            self.base, record.rule, record.attrs, record.inputs[:-count], record.specs[:-count],
            record.xs[:-count], record.outputs, record.y,
            record.layout[:-count] if isinstance(record, GroupedRecord) else None,
            record.output_specs if isinstance(record, GroupedRecord) else None,
            getattr(record, "hit", None), record.own,
        )  # fmt: skip
        cut.pulled = [dxs[:-count] for dxs in pulled]
        made = self.base.rule.complete(others[0] if len(others) == 1 else others, cut, dy)
        several = len(self.base.inputs) > 1 or isinstance(self.base.rule, OwnOfCall)
        made = made if isinstance(made, list | tuple) and several else [made]
        return [*made, *[more[name] for name in self.names]]


def as_name(name: str) -> str:
    """The name of a parameter as a rule may ask for it: `layers_0_weight`."""
    return free(f"{'_' * name[:1].isdigit()}{name.replace('.', '_').replace('/', '_')}")


def names_for(
    asks: Sequence[str], names: Sequence[str | None], moving: Sequence[bool]
) -> list[str]:
    """Return what the arrays that a call is given are called in a rule that asks for some names.

    Those that are arguments themselves have `names`, those of the function's own parameters. Others
    lie in containers, and have none, or None. The only one, or the one that is differentiated
    (`moving`), is called x as well; two are a and b, and any number are xs, a list.
    """
    known, count = [free(n) for n in names if n is not None], len(moving)
    asked = {*asks} - {*known}
    if len(known) < count or not count or {"a", "b", "xs"} & asked:
        return ["xs"] if "xs" in asked else {1: ["x"], 2: ["a", "b"]}.get(count, ["xs"])
    unnamed = [i for i, name in enumerate(known) if name not in asks]
    moves = [i for i in unnamed if moving[i]]
    first = [i for i in unnamed if known[i] == "input"]
    only = next((found for found in (moves, unnamed, first) if len(found) == 1), [])
    if "x" in asked and only:
        known[only[0]] = "x"
    return known


def with_own_gradient(op: Op) -> Op:
    """Return an op type as another library has it, whose own gradient is that library's."""
    if op.rule.is_foreign:
        return op
    theirs = copy(op)
    theirs.rule, theirs.replaced, theirs.reads = Own(), None, {}
    return theirs


# Functions of arrays, and their gradients by a library: `vjp(f, xs, dys)`, by leaf. There are zeros
# where nothing is connected, and None for integers.
Arrays = Sequence[Any]
ArrayFunction = Callable[[Arrays], Arrays]
ArrayVjp = Callable[[ArrayFunction, Arrays, Arrays], Arrays]


class OwnCall(Protocol):
    """A call of a foreign op, as `builtin` and `forward` in a rule ask for it.

    Leaves are arrays, all of the library or all Tensors; numbers and None stand between them.
    """

    @property
    def vjp(self) -> Any:
        """The function by which the library differentiates others: an `ArrayVjp`."""
        ...

    def pull(self, xs: Sequence[Any], dys: Sequence[Any], only: int | None = None) -> Sequence[Any]:
        """Return the library's own gradients, by leaf; None where there is none.

        Of one leaf alone, if `only` is its place.
        """
        ...

    def value_at(self, inputs: Sequence[Any]) -> Any:
        """Return the op's value for other inputs, by parameter."""
        ...


def on_tensors(f: ArrayFunction, vjp: ArrayVjp, xs: Sequence[Any]) -> Sequence[Any]:
    """Return `f(xs)` for arrays or Tensors; of Tensors it is an op, whose gradient is `vjp`'s."""
    if not any(isinstance(x, Tensor) for x in xs):
        return f(xs)
    op = Op(
        "Foreign", "foreign", lambda xp, xs: tuple(f(xs)), [Input("xs", "many")],
        several=True, holomorphic=False,
    )  # fmt: skip
    op.rule = _ByVjp(f, vjp)
    return rerun(op, tuple(map(lift, xs)), {}, (tuple(range(len(xs))),), op.rule)


class _ByVjp(Rule):
    """The gradient of a function of arrays, by its library."""

    name = "builtin"

    def __init__(self, f: ArrayFunction, vjp: ArrayVjp) -> None:
        self.f, self.vjp = f, vjp

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return wanted, False

    def pull(self, record: Record, dy: Any, wanted: Sequence[int]) -> Any:
        return [(0, gradients(self.f, self.vjp, record.xs, dy))]


def gradients(f: ArrayFunction, vjp: ArrayVjp, xs: Sequence[Any], dys: Sequence[Any]) -> list[Any]:
    """Return the gradients of `f(xs)` by a library, of arrays or Tensors; None for integers."""
    floats = [is_inexact(numpy_dtype(x.dtype)) for x in xs]

    def back(given: Arrays) -> Arrays:
        dxs = vjp(f, given[: len(xs)], given[len(xs) :])
        return [dx for dx, is_float in zip(dxs, floats, strict=True) if is_float]

    found = iter(on_tensors(back, vjp, [*xs, *dys]))
    return [next(found) if is_float else None for is_float in floats]


def check_builtin(value: Any, label: str, same: Callable[[Any], bool]) -> None:
    """Refuse another function's own gradient; `same` says whether a key is the rule's."""
    if isinstance(value, ForeignBuiltin) and not same(value.key):
        raise RuleError(f"{value!r} is not the gradient of {label!r}; give builtin({label}).")


class ForeignCall:
    """One call of a foreign op, without its arrays: enough to pull a gradient through it.

    Args:
        rule: the rule in force.
        specs: shape and dtype of each input array.
        attrs: the attributes, by their names in the op.
        layout: which inputs belong to which parameter, where these are not one and one.
        outputs: shape and dtype of each output, where there are several.
        hit: where the call is counted.
        own: the call itself, for a rule that asks for `builtin` or `forward`.
    """

    def __init__(
        self,
        rule: ForeignRule,
        specs: Sequence[Spec],
        attrs: Attrs,
        layout: Layout = None,
        outputs: Sequence[Spec] | None = None,
        hit: Hit | None = None,
        own: OwnCall | None = None,
    ) -> None:
        self.rule = rule
        self.own = own
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
        record = self.record(xs, y, wanted, dy)
        answers = self._answers(record, dy)
        first = _first(dy)
        return [self.checked(record, i, answers.get(i), first) for i in wanted]

    def _answers(self, record: Record, dy: Any) -> Any:
        """Return the rule's answers by leaf, as they are."""
        ids = set(record.inputs)
        ids.discard(0)
        if current() is None:
            return leaf_gradients(record, dy, ids)
        # Tensors may be differentiated once more, by the tapes that are open
        first = _first(dy)
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
        record = self.record(xs, y, wanted, dy)
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
        first = _first(dy)
        return [self.checked(record, i, answers.get(i), first) for i in wanted]

    def record(self, xs: Sequence[Any], y: Any, wanted: Sequence[int], dy: Any) -> Record:
        """Return the call as a record on no tape, with what the rule names."""
        ids = tuple([i + 1 if i in wanted else 0 for i in range(len(self.specs))])
        op, rule = self.rule.op, self.rule.rule
        if self.specs and _is_complex(self.specs[0][1]):
            shape, dtype = self.specs[0]
            rule = effective(op, rule, [(shape, numpy_dtype(dtype))], dy)
        out = tuple([-1 - i for i in range(len(self.outputs))]) if self.outputs else -1
        return record_of(
            op, rule, self.attrs, ids, self.specs, xs, out, y,
            self.layout, self.outputs, self.hit, self.own,
        )  # fmt: skip

    def checked(self, record: Record, leaf: int, dx: Any, dy: Any) -> Any:
        """Return a rule's answer for a leaf as that is to be; raise if it cannot be."""
        if dx is None or dx is NO_GRADIENT or isinstance(dy, Tensor):
            return check_gradient(record, leaf, dx, dy)
        shape, dtype = self.specs[leaf]
        if type(dx) is type(dy) and dx.shape == shape and dx.dtype == dtype:
            return dx
        made = wrap(dx) if _same_library(dx, dy) else dx
        found = check_gradient(record, leaf, made, wrap(dy))
        return None if found is None else found._data


def _first(dy: Any) -> Any:
    return next(d for d in dy if d is not None) if isinstance(dy, tuple) else dy


@cache
def _is_complex(dtype: DTypeLike) -> bool:
    """Return whether a dtype of any library is complex.

    (NumPy compares dtypes with torch's by trying to convert them, and swallows what is raised
    meanwhile, Ctrl-C too.)
    """
    return "complex" in str(dtype)


def _same_library(a: Array, b: Array) -> bool:
    return is_array(a) and BACKENDS[type(a)] is BACKENDS[type(b)]

"""One call of an op under a rule: the arguments of the rule, and its answer.

A host makes a `Call` for its op. regrad does so for replaced values and whole calls, PyTorch and
JAX for all ops. The call makes a record, which holds the arguments of the rule. The op's `Own`
completes the answer, and `Call` checks it. So a wrong answer raises the same error on each host.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from regrad.core.backends import BACKENDS, Array, DTypeLike, is_array, is_inexact, numpy_dtype
from regrad.core.dispatch import lift, rerun
from regrad.core.registry import Attrs, Input, Op
from regrad.core.reports import Hit
from regrad.core.rule import NO_GRADIENT, Rule, RuleFunction, describe_pull, free
from regrad.core.state import current, in_state, masked
from regrad.core.tape import Layout, Record, Spec, effective, positions, record_of
from regrad.core.tensor import Tensor, wrap
from regrad.core.walk import check_gradient, leaf_gradients
from regrad.errors import DetachedTensorWarning, RuleError, near

LIBRARIES = {"regrad", "torch", "jax"}  # the libraries with which users write rules

# -- gradients that a rule may leave out ---------------------------------------------------------


class Own(Rule):
    """Represents another library's own gradient of an op. The record's call computes it."""

    name = "builtin"
    is_foreign = True


class OwnOfOne(Own):
    """Allows a single gradient from the rule, if only one input of the op is differentiated."""

    def complete(self, answer: Any, record: Record, dy: Any, count: int) -> Any:
        wanted = [i for i, moves in enumerate(record.inputs[:count]) if moves]
        if isinstance(answer, list | tuple) or len(wanted) != 1 or count == 1:
            return answer
        return [answer if i in wanted else None for i in range(count)]


class OwnBias(Own):
    """Keeps the own gradient of the last input of an op, a bias.

    A rule may still return a gradient for the bias. Its answer may omit inputs that the call omits.
    """

    def complete(self, answer: Any, record: Any, dy: Any, count: int) -> Any:
        last, layout = count - 1, record.places[:count]
        given = [p for p, place in enumerate(layout) if place is not None]
        if not isinstance(answer, list | tuple) or len(answer) > last:
            return answer
        if given[-1] == last and len(answer) == len(given) - 1:
            dys = dy if isinstance(dy, tuple) else (dy,)
            (leaf,) = positions(layout[last])
            answer = [*answer, record.own.pull(record.xs, dys, leaf).get(leaf)]
        found = dict(zip(given, answer, strict=False)) if len(answer) == len(given) else {}
        return [found.get(p) for p in range(count)] if found else answer


class OwnOfCall(Own):
    """Completes the gradients of parameters: the last inputs of a called module or function.

    If the rule returns no gradient for a parameter by name, the parameter gets the gradient that
    `builtin` computed.
    """

    def __init__(self, count: int, names: Sequence[str]) -> None:
        self.own_count: int | None = count
        self.names = names

    def complete(self, answer: Any, record: Any, dy: Any, count: int) -> Any:
        first, more = _parts(answer)
        if more is None and isinstance(answer, list | tuple) and len(answer) == count:
            return answer  # (by `vjp_of`)
        more = {as_name(n): dx for n, dx in (more or {}).items()}
        which = describe_pull(record)
        if unknown := [n for n in more if n not in self.names]:
            raise RuleError(
                f"wrong gradient: {which} returned one for {unknown[0]!r}, and the call has no "
                f"such parameter.{near(unknown[0], self.names)} It has {', '.join(self.names)}."
            )
        places = record.places[self.own_count : count]
        return [
            *self._by_input(first, record, which),
            *self._by_parameter(places, more, record, which),
        ]

    def _by_input(self, first: list[Any], record: Any, which: str) -> list[Any]:
        count = self.own_count or 0
        if record.op.inputs[0].kind == "many":  # (the input xs takes one list of gradients)
            first = [first]
        moves = [i for i in range(count) if record.inputs[i]]
        if len(first) == 1 < count and len(moves) == 1:
            first = [first[0] if i == moves[0] else None for i in range(count)]
        if len(first) != count:
            raise RuleError(
                f"wrong number of gradients: {which} returned {len(first)}, and the call has "
                f"{count} inputs. Return one per input, in order. Put gradients of parameters in a "
                "dict after them: (dx, {'weight': dw})."
            )
        return first

    def _by_parameter(
        self, places: Sequence[int], more: Mapping[str, Any], record: Any, which: str
    ) -> list[Any]:
        known = dict(zip(self.names, places, strict=True))
        missing = [n for n, leaf in known.items() if record.inputs[leaf] and n not in more]
        pulled = record.pulled
        if missing and len(pulled) != 1:
            how = f"called builtin {len(pulled)} times" if pulled else "did not call builtin"
            raise RuleError(
                f"{which} {how}, so the gradient of {missing[0]!r} is unknown. Call builtin(dy) "
                "once, or return the gradients of the parameters by name, None for no gradient: "
                f"(dx, {{{missing[0]!r}: dw}})."
            )
        own = pulled[0] if pulled else {}
        return [more.get(n, own.get(leaf)) for n, leaf in known.items()]


class OwnOfLearning(Own):
    """Requires gradients for the op's further inputs, which are parameters of the rule.

    Args:
        base: The op without these parameters.
    """

    def __init__(self, base: Op, names: Sequence[str]) -> None:
        self.base = base
        self.names = names
        self.own_count: int | None = base.rule.own_count or len(base.inputs)

    def complete(self, answer: Any, record: Record, dy: Any, count: int) -> Any:
        first, more = _parts(answer)
        if more is None and isinstance(answer, list | tuple) and len(answer) == count:
            return answer  # (by `vjp_of`)
        if more is None or not more.keys() >= {*self.names}:
            raise RuleError(
                f"wrong gradient: {describe_pull(record)} has the parameters "
                f"{', '.join(self.names)}, but did not return their gradients by name after the "
                f"gradients of the inputs. Return (dx, {{{self.names[-1]!r}: …}}), None for no "
                "gradient."
            )
        rest = {name: dx for name, dx in more.items() if name not in self.names}
        others: Any = [*first, rest] if rest else first
        n = count - len(self.names)
        made = self.base.rule.complete(others[0] if len(others) == 1 else others, record, dy, n)
        several = n > 1 or isinstance(self.base.rule, OwnOfCall)
        made = made if isinstance(made, list | tuple) and several else [made]
        return [*made, *[more[name] for name in self.names]]


def _parts(answer: Any) -> tuple[list[Any], dict[str, Any] | None]:
    """Return the gradients of an answer, and the dict of gradients by name that may end it."""
    if not isinstance(answer, list | tuple):
        return [answer], None
    *first, last = answer or [None]
    return (first, last) if isinstance(last, dict) else ([*answer], None)


def as_name(name: str) -> str:
    """Return the name that a parameter has in a rule: `layers_0_weight`."""
    return free(f"{'_' * name[:1].isdigit()}{name.replace('.', '_').replace('/', '_')}")


# -- the op of a call ----------------------------------------------------------------------------

# Functions of arrays, and their gradients by a library: `vjp(f, xs, dys)`, by leaf. A gradient is
# zero for an unconnected input, and None for integers.
Arrays = Sequence[Any]
ArrayFunction = Callable[[Arrays], Arrays]
ArrayVjp = Callable[[ArrayFunction, Arrays, Arrays], Arrays]


class OwnCall(Protocol):
    """A call of another library's op, for `builtin` and `forward` in a rule.

    Its leaves are all arrays of the library or all Tensors, with numbers and None between them.
    """

    vjp: Any  # the function by which the library differentiates functions: an `ArrayVjp`

    def pull(
        self, xs: Sequence[Any], dys: Sequence[Any], only: int | None = None
    ) -> Mapping[int, Any]:
        """Return the library's own gradients, by leaf; None, or no entry, for no gradient.

        With `only`, return the gradient of the leaf at this position alone.
        """
        ...

    def values_at(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the op's results for other inputs, without the inputs that only the rule takes."""
        ...


def on_tensors(f: ArrayFunction, vjp: ArrayVjp, xs: Sequence[Any]) -> Sequence[Any]:
    """Return `f(xs)` for arrays or Tensors. For Tensors it is an op, with the gradient by `vjp`."""
    if not any(isinstance(x, Tensor) for x in xs):
        return f(xs)
    op = Op(
        "Foreign", "foreign", lambda xp, xs: tuple(f(xs)), [Input("xs", "many")],
        several=True, holomorphic=False,
    )  # fmt: skip
    op.rule = _ByVjp(f, vjp)
    return rerun(op, tuple(map(lift, xs)), {}, (tuple(range(len(xs))),), op.rule)


class _ByVjp(Rule):
    """The gradient of a function of arrays, computed by its library."""

    name = "builtin"
    asks_needs = True

    def __init__(self, f: ArrayFunction, vjp: ArrayVjp) -> None:
        self.f, self.vjp = f, vjp

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return wanted, False

    def pull(self, record: Record, dy: Any, wanted: Sequence[int]) -> Any:
        return [(0, gradients(self.f, self.vjp, record.xs, dy, record.inputs))]


def gradients(
    f: ArrayFunction, vjp: ArrayVjp, xs: Sequence[Any], dys: Sequence[Any],
    moves: Sequence[int] | None = None,
) -> list[Any]:  # fmt: skip
    """Return a library's gradients of `f(xs)`, for arrays or Tensors.

    The gradients are None for integers, and where `moves` is 0. (The derivative of an unused
    gradient may be NaN.)
    """
    pairs = zip(xs, moves or [1] * len(xs), strict=True)
    floats = [bool(moving) and is_inexact(numpy_dtype(x.dtype)) for x, moving in pairs]

    def back(given: Arrays) -> Arrays:
        dxs = vjp(f, given[: len(xs)], given[len(xs) :])
        return [dx for dx, is_float in zip(dxs, floats, strict=True) if is_float]

    found = iter(on_tensors(back, vjp, [*xs, *dys]))
    return [next(found) if is_float else None for is_float in floats]


# -- the call ------------------------------------------------------------------------------------


class HostArrays(NamedTuple):
    """A library's part in functions that users write with regrad's functions."""

    is_array: Callable[[Any], bool]
    as_array: Callable[[Any], Any]
    # takes a function of Tensors, arrays, and a name for messages; returns the results as arrays
    # that the library can differentiate
    bridge: Callable[[Callable[[Sequence[Tensor]], Any], Sequence[Any], str], Sequence[Any]]
    names_in: Callable[[Sequence[Any]], set[str]]  # the names in the code of functions


class Asked:
    """One or several functions of a rule, written with the functions of regrad or of a host.

    `plain` is True if the function returns arrays, and None before the first run. The host
    differentiates a plain function, and regrad any other. `named` holds the names in its code
    (None: not read yet).
    """

    plain: bool | None = None
    named: set[str] | None = None
    functions: Sequence[RuleFunction]

    def either(self, plainly: Callable[[], Any], ours: Callable[[], Any]) -> Any:
        """Return the answer to arrays, by `plainly()`, or by `ours()`, which passes Tensors.

        A function runs once if its code names one library. Otherwise it gets arrays first, and runs
        again with Tensors if it cannot take arrays or returns Tensors.
        """
        libraries = (self.named or set()) & LIBRARIES
        if self.plain is False or (self.plain is None and libraries == {"regrad"}):
            self.plain = False
            return ours()
        try:
            answer = plainly() if self.plain else _quietly(plainly)
        except (AttributeError, TypeError) as error:
            if self.plain or (libraries and "regrad" not in libraries):
                raise
            try:
                answer = ours()
            except (AttributeError, TypeError) as other:
                raise error from other
            self.plain = False
            return answer
        if self.plain is None:
            self.plain = not any(isinstance(each, Tensor) for each in answer)
        return answer if self.plain else ours()


def _quietly(run: Callable[[], Any]) -> Any:
    """Run a function that may turn out to need Tensors, without the warning for this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DetachedTensorWarning)
        return run()


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One call of an op, without its arrays: enough to pull a gradient through it.

    The rule is the active one, bound to the op. The specs are the shape and dtype of each input
    array. `outputs` has the specs of the outputs if there are several. The attributes have the
    names of the op's attributes.
    """

    rule: Any
    specs: Sequence[Spec]
    attrs: Attrs
    layout: Layout = None  # the inputs of each parameter, if these are not one to one
    outputs: Sequence[Spec] | None = None
    hit: Hit | None = None  # the counter of the call
    own: OwnCall | None = None  # the call itself, for `builtin` and `forward`

    def pull(self, xs: Sequence[Any], y: Any, dy: Any, wanted: Sequence[int]) -> list[Any]:
        """Return the gradients of the wanted inputs: arrays for arrays, Tensors for Tensors.

        `xs` and `y` hold the values that the rule names, and None elsewhere. An entry is None where
        there is no gradient.

        Raises:
            RuleError: the rule's answer has the wrong number, kind, shape or dtype.
        """
        record = self.record(xs, y, wanted, dy)
        answers = self._answers(record, dy)
        first = _first(dy)
        return [self.checked(record, i, answers.get(i), first) for i in wanted]

    def _answers(self, record: Record, dy: Any) -> Any:
        """Return the rule's answers by leaf, unchecked."""
        ids = set(record.inputs)
        ids.discard(0)
        if current() is None:
            return leaf_gradients(record, dy, ids)
        # open tapes may differentiate Tensors again
        first = _first(dy)
        with masked() if isinstance(first, Tensor) else in_state(None):
            return leaf_gradients(record, dy, ids)

    def pull_either(
        self, xs: Sequence[Any], y: Any, dy: Any, wanted: Sequence[int], ours: Callable[[], Any]
    ) -> Sequence[Any]:
        """Return the gradients for arrays: by a plain rule, or by `ours()`, with Tensors."""
        record: Any = None

        def plainly() -> list[Any]:
            nonlocal record
            record = self.record(xs, y, wanted, dy)
            answers = self._answers(record, dy)
            return [answers.get(i) for i in wanted]

        found = self.rule.either(plainly, ours)
        if not self.rule.plain:
            return found
        first = _first(dy)
        return [self.checked(record, i, dx, first) for i, dx in zip(wanted, found, strict=True)]

    def record(self, xs: Sequence[Any], y: Any, wanted: Sequence[int], dy: Any) -> Record:
        """Return the call as a record that is on no tape, with the values that the rule names."""
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

    def value(self, xs: Sequence[Any], y: Any) -> Any:
        """Return the value of the op's replacement, from the op's inputs (and its own value)."""
        return self.rule.forward(self.record(xs, y, (), ()))

    def checked(self, record: Record, leaf: int, dx: Any, dy: Any) -> Any:
        """Return a rule's answer for a leaf in the form of the leaf, or raise."""
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

    (NumPy compares its dtypes with torch's by trying to convert them, and suppresses any exception
    meanwhile, also Ctrl-C.)
    """
    return "complex" in str(dtype)


def _same_library(a: Array, b: Array) -> bool:
    return is_array(a) and BACKENDS[type(a)] is BACKENDS[type(b)]

"""Check that a compiled function still matches its program: trace it again, and compare.

Two traces are the same if they have the same equations in the same order, on the same inputs and
equal constants. JAX's names of intermediate variables, and the identity of functions among the
parameters, make no difference. The backward programs must be the same as well, and the plain values
and containers that the body returned around its Tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from regrad.core.callers import is_library_file
from regrad.core.pytrees import exactly
from regrad.errors import StaleError

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

    from regrad.core.backends import Array
    from regrad.transforms.traces import Trace

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

Constant: TypeAlias = tuple[Any, ...]  # the mark of a constant; see `_content`


class Difference(NamedTuple):
    """The difference between two traces: old and new state, and the equation that shows it."""

    was: str
    now: str
    equation: Any = None


def compare(name: str, known: Any, again: Any) -> None:
    """Raise StaleError if two stages (`jax.jit(f).trace(…)`) of one function differ."""
    pair = known.out_info[0].trace(), again.out_info[0].trace()
    for difference in (
        *_programs(known.jaxpr, again.jaxpr),
        *_backward(*pair),
        *_around(*pair),
    ):
        raise StaleError(
            f"{name} is stale: a new trace differs from its program{_where(difference.equation)}. "
            f"The program has {difference.was}, the function now has {difference.now}. It depends "
            "on Python state that jit does not see (see docs/compiled.md): pass this state as an "
            "argument, or hold it in a Tensor or a Variable."
        )


def check_memory(name: str, held: np.ndarray, now: np.ndarray) -> None:
    """Raise StaleError if a Tensor's memory was written after the program took the Tensor."""
    if held.astype(now.dtype).tobytes() != now.tobytes():
        raise StaleError(
            f"{name} is stale: the memory of a Tensor that the function reaches was overwritten. "
            "This Tensor shares its memory (asarray(a, copy=False), from_dlpack(a)): let the "
            "function read the array itself, or pass the Tensor as an argument."
        )


def _around(a: Trace, b: Trace) -> Iterator[Difference]:
    """Yield differences outside of Tensors: plain results, and the assigned Variables."""
    if not a.note.is_like(b.note) or _exact(a.note.leaves) != _exact(b.note.leaves):
        yield Difference(f"the results {a.note}", str(b.note))
    if list(map(id, a.assigned)) != list(map(id, b.assigned)):
        names = [[v.name for v in x.assigned] for x in (a, b)]
        yield Difference(f"assignments to the Variables {names[0]}", f"to {names[1]}")


def _exact(leaves: Sequence[Any]) -> list[Any]:
    return [exactly(leaf) for leaf in leaves]


def _backward(a: Trace, b: Trace) -> Iterator[Difference]:
    if a.jaxpr is None or b.jaxpr is None:
        return
    kept = [_constants([k[1] for k in x.kept], [k[0] for k in x.kept]) for x in (a, b)]
    yield from _parts(a.jaxpr.jaxpr, b.jaxpr.jaxpr, *kept)


def _constants(values: Sequence[Array], kinds: Sequence[str] | None = None) -> list[Any]:
    """Return marks that distinguish constants: values, or the places where they come from."""
    kinds = kinds or ["constant"] * len(values)
    return [
        _content(value) if kind == "constant" else (kind, value)
        for value, kind in zip(values, kinds, strict=True)
    ]


def _content(value: Array) -> Any:
    try:
        array = np.asarray(value)
    except Exception:  # a tracer, or a JAX key
        return "object", id(value)
    return "constant", str(array.dtype), array.shape, array.tobytes(), array


# -- programs --------------------------------------------------------------------------------------


def _programs(a: ClosedJaxpr, b: ClosedJaxpr) -> Iterator[Difference]:
    """Yield the differences of two closed jaxprs."""
    yield from _parts(a.jaxpr, b.jaxpr, _constants(a.consts), _constants(b.consts))


def _parts(
    a: Jaxpr, b: Jaxpr, a_consts: Sequence[Constant], b_consts: Sequence[Constant]
) -> Iterator[Difference]:
    """Yield the first difference of two jaxprs with these constants; equations come in order."""
    known, new = _VariableNames(a, a_consts), _VariableNames(b, b_consts)
    for i, (p, q) in enumerate(zip_longest(a.eqns, b.eqns)):
        if p is None or q is None or known.key(p) != new.key(q):
            was, now = (_shown(n, e) for n, e in ((known, p), (new, q)))
            yield Difference(was, now, q if q is not None else p)
            return
        for (c, c_consts), (d, d_consts) in zip(_inner(p), _inner(q), strict=True):
            yield from _parts(c, d, c_consts, d_consts)
        known.add(p.outvars, i)
        new.add(q.outvars, i)
    if [known[v] for v in a.outvars] != [new[v] for v in b.outvars]:
        yield Difference("other results", f"{len(b.outvars)} of its own")


class _VariableNames:
    """The meaning of a jaxpr's variables: inputs and results by place, constants by value."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Constant]) -> None:
        self.of = dict(zip(jaxpr.constvars, consts, strict=True))
        self.add(jaxpr.invars, "input")

    def add(self, variables: Sequence[Var], where: int | str) -> None:
        for i, v in enumerate(variables):
            self.of[v] = where, i, str(v.aval)

    def __getitem__(self, v: Any) -> Any:
        return _content(v.val) if hasattr(v, "val") else self.of[v]

    def key(self, equation: JaxprEqn) -> Any:
        """Return a key of everything that an equation does, without the jaxprs inside it."""
        inputs = [self[v][:4] for v in equation.invars]
        outputs = [str(v.aval) for v in equation.outvars]
        options = {k: _option(v) for k, v in equation.params.items()}
        return equation.primitive.name, inputs, outputs, options


def _option(value: object) -> Any:
    """Return a parameter of an equation, in comparable form."""
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return "jaxpr"
    if isinstance(value, list | tuple):
        return [_option(v) for v in value]
    if isinstance(value, np.ndarray):
        return _content(value)[:4]
    return "function" if callable(value) else _ADDRESS.sub("", repr(value))


def _inner(equation: JaxprEqn) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the jaxprs in an equation, with their constants."""
    for value in equation.params.values():
        for part in value if isinstance(value, list | tuple) else [value]:
            if hasattr(part, "jaxpr"):
                yield part.jaxpr, _constants(part.consts)
            elif hasattr(part, "eqns"):
                yield part, _constants(part.constvars, ["open"] * len(part.constvars))


# -- messages --------------------------------------------------------------------------------------


def _shown(names: _VariableNames, equation: JaxprEqn | None) -> str:
    if equation is None:
        return "nothing more"
    inputs = [names[v] for v in equation.invars]
    shown = [
        np.array2string(known[4], threshold=8) if known[0] == "constant" else v.aval.str_short()
        for v, known in zip(equation.invars, inputs, strict=True)
    ]
    options = {k: v for k, v in equation.params.items() if isinstance(v, int | float | str | tuple)}
    more = [f"{k}={v}" for k, v in options.items() if len(str(v)) < 40]
    return f"{equation.primitive.name}({', '.join([*shown, *more])})"


def _where(equation: JaxprEqn | None) -> str:
    """Return `, at model.py:12 (loss)`: the user's line from which an equation comes."""
    # (JAX does not document where it keeps the traceback; without it, the message is shorter.)
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not is_library_file(frame.file_name):
            return f", at {frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""

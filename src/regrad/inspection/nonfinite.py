"""The first NaN or infinity of a computation, as data: its place, its cause, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from regrad.core.names import SINGULAR
from regrad.inspection.recorder import Bad, Named, Recording, RunRecorder, Tool, located

Phase = Literal["argument", "forward", "backward"]

# The remedy, by op type. The names are regrad's op types; the tools for PyTorch and JAX map their
# names to these.
CURES: dict[str, str] = {
    "Log": "keep the argument away from 0: log(maximum(x, eps)), or log1p, logsumexp, or "
    "xlogy(a, x), which is 0 where a is",
    "Log1p": "keep the argument above -1",
    "Sqrt": "keep the argument above 0, where its slope is infinite: sqrt(x + eps), or "
    "where(x > 0, sqrt(where(x > 0, x, 1)), 0)",
    "Rsqrt": "keep the argument away from 0: rsqrt(x + eps)",
    "RealDiv": "keep the divisor away from 0: where(b != 0, a / where(b != 0, b, 1), 0), or "
    "xdivy(a, b), which is 0 where a is",
    "Reciprocal": "keep the argument away from 0: where(x != 0, 1 / where(x != 0, x, 1), 0)",
    "Pow": "a power of 0 (or of a negative number) has no finite slope here; keep the base above "
           "0",
    "Exp": "it overflows: subtract the largest element, or use logsumexp, softmax, log_softmax",
    "Expm1": "it overflows: bound the argument",
    "SelectV2": "both branches are differentiated: pass a safe argument to the branch that is "
                "not taken",
    "Mul": "0 times infinity: the infinite factor came from an earlier op",
    "Norm": "the norm of a zero vector has no slope: add eps under the root",
    "Asin": "its slope at ±1 is infinite: clip the argument",
    "Acos": "its slope at ±1 is infinite: clip the argument",
    "Atanh": "keep the argument inside (-1, 1)",
    "Acosh": "keep the argument above 1",
    "Atan2": "it has no slope where both arguments are 0",
}  # fmt: skip
MASKED = (
    "0 times infinity behind a mask: the branch that where() did not take is differentiated as "
    "well; pass it a safe argument (a where() inside and outside of it)"
)


@dataclass(frozen=True, slots=True)
class Operand:
    """An input of the faulty op: its name, shape, and its value at the non-finite element.

    `value` is None if the element of the result does not belong to one element of the input.
    `smallest` and `largest` refer to the whole input.
    """

    name: str
    shape: tuple[int, ...]
    value: complex | None
    smallest: float
    largest: float

    @property
    def is_infinite(self) -> bool:
        """True if the input itself is infinite: at the element if that is known, else anywhere."""
        if self.value is not None:
            return bool(np.isinf(self.value))
        return bool(np.isinf(self.smallest) or np.isinf(self.largest))

    def __str__(self) -> str:
        if self.value is not None:
            return f"{self.name} = {self.value:.6g}"
        return f"{self.name} in [{self.smallest:.6g}, {self.largest:.6g}]"


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first NaN or infinity.

    Attributes:
        phase: "forward", "backward", or "argument" if it existed before anything ran.
        what: "NaN" or "inf".
        op_type: The op that produced it; in the backward pass, the op whose rule produced it.
        line: The line of the user's code that ran the op forward, `file:line`.
        path: The module or name scope, or "".
        index: The index of the first element that is not finite.
        count: The number of elements that are not finite.
        operands: The inputs of the op or rule.
        rule: In the backward pass, the rule.
        cure: The usual remedy, or "" if none is known.
        output: The name of the array: an argument's name, or the input of the op by which the
            gradient is not finite.
    """

    phase: Phase
    what: str
    op_type: str
    line: str
    path: str
    index: tuple[int, ...]
    count: int
    operands: tuple[Operand, ...] = ()
    rule: str = ""
    cure: str = ""
    output: str = ""

    def __str__(self) -> str:
        at = f" at index {self.index}" if self.index else ""
        more = f" ({self.count} in total)" if self.count > 1 else ""
        if self.phase == "argument":
            return f"{self.what} in {self.output}{at}{more}: it existed before anything ran"
        where = located(self.op_type, self.line, self.path)
        of = f" from {', '.join(map(str, self.operands))}" if self.operands else ""
        text = f"the first {self.what} of the {self.phase} pass: {where} produced it{of}"
        if self.phase == "backward":
            text = (
                f"the first {self.what} of the backward pass: the gradient of {where} by "
                f"{self.output!r}{of}"
            )
        return text + at + more + (f". {self.cure[0].upper()}{self.cure[1:]}." if self.cure else "")


def operand(name: str, array: Any, shape: tuple[int, ...], index: tuple[int, ...]) -> Operand:
    """Return an input of a faulty op, given the shape of its result and a non-finite element."""
    a = np.asarray(array)
    values = a if a.dtype.kind in "fciub" else a.astype(np.float32)
    real = np.abs(values) if values.dtype.kind == "c" else values
    smallest = float(np.min(real)) if a.size else 0.0
    largest = float(np.max(real)) if a.size else 0.0
    value = None
    with suppress(ValueError):  # it does not broadcast to the result
        value = np.broadcast_to(values, shape)[index].item()
    return Operand(name, a.shape, value, smallest, largest)


# -- the tool ------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """A non-finite array, with the op that it comes from.

    `made` is True if that op produced it from finite numbers. Otherwise the op received it, or was
    meant to produce it.
    """

    array: Any
    found: NonFinite
    made: bool


class Search(Tool):
    """Traces non-finite values to their origin, forward and then backward."""

    keeps: Literal["", "rules", "all"] = "all"

    def __init__(self, recorder: RunRecorder) -> None:
        self.recorder = recorder
        self.origins: dict[int, Origin] = {}  # by the array's key
        self.given: dict[Any, tuple[Named, Origin | None]] = {}  # by op: inputs, and their origin
        self.last: Origin | None = None  # the last non-finite array that an op produced
        self.found: NonFinite | None = None  # in the backward pass

    def ran(self, op: Any, xs: Named, ys: Sequence[Any], writes: bool = False) -> None:
        given = [(self.recorder.key(x), found[0]) for _, x in xs if (found := self.recorder.bad(x))]
        known = next((self.origins[key] for key, _ in given if key in self.origins), None)
        self.given[op] = xs, known
        for y in ys:
            key, bad = self.recorder.key(y), self.recorder.bad(y)
            before = self.origins.pop(key, None)
            if bad is not None:
                # (An op in place, or on a view, returns the array that it received.)
                origin = known or ((before or self.last) if given else None)
                kinds = [kind for _, kind in given]
                made = not writes and (not given or (bad[0] == "NaN" and "NaN" not in kinds))
                if op.op_type and (origin is None or (made and not origin.made)):
                    found = self._finding("forward", op, bad, self._operands(xs, y, bad))
                    origin = Origin(y, found, made)
                    self.last = origin if made else self.last
                    self.done: bool = self.done or (made and bad[0] == "NaN")
                if origin is not None:
                    self.origins[key] = origin._replace(array=y)

    def left(self, op: Any, dxs: Named, dys: Sequence[Any]) -> None:
        for name, dx in dxs if self.found is None else ():
            if (bad := self.recorder.bad(dx)) is not None:
                if not any(map(self.recorder.bad, dys)):  # (otherwise f itself sent it)
                    self.found = self._backward(op, name, dx, dys, bad)
                return

    def _backward(self, op: Any, name: str, dx: Any, dys: Sequence[Any], bad: Bad) -> NonFinite:
        xs, origin = self.given.get(op.first, ((), None))
        if origin is not None and origin.made:
            return origin.found
        arrived = self._operands([("dy", dy) for dy in dys if dy is not None], dx, bad)
        masked = bad[0] == "NaN" and any(each.value == 0 for each in arrived)
        operands = (*arrived, *self._operands(xs, dx, bad))
        return self._finding("backward", op, bad, operands, MASKED if masked else "", name)

    def _finding(
        self, phase: Phase, op: Any, bad: Bad, operands: tuple[Operand, ...], cure: str = "",
        output: str = "",
    ) -> NonFinite:  # fmt: skip
        what, index, count = bad
        place = op.op_type, op.line, op.path, index, count
        known = self.recorder.type_of(op)
        cure = cure or CURES.get(known, "")
        if phase == "backward" and known.lower() in SINGULAR:
            cure += f"{'; or ' if cure else ''}use rg.rules.safe() for {known!r}"
        return NonFinite(phase, what, *place, operands, op.rule, cure, output)

    def _operands(self, xs: Named, y: Any, bad: Bad) -> tuple[Operand, ...]:
        shape, index = tuple(y.shape), bad[1]
        arrays = [(name, self.recorder.array(x)) for name, x in xs]
        return tuple(operand(name, a, shape, index) for name, a in arrays if a is not None)

    def verdict(self, run: Recording) -> NonFinite | None:
        """Return the origin of the values that made results or gradients of a run non-finite."""
        for name, x in self.recorder.given(run):
            if (bad := self.recorder.bad(x)) is not None:
                what, index, count = bad
                return NonFinite("argument", what, "", "", "", index, count, output=name)
        if self.done and not run.ys and self.last is not None:  # (the search stopped the run there)
            return self.last.found
        for y in run.ys:
            if self.recorder.bad(y) is not None:
                origin = self.origins.get(self.recorder.key(y)) or self.last
                return origin.found if origin is not None else self.found
        spoiled = any(self.recorder.bad(leaf.gradient) for leaf in run.leaves)
        return self.found if spoiled else None


def searched(recorder: RunRecorder) -> Callable[..., NonFinite | None]:
    """Return the function that runs a recorder, and reports non-finite values."""

    def checked(*args: Any, **options: Any) -> NonFinite | None:
        search = Search(recorder)
        return search.verdict(recorder.run(args, options, search))

    return checked

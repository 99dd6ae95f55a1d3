"""The guard of a custom function: it refuses what the function uses without being given it.

What f closes over has no part in the answer of grad_func, so a gradient by it would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from regrad.autodiff.custom_functions import CustomFunction
from regrad.autodiff.variables import Variable
from regrad.core.registry import Op
from regrad.core.rule import place
from regrad.core.state import State, next_id
from regrad.core.tape import Tape
from regrad.core.tensor import Tensor
from regrad.errors import GradientError, kind

UNSEEN: Mapping[Tape, int] = MappingProxyType({})

# States for the calls of custom functions under one tape. A call takes one and puts it back: a
# context that was copied while a function ran shares its state, so no two calls may hold one at a
# time.
SPARE: list[State] = []


class Guard:
    """A guard over a custom function while it runs.

    Where one tape is open and nothing else in force, it is also the recorder of the fast path,
    and so hears of the ops whose inputs the tape watches, and of no others. Such guards, with
    their states, serve one call after the other (`SPARE`).
    """

    __slots__ = ("custom", "inputs", "mark", "outer", "seen", "tapes", "watched")

    custom: CustomFunction  # the function that runs
    mark: int  # what is newer, it made
    watched: set[int]  # by the only tape

    def __init__(self) -> None:
        self.outer: Guard | None = None  # of the function inside which this one is called
        self.end()

    def begin(
        self,
        custom: CustomFunction,
        inputs: tuple[Tensor, ...],
        tapes: tuple[Tape, ...],
        seen: Mapping[Tape, int],
    ) -> int:
        """Watch over a call. Return the mark: what is newer, the function made."""
        self.custom, self.inputs, self.tapes, self.seen = custom, inputs, tapes, seen
        self.mark = mark = next_id()
        return mark

    def end(self) -> None:
        """Watch over nothing until the next call."""
        self.inputs: tuple[Tensor, ...] = ()  # what the function may use
        self.tapes: tuple[Tape, ...] = ()
        # the tapes that see what it does, with their numbers of records before
        self.seen: Mapping[Tape, int] = UNSEEN

    def check(self, op: Op, xs: Iterable[Tensor]) -> None:
        """Refuse inputs of an op that f closes over while a tape watches them."""
        for x in xs:
            i = x._id
            if i >= self.mark or i <= 0:
                continue
            for given in self.inputs:
                if x is given:
                    break
            else:
                if any(i in tape.watched for tape in self.tapes):
                    name = name_of(self.custom.f, x) or f"{kind(x)} (in the op {op.type!r})"
                    raise self._closes_over(name)
        if self.outer is not None:
            self.outer.check(op, xs)

    def write_unary(self, op: Op, x: Tensor, y: Tensor) -> None:
        """Check the input of an op (see `Recorder`)."""
        for given in self.inputs:
            if x is given:
                return
        self.check(op, (x,))

    def write_binary(self, op: Op, a: Tensor, b: Tensor, y: Tensor) -> None:
        """Check the inputs of an op (see `Recorder`)."""
        self.check(op, (a, b))

    def check_variable(self, variable: Variable) -> None:
        """Refuse a read of a Variable that a tape watches."""
        if any(tape.wants(variable) for tape in self.tapes):
            raise self._closes_over(f"the Variable {variable.name!r}")
        if self.outer is not None:
            self.outer.check_variable(variable)

    def loses(self, value: Tensor) -> None:
        """A value that f made is assigned to a Variable: the tapes that do not see f lose it."""
        if value._id > self.mark:
            for tape in self.tapes:
                if tape not in self.seen:
                    tape.lost = {*(tape.lost or ()), value._id}
        if self.outer is not None:
            self.outer.loses(value)

    def _closes_over(self, called: str) -> GradientError:
        f = self.custom.f
        return GradientError(
            f"custom_grad: {self.custom.name} ({place(f)}) closes over {called}, which is being "
            "differentiated; its gradient would be lost. Pass it as an input of its own, for "
            "which grad_func returns a gradient too, or use stop_gradient on it."
        )


def name_of(f: Any, x: Tensor) -> str | None:
    """Return the name under which f closes over a tensor; None if there is none."""
    code = getattr(f, "__code__", None)
    if code is None:
        return None
    cells = zip(code.co_freevars, f.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            if cell.cell_contents is x:
                return repr(name)
        except ValueError:  # an empty cell
            continue
    return next((repr(n) for n in code.co_names if f.__globals__.get(n) is x), None)
